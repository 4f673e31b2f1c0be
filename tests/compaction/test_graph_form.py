import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.graph_form import CompactedGraph
from hardconcrete.demo import MLP
from hardconcrete.errors import CompactionError
from tests.compaction.networks import Joined, Sized, TiedWords, at_random, gap, with_shut
from tests.exactness import apart, outputs

SHUT = {"conv": [0, 3], "fc1": [1, 2]}


@pytest.fixture(scope="module")
def gated() -> hc.GatedModel:
    torch.manual_seed(0)
    gated = with_shut(hc.attach_gates(Sized(), Sized.example()), SHUT)
    gated.freeze_gates()
    return gated


@pytest.fixture(scope="module")
def made(gated: hc.GatedModel) -> nn.Module:
    return hc.compact(gated)


@pytest.fixture
def small(made: nn.Module) -> nn.Module:
    return copy.deepcopy(made)


def test_it_is_delivered_where_a_size_is_written_into_the_forward(small: nn.Module) -> None:
    assert type(small) is CompactedGraph
    assert str(hc.CompactionPlan.of(small)).splitlines() == [
        "Sized, as graph", "conv: 4 of 6", "fc1: 3 of 5",
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
@pytest.mark.parametrize("training", [False, True])
def test_any_batch_size_in_both_modes(
    gated: hc.GatedModel, small: nn.Module, batch: int, training: bool
) -> None:
    if training and batch == 1:
        batch = 11  # the norm needs several
    x = Sized.example(batch)
    reference = copy.deepcopy(gated).train(training)
    assert apart(outputs(reference, ((x,), {})), outputs(small.train(training), ((x,), {}))) < 1e-5


def test_the_keys_of_the_state_are_those_of_the_model(
    gated: hc.GatedModel, small: nn.Module
) -> None:
    assert list(small.state_dict()) == list(gated.model.state_dict())
    shapes = {name: list(tensor.shape) for name, tensor in small.state_dict().items()}
    assert shapes["conv.weight"] == [4, 1, 3, 3]
    assert shapes["bn.running_var"] == [4]
    assert shapes["fc1.weight"] == [3, 16]


def test_it_trains(small: nn.Module) -> None:
    x, y = Sized.example(32), torch.randint(2, (32,))
    before = small.bn.running_mean.clone()
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(small(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in small.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(small.bn.running_mean, before)
    assert small.bn.num_batches_tracked == 10


def test_gradients_are_those_of_the_gated_model(gated: hc.GatedModel, small: nn.Module) -> None:
    """Of the rows that stay, by the gates that were folded into the columns."""
    x = Sized.example(6)
    reference = copy.deepcopy(gated).train()
    reference(x).square().sum().backward()
    small.train()(x).square().sum().backward()
    kept = [1, 2, 4, 5]
    expected = reference.model.conv.bias.grad[kept]
    torch.testing.assert_close(small.conv.bias.grad, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small.fc2.bias.grad, reference.model.fc2.bias.grad)


def test_copies_are_independent(small: nn.Module) -> None:
    other, x = copy.deepcopy(small).eval(), Sized.example()
    small.eval()
    assert torch.equal(other(x), small(x))
    other.fc2.bias.data.add_(1.0)
    torch.testing.assert_close(other(x), small(x) + 1.0)
    state = {name: tensor + 0 for name, tensor in other.state_dict().items()}
    small.load_state_dict(state)
    assert torch.equal(other(x), small(x))


def test_it_moves_to_another_precision(gated: hc.GatedModel, small: nn.Module) -> None:
    x = Sized.example().double()
    reference = copy.deepcopy(gated).double().eval()
    torch.testing.assert_close(small.double().eval()(x), reference(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_model_is_kept(gated: hc.GatedModel, training: bool) -> None:
    other = copy.deepcopy(gated).train(training)
    assert hc.compact(other, form="graph").training is training


def test_what_is_frozen_stays_frozen() -> None:
    model = Sized()
    model.conv.requires_grad_(False)
    small = hc.compact(at_random(hc.attach_gates(model, Sized.example())), form="graph")
    assert [n for n, p in small.named_parameters() if not p.requires_grad] == [
        "conv.weight", "conv.bias",
    ]  # fmt: skip


def test_tied_weights_stay_one_tensor() -> None:
    gated = hc.attach_gates(TiedWords(), torch.randint(9, (3, 4)))
    small = hc.compact(with_shut(gated, {"words": [1, 5]}), form="graph")
    assert small.words.weight is small.decoder.weight
    assert small.words.weight.shape == (9, 4)
    assert gap(gated, small, torch.randint(9, (5, 4))) < 1e-5


def test_selected_inputs() -> None:
    sites = ["fc1:in", "fc2:in", "fc3:in"]
    gated = hc.attach_gates(MLP(inputs=20, hidden=(9, 8)), torch.randn(2, 4, 5), sites=sites)
    small = hc.compact(with_shut(gated, {"fc1:in": [0, 1, 19], "fc2:in": [3]}), form="graph")
    assert small.fc1.weight.shape == (8, 17)
    assert small.fc1.kept_inputs.tolist() == list(range(2, 19))
    assert gap(gated, small, torch.randn(7, 4, 5)) < 1e-5


class Constants(nn.Module):
    """The modes differ in the tensors that are written into the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h * torch.tensor(2.0)
        return self.b(h * torch.tensor(3.0))


class Every(nn.Module):
    """Strided slices: the places of what stays are no range."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 12), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h[:, ::2]) + self.c(h[:, 1::2].tanh())


class Split(nn.Module):
    """Chunks, a select, a padding and a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 12, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, dim=1)
        both = torch.cat([right, left], 1).unflatten(1, (2, 6)).flatten(1, 2)
        return self.b(both.expand(x.shape[0], 12, 3, 3)).select(2, -1)


@pytest.mark.parametrize(
    ("model", "shape"), [(Constants, (4,)), (Every, (4,)), (Split, (1, 3, 3)), (Joined, (4,))]
)
def test_sizes_in_the_graph(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    gated = at_random(hc.attach_gates(model(), torch.randn(3, *shape)))
    assert 0 < sum(gated.units_left()) < len(gated.gates.log_alpha)
    gated.freeze_gates()
    small = hc.compact(gated, form="graph")
    assert list(small.state_dict()) == list(gated.model.state_dict())
    for training in (True, False):
        x = torch.randn(5, *shape)
        gated.train(training), small.train(training)
        assert apart(outputs(gated, ((x,), {})), outputs(small, ((x,), {}))) < 1e-5


class OnlyEvaluated(nn.Module):
    """Decides by its data in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.sum() > 0:
            x = -x
        return self.b(self.a(x).relu())


def test_a_graph_for_inference_says_so() -> None:
    gated = at_random(hc.attach_gates(OnlyEvaluated(), torch.randn(3, 4)))
    small = hc.compact(gated.eval(), form="graph")
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5
    with pytest.raises(CompactionError, match="this graph is for inference"):
        small.train()(torch.randn(5, 4))


class Auxiliary(nn.Module):
    """Returns more in training; a second head may be there for that alone."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
        self.more = nn.Linear(6, 3) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        y = self.b(h)
        return (y, self.more(h if isinstance(self.more, nn.Linear) else y)) if self.training else y


def test_more_outputs_in_training() -> None:
    gated = with_shut(hc.attach_gates(Auxiliary(head=False), torch.randn(3, 4)), {"a": [0, 3]})
    gated.freeze_gates()
    small = hc.compact(gated, form="graph")
    for training in (True, False, True):
        x = torch.randn(5, 4)
        expected = outputs(gated.train(training), ((x,), {}))
        assert len(expected) == 1 + training
        assert apart(expected, outputs(copy.deepcopy(small).train(training), ((x,), {}))) < 1e-5


def test_a_layer_that_is_used_in_training_only() -> None:
    """Its inputs could not be cut, as evaluation does not show them: the graph is for inference."""
    gated = with_shut(hc.attach_gates(Auxiliary(head=True), torch.randn(3, 4)), {"a": [0, 3]})
    small = hc.compact(gated, form="graph")
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5
    with pytest.raises(CompactionError, match="this graph is for inference"):
        small.train()(torch.randn(5, 4))


class Quiet(nn.Module):
    """Computes a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x).relu()
        return self.b(h)


def test_blocks_without_gradients_have_a_plain_form_only() -> None:
    gated = at_random(hc.attach_gates(Quiet(), torch.randn(3, 4)))
    assert hc.CompactionPlan.of(hc.compact(gated)).form == "module"
    with pytest.raises(CompactionError, match="from which units are removed, has no graph form"):
        hc.compact(gated, form="graph")


class QuietAngles(nn.Module):
    """Only what is not cut is computed without gradients, and a size is written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.square().mean(1, keepdim=True).sqrt()
        return self.b(self.a(x).relu().view(-1, 6) * scale)


def test_blocks_without_gradients_stay_where_nothing_in_them_is_cut() -> None:
    gated = with_shut(hc.attach_gates(QuietAngles(), torch.randn(3, 4)), {"a": [0, 3]})
    small = copy.deepcopy(hc.compact(gated))
    assert hc.CompactionPlan.of(small).form == "graph"
    assert list(small.state_dict()) == list(gated.model.state_dict())
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


def test_a_plan_in_module_form_applies_as_a_graph(gated: hc.GatedModel, small: nn.Module) -> None:
    plan = replace(hc.CompactionPlan.of(small), form="graph")
    fresh = Sized()
    fresh.load_state_dict(gated.model.state_dict())
    made = plan.apply(fresh, Sized.example(2)).eval()
    x = Sized.example(5)
    assert torch.equal(made(x), small.eval()(x))
