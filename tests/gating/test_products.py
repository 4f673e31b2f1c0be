"""Products of weights and gates: no second copy, and none where all gates are 1."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import GateError
from hardconcrete.gating import plain_copy
from hardconcrete.gating.products import times_open_gates
from tests.gating.oracles import Products, by_hand, gradients, next_draw, spread


class Transposed(nn.Module):
    """A dense layer of somebody else, which keeps its weight the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def network(*, transposed: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    last = Transposed(12, 9) if transposed else nn.Linear(12, 9)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), last, nn.Tanh(), nn.Linear(9, 3))


class Alive(TorchDispatchMode):
    """Products of a shape that somebody still holds."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes, self.seen = shapes, list[weakref.ref[Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and tuple(result.shape) in self.shapes:
            self.seen.append(weakref.ref(result))
        return result

    @property
    def count(self) -> int:
        return sum(each() is not None for each in self.seen)


@pytest.mark.parametrize("transposed", [True, False])
def test_products_are_not_kept_for_backward(transposed: bool) -> None:
    model = network(transposed=transposed)
    plain = copy.deepcopy(model)
    gated = spread(hc.attach_gates(model, torch.zeros(2, 7)))
    x, z = torch.randn(50, 7), next_draw(gated)
    with Alive((12, 9), (9, 12), (3, 9)) as alive:
        output = gated(x)
    assert len(alive.seen) == 2
    assert alive.count == 0
    ours = gradients(output.square().sum(), model)
    theirs = gradients(by_hand(plain, gated, z, x).square().sum(), plain)
    torch.testing.assert_close(ours, theirs)


def test_two_gates_on_one_weight() -> None:
    model = network().double()
    plain, x = copy.deepcopy(model), torch.randn(50, 7).double()
    sites = [hc.Site("2.weight", 0), hc.Site("2.weight", 1), hc.Site("2.bias", None)]
    gated = spread(hc.attach_gates(model, x, sites=sites))
    z = next_draw(gated)
    with Alive((12, 9)) as alive:
        output = gated(x)
    assert len(alive.seen) == 2
    assert alive.count == 0
    expected = by_hand(plain, gated, z, x)
    torch.testing.assert_close(output, expected)
    both = [gradients(each.square().sum(), m) for each, m in ((output, model), (expected, plain))]
    torch.testing.assert_close(*both)


def test_gradients_of_gradients() -> None:
    model = network().double()
    plain, x = copy.deepcopy(model), torch.randn(5, 7).double().requires_grad_()
    gated = spread(hc.attach_gates(model, x))
    z, second = next_draw(gated), []
    for output, weights in ((gated(x), model), (by_hand(plain, gated, z, x), plain)):
        leaves = [x, gated.gates.log_alpha, *weights.parameters()]
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        norm = sum(slope.square().sum() for slope in first)
        second.append(torch.autograd.grad(norm, leaves))
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("of", ["weight", "input"])
def test_a_change_before_backward_is_refused(of: str) -> None:
    """As torch refuses it."""
    model = network()
    gated = spread(hc.attach_gates(model, torch.zeros(2, 7)))
    changed: dict[str, Tensor] = {"weight": model[2]._parameters["weight"]}
    model[2].register_forward_pre_hook(lambda _, inputs: changed.update(input=inputs[0]))
    output = gated(torch.randn(50, 7))
    with torch.no_grad():
        changed[of].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.fixture(params=["save_on_cpu", "hooks", "checkpoint"])
def around(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Others who decide what is saved."""
    packed: list[Tensor] = []

    def call(gated: Any, x: Tensor) -> Tensor:
        if request.param == "checkpoint":
            return checkpoint(gated, x, use_reentrant=False)
        if request.param == "save_on_cpu":
            with save_on_cpu():
                return gated(x)
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            return gated(x)

    yield call
    if request.param == "hooks":
        assert any(tuple(t.shape) == (12, 9) for t in packed)


def test_hooks_of_others_stay_in_force(around: Any) -> None:
    model = network()
    plain, x = copy.deepcopy(model), torch.randn(50, 7)
    gated = spread(hc.attach_gates(model, x))
    z = next_draw(gated)
    ours = gradients(around(gated, x).square().sum(), model)
    theirs = gradients(by_hand(plain, gated, z, x).square().sum(), plain)
    torch.testing.assert_close(ours, theirs)


def budgeted(steps: int = 2000) -> tuple[hc.GatedModel, hc.Budget]:
    gated = hc.attach_gates(network(), torch.zeros(2, 7))
    return gated, hc.Budget(gated, macs=0.5, steps=steps)


