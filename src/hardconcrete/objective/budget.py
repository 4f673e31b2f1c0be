"""A limit on the cost of a model, reached while it trains. Two classes choose the units."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hardconcrete.arguments import refuse_no_count
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating import GatedModel
from hardconcrete.importance.batches import Loss
from hardconcrete.objective.constraint import (
    Constraint,
    Limit,
    constraints,
    delivered,
    expected,
)
from hardconcrete.objective.projection import (
    Projection,
    project,
    refuse_another_model,
    warn_of_distance,
)
from hardconcrete.units.uniform import Classes, uniform_classes

_KINDS: dict[str, type["Budget"]] = {}
"""The class for each value of ``by``."""


class Budget:
    """Brings a model to a given size while it is trained.

    Add ``budget()`` to the loss and call ``budget.step()`` after each step of the optimizer. There
    are two ways to choose the units, and ``by`` selects one:

    - ``"importance"``, the default: all gates are 0 or 1, without noise. The budget measures how
      much the loss depends on each unit, and closes the units that matter least for what they
      cost. See ``ImportanceBudget``.
    - ``"gates"``: the paper's hard concrete gates learn which units to close. The budget sets their
      price. See ``LearnedBudget``.

    Args:
        gated: the model with its gates.
        macs: multiply-adds. A float up to 1 is a fraction of the dense total, including the part
            without gates. An int is absolute, for the example inputs of ``attach_gates``.
        params: parameters, likewise.
        weight_bytes: memory of parameters and buffers, likewise.
        kv_bytes: keys and values of all attention for one token of one example, likewise.
        latency_ms: milliseconds of one call, as ``gated.measure_latency`` predicts them.
        units: open gates of all groups together, or of each group by name:
            ``{"conv1": 10, "fc1": 0.2}``.
        steps: length of the training in optimizer steps. Without it the target comes down within
            the first 1,000 steps.
        by: ``"importance"`` or ``"gates"``.
        round_to: by importance, every group keeps a multiple of so many units.
        uniform: the same groups of all layers keep equally many units, so that one number in a
            configuration describes them. By importance they do so during training, too.
        measure_every: by importance, steps from one measurement to the next. The default is 4 in a
            training of 1,000 steps or more, else 1. Give 1 if you replay a CUDA graph.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.randn(2, 8))
        >>> budget = hc.Budget(gated, macs=0.5, steps=100)
        >>> optimizer = torch.optim.Adam(gated.parameters(), lr=1e-2)
        >>> x = torch.randn(64, 8)
        >>> for _ in range(100):
        ...     loss = (gated(x) - x[:, :2]).square().mean() + budget()
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step(); budget.step()
        >>> print(budget)
        MACs: 50.0% delivered, 50.0% expected, budget 50.0% of 800
        train what is left: the units were fixed at step 40 of 100
        >>> hc.compact(gated)[0]
        Linear(in_features=8, out_features=20, bias=True)
    """

    gated: GatedModel
    steps: int | None
    round_to: int
    classes: Classes
    measure_every: int | None
    constraints: tuple[Constraint, ...]
    limits: Tensor

    def __init_subclass__(cls, by: str) -> None:
        _KINDS[by] = cls

    def __new__(cls, *_: Any, by: str = "importance", **__: Any) -> Self:
        """Make an object of the class that ``by`` names."""
        if cls is not Budget:
            return super().__new__(cls)
        if by not in _KINDS:
            raise ArgumentError(f"by={by!r} is not known; use 'importance' or 'gates'")
        kind: Any = _KINDS[by]
        return super().__new__(kind)  # type: ignore[no-any-return]

    def __init__(
        self,
        gated: GatedModel,
        *,
        macs: Limit | None = None,
        params: Limit | None = None,
        weight_bytes: Limit | None = None,
        kv_bytes: Limit | None = None,
        latency_ms: float | None = None,
        units: Limit | Mapping[str, Limit] | None = None,
        steps: int | None = None,
        by: str = "importance",  # noqa: ARG002  (it chose the class)
        round_to: int = 1,
        uniform: bool = False,
        measure_every: int | None = None,
    ) -> None:
        _check_model_and_steps(gated, steps)
        refuse_no_count(
            round_to=round_to, measure_every=1 if measure_every is None else measure_every
        )
        limits = {
            "macs": macs,
            "params": params,
            "weight_bytes": weight_bytes,
            "kv_bytes": kv_bytes,
        }
        self.gated = gated
        self.steps = None if steps is None else int(steps)
        self.round_to, self.measure_every = int(round_to), measure_every
        self.classes = uniform_classes(gated.groups, gated.model) if uniform else ()
        self.constraints = constraints(gated, limits, units, latency_ms)
        self.limits = torch.tensor(
            [c.limit / c.dense for c in self.constraints],
            dtype=gated.gates.dtype,
            device=gated.gates.device,
        )

    def __call__(self) -> Tensor:
        """The term to add to the loss."""
        raise NotImplementedError

    def step(self) -> None:
        """Call it after each step of the optimizer."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the state of the model first."""
        raise NotImplementedError

    def delivered(self) -> dict[str, float]:
        """Each cost that compaction would leave now, as a fraction of the dense total."""
        return self._by_name(self.delivered_by(self._open()))

    def expected(self) -> dict[str, float]:
        """The mean of each cost over draws of the gates, likewise; see ``gated.expected``."""
        probability = self.gated.gates.open_probability().detach()
        return self._by_name(expected(self.gated, self.constraints, probability, exactly=True))

    def target(self) -> dict[str, float]:
        """The limits, as fractions of the dense totals."""
        return self._by_name(self.limits)

    @torch.inference_mode(False)
    def project(
        self,
        gated: GatedModel | None = None,
        *,
        round_to: int = 1,
        uniform: bool = False,
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
    ) -> Projection:
        """The mask that keeps the limits, as ``hc.compact(gated, budget=...)`` applies it.

        Args:
            gated: the model of this budget or a copy of it, such as an average of its weights.
            round_to: widths are multiples of this, as far as a group has as many units.
            uniform: the same groups of all layers keep equally many units.
            batches: with them, units are chosen by importance and the other weights are re-fitted.
            loss: calls the model on a batch and returns a scalar.

        Example:
            >>> import torch, hardconcrete as hc
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
            >>> gated = hc.attach_gates(model, torch.zeros(2, 4))
            >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([3.0, 3, 3, 3, -3, -3]))
            >>> (hc.Budget(gated, macs=0.7).project().values > 0).tolist()
            [True, True, True, True, False, False]
        """
        gated = self.gated if gated is None else gated
        refuse_another_model(self.gated, gated)
        classes = self.classes
        if uniform and not classes:
            classes = uniform_classes(gated.groups, gated.model)
        mask = project(
            gated,
            self.constraints,
            round_to=round_to,
            classes=classes,
            batches=batches,
            loss=loss,
            importance=self._measured(),
        )
        if batches is None:
            warn_of_distance(gated, self.constraints, self._advice)
        return mask

    _advice: ClassVar[str] = (
        "Train longer, or with a larger learning rate of the gates; hc.check_run says before the "
        "first step how far they get"
    )
    """What to do after a training that ended above its budget."""

    def _measured(self) -> Tensor | None:
        """The importance of every unit, where the budget measures it."""
        return None

    def __str__(self) -> str:
        delivered, expected, target = self.delivered(), self.expected(), self.target()
        return "\n".join(
            f"{c.label}: {delivered[c.name]:.1%} delivered, {expected[c.name]:.1%} expected, "
            f"budget {target[c.name]:.1%} of {c.dense:,.{0 if c.dense == int(c.dense) else 2}f}"
            for c in self.constraints
        )

    def _by_name(self, values: Tensor) -> dict[str, float]:
        return {c.name: v for c, v in zip(self.constraints, values.tolist(), strict=True)}

    def _open(self) -> Tensor:
        return self.gated.gates.is_open().to(torch.float64)

    def delivered_by(self, is_open: Tensor) -> Tensor:
        """Each cost of a model with these open gates, as a fraction of the dense total."""
        return delivered(self.gated, self.constraints, is_open).to(self.limits.dtype)

    def _terms_in_words(self) -> str:
        return " and ".join(f"{c.limit:,.6g} {c.label}" for c in self.constraints)


