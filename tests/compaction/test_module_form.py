import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from tests.compaction.networks import Joined, Maps, TiedWords, at_random, dense, gap, with_shut

SHUT = {"conv1": [0, 4], "conv2": [1], "fc1": [2, 6]}
MAPS, MORE, UNITS = [1, 2, 3, 5], [0, 2, 3, 4], [0, 1, 3, 4, 5]


@pytest.fixture(scope="module")
def pair() -> tuple[hc.GatedModel, Maps]:
    torch.manual_seed(0)
    gated = with_shut(hc.attach_gates(Maps(), Maps.example()), SHUT)
    return gated, hc.compact(gated, form="module")  # type: ignore[return-value]


def test_kept_units_in_order_and_gates_folded_into_what_reads_them(
    pair: tuple[hc.GatedModel, Maps],
) -> None:
    gated, small = pair
    full, z = gated.model.state_dict(), gated.gate_values()
    state = small.state_dict()
    torch.testing.assert_close(state["conv1.weight"], full["conv1.weight"][MAPS])
    torch.testing.assert_close(state["conv1.bias"], full["conv1.bias"][MAPS])
    columns = z["conv1"][MAPS].view(1, -1, 1, 1)
    torch.testing.assert_close(state["conv2.weight"], full["conv2.weight"][MORE][:, MAPS] * columns)
    wide = torch.tensor([4 * k + j for k in MORE for j in range(4)])
    torch.testing.assert_close(
        state["fc1.weight"],
        full["fc1.weight"][UNITS][:, wide] * z["conv2"][MORE].repeat_interleave(4),
    )
    torch.testing.assert_close(state["fc2.weight"], full["fc2.weight"][:, UNITS] * z["fc1"][UNITS])
    torch.testing.assert_close(state["fc2.bias"], full["fc2.bias"])


def test_buffers_are_cut(pair: tuple[hc.GatedModel, Maps]) -> None:
    gated, small = pair
    assert torch.equal(small.bn.running_mean, gated.model.bn.running_mean[MAPS])
    assert torch.equal(small.bn.running_var, gated.model.bn.running_var[MAPS])
    assert torch.equal(small.scale, gated.model.scale[MORE])
    assert torch.equal(small.bn.num_batches_tracked, gated.model.bn.num_batches_tracked)


def test_layers_state_their_sizes(pair: tuple[hc.GatedModel, Maps]) -> None:
    small = pair[1]
    assert (small.conv1.in_channels, small.conv1.out_channels) == (2, 4)
    assert small.bn.num_features == 4
    assert small.slope.num_parameters == 4
    assert (small.depth.in_channels, small.depth.out_channels, small.depth.groups) == (4, 4, 4)
    assert (small.conv2.in_channels, small.conv2.out_channels) == (4, 4)
    assert small.instance.num_features == 4
    assert (small.fc1.in_features, small.fc1.out_features) == (16, 5)
    assert (small.fc2.in_features, small.fc2.out_features) == (5, 3)


def test_a_model_built_from_the_stated_sizes_is_the_same(pair: tuple[hc.GatedModel, Maps]) -> None:
    """The attributes are truthful: constructors called with them make the same shapes."""
    for layer in (pair[1].conv1, pair[1].conv2, pair[1].depth):
        rebuilt = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size,
                            groups=layer.groups)  # fmt: skip
        assert rebuilt.weight.shape == layer.weight.shape


