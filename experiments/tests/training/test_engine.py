import gc
import math
from typing import Any

import pytest
import torch

import hardconcrete as hc
from hardconcrete.demo import MLP, error_rate, scaled
from hardconcrete.demo.data import Images, load_digits
from hardconcrete.errors import ArgumentError, CompactionError, DataError
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.stacked_learners import StackedLearners

SITES = ["fc1:in", "fc2:in", "fc3:in"]


def learner(seed: int = 0, epochs: int = 3, lam: float = 1e-4, device: str = "cpu") -> Learner:
    torch.manual_seed(seed)
    model = MLP(64, (20, 10)).to(device)
    gated = hc.attach_gates(model, torch.zeros(2, 1, 8, 8, device=device), sites=SITES)
    recipe = Recipe(epochs=epochs, batch_size=50)
    return Learner(f"seed {seed}", seed, gated, recipe, hc.L0Penalty(gated, lam))


@pytest.fixture(scope="module")
def digits() -> Images:
    return load_digits("train")


def train(*learners: Learner, data: Images, stacked: bool = False) -> Engine:
    engine = Engine(learners, data, stacked=stacked)
    assert list(engine) == list(range(1, learners[0].recipe.epochs + 1))
    return engine


def assert_same(one: Learner, other: Learner) -> None:
    for name, tensor in one.state().items():
        assert torch.equal(tensor.cpu(), other.state()[name].cpu()), name


@pytest.mark.unwatched
def test_it_learns_and_prunes(digits: Images) -> None:
    recipe = Recipe(epochs=20, batch_size=20, gate_lr=0.02, averaging=0.99)
    dense = Learner("dense", 0, MLP(64, (100, 50)), recipe)
    model = hc.attach_gates(MLP(64, (100, 50)), torch.zeros(2, 64), sites=SITES)
    gated = Learner("gated", 0, model, recipe, hc.L0Penalty(model, 2e-5))
    engine = train(dense, gated, data=digits)
    test = load_digits("test")
    assert error_rate(dense.averaged, test) < 10
    assert error_rate(gated.averaged, test) < 10
    assert sum(gated.averaged.units_left()) < 190  # of 214
    assert all(math.isfinite(loss) for loss in engine.losses)
    assert engine.seconds > 0


def test_a_resumed_run_is_bit_identical(digits: Images) -> None:
    whole = learner(epochs=3)
    train(whole, data=digits)
    first = learner(epochs=2)
    train(first, data=digits)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    second = learner(seed=0, epochs=3)
    torch.rand(7)  # another random state than before
    engine = Engine([second], digits)
    second.restore(saved)
    engine.done = 2
    assert list(engine) == [3]
    assert_same(whole, second)


def test_a_seed_gives_the_same_alone_and_in_company(digits: Images) -> None:
    alone = learner(seed=1, epochs=1)
    train(alone, data=digits)
    other, together = learner(seed=0, epochs=1), learner(seed=1, epochs=1)
    train(other, together, data=digits)
    assert_same(alone, together)
    assert not torch.equal(other.model.gates.log_alpha, together.model.gates.log_alpha)


def test_averages_follow_weights_and_gates(digits: Images) -> None:
    slow = Learner("slow", 0, learner().model, Recipe(epochs=1, batch_size=50, averaging=0.5))
    initial = slow.averaged.gates.log_alpha.clone()
    train(slow, data=digits)
    present, average = slow.model.gates.log_alpha, slow.averaged.gates.log_alpha
    assert not torch.equal(average, initial)
    assert (average - present).abs().max() < (initial - present).abs().max()


def test_preparing_undoes_its_steps(digits: Images) -> None:
    one = learner()
    before = {name: tensor.clone() for name, tensor in one.state().items()}
    Engine([one], digits)
    after = one.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    extra = set(after) - set(before)
    assert extra
    assert all((after[name] == 0).all() for name in extra)


def test_a_state_of_another_network_is_refused(digits: Images) -> None:
    one = learner()
    train(one, data=digits)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    name = "model.gates.log_alpha"
    with pytest.raises(
        DataError, match=r"another network: model.gates.log_alpha is torch.float32 \[3\], not"
    ):
        one.restore({**state, name: torch.zeros(3)})
    del state[name]
    with pytest.raises(DataError, match="log_alpha is in one of them only"):
        one.restore(state)


def test_building_anew_must_pay(digits: Images) -> None:
    engine = Engine([learner()], digits)
    assert engine._worth(1.0) == 0.1  # nothing is compiled here, building is cheap
    engine._settings["compiled"] = True
    engine.epochs, engine.done, engine.seconds_to_build = 200, 40, 30.0
    assert engine._worth(4.0) == pytest.approx(2 * 30 / (0.5 * 160 * 4))
    engine.done = 190
    assert engine._worth(4.0) == 1.0  # 20 seconds are to be had, at most
    engine.done = 200
    assert engine._worth(4.0) == 1.0