def refuse_measured_gates(gated: GatedModel, penalty: str) -> None:
    """Refuse to learn gates that a budget by importance sets to 0 or 1."""
    if gated.gates.measured:
        raise GateError(
            f"{penalty} learns gates, but a budget by importance was built for this model and "
            "keeps them at 0 or 1: use one of the two; attach gates again to start over"
        )


def refuse_no_state(state: object) -> None:
    """Refuse what ``state_dict`` cannot have returned."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"state is a {type(state).__name__}; it takes a budget's state_dict()")


def _check_model_and_steps(gated: object, steps: object) -> None:
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"Budget takes what attach_gates returned, not a {type(gated).__name__}"
        )
    family = gated.gates.family
    if family.location is None:
        what = "single weights, which have no coupled cost" if family.per_weight else "gates"
        raise ArgumentError(
            f"a budget moves gates, and {type(family).__name__} has {what} without a location that "
            "could be moved: use hc.MethodPenalty, or other gates"
        )
    if steps is not None and not (isinstance(steps, Integral) and int(steps) >= 3):
        raise ArgumentError(f"steps={steps!r} must be the steps of the training, at least 3")
    if gated.gates.rule == "mean":
        raise ArgumentError(
            "the readout 'mean' closes no gate, so no cost falls; attach the gates with "
            "readout='paper' or 'median'"
        )
