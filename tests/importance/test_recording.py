"""What a recording says of its layers: order, norms, additions, and what uses a weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.importance.recording import Recorder, Recording
from tests.importance.networks import Attention, Residual


def recorded(model: nn.Module, *inputs: Tensor) -> Recording:
    recorder = Recorder(model)
    with torch.no_grad(), recorder:
        model.eval()(*inputs)
    return recorder.recording()


def test_a_residual_block() -> None:
    layers = recorded(Residual(), torch.randn(2, 3, 8, 8)).layers
    assert [(layer.name, layer.norm, layer.feeds_addition, layer.has_bias) for layer in layers] == [
        ("stem.weight", "bn.running_mean", False, False),
        ("conv1.weight", "bn1.running_mean", False, False),
        ("conv2.weight", "bn2.running_mean", True, False),
        ("fc.weight", None, False, True),
    ]
    assert not any(layer.skip_reason for layer in layers)


def test_layers_inside_attention_are_recorded() -> None:
    layers = recorded(Attention(), torch.randn(2, 6, 8)).layers
    names = ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert [layer.name for layer in layers] == names
    layers = recorded(Attention(cross=True), torch.randn(2, 6, 8)).layers
    assert [layer.name for layer in layers] == [names[0], names[0], names[1]]
    # Two views of one weight, beside each other.
    assert not any(layer.skip_reason for layer in layers)


class TwoLayers(nn.Module):
    """Two layers, and a function of them."""

    def __init__(self, function, bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)
        self.norm, self.table = nn.BatchNorm1d(4), nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def record_two_layers(function) -> Recording:
    return recorded(TwoLayers(function), torch.randn(3, 4))


def feeds_addition(function) -> list[bool]:
    return [layer.feeds_addition for layer in record_two_layers(function).layers]


def test_an_addition_counts_if_it_is_the_only_user_of_the_output() -> None:
    assert feeds_addition(lambda m, x: x + m.a(x)) == [True]
    assert feeds_addition(lambda m, x: torch.add(m.a(x), x)) == [True]
    assert feeds_addition(lambda m, x: torch.add(input=x, other=m.norm(m.a(x)))) == [True]
    assert feeds_addition(lambda m, x: F.dropout(m.a(x), 0.5, m.training) + x) == [True]
    assert feeds_addition(lambda m, x: m.a(x).add_(x)) == [True]
    assert feeds_addition(lambda m, x: x.clone().add_(m.a(x))) == [True]


def test_an_addition_does_not_count_beside_another_user() -> None:
    def twice(m: TwoLayers, x: Tensor) -> Tensor:
        y = m.a(x)
        return (y + x) * y.sigmoid()

    def normed_twice(m: TwoLayers, x: Tensor) -> Tensor:
        y = m.norm(m.a(x))
        return (y + x) * y.sigmoid()

    assert feeds_addition(twice) == [False]
    assert feeds_addition(normed_twice) == [False]
    assert feeds_addition(lambda m, x: m.a(x).add(x, alpha=2)) == [False]
    assert feeds_addition(lambda m, x: m.a(x) + 1) == [False]
    assert feeds_addition(lambda m, x: m.a(x).relu() + x) == [False]
    assert feeds_addition(lambda m, x: m.a(x)[0] + torch.ones(3, 4)) == [False]
    assert feeds_addition(lambda m, x: m.a(x[:1]) + torch.ones(3, 4)) == [False]  # a larger sum


def test_the_last_of_two_branches_makes_up_for_the_other() -> None:
    assert feeds_addition(lambda m, x: m.a(x) + m.b(x)) == [False, True]


def test_a_norm_counts_if_it_is_the_only_user_of_the_output() -> None:
    def both(m: TwoLayers, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.norm(y) + y

    norms = [
        record_two_layers(function).layers[0].norm
        for function in (
            lambda m, x: m.norm(m.a(x)),
            both,
            lambda m, x: m.norm(m.a(x)) + m.norm(m.b(x)),  # one norm for two layers
            lambda m, x: m.norm(m.a(x).relu()),
            lambda m, x: m.norm(m.a(x).relu_()),
            lambda m, x: F.batch_norm(m.a(x), None, None, training=True),
        )
    ]
    assert norms == ["norm.running_mean", None, None, None, None, None]


def test_what_is_used_twice_is_not_re_fitted() -> None:
    layers = record_two_layers(lambda m, x: m.a(m.a(x).relu())).layers
    assert [layer.skip_reason for layer in layers] == ["it is used 2 times in a call"] * 2


def test_a_tied_weight_is_not_re_fitted() -> None:
    def tied(m: TwoLayers, _: Tensor) -> Tensor:
        return F.linear(m.table(torch.arange(3)), m.table.weight)

    (layer,) = record_two_layers(tied).layers
    assert (layer.name, layer.skip_reason) == ("table.weight", "embedding uses it, too")


def test_a_bias_that_two_layers_share_is_not_fitted() -> None:
    model = TwoLayers(lambda m, x: m.b(m.a(x).relu()))
    model.b.bias = model.a.bias
    assert [layer.has_bias for layer in recorded(model, torch.randn(3, 4)).layers] == [False, False]
    layers = record_two_layers(lambda m, x: m.a(x) * m.a.bias.exp()).layers
    assert not layers[0].has_bias


def test_other_users_are_named_except_shapes_and_views() -> None:
    def other(m: TwoLayers, x: Tensor) -> Tensor:
        assert m.b.weight.shape == m.b.weight.T.shape
        return torch.einsum("ni,oi->no", x, m.a.weight) + x @ m.b.weight.T

    recording = record_two_layers(other)
    assert dict(recording.users) == {"a.weight": ["einsum"]}
    assert [layer.name for layer in recording.layers] == ["b.weight"]


def test_no_activation_is_kept_alive() -> None:
    import weakref

    refs = []

    def noted(m: TwoLayers, x: Tensor) -> Tensor:
        y = m.a(x)
        refs.append(weakref.ref(y))
        y = m.norm(y)
        assert refs[0]() is None
        return y

    record_two_layers(noted)
    assert refs
