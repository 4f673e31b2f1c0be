import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, HardConcreteError
from hardconcrete.gating.unit_weights import change_unit_weights, unit_weights
from hardconcrete.objective import Penalty
from hardconcrete.sparsifiers import L1, SBP, GroupLasso, Magnitude, UnitWeights


class Net(nn.Module):
    """Eight maps, each read through four inputs of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 8, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().flatten(1))


def make(method: object, **settings: object) -> hc.GatedModel:
    torch.manual_seed(0)
    return hc.attach_gates(Net(), torch.randn(2, 1, 4, 4), method=method, **settings)


def test_the_sum_over_gates_per_example_with_a_warm_up() -> None:
    gated = make("sbp")
    whole = SBP().divergence_from_prior(gated.gates.gate_parameters()).sum() / 1000
    penalty = hc.MethodPenalty(gated, examples=1000)
    assert isinstance(penalty, Penalty)
    torch.testing.assert_close(penalty(), whole)
    torch.testing.assert_close(hc.MethodPenalty(gated, 1000, strength=0.5)(), 0.5 * whole)
    warm = hc.MethodPenalty(gated, examples=1000, warm_up=4)
    for step in range(6):
        torch.testing.assert_close(warm(), whole * min(1, step / 4))
        warm.step()
    other = hc.MethodPenalty(gated, examples=1000, warm_up=8)
    other.load_state_dict({"steps": 2})
    torch.testing.assert_close(other(), whole / 4)
    assert other.state_dict() == {"steps": 2}


def test_sbp_prunes_what_the_loss_does_not_need() -> None:
    """The target depends on the first of three inputs: the other two lose their gates."""
    torch.manual_seed(0)
    gated = hc.attach_gates(nn.Linear(3, 1), torch.zeros(2, 3), sites=[":in"], method="sbp")
    penalty = hc.MethodPenalty(gated, examples=100)
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-2, gate_lr=5e-2))
    for _ in range(800):
        x = torch.randn(100, 3)
        loss = 50 * (gated(x)[:, 0] - x[:, 0]).square().mean() + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.step()
    assert gated.gates.is_open().tolist() == [True, False, False]


@pytest.mark.parametrize("family", [GroupLasso(9.0), L1(8.0)])
def test_proximal_steps_make_units_exactly_zero(family: GroupLasso | L1) -> None:
    gated = make(family)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
    penalty = hc.MethodPenalty(gated, examples=1000, optimizer=optimizer)
    assert not penalty().requires_grad
    weight = gated.model.fc._parameters["weight"]
    for _ in range(200):
        x = torch.rand(32, 1, 4, 4)
        optimizer.zero_grad()
        ((gated(x)[:, 0] - x.mean((1, 2, 3))).square().mean() + penalty()).backward()
        optimizer.step()
        penalty.step()
    stays = gated.gates.is_open()
    assert 0 < stays.sum() < 8
    norms = weight.view(3, 8, 4).abs().sum((0, 2))
    assert torch.equal(norms > 0, stays)
    small = hc.compact(gated)
    assert small.conv.out_channels == stays.sum()
    torch.testing.assert_close(small(x), gated.eval()(x))
    torch.testing.assert_close(small(x), hc.remove_gates(gated)(x))  # zeros need no mark


def test_one_proximal_step_by_hand() -> None:
    gated = make(GroupLasso(2.0))
    weight = gated.model.fc._parameters["weight"]
    before = weight.detach().clone().view(3, 8, 4)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.3)
    hc.MethodPenalty(gated, examples=10, optimizer=optimizer, strength=0.5).step()
    norms = before.square().sum((0, 2), keepdim=True).sqrt()
    bound = 0.5 * 2.0 / 10 * 0.3 * 12**0.5
    expected = before * (1 - bound / norms).clamp_min(0)
    torch.testing.assert_close(weight.detach().view(3, 8, 4), expected)


def test_groups_that_share_weights_take_their_steps_one_after_the_other() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    weight = layer.weight.detach().clone()
    gated = hc.attach_gates(layer, torch.zeros(2, 4), sites=[":out", ":in"], method=L1(1.0))
    optimizer = torch.optim.SGD(gated.parameters(), lr=1.0)
    hc.MethodPenalty(gated, examples=20, optimizer=optimizer).step()
    expected = weight.sign() * (weight.abs() - 2 * 0.05).clamp_min(0)
    torch.testing.assert_close(layer._parameters["weight"].detach(), expected)


def test_magnitude_marks_at_a_step() -> None:
    gated = make(Magnitude(0.5))
    assert gated.units_left() == (8,)
    penalty = hc.MethodPenalty(gated, examples=1)
    assert penalty() == 0
    penalty.step()
    assert gated.units_left() == (4,)
    assert gated.delivered("params") < gated.costs.dense("params")
    torch.testing.assert_close(gated.expected("params"), gated.delivered("params"))


@pytest.mark.parametrize(
    "sites", ["auto", ["conv:out", "fc:in"], ["fc:each"], [hc.Site("conv.weight", 2)]]
)
def test_weights_are_read_and_written_by_unit(sites: object) -> None:
    gated = make("group-lasso", sites=sites)
    rows = unit_weights(gated).rows
    squares = hc.L0Penalty(make("hard-concrete", sites=sites), 0.1).squared_norms()
    torch.testing.assert_close(UnitWeights(rows).squares(), squares)
    before = {name: value.clone() for name, value in gated.model.state_dict().items()}
    for group in gated.groups:
        change_unit_weights(gated, group, lambda rows: rows)
    assert all(torch.equal(before[k], v) for k, v in gated.model.state_dict().items())
    for group in gated.groups:
        change_unit_weights(gated, group, lambda rows: 2 * rows)
    torch.testing.assert_close(unit_weights(gated).squares(), 4 * squares)


def test_few_units_stay_by_their_rank_where_all_are_closed() -> None:
    gated = make("sbp")
    with torch.no_grad():
        gated.gates.mu.fill_(-9.0)
        gated.gates.log_sigma.copy_(torch.tensor([2.0, 2, 2, 2.1, 2, 2, 2, 2]))
    assert gated.units_left() == (0,)
    with pytest.warns(hc.HardConcreteWarning, match="no gate is open"):
        small = hc.compact(gated)
    assert hc.CompactionPlan.of(small).groups["conv"].kept == (3,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hc.MethodPenalty(Net(), 10), "takes what attach_gates returned, not a Net"),
        (
            lambda: hc.MethodPenalty(make("hard-concrete"), 10),
            r"RectifiedGates gates have no penalty of their own: use hc.L0Penalty\(gated, lam\)",
        ),
        (lambda: hc.MethodPenalty(make("l1"), 10), "L1 takes a proximal step .* pass optimizer="),
        (lambda: hc.MethodPenalty(make("sbp"), 0), "examples=0 must be a whole number, at least 1"),
        (lambda: hc.MethodPenalty(make("sbp"), 1, warm_up=-1), "warm_up=-1 must be a whole"),
        (lambda: hc.MethodPenalty(make("sbp"), 1, strength=-1), "strength=-1 must not be"),
        (
            lambda: hc.L0Penalty(make("sbp"), 0.1),
            r"SBP gates are never 0 in training, .*: use hc.MethodPenalty",
        ),
    ],
)
def test_refusals(call: object, words: str) -> None:
    with pytest.raises(HardConcreteError, match=words):
        call()


def test_an_optimizer_of_other_weights_is_refused() -> None:
    gated = make("l1")
    other = torch.optim.SGD(gated.model.conv.parameters(), lr=0.1)
    penalty = hc.MethodPenalty(gated, 10, optimizer=other)
    with pytest.raises(ArgumentError, match="conv: a proximal step needs one learning rate for fc"):
        penalty.step()
