"""A gated model in use: drawn, read out, copied, saved, compiled, sent and trained in parallel."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.sparsifiers import RectifiedGates
from tests.distributions.oracles import assert_average
from tests.gating import workers
from tests.gating.networks import Net, Temperature
from tests.gating.oracles import by_hand, gradients, next_draw, open_all, spread
from tests.processes import in_processes


def make(**settings: object) -> hc.GatedModel:
    torch.manual_seed(0)
    zeros = torch.zeros(2, 1, 4, 4)
    return spread(hc.attach_gates(Net(), zeros, sites=Net.sites, **settings))


def inputs(batch: int = 5) -> Tensor:
    return torch.randn(batch, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def ungated(gated: hc.GatedModel) -> nn.Module:
    """The plain model with the same weights."""
    return hc.remove_gates(copy.deepcopy(gated))


def watched(units: int = 6, **settings: object) -> hc.GatedModel:
    """Its outputs are its gates where its inputs are 1."""
    layer = nn.Linear(units, units, bias=False)
    nn.init.eye_(layer.weight)
    return hc.attach_gates(layer, torch.zeros(2, units), sites=[":in"], **settings)


# One draw per call


@pytest.mark.parametrize("batch", [2, 50])
def test_one_draw_is_shared_by_the_batch(batch: int) -> None:
    gated, ones = watched(), torch.ones(batch, 6, requires_grad=True)
    z = next_draw(gated)
    first = gated(ones)
    torch.testing.assert_close(first, z.expand(batch, 6))
    assert not torch.equal(gated(ones), first)


def test_draws_of_calls_are_independent_and_of_the_right_distribution() -> None:
    """18 averages within 5.5 standard errors: one seed in 1.4 million fails."""
    gated, ones = spread(watched()), torch.ones(1, 6)
    with torch.no_grad():
        z = torch.stack([gated(ones)[0] for _ in range(2000)])
        law = gated.gates.distribution()
        assert_average(z, law.mean)
        assert_average((z > 0).float(), law.open_probability)
        assert_average((z[::2] - law.mean) * (z[1::2] - law.mean), torch.zeros(6))


def test_the_same_seed_gives_the_same_result() -> None:
    gated, x = make(), inputs()
    torch.manual_seed(4)
    first = gated(x)
    torch.manual_seed(4)
    assert torch.equal(gated(x), first)


def test_outside_a_draw_training_is_an_error_with_words() -> None:
    gated = make()
    layer, x = gated.model.fc1, torch.randn(2, 12)
    for call in (gated.model, gated.model.forward):
        with pytest.raises(GateError, match=r"call it instead of its inner model.*gated.eval\(\)"):
            call(inputs())
    for call in (layer, layer.forward):
        with pytest.raises(GateError, match="in training they are drawn for one call"):
            call(x)
    gated.eval().model.train()
    with pytest.raises(GateError, match="inner model, itself in training, put other"):
        gated(inputs())


def test_a_draw_covers_other_methods() -> None:
    gated, x = make(), inputs()
    plain = ungated(gated)
    z = next_draw(gated)
    with gated.draw():
        hidden, output = gated.model.hidden(x), gated.model(x)
        assert torch.equal(gated(x), output)
        torch.testing.assert_close(gated.model.fc2.weight, plain.fc2.weight * z[-8:])
    torch.testing.assert_close(output, by_hand(plain, gated, z, x))
    torch.testing.assert_close(output, plain.fc2(z[-8:] * hidden.relu()))
    with pytest.raises(GateError):
        gated.model.hidden(x)


def test_draws_nest() -> None:
    gated, ones = watched(), torch.ones(1, 6)
    with gated.draw():
        outer = gated(ones)
        with gated.draw():
            assert not torch.equal(gated(ones), outer)
        assert torch.equal(gated(ones), outer)


def test_a_call_that_fails_holds_nothing() -> None:
    gated = make()
    with pytest.raises(RuntimeError):
        gated(torch.zeros(2, 1, 5, 5))
    assert not gated.gates.held


def test_a_model_that_calls_itself_through_its_gates() -> None:
    """Inside a call the gated model is the model."""
    gated, ones = watched(), torch.ones(1, 6)
    gated.model.register_forward_hook(
        lambda _, args, y: y + gated(args[0] / 2) if args[0].max() > 0.6 else y
    )
    z = next_draw(gated)
    torch.testing.assert_close(gated(ones), 1.5 * z.view(1, 6))


# Evaluation


@pytest.mark.parametrize("readout", ["paper", "median", "mean", "binary"])
def test_evaluation_uses_the_readout(readout: str) -> None:
    gated, x = make(readout=readout).eval(), inputs()
    plain = ungated(gated)
    state = torch.get_rng_state()
    expected = by_hand(plain, gated, gated.gates.readout(), x)
    torch.testing.assert_close(gated(x), expected)
    assert torch.equal(gated.model(x), gated(x))
    with gated.draw():
        assert torch.equal(gated.model(x), gated(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_part_in_evaluation_reads_its_gates_out() -> None:
    gated, x = make(), inputs()
    plain = ungated(gated)
    gated.model.fc1.eval()
    z = next_draw(gated)
    z = torch.cat([z[:3], gated.gates.readout()[3:15], z[15:]])
    torch.testing.assert_close(gated(x), by_hand(plain, gated, z, x))


def test_what_can_be_asked() -> None:
    gated = make()
    law, readout = gated.gates.distribution(), gated.gates.readout()
    names = ["conv:out", "fc1:in", "fc2:in"]
    assert [group.name for group in gated.groups] == names
    assert list(gated.open_probability()) == list(gated.gate_values()) == names
    assert torch.equal(torch.cat([*gated.open_probability().values()]), law.open_probability)
    assert torch.equal(torch.cat([*gated.gate_values().values()]), readout)
    assert [len(z) for z in gated.gate_values().values()] == [3, 12, 8]
    assert [*gated.by_group(torch.zeros(7, 23)).values()][1].shape == (7, 12)
    left = [int((z > 0).sum()) for z in readout.split([3, 12, 8])]
    assert gated.units_left() == tuple(left)
    assert sum(left) < 23


def test_the_summary_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    gated = make()
    gated.summary()
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("group", "weights each", "open now", "mean P(open)"))
    row = next(line for line in printed.splitlines() if "conv:out" in line)
    probability = gated.open_probability()["conv:out"].mean().item()
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["conv:out", "3", "10", str(gated.units_left()[0]), f"{probability:.3f}"]


# Several samples, and one per example


def test_samples_are_stacked() -> None:
    gated, x = make(), inputs()
    torch.manual_seed(2)
    stacked = gated(x, samples=3)
    torch.manual_seed(2)
    assert torch.equal(stacked, torch.stack([gated(x) for _ in range(3)]))
    assert stacked.shape == (3, 5, 4)
    assert not torch.equal(stacked[0], stacked[1])
    with pytest.raises(ArgumentError, match="samples=0 must be a whole number, at least 1"):
        gated(x, samples=0)


def test_an_argument_of_the_model_that_is_called_samples() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, samples: int = 1) -> Tensor:
            return self.layer(x).new_full((), samples)

    gated = hc.attach_gates(Own(), torch.zeros(2, 4), sites=["layer:in"])
    assert gated(torch.zeros(2, 4)) == 1
    assert gated(torch.zeros(2, 4), 5) == 5
    with pytest.raises(ArgumentError, match="pass the model's argument by position"):
        gated(torch.zeros(2, 4), samples=5)


def test_losses_of_samples_are_averaged() -> None:
    """Eq. 9: the mean over draws of the loss, not the loss of the mean."""
    gated, x, y = make(), inputs(), torch.tensor([0, 1, 2, 3, 0])
    torch.manual_seed(2)
    losses = torch.stack([F.cross_entropy(gated(x), y) for _ in range(4)])
    torch.manual_seed(2)
    stacked = gated(x, samples=4)
    loss = F.cross_entropy(stacked.flatten(0, 1), y.repeat(4))
    torch.testing.assert_close(loss, losses.mean())
    torch.testing.assert_close(gradients(loss, gated), gradients(losses.mean(), gated))


class Structured(nn.Linear):
    """Answers with whatever shape of answer was asked for."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(super().forward(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, (2 * y, y.sum())),
        lambda y: {"logits": y, "hidden": [y, y + 1]},
        lambda y: {"logits": y, "loss": None, "layers": 3},
    ],
    ids=["tuple", "dict", "not only tensors"],
)
def test_structures_are_stacked(wrap: Callable[[Tensor], object]) -> None:
    gated = hc.attach_gates(Structured(wrap), torch.zeros(2, 4), sites=[":in"])
    x = torch.randn(2, 4)
    torch.manual_seed(2)
    parts = [gated(x) for _ in range(3)]
    torch.manual_seed(2)
    found = gated(x, samples=3)
    flatten = torch.utils._pytree.tree_flatten
    leaves, structure = flatten(found)
    assert structure == flatten(parts[0])[1]
    for leaf, *draws in zip(leaves, *(flatten(part)[0] for part in parts), strict=True):
        assert torch.equal(leaf, torch.stack(draws)) if isinstance(leaf, Tensor) else leaf in draws


