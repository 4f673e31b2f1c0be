"""What a recorded call says of its contractions: order, norms, sums, and what reads a weight."""

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
    steps = recorded(Residual(), torch.randn(2, 3, 8, 8)).steps
    assert [(step.name, step.norm, step.to_sum, step.has_bias) for step in steps] == [
        ("stem.weight", "bn.running_mean", False, False),
        ("conv1.weight", "bn1.running_mean", False, False),
        ("conv2.weight", "bn2.running_mean", True, False),
        ("fc.weight", None, False, True),
    ]
    assert not any(step.reason for step in steps)


def test_attention_is_seen_from_inside() -> None:
    steps = recorded(Attention(), torch.randn(2, 6, 8)).steps
    names = ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert [step.name for step in steps] == names
    steps = recorded(Attention(cross=True), torch.randn(2, 6, 8)).steps
    assert [step.name for step in steps] == [names[0], names[0], names[1]]
    assert not any(step.reason for step in steps)  # two views of one weight, beside each other


class Reads(nn.Module):
    """Two layers, and a function of them."""

    def __init__(self, function, bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)
        self.norm, self.table = nn.BatchNorm1d(4), nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of(function) -> Recording:
    return recorded(Reads(function), torch.randn(3, 4))


def sums(function) -> list[bool]:
    return [step.to_sum for step in of(function).steps]


def test_a_sum_is_one_where_it_alone_reads_the_results() -> None:
    assert sums(lambda m, x: x + m.a(x)) == [True]
    assert sums(lambda m, x: torch.add(m.a(x), x)) == [True]
    assert sums(lambda m, x: torch.add(input=x, other=m.norm(m.a(x)))) == [True]
    assert sums(lambda m, x: F.dropout(m.a(x), 0.5, m.training) + x) == [True]
    assert sums(lambda m, x: m.a(x).add_(x)) == [True]
    assert sums(lambda m, x: x.clone().add_(m.a(x))) == [True]


def test_a_sum_is_none_where_something_else_reads_them() -> None:
    def twice(m: Reads, x: Tensor) -> Tensor:
        y = m.a(x)
        return (y + x) * y.sigmoid()

    def normed_twice(m: Reads, x: Tensor) -> Tensor:
        y = m.norm(m.a(x))
        return (y + x) * y.sigmoid()

    assert sums(twice) == [False]
    assert sums(normed_twice) == [False]
    assert sums(lambda m, x: m.a(x).add(x, alpha=2)) == [False]
    assert sums(lambda m, x: m.a(x) + 1) == [False]
    assert sums(lambda m, x: m.a(x).relu() + x) == [False]
    assert sums(lambda m, x: m.a(x)[0] + torch.ones(3, 4)) == [False]
    assert sums(lambda m, x: m.a(x[:1]) + torch.ones(3, 4)) == [False]  # a larger sum


def test_the_last_of_two_branches_makes_up_for_the_other() -> None:
    assert sums(lambda m, x: m.a(x) + m.b(x)) == [False, True]


def test_a_norm_counts_where_it_alone_reads_the_results() -> None:
    def both(m: Reads, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.norm(y) + y

    norms = [
        of(function).steps[0].norm
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
    steps = of(lambda m, x: m.a(m.a(x).relu())).steps
    assert [step.reason for step in steps] == ["it is used 2 times in a call"] * 2


def test_a_tied_weight_is_not_re_fitted() -> None:
    def tied(m: Reads, _: Tensor) -> Tensor:
        return F.linear(m.table(torch.arange(3)), m.table.weight)

    (step,) = of(tied).steps
    assert (step.name, step.reason) == ("table.weight", "embedding reads it, too")


def test_a_bias_that_two_layers_share_is_not_fitted() -> None:
    model = Reads(lambda m, x: m.b(m.a(x).relu()))
    model.b.bias = model.a.bias
    assert [step.has_bias for step in recorded(model, torch.randn(3, 4)).steps] == [False, False]
    steps = of(lambda m, x: m.a(x) * m.a.bias.exp()).steps
    assert not steps[0].has_bias


def test_other_readers_are_named_and_shapes_and_views_are_none() -> None:
    def other(m: Reads, x: Tensor) -> Tensor:
        assert m.b.weight.shape == m.b.weight.T.shape
        return torch.einsum("ni,oi->no", x, m.a.weight) + x @ m.b.weight.T

    recording = of(other)
    assert dict(recording.readers) == {"a.weight": ["einsum"]}
    assert [step.name for step in recording.steps] == ["b.weight"]


def test_no_activation_is_kept_alive() -> None:
    import weakref

    refs = []

    def noted(m: Reads, x: Tensor) -> Tensor:
        y = m.a(x)
        refs.append(weakref.ref(y))
        y = m.norm(y)
        assert refs[0]() is None
        return y

    of(noted)
    assert refs
