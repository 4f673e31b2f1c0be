from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.report.pareto import Pareto, Point


@pytest.fixture(scope="module")
def gated() -> hc.GatedModel:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(4, 1, 6, 6))
    nn.init.normal_(gated.gates.log_alpha, 0.0, 3.0)
    return gated


def test_one_run_gives_many_sizes(gated: hc.GatedModel) -> None:
    seen: list[nn.Module] = []

    def evaluate(small: nn.Module) -> float:
        seen.append(small)
        assert not small.training
        return float(len(seen))

    curve = hc.pareto(gated, [0.9, 0.5, 0.2], evaluate, repeats=2)
    whole = int(gated.ledger.dense[1])
    for point, fraction in zip(curve, (0.9, 0.5, 0.2), strict=True):
        assert fraction - 1 / 16 < point.macs / whole <= fraction
        assert point.ms is not None
        assert point.ms > 0
    assert [point.error for point in curve] == [1, 2, 3]
    assert seen[0][0].out_channels > seen[1][0].out_channels > seen[2][0].out_channels
    assert len(curve) == 3


def test_norms_are_estimated_anew(gated: hc.GatedModel) -> None:
    def tracked(small: nn.Module) -> float:
        return float(small[1].num_batches_tracked)  # type: ignore[index]

    batches = [torch.randn(8, 1, 6, 6) for _ in range(5)]
    (point,) = hc.pareto(gated, [0.5], tracked, batches=iter(batches), repeats=0)
    assert (point.error, point.ms) == (5, None)


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    curve = Pareto((Point(0.5, 1200, 90, 1.25, 0.5), Point(0.1, 200, 20, 3.5, 0.25)))
    assert str(curve).splitlines()[1].split() == ["50.0%", "1,200", "90", "1.25", "0.500"]
    svg, _ = curve.plot(tmp_path)
    assert "milliseconds" in svg.read_text()
    svg, _ = Pareto((Point(0.5, 1200, 90, 1.25),)).plot(tmp_path)
    assert "milliseconds" not in svg.read_text()


def test_refused(gated: hc.GatedModel) -> None:
    with pytest.raises(ArgumentError, match="pareto needs fractions"):
        hc.pareto(gated, [], lambda _: 0.0)
    with pytest.raises(ArgumentError, match="pareto needs fractions"):
        hc.pareto(gated, 0.5, lambda _: 0.0)
    with pytest.raises(ArgumentError, match="'half' is no fraction of the dense multiply-adds"):
        hc.pareto(gated, ["half"], lambda _: 0.0)
    with pytest.raises(ArgumentError, match="repeats=1 must be 0, or at least 2"):
        hc.pareto(gated, [0.5], lambda _: 0.0, repeats=1)
    with pytest.raises(ArgumentError, match="a float is a fraction"):
        hc.pareto(gated, [1.5], lambda _: 0.0)
