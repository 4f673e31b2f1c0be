"""Other families than hard concrete: from attaching their gates to the file of the small model."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.sparsifiers import (
    SBP,
    GateParameters,
    GroupLasso,
    GroupNormalJeffreys,
    Sparsifier,
)
from tests.gating.oracles import by_hand, gradients, next_draw
from tests.sparsifiers.families import FixedMask, RectifiedNormal, StraightThrough, penalty_of

FAMILIES = [FixedMask, StraightThrough, RectifiedNormal, SBP, GroupLasso, GroupNormalJeffreys]
LEARNED = [StraightThrough, RectifiedNormal]
CLOSED = (1, 4, 5)

families = pytest.mark.parametrize("family", FAMILIES)
learned_families = pytest.mark.parametrize("family", LEARNED)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def make(family: type[Sparsifier], **settings: object) -> hc.GatedModel:
    torch.manual_seed(0)
    return hc.attach_gates(Net(), torch.randn(4, 5), method=family(), **settings)


def pruned(family: type[Sparsifier]) -> hc.GatedModel:
    """With three units of the first layer closed."""
    gated = make(family)
    is_open = torch.ones(gated.gates.count, dtype=torch.bool)
    is_open[list(CLOSED)] = False
    gated.gates.set_open(is_open)
    return gated


def inputs() -> Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(1))


@families
def test_gates_are_attached(family: type[Sparsifier]) -> None:
    gated = make(family)
    assert gated.gates.count == 14
    assert gated.gates.rule == family.readouts[0]
    state = gated.state_dict()
    assert {f"gates.{name}" for name in gated.gates.names} <= state.keys()
    learned = {name for name, _ in gated.gates.named_parameters()}
    assert learned.isdisjoint(family.fixed)
    assert gated.gates.learns == (family not in (FixedMask, GroupLasso))
    assert gated.units_left() == (8, 6)
    gated.summary()
    assert type(hc.remove_gates(gated).first) is nn.Linear


@families
def test_a_call_multiplies_by_a_draw(family: type[Sparsifier]) -> None:
    gated, x = make(family, droprate=0.4), inputs()
    plain = hc.remove_gates(copy.deepcopy(gated))
    if gated.gates.log_variances is not None:
        gated.gates.log_variances["second/weight"].data.fill_(-100.0)
        gated.gates.log_variances["last/weight"].data.fill_(-100.0)
    z = next_draw(gated)
    torch.testing.assert_close(gated(x), by_hand(plain, gated, z, x))
    gated.eval()
    torch.testing.assert_close(gated(x), by_hand(plain, gated, gated.gates.readout(), x))
    gated.train().freeze_gates()
    torch.testing.assert_close(gated(x), gated.eval()(x))


@families
def test_a_training_step(family: type[Sparsifier]) -> None:
    gated, x = make(family, droprate=0.4), inputs()
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-2, gate_lr=0.1))
    penalty = penalty_of(gated, optimizer)
    before = {name: own.clone() for name, own in gated.state_dict().items()}
    loss = gated(x).square().mean() + penalty()
    loss.backward()
    optimizer.step()
    penalty.step()
    after = gated.state_dict()
    for name, own in before.items():
        fixed = name.removeprefix("gates.") in family.fixed
        assert torch.equal(after[name], own) == fixed, name


@families
def test_a_draw_for_each_example(family: type[Sparsifier]) -> None:
    gated = make(family, sample="example", droprate=0.4)
    assert gated(inputs()).shape == (16, 3)
    assert gated(inputs(), samples=2).shape == (2, 16, 3)


@families
def test_costs(family: type[Sparsifier]) -> None:
    gated = pruned(family)
    small = hc.compact(gated)
    assert gated.delivered("params") == hc.count(small, (inputs()[:4],)).params
    torch.testing.assert_close(
        gated.expected("params"), gated.delivered("params"), rtol=1e-3, atol=0
    )
    open_gates = make(family, droprate=0.4)
    if family is not FixedMask and family.has_l0:
        slopes = gradients(open_gates.expected("macs"), open_gates.gates)
        assert any(slope.any() for slope in slopes)


@families
def test_small_and_saved(family: type[Sparsifier], tmp_path: Path) -> None:
    gated, x = pruned(family), inputs()
    small = hc.compact(gated)
    assert small.first.out_features == 8 - len(CLOSED)
    torch.testing.assert_close(small(x), gated.eval()(x))
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", Net())
    torch.testing.assert_close(loaded(x), small(x))


@families
def test_shrinking_in_training(family: type[Sparsifier]) -> None:
    gated, x = pruned(family), inputs()
    average = torch.optim.swa_utils.AveragedModel(gated)
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3))
    gated(x).sum().backward()
    optimizer.step()
    gated.gates.set_open(gated.gates.is_open())
    before = gated.eval()(x)
    assert hc.shrink(gated, optimizer, averages=average)
    assert gated.gates.count == 14 - len(CLOSED)
    for name, own in gated.gates.gate_parameters().items():
        assert own.shape == (11,), name
    torch.testing.assert_close(gated(x), before)
    gated.train()(x).square().mean().backward()
    optimizer.step()
    dense = make(family)
    dense.load_state_dict(gated.state_dict())
    torch.testing.assert_close(dense.eval()(x), gated.eval()(x))
    small = hc.compact(gated)
    torch.testing.assert_close(small(x), gated(x))
    assert small.first.out_features == 8 - len(CLOSED)


@families
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_states_and_copies(family: type[Sparsifier], copied: object) -> None:
    gated, x = pruned(family), inputs()
    other = copied(gated)
    assert other.gates.family is not gated.gates.family
    torch.testing.assert_close(other.eval()(x), gated.eval()(x))
    fresh = make(family)
    fresh.load_state_dict(gated.state_dict())
    torch.testing.assert_close(fresh.eval()(x), gated(x))
    other.gates.set_open(torch.ones(14, dtype=torch.bool))
    assert not torch.equal(other(x), gated(x))
    if isinstance(other.gates.family, nn.Module):
        assert other.gates.family is other.gates.gate


@families
def test_moves_keep_the_precision_of_gates(family: type[Sparsifier]) -> None:
    gated = pruned(family).double()
    assert gated.gates.dtype == torch.float32
    gated.to("meta")
    assert gated.gates.device.type == "meta"
    assert {own.device.type for own in gated.gates.gate_parameters().values()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@families
def test_other_devices(family: type[Sparsifier]) -> None:
    gated, x = pruned(family), inputs()
    before = gated.eval()(x)
    gated.cuda()
    torch.testing.assert_close(gated(x.cuda()).cpu(), before)
    assert gated.train()(x.cuda()).is_cuda
    assert gated.delivered("macs").is_cuda


@learned_families
def test_a_budget_by_importance(family: type[Sparsifier]) -> None:
    gated, x = make(family), inputs()
    budget = hc.Budget(gated, macs=0.5, steps=20)
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-2))
    for _ in range(20):
        optimizer.zero_grad()
        (gated(x).square().mean() + budget()).backward()
        optimizer.step()
        budget.step()
    assert budget.settled
    assert 0.35 < budget.delivered()["macs"] <= 0.5
    assert hc.count(hc.compact(gated), (x,)).macs <= 0.5 * hc.count(Net(), (x,)).macs
    assert hc.check_run(budget, optimizer, 20) == ()


@learned_families
def test_a_budget_by_learned_gates(family: type[Sparsifier]) -> None:
    gated, x = make(family, droprate=0.1), inputs()
    budget = hc.Budget(gated, macs=0.5, steps=300, by="gates")
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3, gate_lr=5e-2))
    for _ in range(300):
        optimizer.zero_grad()
        (gated(x).square().mean() + budget()).backward()
        optimizer.step()
        budget.step()
    assert budget.delivered()["macs"] <= 0.5
    state = budget.state_dict()
    budget.load_state_dict(state)


@pytest.mark.parametrize("by", ["importance", "gates"])
def test_a_mask_cannot_be_moved(by: str) -> None:
    for family in (FixedMask, SBP, GroupLasso):
        name = family.__name__
        with pytest.raises(ArgumentError, match=f"moves gates, and {name} has gates without a"):
            hc.Budget(make(family), macs=0.5, steps=300, by=by)
    penalty = hc.L0Penalty(make(FixedMask), 0.1)
    with pytest.raises(GateError, match="FixedMask gates have no location"):
        hc.check_run(penalty, torch.optim.SGD(penalty.gated.parameters(), lr=0.1), 10)


@learned_families
def test_how_far_gates_get(family: type[Sparsifier]) -> None:
    gated = make(family)
    penalty = hc.L0Penalty(gated, 0.1)
    reaches = hc.check_run(penalty, torch.optim.Adam(gated.parameters(), lr=0.1), 1_000)
    assert [reach.shut for reach in reaches] == [8, 6]


@families
def test_only_rectified_gates_have_priors_and_distributions(family: type[Sparsifier]) -> None:
    gated = make(family)
    prior = hc.HardConcrete.with_open_probability(0.1)
    words = "gates have no divergence" if family.has_l0 else "gates are never 0 in training"
    with pytest.raises(ArgumentError, match=f"{family.__name__} {words}"):
        hc.L0Penalty(gated, 0.1, prior=prior, examples=10)
    with pytest.raises(GateError, match=f"{family.__name__} gates have no Rectified"):
        gated.gates.distribution()


@families
def test_checkpoints_see_the_draw_of_their_forward(family: type[Sparsifier]) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    gated = hc.attach_gates(Checkpointed(), inputs(), method=family(), droprate=0.4)
    plain = copy.deepcopy(gated)
    plain.model.forward = lambda x: Net.forward(plain.model, x)
    results = []
    for model in (gated, plain):
        torch.manual_seed(3)
        results.append(gradients(model(inputs()).square().sum(), model))
    torch.testing.assert_close(*results)


@families
def test_importance(family: type[Sparsifier]) -> None:
    score = hc.importance(pruned(family), [inputs()], lambda model, x: model(x).square().mean())
    assert len(score["first"]) == 8


@learned_families
def test_importance_and_a_refit(family: type[Sparsifier]) -> None:
    gated, x = make(family), inputs()
    small = hc.compact(
        gated,
        budget=hc.Budget(gated, macs=0.3, steps=20),
        batches=[x],
        loss=lambda model, batch: model(batch).square().mean(),
    )
    assert hc.count(small, (x,)).macs <= 0.3 * hc.count(Net(), (x,)).macs


@pytest.mark.unwatched
@families
def test_compiled_code(family: type[Sparsifier]) -> None:
    gated, x = make(family, droprate=0.4), inputs()
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    results = []
    for model in (gated, compiled):
        torch.manual_seed(3)
        results.append(gradients(model(x).square().sum(), gated))
    torch.testing.assert_close(*results)


def test_unusable_families_are_refused() -> None:
    class Matrix(FixedMask):
        def start(self, droprate: Tensor) -> dict[str, Tensor]:
            return {"mask": torch.ones(len(droprate), 2)}

    class Nothing(FixedMask):
        def start(self, droprate: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
            return {}

    with pytest.raises(ArgumentError, match=r"Matrix.start must give .* of shape \[14, 2\]"):
        make(Matrix)
    with pytest.raises(ArgumentError, match=r"Nothing.start gave no parameters"):
        make(Nothing)
    with pytest.raises(ArgumentError, match="readout 'paper' is not known to FixedMask; use one"):
        make(FixedMask, readout="paper")
    with pytest.raises(ArgumentError, match="method takes a FixedMask, made with its settings"):
        hc.attach_gates(Net(), torch.randn(4, 5), method=FixedMask)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"fixed": ("masks",)}, "names 'masks' in location or fixed, and start gives mask"),
        ({"location": "center"}, "names 'center' in location or fixed"),
        ({"certain": lambda *_: {}}, "certain gives , and start gives mask"),
        (
            {"sample": lambda *_: torch.ones(14)},
            r"sample\(.*of shape \[2, 14\], and is torch.float",
        ),
        (
            {"readout": lambda _, p, __: p["mask"] > 0},
            r"readout\(parameters, 'mask'\) must be float",
        ),
        ({"open_probability": lambda _, p: p["mask"].sum()}, "open_probability.* of shape"),
    ],
)
def test_a_family_with_wrong_results_is_refused(members: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.attach_gates(Net(), torch.zeros(4, 5), method=type("Wrong", (FixedMask,), members)())


@pytest.mark.parametrize("name", ["original", "device", "draw", "a.b"])
def test_names_of_parameters_that_the_bank_cannot_have(name: str) -> None:
    class Renamed(FixedMask):
        fixed = (name,)

        def start(self, droprate: Tensor) -> dict[str, Tensor]:
            return {name: torch.ones(len(droprate))}

        def sample(
            self, parameters: object, shape: object = (), generator: object = None
        ) -> Tensor:
            return super().sample({"mask": parameters[name]}, shape, generator)

        def open_probability(self, parameters: GateParameters) -> Tensor:
            return parameters[name]

        def readout(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
            return parameters[name]

        def certain(self, is_open: Tensor) -> dict[str, Tensor]:
            return {name: is_open.float()}

    with pytest.raises(ArgumentError, match=f"cannot have a parameter '{name}'"):
        hc.attach_gates(Net(), torch.zeros(4, 5), method=Renamed())


def test_parameters_for_another_number_of_gates_are_refused() -> None:
    class Three(FixedMask):
        def start(self, droprate: Tensor) -> dict[str, Tensor]:
            return {"mask": torch.ones_like(droprate[:3])}

    with pytest.raises(ArgumentError, match="mask has 3 for 14 gates"):
        make(Three)