def close(budget: hc.Budget, *gates: int) -> None:
    state = budget.state_dict()
    state["open"][list(gates)] = False
    budget.load_state_dict(state)


def test_open_gates_multiply_nothing() -> None:
    """Also in the steps that measure, where the gates get their gradient all the same."""
    gated, budget = budgeted()
    x = torch.randn(50, 7)
    for measuring in (True, False):
        gated.gates.measuring = measuring
        with Products() as products:
            gated(x)
        assert not {(12, 9), (3, 9)} & products.shapes
    close(budget, 0)  # of the first group
    gated.gates.measuring = False
    with Products() as products:
        gated(x)
    assert (12, 9) in products.shapes
    assert (3, 9) not in products.shapes


@pytest.mark.parametrize("closed", [(), (0,), (0, 15)])
@pytest.mark.parametrize("batch", [2, 50])
def test_results_and_gradients_under_a_budget(batch: int, closed: tuple[int, ...]) -> None:
    gated, budget = budgeted()
    plain = plain_copy(gated)
    close(budget, *closed)
    z = torch.ones(21)
    z[list(closed)] = 0
    z.requires_grad_()
    x = torch.randn(batch, 7)
    gated.gates.measuring = True
    found, expected = gated(x), by_hand(plain, gated, z, x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(gated.gates.log_alpha.grad, z.grad)
    torch.testing.assert_close(
        [p.grad for p in gated.model.parameters()], [p.grad for p in plain.parameters()]
    )


def test_gradients_of_the_gradients_of_open_gates() -> None:
    weight = torch.randn(4, 3).double().requires_grad_()
    z = torch.ones(3).double().requires_grad_()
    second = []
    for times in (times_open_gates, torch.mul):
        first = torch.autograd.grad(times(weight, z).sin().sum(), (weight, z), create_graph=True)
        second.append(torch.autograd.grad(sum(f.square().sum() for f in first), (weight, z)))
    torch.testing.assert_close(*second)


def test_open_gates_under_function_transforms() -> None:
    """Reverse and forward mode see the gates, though all are 1."""
    gated, _ = budgeted()
    x, parameters = torch.randn(50, 7), dict(gated.named_parameters())

    def loss(log_alpha: Tensor) -> Tensor:
        values = {**parameters, "gates.log_alpha": log_alpha}
        return functional_call(gated, values, (x,)).square().sum()

    expected = torch.autograd.grad(gated(x).square().sum(), gated.gates.log_alpha)[0]
    at = gated.gates.log_alpha.detach()
    torch.testing.assert_close(torch.func.grad(loss)(at), expected)
    _, along = torch.func.jvp(loss, (at,), (torch.ones_like(at),))
    torch.testing.assert_close(along, expected.sum())


class Checkpointed(nn.Module):
    """All layers in one checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def test_checkpoints_under_a_budget_in_all_its_steps() -> None:
    """A budget measures in one step of four; the others draw gates without gradients."""
    slopes = []
    for model in (Checkpointed(reentrant=False), network()):
        torch.manual_seed(1)
        gated = hc.attach_gates(model, torch.zeros(2, 7))
        budget = hc.Budget(gated, macs=0.5, steps=2000)
        optimizer = torch.optim.SGD(gated.parameters(), lr=0.01)
        for step in range(6):
            if step == 3:
                close(budget, 0, 1, 15)
            optimizer.zero_grad()
            (gated(torch.randn(50, 7)).square().mean() + budget()).backward()
            optimizer.step()
            budget.step()
        slopes.append([p.grad for p in gated.model.parameters()] + [budget.importance()])
    torch.testing.assert_close(*slopes)


def test_a_cut_between_forward_and_recomputation_is_refused() -> None:
    gated = hc.attach_gates(Checkpointed(reentrant=False), torch.zeros(2, 7))
    budget = hc.Budget(gated, macs=0.5, steps=2000)
    gated.gates.measuring = False
    output = gated(torch.randn(50, 7))
    close(budget, 0)
    with pytest.raises(GateError, match=r"closed units between a forward and its recomputation"):
        output.sum().backward()


def test_states_and_copies_keep_the_mask() -> None:
    gated, budget = budgeted()
    close(budget, 3)
    other, _ = budgeted()
    other.load_state_dict(gated.state_dict())
    for each in (gated, copy.deepcopy(gated), other):
        assert next_draw(each).tolist() == [1.0] * 3 + [0.0] + [1.0] * 17
        assert each.gates.open_groups() == {1}
