"""Importance is the mean of squared derivatives with respect to the gates."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.importance.score import Importance, importance, measure_importance
from hardconcrete.report.plots import importance_curves
from tests.gating.oracles import by_hand
from tests.importance.networks import Residual, varied

STEP = 1e-5


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def images(number: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randint(4, (4,)))
        for _ in range(number)
    ]


def test_the_mean_over_batches_of_the_squared_derivative_by_finite_differences() -> None:
    plain, batches = varied(Residual(4)), images(2)
    gated = hc.attach_gates(copy.deepcopy(plain), batches[0][0])
    z = torch.ones(len(gated.gates.log_alpha), dtype=torch.float64)
    z[1] = 0  # also where a unit is shut
    result = measure_importance(gated, batches, loss, z)

    def at(z: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(by_hand(plain, gated, z, batch[0]), batch[1])

    with torch.no_grad():
        for unit in range(len(z)):
            step = STEP * F.one_hot(torch.tensor(unit), len(z))
            slopes = [(at(z + step, b) - at(z - step, b)) / (2 * STEP) for b in batches]
            expected = torch.stack(slopes).square().mean()
            assert torch.isclose(result[unit], expected, rtol=1e-4, atol=1e-12)


def test_a_unit_that_nothing_needs_has_none() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.zeros_(model[2].weight[:, 1])
    result = hc.importance(model, torch.randn(4, 8, 4).unbind(), lambda m, x: m(x).square().mean())
    assert result["0"][1] == 0
    assert result.order("0")[0] == 1
    assert (result["0"][[0, 2]] > 0).all()


def test_the_model_is_left_as_it_is() -> None:
    model = varied(Residual()).train()
    model.stem.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    result = hc.importance(model, images(), loss)
    assert type(model) is Residual
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model.stem.weight.requires_grad
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert result.examples == 12
    assert len(result.flat()) == sum(len(values) for values in result.values.values())


def test_a_gated_model_is_measured_with_the_gates_that_its_readout_keeps() -> None:
    gated = hc.attach_gates(varied(Residual()), images(1)[0][0]).train()
    with torch.no_grad():
        gated.gates.log_alpha[2] = -9
    batches = images()
    is_open = torch.ones(len(gated.gates.log_alpha))
    is_open[2] = 0
    expected = measure_importance(gated, batches, loss, is_open)
    result = hc.importance(gated, batches, loss)
    assert torch.equal(result.flat(), expected)
    assert list(result.values) == [group.name for group in gated.groups]
    assert gated.training
    assert gated.gates.log_alpha.grad is None


def test_batches_of_keyword_arguments() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, *, features: Tensor, scale: float = 1.0) -> Tensor:
            return self.b(self.a(features).relu()) * scale

    batches = [{"features": torch.randn(5, 4), "scale": 2.0}]
    result = hc.importance(Net(), batches, lambda model, batch: model(**batch).square().mean())
    assert (len(result["a"]), result.examples) == (6, 5)


def test_no_more_examples_than_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    x = torch.randn(10, 8, 4)
    result = hc.importance(model, x.unbind(), lambda m, x: m(x).square().mean(), examples=20)
    assert result.examples == 24


def test_refusals() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), [torch.randn(8, 4)]
    with pytest.raises(ArgumentError, match="takes a module, not a str"):
        importance("model", x, loss)
    with pytest.raises(ArgumentError, match="did not call the model"):
        importance(model, x, lambda _, x: x.sum())
    with pytest.raises(ArgumentError, match="must return a scalar tensor"):
        importance(model, x, lambda m, x: m(x))
    with pytest.raises(ArgumentError, match="there is no group 'fc'; there are a, b"):
        _ = Importance({"a": torch.ones(1), "b": torch.ones(1)}, 1)["fc"]


def test_it_prints_a_row_for_each_group(tmp_path: Path) -> None:
    values = {"conv1": torch.tensor([8.0, 1.0, 1.0]), "fc": torch.zeros(2)}
    result = Importance(values, examples=2048)
    head, conv1, fc, last = str(result).splitlines()
    assert head.split() == ["group", "units", "share", "least", "median", "most", "90%", "in"]
    assert conv1.split() == ["conv1", "3", "100.0%", "1.00e+00", "1.00e+00", "8.00e+00", "2"]
    assert fc.split()[:3] == ["fc", "2", "0.0%"]
    assert last == "Measured on 2,048 examples."
    svg, png = importance_curves(result.values, tmp_path)
    assert "conv1" in svg.read_text()
    assert png.exists()


CALLED = """
import hardconcrete as hc
first = hc.importance
import hardconcrete.importance.score as score
assert hc.importance is first and hc.importance.score is score
from hardconcrete import importance
assert importance is first
assert hc.Importance is score.Importance
try:
    importance("no model", [1], None)
except hc.HardConcreteError as error:
    assert "takes a module" in str(error)
else:
    raise AssertionError
"""


def test_the_name_can_be_called_before_and_after_its_package_is_imported() -> None:
    """Before, in a new process; here it has been imported."""
    subprocess.run([sys.executable, "-c", CALLED], check=True)
    exec(CALLED, {})


def test_in_inference_mode() -> None:
    model, (x, y) = varied(Residual(4)), images(1)[0]
    expected = importance(model, [(x, y)], loss)
    with torch.inference_mode():
        result = importance(model, [(x.clone(), y)], loss)
    assert torch.equal(result.flat(), expected.flat())