def test_shrinking_waits_while_more_and_more_is_shut(digits: Images) -> None:
    model = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(2, 64))
    one = Learner("one", 0, model, Recipe(batch_size=50, shrink=1))
    Engine([one], digits)
    for shut in (4, 8):  # four of thirty more in each epoch
        model.gates.log_alpha.data[:shut] = -20.0
        assert not one.shrink(pays=0.2, left=100)
    model.gates.log_alpha.data[:9] = -20.0
    assert not one.shrink(pays=0.2, left=100)
    assert not one.shrink(pays=0.2, left=100)  # it was more than before, an epoch ago
    assert one.shrink(pays=0.2, left=100)


def test_all_at_once_waits_an_epoch_too(digits: Images) -> None:
    model = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(2, 64))
    one = Learner("one", 0, model, Recipe(batch_size=50, shrink=1))
    Engine([one], digits)
    model.gates.log_alpha.data[:9] = -20.0
    assert [one.shrink(pays=0.2, left=100) for _ in range(3)] == [False, False, True]


def test_what_cannot_shrink_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CompactionError("no")

    monkeypatch.setattr(hc, "shrink", refuse)
    model = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(2, 64))
    one = Learner("one", 0, model, Recipe(batch_size=50, shrink=1))
    with pytest.warns(hc.HardConcreteWarning, match="one goes on as it is: no"):
        assert not one.shrink()
    assert not one.shrink()


@pytest.mark.parametrize("budgeted", [False, True])
def test_a_budget_removes_what_the_readout_shuts(budgeted: bool) -> None:
    model = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(2, 64))
    penalties = [hc.Budget(model, macs=0.5, by="gates")] * budgeted
    one = Learner("one", 0, model, Recipe(batch_size=50, shrink=1), *penalties)
    model.gates.log_alpha.data[:9] = -4.0  # shut, and still open one time in twelve
    assert one.shrink() == budgeted
    assert one.gates == (21 if budgeted else 30)


def test_no_garbage_is_looked_for_while_it_is_built(
    digits: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = []

    def broken(_: StackedLearners) -> None:
        collecting.append(gc.isenabled())
        raise RuntimeError("no step")

    engine = Engine([learner()], digits)
    assert gc.isenabled()
    monkeypatch.setattr(StackedLearners, "step", broken)
    with pytest.raises(RuntimeError, match="no step"):
        engine.build()
    assert gc.isenabled()
    assert collecting == [False]


@pytest.mark.unwatched
def test_what_has_shrunk_is_compiled_once(digits: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    def quickly(function: Any, **_: bool) -> Any:
        return torch.compile(function, dynamic=False, backend="eager")

    monkeypatch.setattr("hardconcrete_paper.training.stacked_learners._compiled", quickly)
    model = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(2, 64), droprate=0.5)
    penalties = hc.L0Penalty(model, 1e-4), hc.Budget(model, macs=0.5, steps=90, by="gates")
    recipe = Recipe(epochs=3, batch_size=50, gate_lr=1e-2, shrink=1)
    one = Learner("one", 0, model, recipe, *penalties)
    engine = Engine([one], digits)
    engine._settings["compiled"] = True
    engine.build()
    model.gates.log_alpha.data[::2] = -20.0
    monkeypatch.setattr(engine, "_worth", lambda _: 0.01)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert list(engine) == [1, 2, 3]
    assert one.gates == 15


def test_learners_need_the_same_pace(digits: Images) -> None:
    with pytest.raises(ArgumentError, match="same epochs and batch size"):
        Engine([learner(epochs=1), learner(epochs=2)], digits)


def test_error_rate_restores_the_mode() -> None:
    data = Images(torch.zeros(3, 1, 1, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]), "blank")
    model = torch.nn.Flatten().train()
    assert error_rate(model, data, batch_size=2) == pytest.approx(200 / 3)
    assert model.training


def test_less_data_than_a_batch_is_refused() -> None:
    data = Images(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3).long(), "blank")
    with pytest.raises(ArgumentError, match="3 examples are less than a batch"):
        Engine([learner()], data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seeds", [(1,), (0, 1)])
def test_a_replayed_graph_gives_what_a_cpu_would(digits: Images, seeds: tuple[int, ...]) -> None:
    replayed = [learner(seed, epochs=1, device="cuda") for seed in seeds]
    train(*replayed, data=digits, stacked=True)
    eager = [learner(seed, epochs=1, device="cuda") for seed in seeds]
    stacks = [
        StackedLearners([one], *on_gpu(digits), prepare=scaled, compiled=False) for one in eager
    ]
    for stack in stacks:
        stack.begin_epoch(0)
        for _ in range(stack.steps):
            stack.step()
    for one, other in zip(replayed, eager, strict=True):
        for name, tensor in one.state().items():
            torch.testing.assert_close(tensor, other.state()[name], rtol=1e-3, atol=1e-4)


def on_gpu(data: Images) -> tuple[torch.Tensor, torch.Tensor]:
    return data.images.cuda(), data.labels.cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_resumed_run_on_a_gpu_repeats(digits: Images) -> None:
    whole, first, second = (learner(epochs=n, device="cuda") for n in (3, 2, 3))
    train(whole, data=digits)
    train(first, data=digits)
    engine = Engine([second], digits)
    second.restore(first.state())
    engine.done = 2
    assert list(engine) == [3]
    assert_same(whole, second)
