"""A budget by learned gates: the price of a gate follows what is delivered."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hardconcrete.cost.latency.table import LatencyTable
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.gated_model import LATENCY
from hardconcrete.objective.budget import Budget, refuse_measured_gates
from hardconcrete.objective.constraint import BAND, Constraint, expected, ledger_costs

STRONGEST = 4.0
"""The largest price, in scales."""

GAIN = 0.05
"""How fast the logarithm of a scale follows the error, per step; faster in a shorter warm-up."""

PATIENCE = 0.1
"""What is left of that while gates are falling."""

SOME = 0.1
"""The part of the open gates that must fall for that."""

FALL = 3.0
"""How far they must fall in a warm-up: about as far as it is to the threshold."""

MEMORY = 50
"""Steps over which that is seen."""

NOTHING = 1e-6
"""Bands that a unit must save for it to be worth shutting; the last one of a group does not."""

FIRST = 0.01
"""The scale to begin with, small for any loss: it grows up to a hundredfold in 100 steps."""

WARMUP = 1000
"""Steps in which the target comes down, if the length of the training is not given."""


class LearnedBudget(Budget, by="gates"):
    """A budget that sets a price on every gate, so that the gates learn which units to shut.

    The *delivered* cost, that of the model which compaction would leave now, is compared with a
    target that comes down to the limit during the warm-up: e = log(delivered / target). Each gate
    then has a price, and the loss gets the gradient of the *expected* cost times the price:

        price = scale * (clip(2 e / BAND + 1 + apart, -STRONGEST, STRONGEST) + side)

    with side = 1 for gates that the readout shuts, -1 for those it leaves open. Within the band
    every gate is pushed further to its side, so undecided gates decide themselves; above it, open
    gates have a positive price and those that the task needs least are shut; below it, shut gates
    have a negative price and come back. The price is no sum of what was exceeded before: satisfied,
    it restarts at once, and no open gate has a positive one. After the warm-up ``apart`` keeps
    units that are larger than the error from being moved to correct it: for an open one it is how
    much less the cheapest open one costs, for one that is shut what it costs itself, and enough for
    it to fit, all in bands. So at least one unit is pushed above the limit, and one that would
    exceed the limit is not asked back.
    The logarithm of the scale grows by GAIN * e above the target, after the warm-up by GAIN * BAND
    at least; during the warm-up it falls below the band. So the scale of the loss does not matter.
    In a warm-up of less than 1,000 steps it moves faster, by the root of how much shorter that is.
    While some of the open gates are falling it hardly grows: they need time to arrive, and a larger
    price would take all others along, needed or not.

    Of several limits the one that is exceeded most sets the price of a gate.

    The gates must be able to travel: learning rate times steps well above 5 with Adam, for example
    ``parameter_groups(gated, lr=1e-3, gate_lr=1e-2)`` in some thousand steps; ``check_run`` says
    whether they can. Start with ``droprate=0.1``: 0.5 is a heavy noise for a residual network.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 8), droprate=0.1)
        >>> budget = hc.Budget(gated, macs=0.5, steps=600, by="gates")
        >>> optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3, gate_lr=2e-2))
        >>> x = torch.randn(64, 8)
        >>> for _ in range(600):
        ...     loss = (gated(x) - x[:, :2]).square().mean() + budget()
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step(); budget.step()
        >>> 0.47 < budget.delivered()["macs"] <= 0.5
        True
    """

    def __init__(self, gated: GatedModel, *, by: str = "gates", **settings: Any) -> None:
        super().__init__(gated, by=by, **settings)
        if self.round_to != 1 or self.measure_every is not None:
            raise ArgumentError(
                "round_to and measure_every are for a budget by importance; with by='gates' give "
                "round_to to hc.compact"
            )
        refuse_measured_gates(gated, "a budget with by='gates'")
        self.warmup = WARMUP if self.steps is None else self.steps // 3
        self._gain = GAIN * max(1.0, math.sqrt(WARMUP / self.warmup))
        log_alpha = gated.gates.log_alpha.detach()
        many = len(self.constraints)
        self._terms = torch.tensor([budget_number(c, self.warmup) for c in self.constraints])
        self._start = torch.maximum(self._delivered(self._open()), self._limits)
        self._log_scale = log_alpha.new_full((many,), math.log(FIRST))
        self._steps = torch.zeros((), dtype=torch.int64, device=log_alpha.device)
        self._price = log_alpha.new_zeros(many, 0)
        self._kept: tuple[LatencyTable | None, Tensor, tuple[Tensor, Tensor]] | None = None
        self._begin()

    def __call__(self) -> Tensor:
        """To be added to the loss of the task: its gradient is that of the expected costs, priced.

        Its value is the sum of these costs, as parts of the dense totals, whatever the prices are.
        """
        refuse_measured_gates(self.gated, "a budget with by='gates'")
        self._keep_up()
        probability = self.gated.gates.distribution().open_probability
        means = [
            expected(self.gated, [constraint], _priced(probability, price))
            for constraint, price in zip(self.constraints, self._price, strict=True)
        ]
        return torch.cat(means).sum().to(probability.dtype)

    @torch.no_grad()
    def step(self) -> None:
        """Look at what is delivered now and set the prices; after the optimiser's step."""
        self._advance(1)

    def _advance(self, steps: int) -> None:
        """Some steps at once, in which what is delivered stays as it is."""
        self._keep_up()
        self._steps.add_(steps)
        is_open = self._open()
        delivered, own = self._looked_at(is_open)
        error, late = self._error(delivered), self._progress() == 1
        above = error.clamp(min=0).maximum(BAND * (late & (error > 0)))
        above = above * torch.where(self._fall(is_open, steps), PATIENCE, 1.0)
        change = above + (error + BAND).clamp(max=0) * ~late
        self._log_scale.add_(steps * self._gain * change).clamp_(-20.0, 20.0)
        self._set_prices(is_open, error, own)

    def _fall(self, is_open: Tensor, steps: int) -> Tensor:
        """Whether some of the open gates that a limit concerns fall fast enough to arrive."""
        log_alpha, own = self.gated.gates.log_alpha.detach(), is_open * self._concerned
        fast = log_alpha - self._past < -FALL * max(steps, MEMORY) / self.warmup
        self._past.lerp_(log_alpha, 1 - (1 - 1 / MEMORY) ** steps)
        return (own * fast).sum(1) > SOME * own.sum(1)

    def _steps_to_come(self) -> int:
        """Until the target has come down to the limits."""
        return max(0, self.warmup - int(self._steps))

    def price(self) -> dict[str, float]:
        """What multiplies the expected cost: the highest price of a gate that is open."""
        self._keep_up()
        concerned = self._concerned & (self._open() > 0)
        highest = self._price.masked_fill(~concerned, -torch.inf).amax(1)
        return self._by_name(highest.where(concerned.any(1), 0.0))

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {name: getattr(self, f"_{name}").clone() for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the model first: prices follow gates."""
        self._keep_up()
        for name in STATE:
            own = getattr(self, f"_{name}")
            if getattr(state.get(name), "shape", None) != own.shape:
                raise ArgumentError(f"this is not the state of such a budget: see its {name!r}")
        if not torch.equal(state["terms"].to(self._terms), self._terms):
            raise ArgumentError(
                "this is the state of a budget of other limits or steps; here "
                f"{self._terms_in_words()} within {self.warmup:,} steps"
            )
        for name in STATE:
            getattr(self, f"_{name}").copy_(state[name])
        self._begin()

    def _progress(self) -> Tensor:
        return (self._steps / self.warmup).clamp(max=1.0)

    def _error(self, delivered: Tensor) -> Tensor:
        """Against a target that comes down by the same part in every step of the warm-up."""
        progress = self._progress()
        target = self._start * (self._limits / self._start) ** progress
        target = torch.where(progress < 1, target, self._limits)
        return (delivered / target).log().clamp(-1.0, 1.0)

    def _keep_up(self) -> None:
        """Units may have been removed meanwhile; limits are in units of the dense model."""
        if self._price.shape[1] != len(self.gated.gates.log_alpha):
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        if self._price.shape[1] != len(self.gated.gates.log_alpha):
            self._make_room()
        is_open = self._open()
        delivered, own = self._looked_at(is_open)
        self._set_prices(is_open, self._error(delivered), own)

    def _make_room(self) -> None:
        """For a price of every gate."""
        log_alpha = self.gated.gates.log_alpha
        concerned = torch.zeros(len(self.constraints), len(log_alpha), dtype=torch.bool)
        for k, constraint in enumerate(self.constraints):
            concerned[k, constraint.gates(self.gated)] = True
        self._concerned = concerned.to(log_alpha.device)
        self._price = torch.zeros_like(self._concerned, dtype=log_alpha.dtype)
        self._past = log_alpha.detach().clone()

    def _set_prices(self, is_open: Tensor, error: Tensor, own: Tensor) -> None:
        """Write the price of every gate, in place: a captured CUDA graph reads it there."""
        error = error[:, None]
        side = (1 - 2 * is_open).to(self._price.dtype)
        own = own * (self._progress() == 1)
        saves = self._concerned & (is_open * own > NOTHING)
        least = own.where(saves, torch.inf).amin(1, keepdim=True)
        larger = (own - least).clamp(min=0)  # than the cheapest open one
        room = own.maximum(2 * own - 2)  # that a unit needs to come back
        apart = torch.where(is_open > 0, -larger, room)
        push = (2 * error / BAND + 1 + apart).clamp(-STRONGEST, STRONGEST) + side
        worst = torch.where(self._concerned, error, -torch.inf).argmax(0)
        governs = torch.arange(len(error), device=worst.device)[:, None] == worst
        self._price.copy_(self._log_scale.exp()[:, None] * push * governs)

    def _looked_at(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """What is delivered; and the cost of each unit, all others as they are, in bands."""
        own, slopes = self._told(is_open)
        dtype = self._price.dtype
        return own.to(dtype), slopes.to(dtype) / (BAND * self._limits[:, None])

    def _told(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """The same as parts of the dense totals; kept while no gate opens or shuts.

        A GPU would have to be waited for, to see whether one does, and compiled code cannot ask.
        """
        if not is_open.is_cpu or torch.compiler.is_compiling():
            return self._tell(is_open)
        times = any(limit.name == LATENCY for limit in self.constraints)
        table = self.gated.latency if times else None
        kept = self._kept
        if kept is None or kept[0] is not table or not torch.equal(kept[1], is_open):
            self._kept = kept = table, is_open, self._tell(is_open)
        return kept[2]

    def _tell(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        def means(gates: Tensor) -> tuple[list[Tensor], Tensor]:
            costs = ledger_costs(self.gated, self.constraints, gates)
            return [limit.expected(self.gated, gates, costs) for limit in self.constraints], costs

        slopes, costs = _slopes(means, is_open, len(self.constraints))
        own = [limit.delivered(self.gated, is_open, costs) for limit in self.constraints]
        return torch.stack(own), slopes


STATE = ("start", "log_scale", "steps", "past", "terms")
"""What changes in training or depends on its beginning, and what it is a budget of."""


def budget_number(limit: Constraint, warmup: int) -> int:
    """A number by which a limit is known again."""
    return zlib.crc32(f"{limit.name} {limit.limit:.6g} {warmup}".encode())


def _slopes(
    function: Callable[[Tensor], tuple[list[Tensor], Tensor]], at: Tensor, many: int
) -> tuple[Tensor, Tensor]:
    """The gradients of so many numbers; and what comes with them.

    Autograd takes half of the time, and cannot be compiled here.
    """
    if torch.compiler.is_compiling():

        def one(at: Tensor, k: int) -> tuple[Tensor, Tensor]:
            numbers, more = function(at)
            return numbers[k], more

        found = [torch.func.grad(one, has_aux=True)(at, k) for k in range(many)]
        return torch.stack([slope for slope, _ in found]), found[0][1]
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        numbers, more = function(at)
        how: Any = {"retain_graph": True, "materialize_grads": True}
        slopes = [torch.autograd.grad(own, at, **how)[0] for own in numbers]
    return torch.stack(slopes), more.detach()


def _priced(probability: Tensor, price: Tensor) -> Tensor:
    """The probabilities, their gradients times the prices."""
    fixed = probability.detach()
    return fixed + price * (probability - fixed)
