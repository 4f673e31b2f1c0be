"""Batch-norm statistics under the readout, against means and variances taken by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hardconcrete as hc
from tests.gating.oracles import by_hand, spread


class Normed(nn.Module):
    """Two batch norms with momenta of their own, and dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3)
        self.drop = nn.Dropout()
        self.fc2, self.bn2 = nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.fc2(self.drop(self.bn1(self.fc1(x)).relu())))


def make() -> hc.GatedModel:
    gated = hc.attach_gates(Normed(), torch.zeros(2, 4), sites=["fc1:in", "fc2:in"])
    return spread(gated)


def batches(count: int = 3) -> list[Tensor]:
    return [2 + 3 * torch.randn(16, 4) for _ in range(count)]


def statistics(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What a batch norm has to estimate from its inputs: averages over batches."""
    means = torch.stack([x.mean(0) for x in inputs]).mean(0)
    return means, torch.stack([x.var(0) for x in inputs]).mean(0)


def test_the_statistics_are_those_of_one_pass_under_the_readout() -> None:
    gated, data = make(), batches()
    plain = hc.remove_gates(copy.deepcopy(gated)).eval()
    gated(data[0])  # statistics under sampled gates, to be forgotten
    hc.recalibrate(gated, data)
    seen: dict[str, list[Tensor]] = {"bn1": [], "bn2": []}
    for name, inputs in seen.items():
        norm = plain.get_submodule(name)
        norm.momentum = None
        norm.reset_running_stats()
        norm.train()
        norm.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    with torch.no_grad():
        for x in data:
            by_hand(plain, gated, gated.gates.readout(), x)
    for name, inputs in seen.items():
        norm = gated.model.get_submodule(name)
        assert norm.num_batches_tracked == 3
        torch.testing.assert_close((norm.running_mean, norm.running_var), statistics(inputs))


def test_one_batch_is_normalised_by_its_own_statistics() -> None:
    model, (data,) = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batches(1)
    gated = hc.attach_gates(model, data, sites=["0:in"])
    hc.recalibrate(gated, [data])
    output = gated.eval()(data)
    torch.testing.assert_close(output.mean(0), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.var(0), torch.ones(3), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_momenta_are_put_back(training: bool) -> None:
    gated = make().train(training)
    gated.model.bn1.eval()
    modes = [module.training for module in gated.modules()]
    hc.recalibrate(gated, batches())
    assert [module.training for module in gated.modules()] == modes
    assert (gated.model.bn1.momentum, gated.model.bn2.momentum) == (0.3, None)
    assert not gated.gates.held


def test_they_are_put_back_after_an_error() -> None:
    gated = make()
    with pytest.raises(RuntimeError):
        hc.recalibrate(gated, [torch.zeros(2, 9)])
    assert all(module.training for module in gated.modules())
    assert gated.model.bn1.momentum == 0.3


def test_nothing_is_drawn_and_nothing_learns() -> None:
    gated = make()
    parameters = [p.detach().clone() for p in gated.parameters()]
    data, state = batches(), torch.get_rng_state()
    hc.recalibrate(gated, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(gated.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in gated.parameters())


def test_plain_models() -> None:
    model, data = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batches()
    hc.recalibrate(model, iter(data))
    expected = statistics([model[0](x).detach() for x in data])
    torch.testing.assert_close((model[1].running_mean, model[1].running_var), expected)
    assert model.training


def test_the_inner_model_of_a_gated_one() -> None:
    gated, data = make(), batches()
    inner = copy.deepcopy(gated)
    hc.recalibrate(gated, data)
    hc.recalibrate(inner.model, data)
    torch.testing.assert_close(inner.state_dict(), gated.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [lambda x: (x, torch.zeros(16)), lambda x: [x, "label"], lambda x: {"x": x}],
    ids=["tuple", "list", "dict"],
)
def test_batches_as_loaders_give_them(wrap: object) -> None:
    gated, data = make(), batches()
    other = copy.deepcopy(gated)
    hc.recalibrate(gated, data)
    hc.recalibrate(other, map(wrap, data))
    torch.testing.assert_close(other.state_dict(), gated.state_dict(), rtol=0, atol=0)


def test_models_without_statistics_are_not_run() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    hc.recalibrate(model, [torch.zeros(2, 99)])


def test_the_gates_of_a_batch_norm_are_read_out() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    gated = hc.attach_gates(model, torch.zeros(2, 4), sites=[hc.Site("1.weight", 0)])
    data = batches()
    hc.recalibrate(gated, data)
    means, _ = statistics([model[0](x).detach() for x in data])
    torch.testing.assert_close(model[1].running_mean, means)


def test_no_batches_lose_no_statistics() -> None:
    """A generator that was used up before is a mistake that costs the training's estimates."""
    gated = make()
    gated(batches(1)[0])
    before = gated.model.bn1.running_mean.clone()
    with pytest.raises(hc.HardConcreteError, match="batch"):
        hc.recalibrate(gated, [])
    assert torch.equal(gated.model.bn1.running_mean, before)


@pytest.mark.parametrize(
    "wrapped",
    [AveragedModel, lambda g: torch.compile(g, backend="eager"), lambda g: g.model],
    ids=["averaged", "compiled", "inner model"],
)
def test_gated_norms_inside_a_wrapper(wrapped: Callable[[hc.GatedModel], nn.Module]) -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(Normed(), torch.zeros(2, 4), sites=[hc.Site("bn1.weight", 0), "fc2:in"])
    own, data = wrapped(spread(gated)), batches()
    hc.recalibrate(own, data)
    found = own.module.model if isinstance(own, AveragedModel) else gated.model
    reference = copy.deepcopy(gated)
    hc.recalibrate(reference, data)
    expected = dict(reference.model.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in found.named_buffers())


def test_where_a_batch_fails_everything_is_as_before() -> None:
    gated = make()
    gated(batches()[0])
    before = copy.deepcopy(gated.state_dict())
    with pytest.raises(RuntimeError):
        hc.recalibrate(gated, [batches()[0], torch.zeros(3, 9)])
    assert all(torch.equal(before[name], value) for name, value in gated.state_dict().items())
    assert all(module.training for module in gated.modules())


class Merging(nn.Linear):
    """Like layers that fold something into their weight for evaluation."""

    def train(self, mode: bool = True) -> "Merging":
        raise AssertionError(f"train({mode}) was called")


def test_modes_are_flags_and_nothing_is_called() -> None:
    model = nn.Sequential(Merging(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 4), sites=["2:in"])
    hc.recalibrate(gated, batches())
    assert all(module.training for module in gated.modules())
