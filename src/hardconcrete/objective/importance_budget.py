"""A budget by importance: the units that matter least for their cost are removed in training."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hardconcrete.cost.expected import Ledger
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.gated_model import LATENCY
from hardconcrete.importance.running import RunningImportance
from hardconcrete.importance.select import select_units
from hardconcrete.objective.budget import Budget
from hardconcrete.objective.constraint import delivered

START, END = 0.05, 0.4
"""The parts of the training between which the target comes down."""

DEFAULT_STEPS = 2500
"""Length of a training that names none: the target has come down after 1,000 steps."""

LEAST_STEPS = 10
"""A shorter training has no time to measure, cut and learn."""

MAX_CUTS = 100
"""How often units are removed at most."""

STEPS_BETWEEN_CUTS = 10
"""How many steps are measured at least before units are removed again, in a long training."""

LONG_TRAINING = 1000
"""Steps of a training in which every fourth step is enough to measure."""

OPEN = 20.0
"""log_alpha of an open gate, and minus that of a shut one: the readouts are exactly 1 and 0."""


class ImportanceBudget(Budget, by="importance"):
    """A budget that removes the units which matter least for what they cost.

    The training has three phases, which ``print(budget)`` names:

    1. *Come down*: from 5% to 40% of the steps the target falls from the present cost to the limit
       by the same factor in every step. The importance of a unit is the running mean of (dL/dz)^2,
       which comes with the backward pass. Every few steps the units with the smallest ratio of
       importance to marginal cost are shut, until the target of the moment is met.
    2. *Settle*: at the limit, units that still fit come back, and the gates are frozen.
    3. *Train what is left*: the rest is ordinary training, without noise and without any change of
       the structure. ``shrink(gated, optimizer)`` takes the shut units out, and a step gets faster.

    All gates are 0 or 1. The budget writes ``gated.gates.log_alpha`` itself. It needs no learning
    rate and adds nothing to the loss.

    Of several limits, the one that is exceeded most decides.
    """

    def __init__(self, gated: GatedModel, *, by: str = "importance", **settings: Any) -> None:
        super().__init__(gated, by=by, **settings)
        steps = DEFAULT_STEPS if self.steps is None else self.steps
        if steps < LEAST_STEPS:
            raise ArgumentError(
                f"steps={steps} is too short: a budget needs {LEAST_STEPS} steps at least. "
                "hc.prune makes a trained model smaller without training"
            )
        self._length, self._first, self._last = steps, round(START * steps), round(END * steps)
        self._measure_every = self.measure_every or (4 if steps >= LONG_TRAINING else 1)
        span = self._last - self._first
        self._every = max(min(STEPS_BETWEEN_CUTS, span // 4), -(-span // MAX_CUTS), 1)
        is_open, before = self._open(), gated.gates.log_alpha.detach().clone()
        gated.gates.measured = gated.gates.measuring = True
        self._write(is_open)
        _refuse_other_gates(gated, before)
        self._ledger: tuple[Ledger | None, Ledger | None] = None, None
        self._places = torch.arange(len(before), device=before.device)
        self._start = delivered(gated, self.constraints, is_open)
        self._running = RunningImportance(gated.gates.log_alpha)
        self._step, self._settled = 0, False

    def __call__(self) -> Tensor:
        """Zero: the budget does not change the loss."""
        log_alpha = self.gated.gates.log_alpha
        if not log_alpha.requires_grad:
            return log_alpha.new_zeros(())
        return 0 * log_alpha.sum()  # so that it has a gradient in every step

    @torch.no_grad()
    def step(self) -> None:
        """Measure, and remove units when it is time for it; after the optimizer's step."""
        log_alpha = self.gated.gates.log_alpha
        measured = self.gated.gates.measuring and not self._settled
        if measured and log_alpha.grad is None:
            raise GateError(
                "budget.step() needs the gradients of this step: call the GatedModel in training "
                "mode, loss.backward(), optimizer.step(), budget.step(), and zero_grad() after that"
            )
        self._step += 1
        log_alpha.sign_().mul_(OPEN)  # whatever an optimizer did to the gates is undone
        if log_alpha.grad is not None:
            if measured:
                self._keep_up()
                self._running.add(log_alpha.grad)
            log_alpha.grad.zero_()
        if self._settled:
            return
        self.gated.gates.measuring = self._step % self._measure_every == 0
        if self._step >= self._first and (self._step - self._first) % self._every == 0:
            self._write(self._cut(self._open()))
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
        """How many more steps it takes until the structure is fixed."""
        return 0 if self._settled else max(0, self._last - self._step)

    def importance(self) -> Tensor:
        """The running mean of (dL/dz)^2 of every gate."""
        self._keep_up()
        return self._running.mean()

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
            "start": self._start.clone(),
            "total": self._running.total.clone(),
            "weight": self._running.weight.clone(),
            "terms": torch.tensor(self._terms()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the state of the model first."""
        self._keep_up()
        wanted = self.state_dict()
        for name, value in wanted.items():
            if getattr(state.get(name), "shape", None) != value.shape:
                raise ArgumentError(f"this is not the state of such a budget: see its {name!r}")
        if state["terms"].tolist() != wanted["terms"].tolist():
            raise ArgumentError(
                "this is the state of a budget of other limits or steps; here "
                f"{self._terms_in_words()} within {self._length:,} steps"
            )
        self._step, self._start = int(state["steps"]), state["start"].to(self._start)
        self._running.total.copy_(state["total"])
        self._running.weight.copy_(state["weight"])
        self._settled = bool(state["settled"])
        self.gated.freeze_gates(False)
        self.gated.gates.measuring = not self._settled
        if self._settled:
            self._freeze()

    def _cut(self, is_open: Tensor) -> Tensor:
        """Shut units until the target of this step is met."""
        progress = (self._step - self._first) / max(self._last - self._first, 1)
        return self._chosen(is_open, min(progress, 1.0))

    def _chosen(self, is_open: Tensor, progress: float) -> Tensor:
        limits = self._limits.double()
        start = self._start.maximum(limits)
        target = (start * (limits / start) ** progress).to(self._place)
        score = self._running.mean().to(self._place)
        if not score.any():
            raise GateError(
                "no gradient of the gates was measured: the forward of the GatedModel does not "
                "reach the loss, or runs compiled and captured for every step alike; then build "
                "the budget with measure_every=1"
            )
        kept = select_units(
            score,
            self.gated.groups,
            is_open.to(self._place),
            lambda gates: self._costs(gates) / target,
            round_to=self.round_to,
        )
        return kept.to(is_open.device)

    @property
    def _place(self) -> torch.device:
        """Where costs are computed: choosing takes many small steps, which a GPU is slow at."""
        on_device = any(limit.name == LATENCY for limit in self.constraints)
        return self.gated.gates.log_alpha.device if on_device else torch.device("cpu")

    def _costs(self, gates: Tensor) -> Tensor:
        """Each cost as a part of its dense total."""
        ledger = self.gated.ledger
        if self._ledger[0] is not ledger:
            self._ledger = ledger, ledger.to(self._place)
        costs = self._ledger[1].cost(gates)  # type: ignore[union-attr]
        return torch.stack([c.delivered(self.gated, gates, costs) for c in self.constraints])

    def _settle(self) -> None:
        """Fix the structure."""
        self._write(self._chosen(self._open(), 1.0))
        self._settled = True
        self.gated.gates.measuring = False
        self._freeze()

    def _freeze(self) -> None:
        """From now on the gates are constants.

        Not where processes share a model: ``DistributedDataParallel`` waits for the gradient of
        every parameter that it was wrapped with. There the gates keep their values all the same.
        """
        if not (dist.is_available() and dist.is_initialized()):
            self.gated.freeze_gates()

    def _write(self, is_open: Tensor) -> None:
        with torch.no_grad():
            self.gated.gates.log_alpha.copy_(torch.where(is_open > 0, OPEN, -OPEN))

    def _keep_up(self) -> None:
        """``shrink`` may have removed gates."""
        bank = self.gated.gates
        if bank.original is None or len(bank.original) == len(self._places):
            return
        self._running.keep(torch.searchsorted(self._places, bank.original))
        self._places = bank.original.clone()

    def _terms(self) -> list[int]:
        """Numbers that tell two budgets apart."""
        words = [f"{c.name} {c.limit:.6g}" for c in self.constraints]
        return [zlib.crc32(" ".join([*words, str(self.round_to)]).encode()), self._length]


def _refuse_other_gates(gated: GatedModel, before: Tensor) -> None:
    """Refuse a gate family or a readout that is not exactly 0 or 1 at the ends."""
    values = gated.gates.readout().detach()
    if ((values == 0) | (values == 1)).all():
        return
    with torch.no_grad():
        gated.gates.log_alpha.copy_(before)
    gated.gates.measured = False
    raise ArgumentError(
        f"a budget by importance needs gates that are 0 or 1, and the readout of these is "
        f"{values.max().item():.3g} at log_alpha {OPEN:g}: use the default gates, or by='gates'"
    )
