"""A budget by learned gates: the price of a gate follows the delivered cost."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hardconcrete.cost.latency.table import LatencyTable
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.costs import LATENCY
from hardconcrete.objective.budget import Budget, refuse_measured_gates, refuse_no_state
from hardconcrete.objective.constraint import BAND, Constraint, expected, ledger_costs

MAX_PUSH = 4.0
"""The largest price, in scales."""

GAIN_PER_STEP = 0.05
"""How fast the logarithm of a scale follows the error, per step; more in a shorter warm-up."""

GAIN_FACTOR_WHILE_FALLING = 0.1
"""Factor on ``GAIN_PER_STEP`` while gates are falling."""

FALLING_FRACTION = 0.1
"""Fraction of the open gates that must fall for this factor."""

FALL_PER_WARMUP = 3.0
"""Distance that these gates must fall in a warm-up: about that to the threshold."""

FALL_MEMORY_STEPS = 50
"""Steps over which the fall is measured."""

MIN_SAVING_IN_BANDS = 1e-6
"""Bands that a unit must save to be worth closing; the last unit of a group saves nothing."""

FIRST_SCALE = 0.01
"""The first scale, small for any loss: it grows up to a hundredfold in 100 steps."""

WARMUP_STEPS = 1000
"""Steps in which the target comes down, for a training of unknown length."""


class LearnedBudget(Budget, by="gates"):
    """A budget that sets a price on every gate, so that the gates learn which units to close.

    The *delivered* cost is that of the model which compaction would leave now. It is compared with
    a target that comes down to the limit during the warm-up: e = log(delivered / target). The loss
    gets the gradient of the *expected* cost, each gate times its price:

        price = scale * (clip(2 e / BAND + 1 + apart, -MAX_PUSH, MAX_PUSH) + side)

    Here side is 1 for gates that the readout closes and -1 for open ones. Within the band every
    gate is pushed further to its side, so that undecided gates decide. Above the band open gates
    have a positive price, and those that the task needs least are closed. Below the band closed
    gates have a negative price and come back. The price does not add up past errors: as soon as the
    limit is kept, no open gate has a positive price. After the warm-up ``apart`` keeps units that
    are larger than the error from being moved. For an open unit it is how much less the cheapest
    open unit costs; for a closed one it is its cost, and enough for it to fit; all in bands. So
    above the limit at least one unit is pushed, and a unit that would exceed the limit does not
    come back.
    The logarithm of the scale grows by GAIN_PER_STEP * e above the target, after the warm-up by
    GAIN_PER_STEP * BAND at least; during the warm-up it falls below the band. So the scale of the
    loss does not matter.
    In a warm-up of less than 1,000 steps it moves faster, by the root of how much shorter that is.
    While some of the open gates are falling it hardly grows: they need time to arrive, and a larger
    price would close others too, needed or not.

    Of several limits, the one that is exceeded most sets the price of a gate.

    The gates must be able to move far enough: with Adam, learning rate times steps well above 5,
    for example ``parameter_groups(gated, lr=1e-3, gate_lr=1e-2)`` in some thousand steps.
    ``check_run`` says whether they can. Start with ``droprate=0.1``: 0.5 is a heavy noise for a
    residual network.

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
        self.warmup = WARMUP_STEPS if self.steps is None else self.steps // 3
        self._gain = GAIN_PER_STEP * max(1.0, math.sqrt(WARMUP_STEPS / self.warmup))
        location = gated.gates.location.detach()
        limit_count = len(self.constraints)
        self._terms = torch.tensor([budget_number(c, self.warmup) for c in self.constraints])
        self._start = torch.maximum(self.delivered_by(self._open()), self.limits)
        self._log_scale = location.new_full((limit_count,), math.log(FIRST_SCALE))
        self._steps = torch.zeros((), dtype=torch.int64, device=location.device)
        self._price = location.new_zeros(limit_count, 0)
        self._cache: tuple[LatencyTable | None, Tensor, tuple[Tensor, Tensor]] | None = None
        self._begin()

    def __call__(self) -> Tensor:
        """The term for the loss: its gradient is that of the expected costs times the prices.

        Its value is the sum of these costs as fractions of the dense totals, without the prices.
        """
        refuse_measured_gates(self.gated, "a budget with by='gates'")
        self._keep_up()
        probability = self.gated.gates.open_probability()
        self._refuse_nan(probability)
        means = [
            expected(self.gated, [constraint], _priced(probability, price))
            for constraint, price in zip(self.constraints, self._price, strict=True)
        ]
        return torch.cat(means).sum().to(probability.dtype)

    def _refuse_nan(self, probability: Tensor) -> None:
        """Not on a GPU, where the check would wait for the device on each step."""
        if probability.is_cpu and not torch.compiler.is_compiling() and probability.isnan().any():
            raise GateError(
                f"{self.gated.gates.family.location} has NaN in it, so the gates have no cost: go "
                "back to the last checkpoint with a lower learning rate"
            )

    @torch.no_grad()
    def step(self) -> None:
        """Set the prices by the delivered cost; after the optimizer's step."""
        self.advance(1)

    def advance(self, steps: int) -> None:
        """Take several steps at once, in which the delivered cost stays the same."""
        self._keep_up()
        self._steps.add_(steps)
        is_open = self._open()
        delivered, unit_costs = self._costs_in_bands(is_open)
        error, late = self._error(delivered), self._progress() == 1
        above = error.clamp(min=0).maximum(BAND * (late & (error > 0)))
        above = above * torch.where(self._fall(is_open, steps), GAIN_FACTOR_WHILE_FALLING, 1.0)
        change = above + (error + BAND).clamp(max=0) * ~late
        self._log_scale.add_(steps * self._gain * change).clamp_(-20.0, 20.0)
        self._set_prices(is_open, error, unit_costs)

    def _fall(self, is_open: Tensor, steps: int) -> Tensor:
        """Whether enough open gates that a limit concerns fall fast enough to arrive."""
        location, counted = self.gated.gates.location.detach(), is_open * self.concerned
        fast = (
            location - self._past < -FALL_PER_WARMUP * max(steps, FALL_MEMORY_STEPS) / self.warmup
        )
        self._past.lerp_(location, 1 - (1 - 1 / FALL_MEMORY_STEPS) ** steps)
        return (counted * fast).sum(1) > FALLING_FRACTION * counted.sum(1)

    @property
    def steps_to_come(self) -> int:
        """Steps until the target has come down to the limits."""
        return max(0, self.warmup - int(self._steps))

    def price(self) -> dict[str, float]:
        """The factor on each expected cost: the highest price of an open gate."""
        self._keep_up()
        concerned = self.concerned & (self._open() > 0)
        highest = self._price.masked_fill(~concerned, -torch.inf).amax(1)
        return self._by_name(highest.where(concerned.any(1), 0.0))

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {name: getattr(self, f"_{name}").clone() for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the state of the model first."""
        refuse_no_state(state)
        self._keep_up()
        for name in STATE:
            present = getattr(self, f"_{name}")
            if getattr(state.get(name), "shape", None) != present.shape:
                raise ArgumentError(
                    f"this is not the state of a learned budget of this model: {name!r} differs"
                )
        if not torch.equal(state["terms"].to(self._terms), self._terms):
            raise ArgumentError(
                "this is the state of a budget with other limits or steps; this one has "
                f"{self._terms_in_words()} within {self.warmup:,} steps"
            )
        for name in STATE:
            getattr(self, f"_{name}").copy_(state[name])
        self._begin()

    def _progress(self) -> Tensor:
        return (self._steps / self.warmup).clamp(max=1.0)

    def _error(self, delivered: Tensor) -> Tensor:
        """log(delivered / target); in the warm-up each step divides the target by one number."""
        progress = self._progress()
        target = self._start * (self.limits / self._start) ** progress
        target = torch.where(progress < 1, target, self.limits)
        return (delivered / target).log().clamp(-1.0, 1.0)

    def _keep_up(self) -> None:
        """Follow ``shrink``, which may have removed gates. Limits refer to the dense model."""
        if self._price.shape[1] != self.gated.gates.count:
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        if self._price.shape[1] != self.gated.gates.count:
            self._resize()
        is_open = self._open()
        delivered, unit_costs = self._costs_in_bands(is_open)
        self._set_prices(is_open, self._error(delivered), unit_costs)

    def _resize(self) -> None:
        """Make tensors for the present number of gates."""
        location = self.gated.gates.location
        concerned = torch.zeros(len(self.constraints), len(location), dtype=torch.bool)
        for k, constraint in enumerate(self.constraints):
            concerned[k, constraint.gates(self.gated)] = True
        self.concerned = concerned.to(location.device)
        self._price = torch.zeros_like(self.concerned, dtype=location.dtype)
        self._past = location.detach().clone()

    def _set_prices(self, is_open: Tensor, error: Tensor, unit_costs: Tensor) -> None:
        """Write the price of every gate, in place: a captured CUDA graph reads it there."""
        error = error[:, None]
        side = (1 - 2 * is_open).to(self._price.dtype)
        unit_costs = unit_costs * (self._progress() == 1)
        saves = self.concerned & (is_open * unit_costs > MIN_SAVING_IN_BANDS)
        least = unit_costs.where(saves, torch.inf).amin(1, keepdim=True)
        larger = (unit_costs - least).clamp(min=0)  # than the cheapest open one
        room = unit_costs.maximum(2 * unit_costs - 2)  # that a unit needs to come back
        apart = torch.where(is_open > 0, -larger, room)
        push = (2 * error / BAND + 1 + apart).clamp(-MAX_PUSH, MAX_PUSH) + side
        worst = torch.where(self.concerned, error, -torch.inf).argmax(0)
        governs = torch.arange(len(error), device=worst.device)[:, None] == worst
        self._price.copy_(self._log_scale.exp()[:, None] * push * governs)

    def _costs_in_bands(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """The delivered costs; and the cost of each unit if only it changes, in bands."""
        costs, slopes = self._costs(is_open)
        dtype = self._price.dtype
        return costs.to(dtype), slopes.to(dtype) / (BAND * self.limits[:, None])

    def _costs(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """The same as fractions of the dense totals.

        They are cached while no gate opens or closes. There is no cache on a GPU, where the
        comparison would wait for the device, and in compiled code.
        """
        if not is_open.is_cpu or torch.compiler.is_compiling():
            return self._compute_costs(is_open)
        times = any(limit.name == LATENCY for limit in self.constraints)
        table = self.gated.latency if times else None
        cache = self._cache
        if cache is None or cache[0] is not table or not torch.equal(cache[1], is_open):
            self._cache = cache = table, is_open, self._compute_costs(is_open)
        return cache[2]

    def _compute_costs(self, is_open: Tensor) -> tuple[Tensor, Tensor]:
        def means(gates: Tensor) -> tuple[list[Tensor], Tensor]:
            costs = ledger_costs(self.gated, self.constraints, gates)
            return [limit.expected(self.gated, gates, costs) for limit in self.constraints], costs

        slopes, costs = _slopes(means, is_open, len(self.constraints))
        present = [limit.delivered(self.gated, is_open, costs) for limit in self.constraints]
        return torch.stack(present), slopes


STATE = ("start", "log_scale", "steps", "past", "terms")
"""Attributes of the state: what changes in training or depends on its start, and the limits."""


def budget_number(limit: Constraint, warmup: int) -> int:
    """A number that identifies a limit and its warm-up in a state."""
    return zlib.crc32(f"{limit.name} {limit.limit:.6g} {warmup}".encode())


def _slopes(
    function: Callable[[Tensor], tuple[list[Tensor], Tensor]], at: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``count`` numbers, and the second result of the function.

    Autograd takes half the time of ``torch.func``, and cannot be compiled here.
    """
    if torch.compiler.is_compiling():

        def one(at: Tensor, k: int) -> tuple[Tensor, Tensor]:
            numbers, more = function(at)
            return numbers[k], more

        results = [torch.func.grad(one, has_aux=True)(at, k) for k in range(count)]
        return torch.stack([slope for slope, _ in results]), results[0][1]
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        numbers, more = function(at)
        how: Any = {"retain_graph": True, "materialize_grads": True}
        slopes = [torch.autograd.grad(number, at, **how)[0] for number in numbers]
    return torch.stack(slopes), more.detach()


def _priced(probability: Tensor, price: Tensor) -> Tensor:
    """The probabilities, with their gradients multiplied by the prices."""
    fixed = probability.detach()
    return fixed + price * (probability - fixed)
