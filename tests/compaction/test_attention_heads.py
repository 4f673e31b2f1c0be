"""``nn.MultiheadAttention`` without some of its heads, against all heads with zero columns."""

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.attention_heads import has_fewer_heads, set_heads

HEADS, SIZE = 4, 3
KEPT = [0, 3]
WIDTH = HEADS * SIZE
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def rows(heads: list[int], parts: int = 1) -> Tensor:
    """The features of these heads, in a projection of several parts."""
    inside = torch.tensor([SIZE * head + k for head in heads for k in range(SIZE)])
    return torch.cat([inside + WIDTH * part for part in range(parts)])


def with_and_without(**settings: Any) -> tuple[Any, Any]:
    """A layer in which two heads have no effect, and the layer without them."""
    torch.manual_seed(0)
    dense: Any = nn.MultiheadAttention(WIDTH, HEADS, **settings).eval()
    for parameter in dense.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    shut = rows([head for head in range(HEADS) if head not in KEPT])
    dense.out_proj.weight.data[:, shut] = 0.0
    small = copy.deepcopy(dense)
    for name, parameter in small.named_parameters():
        if name == "out_proj.weight":
            parameter.data = parameter.data[:, rows(KEPT)]
        elif name.startswith("in_proj"):
            parameter.data = parameter.data[rows(KEPT, 3)]
        elif name.startswith("bias_"):
            parameter.data = parameter.data[..., rows(KEPT)]
        elif name != "out_proj.bias":
            parameter.data = parameter.data[rows(KEPT)]
    set_heads(small)
    assert has_fewer_heads(small)
    assert (small.num_heads, small.embed_dim, small.head_dim) == (len(KEPT), WIDTH, SIZE)
    return dense, small


MASKS: list[dict[str, Any]] = [
    {},
    {"attn_mask": CAUSAL},
    {"attn_mask": CAUSAL < 0},
    {"attn_mask": CAUSAL, "is_causal": True},
    {"key_padding_mask": PADDING},
    {"key_padding_mask": PADDING, "attn_mask": CAUSAL < 0},
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 7, "vdim": 9},
        {"dropout": 0.5},
    ],
    ids=str,
)
def test_it_computes_the_same(settings: dict[str, Any]) -> None:
    keys = settings.get("kdim", WIDTH), settings.get("vdim", WIDTH)
    for mask, first, weights in product(MASKS, [False, True], [False, True]):
        if mask.get("is_causal") and settings.get("add_zero_attn"):
            continue  # torch's hint ignores the key that is added
        dense, small = with_and_without(batch_first=first, **settings)
        shape = (2, 5) if first else (5, 2)
        inputs = [torch.randn(*shape, width) for width in (WIDTH, *keys)]
        expected, by_head = dense(*inputs, need_weights=weights, average_attn_weights=False, **mask)
        actual, fewer = small(*inputs, need_weights=weights, average_attn_weights=False, **mask)
        torch.testing.assert_close(actual, expected)
        if weights:
            torch.testing.assert_close(fewer, by_head[:, KEPT])
            _, mean = small(*inputs, **mask)
            torch.testing.assert_close(mean, fewer.mean(1))
        else:
            assert fewer is None


def test_without_a_batch_and_with_a_mask_for_each_head() -> None:
    dense, small = with_and_without()
    x, mask = torch.randn(5, WIDTH), torch.randn(HEADS, 5, 5)
    expected, by_head = dense(x, x, x, attn_mask=mask, average_attn_weights=False)
    actual, fewer = small(x, x, x, attn_mask=mask[KEPT], average_attn_weights=False)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(fewer, by_head[KEPT])
    with pytest.raises(RuntimeError, match="shape"):
        small(x, x, x, attn_mask=mask)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        small(x, x, x, is_causal=True)


def test_dropout_of_weights_in_training() -> None:
    _, small = with_and_without(dropout=0.5)
    x = torch.randn(5, 2, WIDTH)
    torch.manual_seed(1)
    dropped, weights = small.train()(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    assert not torch.equal(dropped, small.eval()(x, x, x)[0])


def test_it_stays_an_instance_with_its_state() -> None:
    dense, small = with_and_without()
    assert isinstance(small, nn.MultiheadAttention)
    assert list(small.state_dict()) == list(dense.state_dict())
    x = torch.randn(5, 2, WIDTH)
    for copied in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(copied(x, x, x)[0], small(x, x, x)[0])
    again = type(small)
    set_heads(small)
    assert type(small) is again


class Classifier(nn.Module):
    """Torch's stack of encoder layers, with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.layers(x, src_key_padding_mask=padding)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_encoders_with_padding_have_no_kernel_for_all_heads() -> None:
    """In evaluation without gradients, where torch would use nested tensors."""
    torch.manual_seed(0)
    model = Classifier().eval()
    example = torch.randn(2, 5, 8), PADDING
    small = hc.compact(model, example, keep={"layers.layers.0.self_attn": [0, 2, 3]})
    first, second = small.layers.layers
    assert (first.self_attn.num_heads, second.self_attn.num_heads) == (3, 4)
    assert hc.CompactionPlan.of(small).form == "module"
    with torch.no_grad():
        slow, fast = [small(*example) for _ in range(2)]
        model.layers.layers[0].self_attn.out_proj.weight[:, 2:4] = 0.0
        torch.testing.assert_close(fast, model(*example))
    torch.testing.assert_close(small(*example), fast)
    assert torch.equal(slow, fast)


def test_a_small_encoder_is_made_small_again() -> None:
    """The plans of both compactions load into the dense model."""
    torch.manual_seed(0)
    model, example = Classifier().eval(), (torch.randn(2, 5, 8), PADDING)
    name = "layers.layers.1.self_attn"
    first = hc.compact(model, example, keep={name: [0, 2, 3]})
    second = hc.compact(first, example, keep={name: [1, 2]})
    plan = hc.CompactionPlan.of(second)
    assert plan.groups[name].kept == (2, 3)
    torch.testing.assert_close(plan.apply(model)(*example), second(*example))


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 6}], ids=["packed", "separate"])
@pytest.mark.parametrize("form", ["module", "graph"])
def test_attention_alone_is_a_model(sizes: dict[str, int], form: Any) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 4, **sizes).eval()
    x, y = torch.randn(5, 3, 8), torch.randn(7, 2, sizes.get("kdim", 8))
    keys = y[:5, :1].expand(-1, 3, -1) if sizes else x
    without = {"need_weights": False}
    gated = hc.attach_gates(model, (x, keys, keys), without).eval()
    assert [(group.kind, group.units) for group in gated.groups] == [("attention head", 4)]
    gated.gates.log_alpha.data.copy_(torch.tensor([4.0, -4.0, 0.5, 4.0]))
    small = hc.compact(gated, form=form)
    queries, others = torch.randn(4, 2, 8), y
    for example in ((x, keys, keys), (queries, others, others), (queries, others, others + 1)):
        expected, actual = (each(*example, **without)[0] for each in (gated, small))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_weights_that_attention_returns_fix_its_heads() -> None:
    x = torch.randn(5, 3, 8)
    found = hc.find_groups(nn.MultiheadAttention(8, 4), (x, x, x))
    assert found.names == ()
    assert "mean reads all of them" in str(found)
