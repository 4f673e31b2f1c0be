"""Simulated gates against optimizers that really run on the penalty alone."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hardconcrete as hc
from hardconcrete.objective.gate_distance import UpdateRule, simulate_penalty


def network(**settings: object) -> hc.GatedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 5))
    return hc.attach_gates(model, torch.zeros(2, 4), sites=["0:in", "1:in"], **settings)


def run_optimizer(
    penalty: hc.L0Penalty, optimizer: Optimizer, steps: int, factor: object
) -> torch.Tensor:
    """Only the penalty's gradient, step by step."""
    scheduler = LambdaLR(optimizer, factor)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty().backward()
        optimizer.step()
        scheduler.step()
        penalty.step()
    return penalty.gated.gates.log_alpha.detach()


OPTIMIZERS = {
    "sgd": lambda gates: SGD(gates, lr=0.5),
    "momentum": lambda gates: SGD(gates, lr=0.05, momentum=0.9, nesterov=True),
    "dampened": lambda gates: SGD(gates, lr=0.5, momentum=0.8, dampening=0.5),
    "decayed": lambda gates: SGD(gates, lr=0.5, weight_decay=0.02),
    "adam": lambda gates: Adam(gates, lr=2e-3),
    "adam, decayed": lambda gates: Adam(gates, lr=2e-3, weight_decay=5e-3),
    "adamw": lambda gates: AdamW(gates, lr=2e-3, weight_decay=0.5),
    "adamax": lambda gates: Adamax(gates, lr=2e-3),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("step_down", [False, True])
def test_an_optimizer_moves_gates_as_simulated(make: object, step_down: bool) -> None:
    penalty = hc.L0Penalty(network(droprate=0.3), {"0:in": 3e-3, "1:in": 1e-2})
    gates = penalty.gated.gates.log_alpha
    factor = (lambda step: 0.2 if step >= 600 else 1.0) if step_down else (lambda _: 1.0)
    optimizer = make([gates])
    before = gates.detach().clone()
    found = simulate_penalty(penalty, UpdateRule.of(optimizer, gates), 1000, factor)
    assert torch.equal(gates, before)
    real = run_optimizer(penalty, optimizer, 1000, factor)
    assert (before - real).min() > 0.2
    torch.testing.assert_close(before - found, before - real, rtol=0.04, atol=0.0)


def test_schedules_decay_and_priors_are_simulated() -> None:
    """The weights do not change, neither here nor in the simulation."""
    settings = {"weight_decay": 0.2, "examples": 100}
    prior = hc.HardConcrete.with_open_probability(0.1)
    warm = lambda step: 2e-2 * min(1.0, step / 400)  # noqa: E731
    ends = []
    for lam, extra in ((warm, {}), (1e-3, settings), (0.0, {"prior": prior, "examples": 200})):
        penalty = hc.L0Penalty(network(), lam, **extra)
        gates = penalty.gated.gates.log_alpha
        optimizer = SGD([gates], lr=0.3)
        found = simulate_penalty(penalty, UpdateRule.of(optimizer, gates), 500, lambda _: 1.0)
        torch.testing.assert_close(
            found, run_optimizer(penalty, optimizer, 500, lambda _: 1.0), rtol=0.02, atol=0.05
        )
        assert penalty.steps == 500
        ends.append(found.mean().item())
    assert max(ends) < -0.1


def test_a_factor_on_lambda_is_one_on_the_penalty() -> None:
    gated = network()
    rule = UpdateRule(lr=0.1)
    found = simulate_penalty(hc.L0Penalty(gated, 1e-3), rule, 300, lambda _: 1.0, lam_factor=7.0)
    assert torch.equal(found, simulate_penalty(hc.L0Penalty(gated, 7e-3), rule, 300, lambda _: 1.0))


def test_an_optimiser_without_the_gates_or_unknown_has_no_update_rule() -> None:
    gates = nn.Parameter(torch.zeros(3))
    assert UpdateRule.of(SGD([nn.Parameter(torch.zeros(3))], lr=1.0), gates) is None
    assert UpdateRule.of(torch.optim.LBFGS([gates]), gates) is None
