import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import GateError
from tests.gating.networks import Segments
from tests.gating.oracles import gradients, next_draw

Call = Callable[[hc.GatedModel, Tensor], Tensor]


def call(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x)


def two_calls(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x) + 2 * gated(0.5 * x)


def checkpointed(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return checkpoint(gated, x, use_reentrant=False)


def with_generator(gated: hc.GatedModel, x: Tensor) -> Tensor:
    gated.gates.generator = torch.Generator().manual_seed(5)
    return checkpointed(gated, x)


def results(plan: str, use: Call = call, training: bool = True) -> list[Tensor]:
    """The gradients of gates, weights and input after one backward."""
    torch.manual_seed(1)
    sites = [f"layers.{k}:in" for k in range(len(plan))]
    gated = hc.attach_gates(Segments(plan), torch.zeros(2, 6), sites=sites).train(training)
    x = torch.randn(4, 6, requires_grad=True)
    use(gated, x).square().sum().backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in (*gated.parameters(), x)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert expected[-2].any(), "the gates have a gradient"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["NNN", "-N-", "N-N", "--N"])
@pytest.mark.parametrize(
    "use",
    [
        call,
        two_calls,
        lambda gated, x: gated(x, samples=20),
        lambda gated, x: gated(gated(x).detach()),
    ],
    ids=["once", "two forwards, one backward", "samples", "detached chain"],
)
def test_checkpointing_gives_exact_gradients(plan: str, use: Call) -> None:
    assert_same(results(plan, use), results("---", use))


def test_checkpointing_with_a_draw_in_between() -> None:
    """Calls that are not differentiated do not confuse the one that is."""

    def busy(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = gated(x)
        gated(x)
        with torch.no_grad():
            gated(x)
        return result

    assert_same(results("NNN", busy), results("---", busy))


def test_checkpointing_with_two_backwards() -> None:
    def twice(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = gated(x)
        result.sum().backward(retain_graph=True)
        return result

    assert_same(results("NNN", twice), results("---", twice))


def test_checkpointing_with_frozen_gates() -> None:
    def frozen(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.freeze_gates()
        return gated(x)

    torch.testing.assert_close(results("NNN", frozen), results("---", frozen), rtol=0, atol=0)


def test_checkpointing_in_evaluation() -> None:
    assert_same(results("NNN", training=False), results("---", training=False))


def test_checkpointing_the_whole_gated_model() -> None:
    assert_same(results("---", checkpointed), results("---"))


@pytest.mark.parametrize(
    "use",
    [
        with_generator,
        lambda gated, x: checkpoint(gated, x, use_reentrant=False, preserve_rng_state=False),
    ],
    ids=["generator", "random state not kept"],
)
def test_a_second_draw_in_backward_is_no_other_draw(use: Call) -> None:
    """The recomputed forward draws anew: from the same noise, or that is an error."""

    def plainly(gated: hc.GatedModel, x: Tensor) -> Tensor:
        if use is with_generator:
            gated.gates.generator = torch.Generator().manual_seed(5)
        return gated(x)

    try:
        found = results("---", use)
    except GateError:
        return
    assert_same(found, results("---", plainly))


quiet = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@quiet
@pytest.mark.parametrize("plan", ["RRR", "R--", "--R", "-R-", "NRN"])
def test_reentrant_checkpointing_is_refused(plan: str) -> None:
    """Its gradients of the gates would be lost."""
    with pytest.raises(GateError, match="use_reentrant=False"):
        results(plan)


@quiet
def test_reentrant_checkpointing_of_inputs_without_gradients_is_refused() -> None:
    """Torch would not even recompute it. Without gradients altogether nothing is lost."""
    gated = hc.attach_gates(Segments("R-"), torch.ones(2, 6), sites=["layers.0:in"])
    with pytest.raises(GateError, match="use_reentrant=False"):
        gated(torch.ones(2, 6))
    with torch.no_grad():
        gated(torch.ones(2, 6))


@quiet
def test_reentrant_checkpointing_in_evaluation() -> None:
    assert_same(results("RRR", training=False), results("---", training=False))


def test_chained_forwards_are_right_or_refused() -> None:
    def chained(gated: hc.GatedModel, x: Tensor) -> Tensor:
        return gated(gated(x))

    expected = results("---", chained)
    try:
        found = results("NNN", chained)
    except GateError:
        return
    assert_same(found, expected)


def test_a_draw_is_gone_with_its_graph() -> None:
    gated = hc.attach_gates(nn.Linear(97, 5), torch.zeros(2, 97), sites=[":in"])

    def alive() -> int:
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) is Tensor and 97 in thing.shape)

    def step() -> None:
        gated(torch.ones(3, 97)).sum().backward()
        gated.zero_grad()

    step()
    before = alive()
    for _ in range(10):
        step()
    assert alive() <= before


class Branches(nn.Module):
    """A segment whose last operation does not depend on a gate."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.gated, self.free = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def segment(self, x: Tensor) -> Tensor:
        return self.gated(x) + torch.tanh(self.free(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.segment, x, use_reentrant=False)
        return self.segment(x)


def test_a_segment_with_branches_is_right_or_refused() -> None:
    def branches(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Branches(checkpointed)
        gated = hc.attach_gates(model, torch.zeros(2, 6), sites=["gated:in"])
        return gradients(gated(torch.randn(4, 6)).square().sum(), gated)

    try:
        found = branches(True)
    except GateError:
        return
    torch.testing.assert_close(found, branches(False), rtol=0, atol=0)


def test_a_draw_belongs_to_its_call_without_checkpointing_too() -> None:
    gated = hc.attach_gates(nn.Linear(6, 2), torch.zeros(2, 6), sites=[":in"])
    x, weight = torch.ones(1, 6), gated.model._parameters["weight"]
    z = next_draw(gated)
    first = gated(x)
    gated(x)
    (slope,) = torch.autograd.grad(first.sum(), weight)
    torch.testing.assert_close(slope, z.expand(2, 6))