LAYERS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "Conv1d": (
        lambda: (nn.Conv1d(2, 6, 2), nn.BatchNorm1d(6, affine=False), nn.Conv1d(6, 3, 2)), (2, 5),
        {"0.out_channels": 4, "1.num_features": 4, "2.in_channels": 4}),
    "Conv3d": (
        lambda: (nn.Conv3d(2, 6, 2), nn.InstanceNorm3d(6, affine=True), nn.Conv3d(6, 3, 2)),
        (2, 4, 4, 4), {"0.out_channels": 4, "1.num_features": 4, "2.in_channels": 4}),
    "transposed": (
        lambda: (nn.ConvTranspose2d(2, 6, 2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2)), (2, 3, 3),
        {"0.in_channels": 2, "0.out_channels": 4, "2.in_channels": 4, "2.out_channels": 3}),
    "depthwise, transposed": (
        lambda: (nn.Conv2d(2, 6, 1), nn.ConvTranspose2d(6, 6, 2, groups=6), nn.Conv2d(6, 3, 1)),
        (2, 3, 3), {"1.groups": 4, "1.in_channels": 4, "1.out_channels": 4}),
    "depthwise, multiplied": (
        lambda: (nn.Conv2d(2, 6, 1), nn.Conv2d(6, 12, 1, groups=6), nn.Conv2d(12, 3, 1)),
        (2, 3, 3), {"1.groups": 4, "1.in_channels": 4, "1.out_channels": 8, "2.in_channels": 8}),
    "grouped": (
        lambda: (nn.Conv2d(2, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1, groups=2)), (2, 3, 3),
        {"0.out_channels": 8, "2.in_channels": 8, "2.groups": 2, "2.out_channels": 4}),
    "one slope": (
        lambda: (nn.Linear(2, 6), nn.PReLU(), nn.Linear(6, 3)), (2,),
        {"0.out_features": 4, "1.num_parameters": 1, "2.in_features": 4}),
    "bag": (
        lambda: (nn.EmbeddingBag(7, 6), nn.Linear(6, 3)), (), {"0.embedding_dim": 4,
        "0.num_embeddings": 7, "1.in_features": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_layer(name: str) -> None:
    make, shape, sizes = LAYERS[name]
    model = nn.Sequential(*make())
    x = torch.randn(3, *shape) if shape else torch.randint(7, (3, 4))
    gated = hc.attach_gates(model, x)
    first = gated.groups[0].name
    small = hc.compact(with_shut(gated, {first: [1, 4]}), form="module")
    for path, size in sizes.items():
        layer, _, attribute = path.partition(".")
        assert getattr(small[int(layer)], attribute) == size, path
    assert gap(gated, small, x) < 1e-5


def test_weight_norm_is_cut_in_its_parts() -> None:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    gated = hc.attach_gates(nn.Sequential(first, nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4))
    small = hc.compact(with_shut(gated, {"0": [1, 4]}), form="module")
    assert (small[0].out_features, small[0].weight.shape) == (4, (4, 4))
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


def test_tied_weights_stay_one_tensor() -> None:
    gated = hc.attach_gates(TiedWords(), torch.randint(9, (3, 4)))
    small = hc.compact(with_shut(gated, {"words": [1, 5]}), form="module")
    assert small.words.weight is small.decoder.weight
    assert small.words.weight.shape == (9, 4)
    assert (small.words.num_embeddings, small.words.embedding_dim) == (9, 4)
    assert (small.decoder.in_features, small.decoder.out_features) == (4, 9)
    assert gap(gated, small, torch.randint(9, (5, 4))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before", [True, False])
def test_precision_is_kept(dtype: torch.dtype, before: bool) -> None:
    """Whether the model had it when gates were attached, or got it later."""
    model, x = Joined(), torch.randn(3, 4)
    gated = hc.attach_gates(model.to(dtype), x.to(dtype)) if before else hc.attach_gates(model, x)
    gated = at_random(gated.to(dtype))
    small = hc.compact(gated, form="module")
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert gated.gates.log_alpha.dtype == torch.float32
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert gap(gated, small, torch.randn(5, 4, dtype=dtype)) < tolerance


def test_mixed_precision_is_kept() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).double())

    gated = at_random(hc.attach_gates(Mixed(), torch.randn(3, 4)))
    small = hc.compact(gated, form="module")
    assert [p.dtype for p in small.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def marked() -> Maps:
    """Modes, frozen parameters, hooks and attributes of the user."""
    model = Maps().train()
    model.bn.eval(), model.fc2.eval()
    model.conv1.requires_grad_(False)
    model.fc1.bias.requires_grad_(False)
    model.note, model.fc1.note = {"who": ["user"]}, "kept"  # type: ignore[assignment]
    return model


def test_what_the_user_set_is_kept() -> None:
    model, calls = marked(), []
    model.fc1.register_forward_hook(lambda *_: calls.append("after"))
    model.fc1.register_forward_pre_hook(lambda *_: calls.append("before"))
    modes = {name: m.training for name, m in model.named_modules()}
    learn = {name: p.requires_grad for name, p in model.named_parameters()}
    kinds = {name: type(m) for name, m in model.named_modules()}
    gated = with_shut(hc.attach_gates(model, Maps.example()), SHUT)
    small = hc.compact(gated, form="module")
    assert {name: m.training for name, m in small.named_modules()} == modes
    assert {name: p.requires_grad for name, p in small.named_parameters()} == learn
    assert {name: type(m) for name, m in small.named_modules()} == kinds
    assert (small.note, small.fc1.note) == ({"who": ["user"]}, "kept")
    calls.clear()
    small(Maps.example())
    assert calls == ["before", "after"]
    assert all(p.device.type == "cpu" and p.is_leaf for p in small.parameters())


def test_gradients_of_the_training_are_not_carried_over() -> None:
    gated = at_random(hc.attach_gates(dense(), torch.randn(3, 4)))
    gated(torch.randn(3, 4)).sum().backward()
    small = hc.compact(gated)
    assert all(p.grad is None for p in small.parameters())
    assert all(p.grad is not None for p in gated.model.parameters())
    small(torch.randn(3, 4)).sum().backward()
    assert all(p.grad.shape == p.shape for p in small.parameters())


@pytest.mark.parametrize("form", ["module", "graph"])
def test_a_weight_that_is_computed_keeps_its_state(form: str) -> None:
    """Spectral norm iterates whenever its weight is read in training."""
    last = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), last)
    gated = with_shut(hc.attach_gates(model.train(), torch.randn(3, 4), include="0"), {"0": [1]})
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    for name, tensor in gated.model.state_dict().items():
        if name.startswith("4."):
            assert torch.equal(small.state_dict()[name], tensor), name


def test_a_copy_is_its_own_model(pair: tuple[hc.GatedModel, Maps]) -> None:
    small, x = pair[1], Maps.example()
    other = copy.deepcopy(small)
    assert hc.CompactionPlan.of(other) == hc.CompactionPlan.of(small)
    torch.testing.assert_close(other.eval()(x), copy.deepcopy(small).eval()(x), rtol=0, atol=0)


def test_a_small_model_shares_no_memory_and_the_dense_one_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 4))
    model[3].weight = nn.Parameter(model[3].weight.detach(), requires_grad=False)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    small = hc.compact(model, torch.ones(2, 4), keep={"0": [0, 2]})
    assert {p.data_ptr() for p in small.parameters()}.isdisjoint(
        p.data_ptr() for p in model.parameters()
    )
    assert [p.requires_grad for p in small.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_tied_weights_that_are_not_cut_stay_one_tensor() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 2)
    )
    model[2].weight = model[0].weight
    small = hc.compact(model, torch.ones(2, 4), keep={"3": [0, 2]})
    assert small[2].weight is small[0].weight
    assert small[2].weight is not model[2].weight
