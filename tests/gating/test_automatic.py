"""Gates on units that were found: several indices of a unit, several units on a dimension."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.func import functional_call

import hardconcrete as hc
from hardconcrete.errors import SiteError
from tests.gating.networks import Net
from tests.gating.oracles import (
    Products,
    anatomy,
    gradients,
    next_draw,
    open_all,
    spread,
    unchanged,
)
from tests.gating.workers import found_gates, found_step

SEEDED = torch.Generator().manual_seed(0)
IMAGES, ROWS = (torch.randn(shape, generator=SEEDED) for shape in ((3, 1, 4, 4), (3, 4)))


class Flat(nn.Module):
    """Every map is 16 columns of the dense layer, as in LeNet-5."""

    def __init__(self, maps: int = 50) -> None:
        super().__init__()
        self.conv, self.fc1 = nn.Conv2d(1, maps, 3, padding=1), nn.Linear(16 * maps, 6)
        self.fc2 = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.conv(x).relu().flatten(1)).tanh())


class Joined(nn.Module):
    """The head reads two groups and 3 inputs that are no units, along one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 5)
        self.head = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x).tanh(), x, self.right(x).relu()], dim=1))


def by_hand(plain: nn.Module, gated: hc.GatedModel, z: Tensor, x: Tensor) -> Tensor:
    """Weights times gates, index after index."""
    weights = dict(plain.named_parameters())
    for group in gated.groups:
        own = z[group.slice]
        for axis in group.gated:
            columns = weights[axis.tensor].unbind(axis.dim)
            units = axis.units.tolist()
            scaled = [
                c * own[u].to(c.dtype) if u >= 0 else c for c, u in zip(columns, units, strict=True)
            ]
            weights[axis.tensor] = torch.stack(scaled, axis.dim)
    return functional_call(plain, weights, (x,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "flatten": (Flat, IMAGES),
    "concat": (Joined, ROWS),
    "norm": (Net, IMAGES),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, x = NETWORKS[request.param]
    return make(), x


def test_which_gate_each_index_has() -> None:
    flat = hc.attach_gates(Flat(), IMAGES)
    assert [(g.name, g.units, g.gated_parameters) for g in flat.groups] == [
        ("conv", 50, ("fc1.weight",)), ("fc1", 6, ("fc2.weight",)),
    ]  # fmt: skip
    assert flat.groups[0].gated[0].units.tolist() == [k for k in range(50) for _ in range(16)]
    assert flat.groups[1].gated[0].is_one_to_one
    joined = hc.attach_gates(Joined(), ROWS)
    left, right = (group.gated[0].units.tolist() for group in joined.groups)
    assert left == [0, 1, 2, 3, 4, 5] + [-1] * 9
    assert right == [-1] * 10 + [0, 1, 2, 3, 4]


@pytest.mark.parametrize("batch", [1, 200])
@pytest.mark.parametrize("name", ["flatten", "concat"])
def test_values_and_gradients_are_those_of_an_explicit_product(name: str, batch: int) -> None:
    """With few examples the activation is multiplied, with many the weight."""
    make, x = NETWORKS[name]
    model, x = make(), torch.randn(batch, *x.shape[1:])
    plain = copy.deepcopy(model)
    gated = spread(hc.attach_gates(model, x))
    for training in (True, False):
        gated.train(training), plain.train(training)
        z = next_draw(gated) if training else gated.gates.readout()
        expected, found = by_hand(plain, gated, z, x), gated(x)
        torch.testing.assert_close(found, expected)
        slope = torch.randn_like(expected)
        torch.testing.assert_close(
            gradients((found * slope).sum(), gated.model, gated.gates),
            gradients((expected * slope).sum(), plain, gated.gates),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("name", ["flatten", "concat"])
def test_both_faces_are_taken_and_agree(name: str) -> None:
    make, x = NETWORKS[name]
    weight = "fc1.weight" if name == "flatten" else "head.weight"
    gated = spread(hc.attach_gates(make(), x)).eval()
    shape = tuple(dict(gated.model.named_parameters())[weight].shape)
    few, many = torch.randn(1, *x.shape[1:]), torch.randn(60, *x.shape[1:])
    many[0] = few[0]
    with torch.no_grad():
        with Products() as activation:
            small = gated(few)
        with Products() as parameter:
            large = gated(many)
    assert shape not in activation.shapes
    assert shape in parameter.shapes
    torch.testing.assert_close(small[0], large[0], rtol=1e-5, atol=1e-5)


def test_open_gates_change_no_bit(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    plain = copy.deepcopy(model)
    gated = open_all(hc.attach_gates(model, x))
    for training in (False, True):
        assert torch.equal(gated.train(training)(x), plain.train(training)(x))


def test_gates_come_off_without_a_trace(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    before = anatomy(model)
    assert hc.remove_gates(hc.attach_gates(model, x)) is model
    assert anatomy(model) == before


def test_a_group_counts_all_parameters_that_a_unit_owns() -> None:
    gated = hc.attach_gates(Flat(), IMAGES, droprate=0.5)
    owned = 9 + 1 + 16 * 6, 800 + 1 + 2
    assert tuple(group.size for group in gated.groups) == owned
    lam = {"conv": 0.5, "fc1": 0.25}
    p = gated.open_probability()
    expected = 0.5 * owned[0] * p["conv"].sum() + 0.25 * owned[1] * p["fc1"].sum()
    torch.testing.assert_close(hc.L0Penalty(gated, lam)(), expected)


def test_norms_and_buffers_among_what_a_unit_owns() -> None:
    """9 weights, a bias, scale and shift of the norm, 4 columns of 8; no statistics."""
    gated = hc.attach_gates(Net(), IMAGES)
    assert [(group.name, group.size) for group in gated.groups] == [("conv", 44), ("fc1", 17)]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_l2_term_is_that_of_the_gated_weights(name: str) -> None:
    """And of what lies beside them and has no gate, as if it were always open."""
    make, x = NETWORKS[name]
    gated = spread(hc.attach_gates(make(), x))
    expected = torch.zeros(())
    parameters = dict(gated.model.named_parameters())
    gateless = {n: torch.ones_like(parameters[n]) for g in gated.groups for n in g.gated_parameters}
    for group in gated.groups:
        p = gated.open_probability()[group.name]
        for axis in group.gated:
            weight = parameters[axis.tensor].detach()
            for index, column in enumerate(weight.unbind(axis.dim)):
                unit = int(axis.units[index])
                if unit >= 0:
                    expected = expected + 0.5 * 0.3 * p[unit] * column.square().sum()
                    gateless[axis.tensor].select(axis.dim, index).zero_()
    for own, mask in gateless.items():
        expected = expected + 0.5 * 0.3 * (mask * parameters[own].detach().square()).sum()
    penalty = hc.L0Penalty(gated, 0.0, weight_decay=0.3)()
    torch.testing.assert_close(penalty, expected)
    gates, *weights = torch.autograd.grad(
        penalty, [gated.gates.log_alpha, *gated.model.parameters()], materialize_grads=True
    )
    assert (gates > 0).all()
    decayed = [bool(w.any()) for w in weights]
    names = {name for group in gated.groups for name in group.gated_parameters}
    assert decayed == [name in names for name, _ in gated.model.named_parameters()]


def test_a_small_drop_rate_hardly_changes_the_function() -> None:
    """No bit of the readout; with sampled gates far less than a drop rate of one half does."""
    plain, x = Flat(20), torch.randn(50, 1, 4, 4)
    expected = plain(x).detach()
    moved = {}
    for droprate in (0.01, 0.5):
        gated = hc.attach_gates(copy.deepcopy(plain), x[:3], droprate=droprate)
        with torch.no_grad():
            draws = [(gated(x) - expected).square().mean() for _ in range(20)]
        moved[droprate] = torch.stack(draws).mean().sqrt()
        same = torch.equal(gated.eval()(x), expected)
        assert same == (droprate == 0.01)
    assert moved[0.01] < 0.15 * expected.square().mean().sqrt()
    assert moved[0.01] < 0.5 * moved[0.5]


class Wide(nn.Module):
    """What follows the gates is linear, so that means pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 5, 3), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().flatten(1))


@pytest.mark.parametrize(("make", "x"), [(Wide, IMAGES), (Joined, ROWS)])
@pytest.mark.parametrize("droprate", [0.1, 0.5])
def test_keep_mean_keeps_the_mean(make: type[nn.Module], x: Tensor, droprate: float) -> None:
    """Within 5 standard errors of 4,000 draws: fails by chance for fewer than 1 in 10^5 seeds."""
    plain, many = make(), x[:1].expand(4000, *x.shape[1:])
    expected = plain(x[:1]).detach()
    off = {}
    for keep in (True, False):
        model = copy.deepcopy(plain)
        settings = {"droprate": droprate, "keep_mean": keep, "sample": "example"}
        gated = hc.attach_gates(model, x, **settings)  # type: ignore[arg-type]
        with torch.no_grad():
            drawn = gated(many)
        off[keep] = (drawn.mean(0) - expected).abs() / (drawn.std(0) / 4000**0.5)
    assert off[True].max() < 5
    assert off[False].max() > 10


def test_keep_mean_divides_each_index_once() -> None:
    model = Joined()
    before = model.head.weight.detach().clone()
    gated = hc.attach_gates(model, ROWS, droprate=0.5, keep_mean=True)
    mean = gated.by_group(gated.gates.distribution().mean)
    z = torch.cat([mean["left"], torch.ones(4), mean["right"]])
    torch.testing.assert_close(dict(model.named_parameters())["head.weight"] * z, before)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_draw_per_example_is_a_loop_over_examples(name: str) -> None:
    make, x = NETWORKS[name]
    model = make()
    plain = copy.deepcopy(model).eval()
    gated = spread(hc.attach_gates(model, x, sample="example"))
    for part in gated.model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()  # each example on its own
    z = next_draw(gated, len(x))
    expected = torch.cat([by_hand(plain, gated, z[k], x[k : k + 1]) for k in range(len(x))])
    torch.testing.assert_close(gated(x), expected)


def test_a_draw_per_example_is_refused_where_weights_are_multiplied() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 2, 3))
    with unchanged(model), pytest.raises(SiteError, match="a gate per example multiplies activ"):
        hc.attach_gates(model, IMAGES, sample="example")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize("name", ["flatten", "concat"])
def test_copies(name: str, again: Callable[[hc.GatedModel], hc.GatedModel]) -> None:
    make, x = NETWORKS[name]
    gated = spread(hc.attach_gates(make(), x))
    other = again(gated)
    torch.manual_seed(3)
    expected = gated(x)
    torch.manual_seed(3)
    assert torch.equal(other(x), expected)
    other.gates.log_alpha.data.fill_(-9.0)
    other.gates.log_alpha.data[0] = 9.0
    assert not torch.equal(other.eval()(x), gated.eval()(x))
    assert hc.compact(other) is not None


@pytest.mark.parametrize("name", ["flatten", "concat"])
def test_the_state_goes_to_another_model(name: str, tmp_path: Path) -> None:
    """Which gate an index has is no state: it is found again."""
    make, x = NETWORKS[name]
    gated, other = spread(hc.attach_gates(make(), x)), hc.attach_gates(make(), x)
    assert [n for n in gated.state_dict() if n.startswith("gates")] == ["gates.log_alpha"]
    torch.save(gated.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert torch.equal(other.eval()(x), gated.eval()(x))


@pytest.mark.parametrize("name", ["flatten", "concat"])
def test_compiled_training(name: str) -> None:
    make, x = NETWORKS[name]
    gated = spread(hc.attach_gates(make(), x))
    torch.manual_seed(3)
    expected = gradients(gated(x).square().sum(), gated)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    torch.testing.assert_close(gradients(compiled(x).square().sum(), gated), expected)


def test_a_spawned_process_trains_the_model_it_got(tmp_path: Path) -> None:
    gated, answer = found_gates(), tmp_path / "state.pt"
    own = copy.deepcopy(gated)
    mp.spawn(found_step, (gated, answer))
    found_step(0, own, tmp_path / "own.pt")
    there, here = (torch.load(f, weights_only=True) for f in (answer, tmp_path / "own.pt"))
    torch.testing.assert_close(there, here)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    gated = hc.attach_gates(model, x).to(dtype)
    assert gated.gates.log_alpha.dtype == torch.float32
    assert gated(x.to(dtype)).dtype == dtype
    assert [t.dtype for t in gated.example[0]] == [dtype]


def test_example_inputs_are_kept_for_compaction() -> None:
    tokens = torch.zeros(2, 3).long()
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 2))
    gated = hc.attach_gates(model, tokens).double()
    assert gated.example[0][0].dtype == torch.int64
    assert gated.example[1] == {}
