"""A valid call of every public name, of which the table of bad calls changes one argument."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hardconcrete as hc

x = torch.ones(4, 6)
nan = math.nan
nothing = object()


def function(*_: Any, **__: Any) -> None:
    """A function that returns None."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@cache
def gated() -> hc.GatedModel:
    return hc.attach_gates(network(), x)


@cache
def small() -> nn.Module:
    return hc.compact(network(), x, keep={"0": [0, 1, 2]})


@cache
def groups() -> hc.Analysis:
    return hc.find_groups(network(), x)


@cache
def budget(by: str) -> hc.Budget:
    return hc.Budget(hc.attach_gates(network(), x), macs=0.5, by=by)


def plan() -> hc.CompactionPlan:
    return hc.CompactionPlan.of(small())


def site(**arguments: Any) -> object:
    return hc.attach_gates(network(), x, sites=[hc.Site(**arguments)])


def lam_by_gate(**arguments: Any) -> object:
    return hc.lam_per_weight(0.1, per="gate", **arguments)


Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]

CALLS: dict[str, Call] = {
    "attach_gates": (hc.attach_gates, lambda: {"model": network(), "example_inputs": x}),
    "remove_gates": (hc.remove_gates, dict),
    "find_groups": (hc.find_groups, lambda: {"model": network(), "example_inputs": x}),
    "Analysis": (lambda key: groups()[key], dict),
    "Site": (site, lambda: {"parameters": "0.weight", "dim": 1}),
    "compact": (hc.compact, lambda: {"model": gated()}),
    "compact(keep)": (
        hc.compact,
        lambda: {"model": network(), "example_inputs": x, "keep": {"0": [0]}},
    ),
    "save": (hc.save, lambda: {"path": Path("nowhere/file"), "small": small()}),
    "load": (hc.load, lambda: {"path": Path("nowhere"), "dense_model": network()}),
    "shrink": (hc.shrink, lambda: {"gated": gated(), "optimizer": None}),
    "CompactionPlan.from_json": (hc.CompactionPlan.from_json, dict),
    "CompactionPlan.of": (hc.CompactionPlan.of, dict),
    "CompactionPlan.apply": (lambda **a: plan().apply(**a), dict),
    "CompactionPlan.after": (lambda **a: plan().after(**a), dict),
    "prune": (
        hc.prune,
        lambda: {
            "model": network(),
            "example_inputs": x,
            "batches": [x],
            "loss": loss,
            "macs": 0.5,
        },
    ),
    "pareto": (
        hc.pareto,
        lambda: {
            **{"model": network(), "example_inputs": x, "batches": [x], "loss": loss},
            **{"fractions": [0.5], "evaluate": lambda _: 1.0},
        },
    ),
    "importance": (hc.importance, lambda: {"model": network(), "batches": [x], "loss": loss}),
    "Importance": (lambda group: hc.Importance({"0": torch.ones(2)}, 1)[group], dict),
    "measure": (hc.measure, lambda: {"before": network(), "after": small(), "inputs": x}),
    "count": (hc.count, lambda: {"model": network(), "inputs": x}),
    "recalibrate": (hc.recalibrate, lambda: {"model": network(), "batches": [x]}),
    "check_gates": (hc.check_gates, lambda: {"gated": gated()}),
    "check_run": (
        hc.check_run,
        lambda: {
            "penalty": hc.L0Penalty(gated(), 0.1),
            "optimizer": torch.optim.SGD(gated().parameters(), 0.1),
            "steps": 10,
        },
    ),
    "distillation_loss": (hc.distillation_loss, lambda: {"student_out": x, "teacher_out": x}),
    "parameter_groups": (hc.parameter_groups, lambda: {"gated": gated(), "lr": 0.1}),
    "lam_per_weight": (hc.lam_per_weight, lambda: {"value": 0.1}),
    "lam_per_weight(gate)": (lam_by_gate, lambda: {"gated": gated()}),
    "MethodPenalty": (hc.MethodPenalty, lambda: {"gated": gated(), "examples": 10}),
    "L0Penalty": (hc.L0Penalty, lambda: {"gated": gated(), "lam": 0.1}),
    "Budget": (hc.Budget, lambda: {"gated": gated(), "macs": 0.5}),
    "Budget(gates)": (hc.Budget, lambda: {"gated": gated(), "macs": 0.5, "by": "gates"}),
    "Budget.load_state_dict": (lambda state: budget("importance").load_state_dict(state), dict),
    "LearnedBudget.load_state_dict": (lambda state: budget("gates").load_state_dict(state), dict),
    "Budget.project": (lambda gated: budget("gates").project(gated), dict),
    "GatedModel.measure_latency": (lambda **a: gated().measure_latency(**a), dict),
    "GatedModel.delivered": (lambda kind: gated().delivered(kind), dict),
    "GatedModel.expected": (lambda kind: gated().expected(kind), dict),
    "HardConcrete": (hc.HardConcrete, lambda: {"log_alpha": torch.zeros(3)}),
    "HardConcrete.readout": (hc.HardConcrete(torch.zeros(3)).readout, dict),
    "Rectified": (hc.Rectified, dict),
}
"""The function and its valid arguments, made when the call is made."""


def call(name: str, argument: str, value: Any) -> None:
    """The valid call with one other argument."""
    function, valid = CALLS[name]
    function(**{**valid(), argument: value})
