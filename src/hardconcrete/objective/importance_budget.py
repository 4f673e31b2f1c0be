"""A budget by importance: training removes the units that matter least for their cost."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.bank import GateBank
from hardconcrete.importance.running_importance import RunningImportance
from hardconcrete.importance.select import select_units
from hardconcrete.objective.budget import Budget, refuse_no_state
from hardconcrete.objective.cost_targets import CostTargets

DESCENT_START, DESCENT_END = 0.05, 0.4
"""Fractions of the training between which the target comes down."""

DEFAULT_STEPS = 2500
"""Length of a training without ``steps``: the target has come down after 1,000 steps."""

MIN_STEPS = 10
"""A shorter training has no time to measure, close units and learn."""

MAX_CUTS = 100
"""How often units are closed at most."""

STEPS_BETWEEN_CUTS = 10
"""Steps of measurement between two cuts, in a long training."""

LONG_TRAINING_STEPS = 1000
"""Trainings of at least so many steps measure every fourth step only."""


class ImportanceBudget(Budget, by="importance"):
    """A budget that removes the units which matter least for what they cost.

    The training has three phases, which ``print(budget)`` names:

    1. *Come down*: from 5% to 40% of the steps the target falls from the present cost to the limit,
       by the same factor in every step. The importance of a unit is the running mean of (dL/dz)^2,
       which comes with the backward pass. Every few steps the units with the smallest ratio of
       importance to marginal cost are closed, until the present target is met.
    2. *Settle*: at the limit, units that still fit are opened again, and the gates are frozen.
    3. *Train what is left*: the rest is ordinary training, without noise and with a fixed
       structure. ``shrink(gated, optimizer)`` cuts the closed units out, and each step gets faster.

    All gates are 0 or 1 in training. From its first step on the budget writes the parameters of the
    gates itself. It needs no learning rate and adds nothing to the loss. A step with infinite or
    NaN gradients is not measured.

    Of several limits, the one that is exceeded most decides which units are closed.
    """

    def __init__(self, gated: GatedModel, *, by: str = "importance", **settings: Any) -> None:
        super().__init__(gated, by=by, **settings)
        steps = DEFAULT_STEPS if self.steps is None else self.steps
        if steps < MIN_STEPS:
            raise ArgumentError(
                f"steps={steps} is too short: a budget needs {MIN_STEPS} steps at least. "
                "hc.prune makes a trained model smaller without training"
            )
        self._length = steps
        self._first, self._last = round(DESCENT_START * steps), round(DESCENT_END * steps)
        self._measure_every = self.measure_every or (4 if steps >= LONG_TRAINING_STEPS else 1)
        span = self._last - self._first
        self._every = max(min(STEPS_BETWEEN_CUTS, span // 4), -(-span // MAX_CUTS), 1)
        _refuse_other_gates(gated)
        bank = gated.gates
        gated.freeze_gates(False)
        bank.location.requires_grad_()
        bank.measured, bank.measuring = bank.measured + 1, True
        self._number = bank.measured
        self._mask = bank.is_open()
        bank.set_budget_mask(self._mask)
        self._places = _places(bank)
        self._targets = CostTargets(gated, self.constraints, self._open())
        self._running = RunningImportance(bank.location)
        self._step, self._settled = 0, False

    def __call__(self) -> Tensor:
        """Zero: the budget does not change the loss."""
        location = self.gated.gates.location
        if not location.requires_grad:
            return location.new_zeros(())
        return 0 * location.sum()  # so that it has a gradient in every step

    @torch.no_grad()
    def step(self) -> None:
        """Measure, and close units when it is time; after the optimizer's step."""
        bank = self.gated.gates
        if bank.measured != self._number:
            raise GateError(
                "another budget by importance was built for this model since; give one budget all "
                "limits: hc.Budget(gated, macs=0.5, params=0.4)"
            )
        slope, measured = bank.location.grad, bank.measuring and not self._settled
        if measured and slope is None:
            raise GateError(_no_gradient(bank))
        self._step += 1
        self._keep_up()
        if slope is not None:
            if measured:
                self._running.add(slope)
            slope.zero_()
        self._write()  # an optimizer may have changed the gates
        if self._settled:
            return
        bank.measuring = self._step % self._measure_every == 0
        if self._step >= self._first and (self._step - self._first) % self._every == 0:
            self._cut((self._step - self._first) / (self._last - self._first))
        if self._step >= self._last:
            self._settle()

    @property
    def phase(self) -> str:
        """``"come down"``, ``"settle"`` or ``"train what is left"``."""
        if self._settled:
            return "train what is left"
        return "settle" if self._step >= self._last else "come down"

    @property
    def settled(self) -> bool:
        """Whether the units are chosen: from then on the structure stays as it is."""
        return self._settled

    @property
    def steps_to_settle(self) -> int:
        """Steps until the structure is fixed."""
        return 0 if self._settled else max(0, self._last - self._step)

    def importance(self) -> Tensor:
        """The running mean of (dL/dz)^2 of every gate."""
        self._keep_up()
        return self._running.mean()

    _advice = (
        "Train until the budget has fixed the units, or pass batches=... and loss=... to re-fit "
        "those that stay"
    )

    def _measured(self) -> Tensor:
        return self.importance()

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.phase}: {self._progress_in_words()}"

    def _progress_in_words(self) -> str:
        if self._settled:
            return f"the units were fixed at step {self._last:,} of {self._length:,}"
        return (
            f"step {self._step:,} of {self._length:,}; units are removed from step {self._first:,} "
            f"on and fixed at step {self._last:,}"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        self._keep_up()
        return {
            "steps": torch.tensor(self._step),
            "settled": torch.tensor(self._settled),
            "open": self._mask.clone(),
            "start": self._targets.start.clone(),
            "total": self._running.total.clone(),
            "weight": self._running.weight.clone(),
            "terms": torch.tensor(self._terms()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the state of the model first."""
        refuse_no_state(state)
        self._keep_up()
        expected = self.state_dict()
        for name, value in expected.items():
            if getattr(state.get(name), "shape", None) != value.shape:
                raise ArgumentError(
                    "this is not the state of a budget by importance of this model: "
                    f"{name!r} differs"
                )
        if state["terms"].tolist() != expected["terms"].tolist():
            raise ArgumentError(
                "this is the state of a budget with other limits or steps; this one has "
                f"{self._terms_in_words()} within {self._length:,} steps"
            )
        self._step = int(state["steps"])
        self._targets.start.copy_(state["start"])
        self._mask.copy_(state["open"])
        self._running.total.copy_(state["total"])
        self._running.weight.copy_(state["weight"])
        self._settled = bool(state["settled"])
        self.gated.freeze_gates(False)
        self.gated.gates.measuring = not self._settled
        self._apply_mask()
        if self._settled:
            self._freeze()

    def _cut(self, part: float, *, reopen: bool = False) -> None:
        """Close units until the target at this part of the way down is met."""
        score = self._running.mean().cpu()
        if not score.any():
            raise GateError(
                "no gradient of the gates was measured: the GatedModel was called in evaluation "
                "mode, its output does not reach the loss, no gradient was finite, or one CUDA "
                "graph is replayed for all steps (then build the budget with measure_every=1)"
            )
        costs, settings = self._targets(part, reopen=reopen)
        groups, is_open = self.gated.groups, self._mask.double().cpu()
        kept = select_units(
            score,
            groups,
            is_open,
            costs,
            round_to=self.round_to,
            classes=self.classes,
            settings=settings,
        )
        self._mask.copy_(kept > 0)
        self._apply_mask()

    def _settle(self) -> None:
        """Fix the structure."""
        self._cut(1.0, reopen=True)
        self._settled = True
        self.gated.gates.measuring = False
        self._freeze()

    def _freeze(self) -> None:
        """Make the gates constants.

        Not where processes share a model: ``DistributedDataParallel`` waits for the gradient of
        every parameter that it was wrapped with. The gates keep their values there, too.
        """
        if not (dist.is_available() and dist.is_initialized()):
            self.gated.freeze_gates()

    def _apply_mask(self) -> None:
        """Train with the chosen units from now on."""
        self.gated.gates.set_budget_mask(self._mask)
        self._write()

    def _write(self) -> None:
        """Open and close the gates as the budget chose."""
        self.gated.gates.set_open(self._mask)

    def _keep_up(self) -> None:
        """Follow the model to another device, and ``shrink``, which may have removed gates."""
        bank = self.gated.gates
        device = bank.device
        if device != self._mask.device:
            self._mask, self._places = self._mask.to(device), self._places.to(device)
            self._running.to(device)
        if bank.count != len(self._places):
            kept = torch.searchsorted(self._places, _places(bank))
            self._running.keep(kept)
            self._mask, self._places = self._mask[kept], _places(bank)
            bank.set_budget_mask(self._mask)

    def _terms(self) -> list[int]:
        """Numbers that identify the limits and the length in a state."""
        words = [f"{c.name} {c.limit:.6g}" for c in self.constraints]
        words += [str(self.round_to), *["uniform"] * bool(self.classes)]
        return [zlib.crc32(" ".join(words).encode()), self._length]


def _places(bank: GateBank) -> Tensor:
    """The indices that the gates had in the dense model."""
    if bank.original is not None:
        return bank.original.clone()
    return torch.arange(bank.count, device=bank.device)


def _no_gradient(bank: GateBank) -> str:
    """Why there may be no gradient, and what to do."""
    if not bank.location.requires_grad:
        return (
            f"budget.step() needs the gradients of the gates, and gated.gates."
            f"{bank.family.location} was frozen after the budget was built: freeze gated.model "
            "instead of gated"
        )
    return (
        "budget.step() needs the gradients of this step: call the GatedModel in training mode, "
        "loss.backward(), optimizer.step(), budget.step(), and zero_grad() after that"
    )


@torch.no_grad()
def _refuse_other_gates(gated: GatedModel) -> None:
    """Refuse gates whose readout is not exactly 0 or 1 at the ends."""
    bank = gated.gates
    every = torch.ones(bank.count, dtype=torch.bool, device=bank.device)
    for state, is_open in (("closed", ~every), ("open", every)):
        values = bank.family.readout(bank.family.certain(is_open), bank.rule)
        if (values != is_open.to(values.dtype)).any():
            raise ArgumentError(
                "a budget by importance needs gates that are 0 or 1, and the readout of these is "
                f"{values.max().item():.3g} where they are certainly {state}: use the default "
                "gates, or by='gates'"
            )
