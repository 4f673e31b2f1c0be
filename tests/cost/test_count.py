"""Counts against numbers worked out by hand, and what must be as before after a count."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.cost import Count, count
from hardconcrete.cost.count import readable_bytes
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.models import LeNet5


class Does(nn.Module):
    """Any function as a module; ``layer`` is there so that it can have parameters."""

    def __init__(self, function, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer or nn.Identity()

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


def needs_data(layer: nn.Module) -> Does:
    """Reads a value, which meta tensors do not have: counted on the model itself."""

    def function(layer: nn.Module, *args: Tensor) -> Tensor:
        output = layer(*args)
        tensor = output[0] if isinstance(output, tuple) else output
        return tensor * tensor.sum().item()

    return Does(function, layer)


x, query, key = torch.zeros(2, 5, 8), torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 7, 8)
attention = nn.MultiheadAttention(8, 2, batch_first=True)
# Per example: queries, keys, values and outputs (4 5 8 8), scores and their product (2 5 5 8).
ATTENTION = 4 * 5 * 8 * 8 + 2 * 5 * 5 * 8
encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

BY_HAND = {
    "linear": (nn.Linear(7, 3), (torch.zeros(4, 7),), 4 * 7 * 3),
    "linear on sequences": (nn.Linear(8, 3), (x,), 2 * 5 * 8 * 3),
    "no bias": (nn.Linear(7, 3, bias=False), (torch.zeros(1, 7),), 7 * 3),
    "conv": (nn.Conv2d(3, 8, 5), (torch.zeros(2, 3, 9, 9),), 2 * 8 * 5 * 5 * 3 * 25),
    "stride and padding": (
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        (torch.zeros(1, 3, 9, 9),),
        8 * 5 * 5 * 3 * 9,
    ),
    "groups": (nn.Conv2d(8, 12, 3, groups=4), (torch.zeros(1, 8, 6, 6),), 12 * 4 * 4 * 2 * 9),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (torch.zeros(1, 8, 6, 6),), 8 * 4 * 4 * 9),
    "conv1d": (nn.Conv1d(3, 4, 5), (torch.zeros(1, 3, 10),), 4 * 6 * 3 * 5),
    "without a batch": (nn.Conv2d(3, 8, 5), (torch.zeros(3, 9, 9),), 8 * 5 * 5 * 3 * 25),
    "transposed": (
        nn.ConvTranspose2d(3, 8, 2, stride=2),
        (torch.zeros(2, 3, 5, 5),),
        2 * 5 * 5 * 3 * 8 * 4,
    ),
    "transposed groups": (
        nn.ConvTranspose2d(4, 8, 2, groups=2),
        (torch.zeros(1, 4, 5, 5),),
        5 * 5 * 4 * 4 * 4,
    ),
    "matmul": (Does(lambda _, a, b: a @ b), (torch.zeros(3, 4), torch.zeros(4, 5)), 3 * 4 * 5),
    "batched": (Does(lambda _, a: a @ a.mT), (x,), 2 * 5 * 8 * 5),
    "matrix by vector": (Does(lambda _, a: a @ a[0]), (torch.zeros(3, 4),), 3 * 4),
    "dot": (Does(lambda _, a: a @ a), (torch.zeros(4),), 4),
    "addmv": (Does(lambda _, a: torch.addmv(a[0], a, a[0])), (torch.zeros(3, 3),), 9),
    "addbmm": (Does(lambda _, a: torch.addbmm(a[0, :, :5], a, a.mT)), (x,), 2 * 5 * 8 * 5),
    "einsum": (Does(lambda _, a: torch.einsum("bij,bkj->ik", a, a)), (x,), 2 * 5 * 8 * 5),
    "einsum over one": (
        Does(lambda _, a, b: torch.einsum("bti, io -> bo", a, b)),
        (torch.zeros(2, 5, 1), torch.zeros(1, 8)),
        2 * 1 * 8,
    ),
    "einsum of no product": (Does(lambda _, a: torch.einsum("bij,bij->bij", a, a)), (x,), 0),
    "einsum of one tensor": (Does(lambda _, a: torch.einsum("bij->b", a)), (x,), 0),
    "einsum without an arrow": (Does(lambda _, a: torch.einsum("bij,bij", a, a)), (x,), 2 * 5 * 8),
    "attention": (
        Does(lambda _, *qkv: F.scaled_dot_product_attention(*qkv)),
        (query, key, key),
        2 * 4 * 6 * 7 * (8 + 8),
    ),
    "causal attention": (
        Does(lambda _, *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)),
        (query, query, query),
        2 * 4 * 6 * 6 * (8 + 8),
    ),
    "grouped queries": (
        Does(lambda _, *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True)),
        (query, key[:, :2], key[:, :2]),
        2 * 4 * 6 * 7 * (8 + 8),
    ),
    "MultiheadAttention": (attention, (x, x, x), 2 * ATTENTION),
    "MultiheadAttention, no weights": (
        Does(lambda layer, *qkv: layer(*qkv, need_weights=False), attention),
        (x, x, x),
        2 * ATTENTION,
    ),
    "encoder layer": (encoder, (x,), 2 * (ATTENTION + 2 * 5 * 8 * 16)),
    "lstm": (nn.LSTM(8, 3, batch_first=True), (x,), 2 * 5 * 4 * 3 * (8 + 3)),
    "gru": (nn.GRU(8, 3, batch_first=True), (x,), 2 * 5 * 3 * 3 * (8 + 3)),
    "lstm cell": (nn.LSTMCell(8, 3), (x[:, 0],), 2 * 4 * 3 * (8 + 3)),
    "LeNet-5": (
        LeNet5(),
        (torch.zeros(1, 1, 28, 28),),
        20 * 24 * 24 * 25 + 50 * 8 * 8 * 500 + 800 * 500 + 500 * 10,
    ),
}


@pytest.mark.parametrize(("model", "inputs", "macs"), BY_HAND.values(), ids=BY_HAND)
def test_multiply_adds(model: nn.Module, inputs: tuple[Tensor, ...], macs: int) -> None:
    result = count(model, inputs)
    assert (result.macs, result.uncounted) == (macs, ())
    assert count(copy.deepcopy(model).to("meta"), inputs) == result


@pytest.mark.parametrize(
    "name", [name for name in BY_HAND if "lstm" not in name and "weights" not in name]
)
def test_multiply_adds_where_the_forward_needs_data(name: str) -> None:
    model, inputs, macs = BY_HAND[name]
    result = count(needs_data(model), inputs)
    assert (result.macs, result.uncounted) == (macs, ())


def test_parameters_and_bytes_of_lenet5() -> None:
    result = count(LeNet5(), torch.zeros(1, 1, 28, 28))
    assert (result.params, result.macs) == (431_080, 2_293_000)
    assert result.weight_bytes == 4 * 431_080


def test_tied_weights_count_once_and_multiply_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    result = count(model, torch.zeros(1, 4))
    assert (result.params, result.macs, result.weight_bytes) == (16, 32, 64)


def test_buffers_are_memory_but_no_parameters() -> None:
    result = count(nn.BatchNorm1d(3), torch.zeros(2, 3))
    assert (result.params, result.macs) == (6, 0)
    assert result.weight_bytes == 4 * 12 + 8  # and the number of batches, in 8 bytes


def test_activations_are_results_without_views_and_in_place_ones() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(inplace=True), nn.Tanh())
    assert count(model, torch.zeros(2, 3, 4)).activation_bytes == 4 * 2 * (5 + 5)
    assert count(model.double(), torch.zeros(2, 3, 4).double()).activation_bytes == 8 * 2 * 10


def test_a_view_that_is_not_declared_as_one() -> None:
    """Dense layers without bias on sequences end in aten._unsafe_view."""
    assert count(nn.Linear(8, 3, bias=False), x).activation_bytes == 4 * 2 * 5 * 3


def test_the_count_is_for_exactly_the_inputs() -> None:
    one, many = (count(LeNet5(), torch.zeros(n, 1, 28, 28)) for n in (1, 6))
    assert many.macs == 6 * one.macs
    assert many.activation_bytes == 6 * one.activation_bytes


def test_keyword_inputs() -> None:
    model = Does(lambda layer, a, *, scale, extra: layer(a) * scale + extra["b"], nn.Linear(4, 3))
    kwargs = {"scale": 2, "extra": {"b": torch.zeros(3)}}
    assert count(model, torch.zeros(2, 4), kwargs).macs == 24
    assert (
        count(Does(lambda layer, a: layer(a), nn.Linear(4, 3)), (), {"a": x[..., :4]}).macs == 120
    )


@pytest.mark.parametrize(
    ("model", "inputs", "names"),
    [
        (Does(lambda _, a: torch.fft.rfft(a)), x, ("aten._fft_r2c",)),
        (Does(lambda _, a: torch.linalg.inv(a)), torch.eye(3), ("aten.linalg_inv_ex",)),
        (
            Does(lambda _, a, grid: F.grid_sample(a, grid, align_corners=False)),
            (torch.zeros(1, 1, 4, 4), torch.zeros(1, 2, 2, 2)),
            ("aten.grid_sampler_2d",),
        ),
        (nn.Bilinear(3, 4, 5), (torch.zeros(2, 3), torch.zeros(2, 4)), ("aten._trilinear",)),
        (
            Does(lambda _, a: torch.sparse.mm(a.to_sparse(), a)),
            torch.eye(3),
            ("aten._sparse_addmm",),
        ),
    ],
)
def test_uncounted_operators_are_named(
    model: nn.Module, inputs: object, names: tuple[str, ...]
) -> None:
    result = count(model, inputs)
    assert (result.macs, result.uncounted) == (0, names)
    assert str(result).endswith(f"; not counted: {', '.join(names)}")


def test_an_lstm_is_counted_or_named_where_the_forward_needs_data() -> None:
    """On some processors it is one kernel, which hides its products."""
    found = count(needs_data(nn.LSTM(8, 3)), x)
    if found.uncounted:
        assert (found.macs, found.uncounted) == (0, ("aten.mkldnn_rnn_layer",))
    else:
        assert found.macs == count(nn.LSTM(8, 3), x).macs > 0


def test_custom_operators_are_named_until_they_have_a_formula() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    @torch.library.custom_op("hardconcrete_test::twice", mutates_args=())
    def twice(a: Tensor) -> Tensor:
        return a + a

    twice.register_fake(torch.empty_like)
    model, operator = Does(lambda _, a: twice(a)), torch.ops.hardconcrete_test.twice
    assert count(model, x).uncounted == ("hardconcrete_test.twice",)
    register_flop_formula(operator)(lambda shape, **_: 2 * math.prod(shape))
    try:
        assert count(model, x) == Count(0, 80, 0, 320)
    finally:
        del flop_registry[operator]


PLAIN = [
    nn.Sequential(
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.LocalResponseNorm(2),
        nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.ReflectionPad2d(1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AdaptiveMaxPool2d(4),
        nn.PixelShuffle(2),
        nn.AdaptiveAvgPool2d(3),
        nn.Dropout2d(),
        nn.Flatten(),
    ),
    nn.Sequential(
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.GELU(),
        nn.SiLU(inplace=True),
        nn.PReLU(),
        nn.RReLU(),
        nn.Hardswish(),
        nn.Mish(inplace=True),
        nn.Softplus(),
        nn.LogSigmoid(),
        nn.Threshold(0.1, 0, inplace=True),
        nn.ELU(),
        nn.GLU(),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
    ),
    Does(lambda _, a: a.sort()[0].cumsum(-1).roll(1).flip(0).topk(3)[1].float().std(-1)),
    Does(lambda _, a: F.normalize(torch.stack([a.tril(), torch.rand_like(a)]).amax(0))),
    Does(lambda layer, a: layer(a[..., 0, 0].long()), nn.Embedding(3, 2)),
    Does(lambda _, a: F.cross_entropy(a.flatten(1), torch.zeros_like(a[:, 0, 0, 0]).long())),
]


@pytest.mark.parametrize("model", PLAIN)
def test_pointwise_normalisation_pooling_and_movement_have_no_multiply_adds(
    model: nn.Module,
) -> None:
    images = torch.zeros(2, 4, 8, 8)
    for result in (count(model, images), count(needs_data(model), images)):
        assert (result.macs, result.uncounted) == (0, ())


class Restless(nn.Module):
    """Draws, counts its calls in two ways, has a hook, and may need data."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.data, self.table = data, torch.ones(4)
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.norm.eval()
        self.fc.register_forward_hook(lambda *call: 2 * call[-1])

    def forward(self, a: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + 1
        if self.data and self.calls.item() < 0:
            return a
        a.add_(1)
        return self.drop(self.norm(self.fc(a * self.table + torch.rand_like(a))))


@pytest.mark.parametrize("data", [False, True])
def test_nothing_changes(data: bool) -> None:
    model, inputs = Restless(data), torch.randn(3, 4)
    before, given = copy.deepcopy(model), inputs.clone()
    tensors = list(model.state_dict(keep_vars=True).values())
    state = torch.get_rng_state()
    result = count(model, inputs)
    assert result.macs == 3 * 16
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, given)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    after = model.state_dict(keep_vars=True)
    assert all(one is other for one, other in zip(after.values(), tensors, strict=True))
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert hooks == [len(m._forward_hooks) for m in before.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_model_is_restored_after_an_error() -> None:
    model = needs_data(nn.Linear(4, 3)).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count(model, torch.zeros(2, 5))
    assert all(module.training for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_no_memory_is_needed_for_a_meta_model() -> None:
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6, bias=False)
    assert count(model, torch.empty(1, 10**6, device="meta")).macs == 10**12


def test_a_meta_model_that_needs_data_says_so() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        count(needs_data(nn.Linear(4, 3)).to("meta"), torch.zeros(2, 4))


def test_models_of_other_kinds() -> None:
    plain, inputs = LeNet5(), torch.zeros(2, 1, 28, 28)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = [
            torch.export.export(plain, (inputs,)).module(),
            torch.jit.script(plain),
            torch.compile(plain, backend="eager"),
        ]
    expected = count(plain, inputs)
    assert [count(other, inputs) for other in others] == [expected] * 3


def test_old_weight_norm_whose_weight_is_no_leaf() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(4, 3))
    assert count(model, torch.zeros(2, 4)).macs == 24


