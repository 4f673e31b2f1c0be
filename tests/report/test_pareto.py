import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.report.pareto import Pareto, Point

X = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0))
EXAMPLE = X[:4]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flatten(1)[:, :3]).square().mean()


def error(model: nn.Module) -> float:
    return loss(model, X).item()


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model, X).backward()
        optimizer.step()
    return model


def curve(model: nn.Module, fractions: Any, evaluate: Any = error, **settings: Any) -> Pareto:
    settings = {"example_inputs": EXAMPLE, "repeats": 0} | settings
    batches = X.split(16)
    return hc.pareto(
        model, batches=batches, loss=loss, fractions=fractions, evaluate=evaluate, **settings
    )


def test_one_model_gives_many_sizes(model: nn.Sequential) -> None:
    seen: list[nn.Module] = []

    def evaluate(small: nn.Module) -> float:
        seen.append(small)
        assert not small.training
        return float(len(seen))

    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    points = curve(model, [0.5, 0.9, 0.2], evaluate, repeats=2)
    whole = hc.count(model, EXAMPLE).macs
    for point, fraction in zip(points, (0.5, 0.9, 0.2), strict=True):
        assert fraction - 1 / 16 < point.macs / whole <= fraction
        assert point.ms is not None
        assert point.ms > 0
    assert [point.error for point in points] == [1, 2, 3]
    assert [small[0].out_channels for small in seen] == [8, 14, 3]  # type: ignore[union-attr, index]
    assert len(points) == 3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_sizes_are_refitted_and_go_on_from_the_larger_one(model: nn.Sequential) -> None:
    kept: list[set[int]] = []

    def evaluate(small: nn.Module) -> float:
        plan = hc.CompactionPlan.of(small)
        kept.append(set(plan.groups["0"].kept))
        return error(small) / error(plan.apply(model).eval())

    points = curve(model, [0.8, 0.4, 0.2], evaluate)
    assert kept[0] > kept[1] > kept[2]
    assert all(point.error < 0.8 for point in points)


def test_fine_tuned_by_the_users_own_steps(model: nn.Sequential) -> None:
    """Smaller sizes go on from what was there before."""
    seen: list[int] = []

    def finetune(small: nn.Module) -> None:
        assert small.training
        seen.append(small[0].out_channels)  # type: ignore[index, union-attr, arg-type]
        if len(seen) == 1:
            small.get_parameter("4.bias").data.add_(1.0)

    cut, trained = curve(model, [0.5, 0.25]), curve(model, [0.5, 0.25], finetune=finetune)
    assert seen == [8, 4]
    assert trained.points[0].error > cut.points[0].error + 0.5
    assert trained.points[1] == cut.points[1]


def test_fine_tuning_has_gradients_wherever_it_is_called(model: nn.Sequential) -> None:
    def finetune(small: nn.Module) -> None:
        assert torch.is_grad_enabled()
        assert not any(parameter.is_inference() for parameter in small.parameters())

    with torch.inference_mode():
        curve(model, [0.5], finetune=finetune)


def test_a_gated_model_is_cut_from_what_it_computes(model: nn.Sequential) -> None:
    gated = hc.attach_gates(copy.deepcopy(model), EXAMPLE)
    gated.gates.log_alpha.data[::2] = -5.0
    (point,) = curve(gated, [0.25], example_inputs=None)
    assert point.macs == hc.count(model, EXAMPLE).macs // 4
    assert (gated.gates.readout() > 0).sum() == 8
    with pytest.raises(ArgumentError, match="a gated model knows its inputs and groups"):
        curve(gated, [0.25])


def test_widths_are_multiples(model: nn.Sequential) -> None:
    curve(model, [0.8, 0.5], lambda small: float(small[0].out_channels % 4 == 0), round_to=4)  # type: ignore[index, operator, union-attr]
    points = curve(model, [0.8, 0.6], lambda small: small[0].out_channels, round_to=4)  # type: ignore[index, union-attr]
    assert [point.error for point in points] == [12, 8]


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    points = Pareto((Point(0.5, 1200, 90, 1.25, 0.5), Point(0.1, 200, 20, 3.5, 0.25)))
    assert str(points).splitlines()[1].split() == ["50.0%", "1,200", "90", "1.25", "0.500"]
    svg, _ = points.plot(tmp_path)
    assert "milliseconds" in svg.read_text()
    svg, _ = Pareto((Point(0.5, 1200, 90, 1.25),)).plot(tmp_path)
    assert "milliseconds" not in svg.read_text()


def test_refused(model: nn.Sequential) -> None:
    with pytest.raises(ArgumentError, match="pareto needs fractions"):
        curve(model, [])
    with pytest.raises(ArgumentError, match="pareto needs fractions"):
        curve(model, 0.5)
    with pytest.raises(ArgumentError, match="'half' is no fraction of the dense cost"):
        curve(model, ["half"])
    with pytest.raises(ArgumentError, match="repeats=1 must be 0, or at least 2"):
        curve(model, [0.5], repeats=1)
    with pytest.raises(ArgumentError, match="a float is a fraction"):
        curve(model, [1.5])
