import gc
from collections.abc import Callable
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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
        lambda gated, x: gated(gated(gated(x))),
    ],
    ids=["once", "two forwards, one backward", "samples", "detached chain", "chain"],
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


def test_checkpointing_in_evaluation_and_backward_in_training_is_refused() -> None:
    """The recomputation would see a draw where the forward saw the readout."""

    def evaluated_between(gated: hc.GatedModel, x: Tensor) -> Tensor:
        first = gated(x)
        second = gated.eval()(first)
        return gated.train()(second)

    with pytest.raises(GateError, match="mode"):
        results("NNN", evaluated_between)


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

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.free = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = False

    def segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.gated(x)) + torch.sigmoid(self.free(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.segment, x, use_reentrant=False)
        return self.segment(x)


def under_one_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    """The call in the middle draws for itself; before and after it the outer draw is in force."""
    with gated.draw():
        return gated.model(gated(gated.model(x)))


@pytest.mark.parametrize(
    "use",
    [
        call,
        two_calls,
        lambda gated, x: gated(gated(x)),
        lambda gated, x: gated(gated(gated(x))),
        lambda gated, x: gated(x, samples=3),
        under_one_draw,
    ],
    ids=["once", "two forwards", "its own output", "twice its own output", "samples", "nested"],
)
def test_a_segment_with_branches_gives_exact_gradients(use: Call) -> None:
    torch.manual_seed(1)
    model, x = Branches(), torch.randn(4, 6)
    gated = hc.attach_gates(model, x, sites=["gated:in"])
    found = []
    for model.checkpointed in (True, False):
        torch.manual_seed(2)
        found.append(gradients(use(gated, x).square().sum(), gated))
    assert found[1][-1].any()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_checkpointing_of_more_than_the_gated_model() -> None:
    """What is recomputed first was made when the call was over."""

    def longer(gated: hc.GatedModel, x: Tensor) -> Tensor:
        return torch.tanh(gated(x))

    def twice(gated: hc.GatedModel, x: Tensor) -> Tensor:
        return sum(checkpoint(longer, gated, k * x, use_reentrant=False) for k in (1.0, 0.5))

    def plainly(gated: hc.GatedModel, x: Tensor) -> Tensor:
        return sum(longer(gated, k * x) for k in (1.0, 0.5))

    assert_same(results("---", twice), results("---", plainly))


def test_many_draws_at_once() -> None:
    """More of them than are kept without a look at which are gone."""

    def often(gated: hc.GatedModel, x: Tensor) -> Tensor:
        for _ in range(70):
            gated(x)
        return sum(gated(x) for _ in range(70))

    assert_same(results("NNN", often), results("---", often))


def test_forwards_in_two_threads_are_refused() -> None:
    """Each thread numbers its nodes for itself, so that another's may have the same numbers."""

    def threads(gated: hc.GatedModel, x: Tensor) -> Tensor:
        def add() -> None:
            outputs.append(gated(x))

        outputs: list[Tensor] = []
        for _ in range(2):
            thread = Thread(target=add)
            thread.start()
            thread.join()
        return sum(outputs)

    results("---", threads)
    with pytest.raises(GateError, match="threads"):
        results("NNN", threads)


def started(work: Callable[[], Tensor]) -> Tensor:
    """What another thread makes."""
    found: list[Tensor] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("nodes", [0, 3, 6, 9])
def test_gates_drawn_in_one_thread_and_read_in_another_are_refused(nodes: int) -> None:
    """Its nodes could have numbers that in the first thread belong to another draw."""

    def elsewhere(gated: hc.GatedModel, x: Tensor) -> Tensor:
        def work() -> Tensor:
            h = x
            for _ in range(nodes):
                h = h * 1.0
            return gated.model(h)

        def draw() -> Tensor:
            kept.append(gated(x))
            with gated.draw():
                return started(work)

        kept: list[Tensor] = []
        return started(draw) + 0 * kept[0]

    with pytest.raises(GateError, match="threads"):
        results("NNN", elsewhere)


def test_freezing_between_forward_and_backward() -> None:
    def freezes(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = gated(x)
        gated.freeze_gates()
        return result

    found, expected = results("NNN", freezes), results("---", freezes)
    assert expected[0].any()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_whole_model_frozen_before_its_call_or_after_it() -> None:
    def before(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.freeze_gates()
        return checkpointed(gated, x)

    def plainly(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.freeze_gates()
        return gated(x)

    def after(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = checkpointed(gated, x)
        gated.freeze_gates()
        return result

    torch.testing.assert_close(results("---", before), results("---", plainly), rtol=0, atol=0)
    with pytest.raises(GateError, match="before freeze_gates"):
        results("---", after)


def test_gates_that_did_not_learn_when_they_were_drawn_and_are_frozen_since_are_refused() -> None:
    """Nothing is kept of such a draw, and the readout is another."""

    def since(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.gates.log_alpha.requires_grad_(False)
        result = gated(x)
        gated.freeze_gates()
        return result

    with pytest.raises(GateError, match="finds 0 draws"):
        results("NNN", since)


def test_a_draw_without_gradients_inside_a_segment_is_refused() -> None:
    """Nothing is kept of it to compare with."""

    def segment(gated: hc.GatedModel, x: Tensor) -> Tensor:
        with torch.no_grad(), gated.draw():
            scale = gated.model(x)
        return gated.model(x) * scale

    def inside(gated: hc.GatedModel, x: Tensor) -> Tensor:
        with gated.draw():
            return checkpoint(segment, gated, x, use_reentrant=False)

    with pytest.raises(GateError, match="without gradients"):
        results("---", inside)


def test_a_call_recomputed_inside_another_draw_is_refused() -> None:
    """Whether it drew for itself cannot be told there."""

    def inside(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = checkpointed(gated, x)
        with gated.draw():
            result.sum().backward()
        return result

    with pytest.raises(GateError, match="call backward after it"):
        results("---", inside)


def test_backward_between_two_parts_of_a_draw() -> None:
    """The second part is not taken for what the backward recomputed."""

    def between(gated: hc.GatedModel, x: Tensor) -> Tensor:
        first = gated(x)
        with gated.draw():
            second = gated.model(x)
            first.sum().backward()
            third = gated.model(second)
        return second + third

    assert_same(results("NNN", between), results("---", between))


class Slopes(nn.Module):
    """A model that differentiates itself."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.outer = plan == "N"

    def segment(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: torch.tanh(self.layers[0](x)), x, use_reentrant=False)
        (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return torch.tanh(self.layers[1](h + slope))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            if self.outer:
                return checkpoint(self.segment, x, use_reentrant=False)
            return self.segment(x)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_differentiates_itself_is_right_or_refused(
    whole: bool, early_stop: bool
) -> None:
    def slopes(plan: str) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Slopes(plan), torch.randn(4, 6, requires_grad=True)
        gated = hc.attach_gates(model, torch.zeros(2, 6), sites=["layers.0:in", "layers.1:in"])
        with set_checkpoint_early_stop(early_stop):
            result = checkpointed(gated, x) if whole and plan else gated(x)
            with gated.draw():
                return gradients(result.square().sum(), gated)

    expected = slopes("")
    for plan in ("-", "N"):
        try:
            found = slopes(plan)
        except GateError:
            continue
        torch.testing.assert_close(found, expected)


class Broken(Segments):
    """Compiled, it comes in pieces."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Segments, Broken])
def test_checkpointing_in_a_compiled_model(kind: type[Segments]) -> None:
    def compiled(plan: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        gated = hc.attach_gates(kind(plan), torch.zeros(2, 6), sites=["layers.0:in"])
        run = torch.compile(gated, backend="aot_eager") if plan == "N" else gated
        torch.manual_seed(2)
        with gated.draw():
            result = run(torch.ones(4, 6), samples=2) + run(torch.ones(4, 6))
        return gradients(result.square().sum(), gated)

    torch.testing.assert_close(compiled("N"), compiled("-"))


def test_a_draw_belongs_to_its_call_without_checkpointing_too() -> None:
    gated = hc.attach_gates(nn.Linear(6, 2), torch.zeros(2, 6), sites=[":in"])
    x, weight = torch.ones(1, 6), gated.model._parameters["weight"]
    z = next_draw(gated)
    first = gated(x)
    gated(x)
    (slope,) = torch.autograd.grad(first.sum(), weight)
    torch.testing.assert_close(slope, z.expand(2, 6))