def test_a_gated_model_counts_its_gates_as_parameters_and_no_more_macs() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    result = count(gated, torch.zeros(2, 4))
    assert (result.params, result.macs) == (15 + 4, 24)


def test_inside_inference_mode_the_count_is_the_same() -> None:
    with torch.inference_mode():
        inside = count(encoder, torch.zeros(2, 5, 8))
    assert inside == count(encoder, x)


def test_tensors_that_are_plain_attributes_lose_their_data_too() -> None:
    """Otherwise the forward would mix devices, fail, and be counted where LSTMs are opaque."""
    model = Does(lambda layer, a: layer(a * layer.table), nn.LSTM(8, 3))
    model.layer.table = torch.ones(8)
    assert count(model, x).macs == 2 * 5 * 4 * 3 * (8 + 3)
    assert torch.equal(model.layer.table, torch.ones(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["LeNet-5", "attention", "encoder layer", "lstm"])
def test_on_a_gpu(name: str) -> None:
    model, inputs, macs = BY_HAND[name]
    expected = count(model, inputs)
    model, inputs = copy.deepcopy(model).cuda(), tuple(each.cuda() for each in inputs)
    state = torch.cuda.get_rng_state()
    assert count(model, inputs) == expected
    if name != "lstm":
        assert count(needs_data(model), inputs).macs == macs
    else:
        assert count(needs_data(model), inputs).uncounted == ("aten._cudnn_rnn",)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_text_of_a_count() -> None:
    result = Count(1234, 10**7, 4936, 12_000_000)
    words = "1,234 parameters, 10,000,000 MACs, 4.9 kB of weights, 12 MB of activations"
    assert str(result) == words
    assert str(dataclasses.replace(result, uncounted=("a", "b"))) == words + "; not counted: a, b"


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9_960, "10 kB"), (999_600, "1.0 MB")],
)
def test_readable_bytes(size: int, words: str) -> None:
    assert readable_bytes(size) == words


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"count takes an nn\.Module, not a function"):
        count(F.relu, x)
    with pytest.raises(ArgumentError, match="weight has no shape yet: call the model once"):
        count(nn.LazyLinear(3), x)


def test_an_einsum_over_one_unit_in_a_traced_graph() -> None:
    """Torch runs it as an elementwise product, in a module and in a graph."""
    layer = Does(lambda _, x, w: torch.einsum("btc,co->bto", x, w))
    example = torch.randn(2, 5, 1), torch.randn(1, 4)
    graph = torch.export.export(layer, example).module()
    assert hc.count(layer, example).macs == hc.count(graph, example).macs == 40


def test_products_in_groups() -> None:
    """Each of 6 rows times one of 3 matrices, as in a mixture of experts."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, rows: Tensor) -> Tensor:
            ends = torch.tensor([1, 4, 6], dtype=torch.int32)
            return F.grouped_mm(rows, self.weight, offs=ends)

    found = count(Experts(), torch.randn(6, 4))
    assert (found.macs, found.uncounted) == (6 * 4 * 8, ())