def test_every_example_has_gates_of_its_own() -> None:
    """24 averages within 5.5 standard errors: one seed in a million fails."""
    gated = spread(watched(sample="example"))
    z = gated(torch.ones(20_000, 6)).detach()
    law = gated.gates.distribution()
    assert_average(z, law.mean.detach())
    assert_average((z > 0).float(), law.open_probability.detach())
    pairs = (z[::2] - law.mean) * (z[1::2] - law.mean)
    assert_average(pairs.detach(), torch.zeros(6))
    assert_average(pairs.roll(1, 1).detach(), torch.zeros(6))


@pytest.mark.parametrize(
    ("model", "sites", "shape"),
    [
        (MLP(20, (9, 7)), ("fc1:in", "fc2:out", "fc3:in"), (20,)),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), ("0:out", "1:in"), (7, 4)),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 1)), ("0:in", "1:out"), (3, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), ("0:in", "0:out"), (3, 6, 6)),
        (nn.Conv2d(4, 4, 3, groups=4, bias=False), (":out",), (4, 5, 5)),
        (nn.Conv3d(2, 3, 2), (":in", ":out"), (2, 3, 3, 3)),
    ],
    ids=["MLP", "sequences", "Conv1d", "Conv2d", "depthwise", "Conv3d"],
)
def test_a_draw_per_example_is_a_loop_over_examples(
    model: nn.Module, sites: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    model, plain = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(6, *shape)
    gated = spread(hc.attach_gates(model, x, sites=sites, sample="example"))
    z = next_draw(gated, 6)
    expected = torch.cat([by_hand(plain, gated, z[k], x[k : k + 1]) for k in range(6)])
    found = gated(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients(found.square().sum(), gated),
        gradients(expected.square().sum(), plain, gated.gates),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_draw_per_example_elsewhere() -> None:
    gated = watched(sample="example")
    assert gated(torch.ones(4, 6), samples=3).shape == (3, 4, 6)
    assert torch.equal(gated.eval()(torch.ones(4, 6))[0], gated.gates.readout())
    gated.train()
    with pytest.raises(ArgumentError, match=r"a draw needs the batch size: draw\(64\)"):
        gated.draw().__enter__()
    with gated.draw(4):
        assert torch.equal(gated(torch.ones(4, 6)), gated.model(torch.ones(4, 6)))
    with pytest.raises(ArgumentError, match="needs a tensor input whose dimension 0 is the batch"):
        gated(3, torch.tensor(1.0))
    gated.freeze_gates()
    assert torch.equal(gated(torch.ones(4, 6)), gated.gates.readout().expand(4, 6))


def test_the_batch_is_also_found_in_keywords() -> None:
    assert watched(sample="example")(input=torch.ones(4, 6)).shape == (4, 6)


def test_a_batch_size_does_not_change_what_is_sampled() -> None:
    """One draw per batch was asked for when the gates were put on."""
    gated = watched()
    with gated.draw(4):
        rows = gated(torch.ones(4, 6))
    torch.testing.assert_close(rows, rows[:1].expand(4, 6))


# Frozen gates


def test_frozen_gates_are_the_readout_in_training_too() -> None:
    gated, x = make(), inputs(60)
    gated.model.bn.eval()
    expected = gated.eval()(x)
    gated.train()
    gated.model.bn.eval()
    gated.freeze_gates()
    state = torch.get_rng_state()
    found = gated(x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert gated.gates.log_alpha.grad is None
    assert gated.model.fc2._parameters["weight"].grad.any()
    gated.freeze_gates(False)
    assert not torch.equal(gated(x), found)
    gated(x).sum().backward()
    assert gated.gates.log_alpha.grad.any()


@pytest.mark.parametrize("to_none", [True, False])
def test_frozen_gates_stay_whatever_their_optimiser_remembers(to_none: bool) -> None:
    gated, x = make(), inputs()
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=0.1))
    (gated(x).square().sum() + hc.L0Penalty(gated, 1.0)()).backward()
    optimizer.step()
    gated.freeze_gates()
    before = gated.gates.log_alpha.detach().clone()
    for _ in range(3):
        gated(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert torch.equal(gated.gates.log_alpha, before)


def test_frozen_gates_do_not_learn_a_temperature() -> None:
    gated = watched(method=RectifiedGates(Temperature()), readout="mean")
    before = gated.gates.readout().detach()
    gated.freeze_gates()
    groups = hc.parameter_groups(gated, lr=1.0)
    (gated(torch.ones(2, 6)).sum() + hc.L0Penalty(gated, 1.0)()).backward()
    torch.optim.SGD(groups).step()
    assert torch.equal(gated.gates.readout(), before)


# State, copies and averages


def step(gated: hc.GatedModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    (gated(inputs()).square().mean() + hc.L0Penalty(gated, 0.01)()).backward()
    optimizer.step()


def adam(gated: hc.GatedModel) -> torch.optim.Adam:
    return torch.optim.Adam(hc.parameter_groups(gated, lr=1e-2, gate_lr=0.1))


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_the_keys_of_the_state() -> None:
    plain, gated = Net(), make()
    assert list(gated.model.state_dict()) == list(plain.state_dict())
    assert set(gated.state_dict()) == {f"model.{k}" for k in plain.state_dict()} | {
        "gates.log_alpha"
    }
    plain.load_state_dict(gated.model.state_dict())
    assert torch.equal(plain.eval()(inputs()), open_all(gated).eval()(inputs()))


@pytest.mark.parametrize("holder", [lambda gated: gated, nn.Sequential, AveragedModel])
def test_a_state_of_other_sites_is_refused(tmp_path: Path, holder: Any) -> None:
    """Also where they have the same number of gates."""
    first, second = hc.Site(("fc1.weight", "fc1.bias"), 0), "fc2:in"
    here = hc.attach_gates(Net(), inputs(), sites=[first, second])
    there = holder(hc.attach_gates(Net(), inputs(), sites=[second, "fc1:out"]))
    torch.save(holder(here).state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    before = copy.deepcopy(there.state_dict())
    words = r"of fc1.bias:0, fc1.weight:0 in this state would become those of fc2.weight:1"
    with pytest.raises(hc.HardConcreteError, match=words):
        there.load_state_dict(state)
    torch.testing.assert_close(there.state_dict(), before, rtol=0, atol=0)
    flipped = hc.Site(("fc1.bias", "fc1.weight"), 0)
    same = holder(hc.attach_gates(Net(), inputs(), sites=[flipped, hc.Site("fc2.weight", 1)]))
    same.load_state_dict(state)
    assert_same_state(same, holder(here))


def test_a_state_without_metadata_loads() -> None:
    """Formats that keep nothing but tensors lose it."""
    gated, other = make(), hc.attach_gates(Net(), inputs(), sites=Net.sites)
    other.load_state_dict({**gated.state_dict()})
    assert_same_state(other, gated)


@pytest.mark.parametrize("mode", ["training", "draw", "evaluation"])
def test_distributed_checkpoints_read_the_state(mode: str) -> None:
    gated = make().train(mode != "evaluation")
    with gated.draw() if mode == "draw" else nullcontext():
        state = get_model_state_dict(gated)
    torch.testing.assert_close(state, dict(gated.state_dict()), rtol=0, atol=0)


def test_weights_alone_load_whatever_is_gated() -> None:
    state = hc.attach_gates(Net(), inputs(), sites=["fc1:in"]).state_dict()
    del state["gates.log_alpha"]
    other = hc.attach_gates(Net(), inputs(), sites=["fc2:in"])
    other.load_state_dict(state, strict=False)
    assert torch.equal(other.model.fc1.weight, state["model.fc1.weight"])


class Branches(nn.Module):
    """Two that are read side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(x).relu(), self.b(x).relu()], 1))


def test_gates_of_another_part_of_the_same_weights_are_refused() -> None:
    a, b = (hc.attach_gates(Branches(), torch.zeros(2, 4), include=name) for name in "ab")
    with pytest.raises(ArgumentError, match=r"of out.weight:1 \(a\) .* of out.weight:1 \(b\)"):
        b.load_state_dict(a.state_dict())
    shrinking = hc.attach_gates(Branches(), torch.zeros(2, 4))
    with torch.no_grad():
        shrinking.gates.log_alpha[:3] = -20
    assert hc.shrink(shrinking, None, pays=0)
    other = hc.attach_gates(Branches(), torch.zeros(2, 4))
    other.load_state_dict(shrinking.state_dict())
    assert_same_state(other, shrinking)


def test_states_travel_between_wrapped_and_plain_models() -> None:
    def dense(wrap: Callable[[nn.Module], nn.Module]) -> hc.GatedModel:
        layers = nn.Linear(4, 3), nn.ReLU(), wrap(nn.Linear(3, 2))
        return hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 4))

    plain, wrapped = dense(lambda layer: layer), dense(checkpoint_wrapper)
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    assert torch.equal(plain.gates.log_alpha, wrapped.gates.log_alpha)


def test_tied_weights_have_one_name_in_states() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    first, second = (
        hc.attach_gates(Tied(), torch.zeros(2, 4), sites=[hc.Site(f"{name}.weight", 1)])
        for name in ("first", "second")
    )
    first.load_state_dict(second.state_dict())
    assert_same_state(first, second)


def test_a_saved_run_goes_on_where_it_was(tmp_path: Path) -> None:
    gated = make()
    optimizer = adam(gated)
    step(gated, optimizer, 1)
    torch.save([gated.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
    step(gated, optimizer, 2)
    model_state, optimizer_state = torch.load(tmp_path / "run.pt", weights_only=True)
    torch.manual_seed(9)
    other = hc.attach_gates(Net(), inputs(), sites=Net.sites)
    other.load_state_dict(model_state)
    resumed = adam(other)
    resumed.load_state_dict(optimizer_state)
    step(other, resumed, 2)
    assert_same_state(other, gated)


@pytest.mark.parametrize("training", [True, False])
def test_a_state_can_be_assigned(training: bool) -> None:
    gated, other = make(), make().train(training)
    nn.init.zeros_(other.gates.log_alpha)
    other.load_state_dict(gated.state_dict(), assign=True)
    assert_same_state(other, gated)
    assert torch.equal(other.eval()(inputs()), gated.eval()(inputs()))


def through_pickle(gated: hc.GatedModel) -> hc.GatedModel:
    return pickle.loads(pickle.dumps(gated))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copies_after_a_step(copied: Callable[[hc.GatedModel], hc.GatedModel]) -> None:
    gated = make()
    step(gated, adam(gated), 1)
    with gated.draw():
        gated(inputs())
        other = copied(gated)
    assert not other.gates.held
    assert type(other.model.fc1) is type(gated.model.fc1)
    assert_same_state(other, gated)
    for model in (gated, other):
        step(model, adam(model), 2)
    assert_same_state(other, gated)
    before = gated.eval()(inputs())
    open_all(other)
    assert torch.equal(gated(inputs()), before)
    assert not torch.equal(other.eval()(inputs()), before)
    assert torch.equal(other.model(inputs()), other(inputs()))
    assert type(hc.remove_gates(other).fc1) is nn.Linear


def test_gates_keep_their_precision() -> None:
    """A model may become half precision; its gates are always float32."""
    for gated in (make().bfloat16(), make().half(), make().double()):
        assert gated.gates.log_alpha.dtype == torch.float32
        assert gated.model.fc1._parameters["weight"].dtype != torch.float32


def test_gradients_and_learnt_temperatures_keep_their_precision_too() -> None:
    gated = hc.attach_gates(
        nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"], method=RectifiedGates(Temperature())
    )
    gated(torch.ones(2, 4)).sum().backward()
    slope = gated.gates.log_alpha.grad.clone()
    optimizer = torch.optim.Adam(gated.parameters())
    gated.bfloat16()
    assert {p.dtype for p in gated.gates.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in gated.gates.parameters()} == {torch.float32}
    assert torch.equal(gated.gates.log_alpha.grad, slope)
    optimizer.step()


def test_averages_include_the_gates() -> None:
    gated = make()
    average = AveragedModel(gated, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    optimizer = adam(gated)
    expected = None
    for seed in range(3):
        step(gated, optimizer, seed)
        average.update_parameters(gated)
        now = [p.detach().clone() for p in gated.parameters()]
        old = expected or now
        expected = [torch.lerp(b, a, 0.25) for a, b in zip(now, old, strict=True)]
    torch.testing.assert_close(list(average.module.parameters()), expected)
    log_alpha = average.module.gates.log_alpha
    assert not torch.equal(log_alpha, gated.gates.log_alpha)
    values = torch.cat([*average.module.gate_values().values()])
    torch.testing.assert_close(values, hc.HardConcrete(log_alpha).readout("paper"))
    average.eval()
    assert torch.equal(average(inputs()), average.module.model(inputs()))
    assert not torch.equal(average(inputs()), gated.eval()(inputs()))


# Compilers and other processes


@pytest.mark.early
@pytest.mark.unwatched
@inductor.patch(fallback_random=True)
def test_compiled_training() -> None:
    """One graph for the forward and the penalty; the same numbers and gradients."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    gated = spread(hc.attach_gates(model, torch.zeros(2, 6), sites=["0:in", "2:out"]))
    prior, x = hc.HardConcrete.with_open_probability(0.1), torch.randn(4, 6)
    penalty = hc.L0Penalty(gated, 0.01, weight_decay=0.1, prior=prior, examples=100)

    def loss(x: Tensor) -> Tensor:
        return gated(x).square().mean() + penalty()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        torch.manual_seed(3)
        value = function(x)
        results.append([value.detach(), *gradients(value, gated)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    assert not gated.gates.held


@pytest.mark.unwatched
def test_compiled_evaluation() -> None:
    gated, x = make().eval(), inputs()
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    found = compiled(x)
    torch.testing.assert_close(found, gated(x))
    torch.testing.assert_close(
        gradients(found.sum(), gated.gates), gradients(gated(x).sum(), gated.gates)
    )


def test_a_spawned_process_trains_the_model_it_got(tmp_path: Path) -> None:
    gated = workers.make_gated()
    gated(inputs()).sum().backward()
    gated.zero_grad()
    twin = copy.deepcopy(gated)
    mp.spawn(workers.train_step, args=(gated, tmp_path / "child.pt"), nprocs=1)
    workers.train_step(0, twin, tmp_path / "here.pt")
    child, here = (torch.load(tmp_path / name) for name in ("child.pt", "here.pt"))
    torch.testing.assert_close(child, here, rtol=1e-5, atol=1e-6)
    assert not torch.equal(child["gates.log_alpha"], workers.make_gated().gates.log_alpha)


def test_data_parallel_training_averages_the_gradients(tmp_path: Path) -> None:
    """Two processes draw their own gates; no search for unused parameters."""
    in_processes(2, workers.distributed_gradients, tmp_path)
    gated = workers.make_gated()
    penalty = hc.L0Penalty(gated, workers.LAM, weight_decay=workers.DECAY)
    names = [name for name, _ in gated.named_parameters()]
    alone = [gradients(workers.loss_of_rank(gated, penalty, rank), gated) for rank in (0, 1)]
    mean = {n: (a + b) / 2 for n, a, b in zip(names, *alone, strict=True)}
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0)
    for found in ranks[0]:
        torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(alone[0][-1], alone[1][-1])
    assert names[-1] == "gates.log_alpha"


@dataclass
class Answer:
    """An output that torch cannot look into."""

    scores: Tensor


@pytest.mark.parametrize("wrap", [Answer, lambda scores: {"first": scores[0, 0].item()}])
def test_samples_that_cannot_be_stacked_are_refused(wrap: Any) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    gated = hc.attach_gates(Model(4, 3), torch.ones(2, 4), sites=[":in"])
    with pytest.raises(ArgumentError, match="that differs between draws"):
        gated(torch.ones(2, 4), samples=3)


def test_what_was_fixed_stays_fixed_after_freezing() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.5), requires_grad=False)

        def forward(self, log_alpha: Tensor) -> hc.HardConcrete:
            return hc.HardConcrete(log_alpha, self.temperature)

    gated = hc.attach_gates(
        nn.Linear(4, 3), torch.ones(2, 4), sites=[":in"], method=RectifiedGates(Gate())
    )
    for frozen in (False, True, True, False, False):
        gated.freeze_gates(frozen)
        assert gated.gates.log_alpha.requires_grad != frozen
        assert not gated.gates.gate.temperature.requires_grad


def test_a_state_in_half_precision_leaves_gates_exact() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.ones(2, 4), sites=[":in"])
    state = {name: value.bfloat16() for name, value in gated.state_dict().items()}
    gated.load_state_dict(state, assign=True)
    assert gated.gates.log_alpha.dtype == torch.float32
    assert gated.model._parameters["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_averages_of_buffers_leave_gates_where_they_are(decay: float) -> None:
    """Averages of integers round: a table of indices must not be among them."""
    layers = nn.Conv2d(1, 64, 2), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(256, 2)
    gated = spread(hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 1, 3, 3)))
    averaging = get_ema_multi_avg_fn(decay)
    average = AveragedModel(gated, multi_avg_fn=averaging, use_buffers=True)
    for _ in range(3):
        average.update_parameters(gated)
    x = torch.randn(4, 1, 3, 3)
    torch.testing.assert_close(average.eval()(x), gated.eval()(x))


def test_gates_per_example_compiled_for_several_batch_sizes() -> None:
    layers = nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 4), sample="example")
    compiled = torch.compile(gated, backend="aot_eager", fullgraph=True)
    assert [compiled(torch.ones(n, 4)).shape for n in (6, 5, 3)] == [(6, 2), (5, 2), (3, 2)]
