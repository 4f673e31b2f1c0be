"""A model with gates: drawn for each call in training, read out in evaluation."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hardconcrete.cost.latency.table import LatencyTable
from hardconcrete.cost.ledger import KINDS, Ledger
from hardconcrete.errors import ArgumentError, GateError, TraceError
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.checkpointing import refuse_inside_draw
from hardconcrete.gating.groups import gate_targets
from hardconcrete.gating.select_groups import SelectedGroups
from hardconcrete.gating.shrunk_states import remove_units
from hardconcrete.units import Analysis, Group, analyze

LATENCY = "latency_ms"
"""The cost that a clock gives."""


class GatedModel(nn.Module):
    """What ``attach_gates`` returns: the user's model, its gates, and what can be asked of them.

    Call it like the model. In training each call draws one z for all its examples (or one per
    example); in evaluation the readout applies, also where ``gated.model`` is called directly.

    Attributes:
        model: the user's module, its state_dict keys and parameters unchanged.
        gates: the bank, with ``gates.log_alpha`` for all units.
        groups: what is gated, in the order of the bank.
        analysis: the groups of the dense model, and what is fixed and why; None where you named
            sites only.
        overruled: groups found by tracing that have no gates because a named site overlaps them.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), sites=["0:in", "1:in"])
        >>> gated(torch.ones(8, 4)).shape
        torch.Size([8, 2])
        >>> gated(torch.ones(8, 4), samples=5).shape    # five draws: average their losses (eq. 9)
        torch.Size([5, 8, 2])
        >>> {name: len(z) for name, z in gated.eval().gate_values().items()}
        {'0:in': 4, '1:in': 3}
    """

    _ledger: Ledger | None
    shrink_history: object | None = None
    """What ``shrink`` removed: a ``ShrinkHistory`` of ``hardconcrete.compaction``."""

    def __init__(
        self,
        model: nn.Module,
        gates: GateBank,
        choice: SelectedGroups,
        sample: str,
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.gates = gates
        self.regroup(choice.groups)
        self.analysis = choice.analysis
        self.overruled = choice.overruled
        self.sample = sample
        self._example = example
        self._latest = choice.analysis
        self._latency: LatencyTable | None = None
        self._nobody_decays()

    def _nobody_decays(self) -> None:
        """Penalties and optimisers belong to one model, and to none of its copies."""
        self.decaying: WeakSet[Any] = WeakSet()  # penalties that carry the decay of gated weights
        self.decayed_by_optimizer: frozenset[str] = frozenset()

    @property
    def decayed_by_penalty(self) -> frozenset[str]:
        """Names of the parameters whose decay some penalty carries."""
        names = (name for group in self.groups for name in group.gated_parameters)
        return frozenset(names if self.decaying else ())

    def regroup(self, groups: tuple[Group, ...], ledger: Ledger | None = None) -> None:
        """Set the groups and costs of the gates, as ``shrink`` does after it removed units."""
        self._latest, self._ledger = None, ledger
        self.groups = groups
        sizes = [torch.full((group.units,), group.size, dtype=torch.float64) for group in groups]
        self._group_sizes = torch.cat(sizes).to(self.gates.log_alpha.device)

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs the gates were attached with, positional and by keyword, on their device."""
        device = self.gates.log_alpha.device
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self._example)  # type: ignore[no-any-return]

    def forward(self, *args: Any, samples: int | None = None, **kwargs: Any) -> Any:
        """The model's own forward, under one draw; with ``samples=L`` stacked over L draws."""
        if samples is None and self.gates.held:
            refuse_inside_draw()
            return self.model(*args, **kwargs)
        if samples is None:
            return self._drawn(args, kwargs)
        if not isinstance(samples, int) or samples < 1:
            raise ArgumentError(f"samples={samples} must be a whole number, at least 1")
        if "samples" in signature(self.model.forward).parameters:
            raise ArgumentError(
                "samples=... asks for draws of the gates, and this model has an argument of that "
                "name: pass its own by position"
            )
        outputs = [self._drawn(args, kwargs) for _ in range(samples)]
        return tree_map(_stacked, *outputs)

    def _drawn(self, args: Any, kwargs: Any) -> Any:
        with self._holding(_batch_size(args, kwargs) if self.sample == "example" else None):
            return self.model(*args, **kwargs)

    @contextmanager
    def draw(self, batch_size: int | None = None) -> Iterator[None]:
        """One draw for everything inside, for methods of the model other than its forward.

        Args:
            batch_size: needed where every example has gates of its own.
        """
        with self._holding(batch_size):
            yield

    def _holding(self, batch_size: int | None) -> AbstractContextManager[None]:
        if self.sample == "example" and self.training and batch_size is None:
            raise ArgumentError("with sample='example' a draw needs the batch size: draw(64)")
        if not self.training:  # every module reads the gates itself: threads share no state
            return nullcontext()
        shape = () if batch_size is None or self.sample == "batch" else (batch_size,)
        return self.gates.holding(self.gates.draw(shape), None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The example inputs move along: the model may be traced with them again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._example = tree_map(lambda x: fn(x) if isinstance(x, Tensor) else x, self._example)
        self._group_sizes = self._group_sizes.to(self.gates.log_alpha.device)
        if self._ledger is not None:
            self._ledger = self._ledger.to(self.gates.log_alpha.device)
        if self._latency is not None and self._latency.selects.device != self._group_sizes.device:
            self._latency = None  # another device takes other times
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatedModel":
        """What a model keeps of its last call is cut from its graph, for graphs have no copies.

        Records of what was found always say the same, so copies share them.
        """
        for record in (self.groups, self._ledger, self._latency):
            memo[id(record)] = record
        for value in [value for module in self.modules() for value in vars(module).values()]:
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this model alone."""
        state = dict(self.__dict__)
        del state["decaying"], state["decayed_by_optimizer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._nobody_decays()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """What is gated goes into the metadata of the state, where torch keeps versions."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata["gates"] = gate_targets(self.model, self.groups)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """First remove what the saved model had removed."""
        if f"{prefix}gates.log_alpha" in state_dict:
            self._refuse_others(local_metadata.get("gates", []))
        own, saved = self.gates.original, state_dict.get(f"{prefix}gates.original")
        if saved is not None and (own is None or not torch.equal(own.cpu(), saved.cpu())):
            remove_units(self, saved)
        elif saved is None and own is not None:
            raise ArgumentError(
                "this state has units that were removed here: load it into a new dense model, with "
                "gates attached as before"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _refuse_others(self, saved: list[list[str]]) -> None:
        """Refuse gates that would become those of other units."""
        for own, other in zip(gate_targets(self.model, self.groups), saved, strict=False):
            if own != other:
                raise ArgumentError(
                    f"the gates of {', '.join(other)} in this state would become those of "
                    f"{', '.join(own)}: attach gates to the same sites in the same order, or load "
                    "{**state}, which does not say whose they are"
                )

    def open_probability(self) -> dict[str, Tensor]:
        """P(open) of every unit, by group (eq. 6)."""
        return self.by_group(self.gates.open_probability())

    def gate_values(self) -> dict[str, Tensor]:
        """The test-time value of every gate, by group: the readout."""
        return self.by_group(self.gates.readout())

    def by_group(self, values: Tensor) -> dict[str, Tensor]:
        """Anything that has one entry per gate, taken apart."""
        return {group.name: values[..., group.slice] for group in self.groups}

    def units_left(self) -> tuple[int, ...]:
        """How many gates of each group the readout leaves open, as the paper counts them."""
        return tuple(int((values > 0).sum()) for values in self.gate_values().values())

    def analyze(self, plain: nn.Module) -> Analysis:
        """The analysis of the model without its gates; the latest one as long as it fits."""
        if self._latest is None or not self._latest.fits(plain):
            self._latest = analyze(plain, *self.example)
        return self._latest

    @property
    def ledger(self) -> Ledger:
        """What the model costs by its gates; made when it is first asked for, by tracing."""
        if self._ledger is None:
            from hardconcrete.gating.cost_model import ledger_of

            if torch.compiler.is_compiling():
                raise GateError("costs are found by tracing: ask once before compiling")
            with torch.inference_mode(False):  # it will be differentiated elsewhere
                self._ledger = ledger_of(self)
        return self._ledger

    @property
    def latency(self) -> LatencyTable:
        """Times by gates; measured when they are first asked for, with default settings."""
        return self.measure_latency() if self._latency is None else self._latency

    @property
    def has_latency(self) -> bool:
        """Whether times were measured; they hold for the widths that the model had then."""
        return self._latency is not None

    def measure_latency(
        self, *, batch: int | None = None, repeats: int | None = None, fresh: bool = False
    ) -> LatencyTable:
        """Time every operator over a grid of widths, for ``expected("latency_ms")`` from now on.

        On this device, with as many threads as torch has now, in evaluation mode. What was timed
        before on such a machine comes from the cache, ``~/.cache/hardconcrete/latency``.

        Args:
            batch: examples in a call; as many as the gates were attached with unless given.
            repeats: timed calls of each operator at each point of its grid; without it three passes
                of five calls and three seconds at least, of which the least counts: a machine that
                others use is slow for seconds at times.
            fresh: time again what is in the cache, after a machine was busy, for example.
        """
        from hardconcrete.gating.cost_model import latency_of

        if torch.compiler.is_compiling():
            raise GateError("latency is measured: ask once before compiling")
        with torch.inference_mode(False):  # it will be differentiated elsewhere
            self._latency = latency_of(self, batch=batch, repeats=repeats, fresh=fresh)
        return self._latency

    def expected(self, cost: str) -> Tensor:
        """The mean cost over draws of the gates, in float64, differentiable.

        A weight counts when its input unit and its output unit are alive. With gates at 0 and 1 it
        is what ``count`` says of the compacted model; elsewhere it knows that a group may be left
        with nothing, and what that takes along: exact for up to twelve groups in doubt. It is near
        the mean where named sites gate one of several layers that read or make a unit, as long as
        none is likely to lose all its gates, and of bytes where layers select among their inputs.
        Single weights (``"fc1:each"``) leave a matrix dense and save nothing here before all of a
        unit's are shut.

        Args:
            cost: ``"params"``; ``"macs"``, for all examples of the inputs that the gates were
                attached with, as ``count`` does; ``"weight_bytes"``; ``"group_size"``, the
                paper's uncoupled number of weights, |g| for each open gate; or ``"latency_ms"``,
                milliseconds at the expected widths, from what ``measure_latency`` measured.

        Example:
            >>> import torch, hardconcrete as hc
            >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
            >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
            >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([-2.0, 9.0, 9.0]))
            >>> round(gated.expected("params").item(), 2), gated.delivered("params").item()
            (18.81, 23.0)
        """
        probability = self.gates.distribution().open_probability
        if cost == "group_size":
            return (probability * self._group_sizes).sum()
        if cost == LATENCY:
            return self.latency.expected(probability)
        return self.ledger.mean(probability)[_place(cost)]

    @torch.no_grad()
    def delivered(self, cost: str) -> Tensor:
        """The cost of what the readout of the gates leaves now: that of the compacted model.

        Args:
            cost: as for ``expected``, which undecided gates make differ from this.
        """
        left = self.gates.readout() > 0
        if cost == "group_size":
            return (left * self._group_sizes).sum()
        if cost == LATENCY:
            return self.latency.delivered(left)
        return self.ledger.cost(left)[_place(cost)]

    def freeze_gates(self, frozen: bool = True) -> None:
        """Fix the gates at their readout, in training too, to fine-tune what is left."""
        bank = self.gates
        if frozen and not bank.frozen:
            bank.learnt = tuple(n for n, p in bank.named_parameters() if p.requires_grad)
        bank.frozen = frozen
        for name in bank.learnt:
            parameter = bank.get_parameter(name).requires_grad_(not frozen)
            if frozen:
                parameter.grad = None  # else an optimiser goes on with the last one

    def summary(self) -> None:
        """Print a table of the groups: units, weights per unit, and how open they are."""
        from rich.console import Console
        from rich.table import Table

        table = Table("group", "units", "weights each", "open now", "mean P(open)")
        for column in table.columns[1:]:
            column.justify = "right"
        rows = zip(self.groups, self.units_left(), self.open_probability().values(), strict=True)
        for group, left, probability in rows:
            numbers = (group.units, group.size, left, f"{probability.mean().item():.3f}")
            table.add_row(group.name, *map(str, numbers))
        console = Console()
        console.print(table)
        for name, site in self.overruled.items():
            console.print(f"{name}: the site {site} is gated instead")
        for line in self._costs():
            console.print(line)

    def _costs(self) -> list[str]:
        """Expected and delivered cost, as parts of the dense model's."""
        try:
            dense = self.ledger.dense.tolist()
        except TraceError as error:
            return [f"costs are not known: {error}"]
        return [
            f"{kind}: {self.expected(kind).item() / whole:.1%} expected, "
            f"{self.delivered(kind).item() / whole:.1%} delivered, of {whole:,.0f}"
            for kind, whole in zip(KINDS, dense, strict=True)
            if whole
        ]


def _place(cost: str) -> int:
    if cost not in KINDS:
        known = ", ".join(map(repr, (*KINDS, "group_size", LATENCY)))
        raise ArgumentError(f"cost={cost!r} is not known; use one of {known}")
    return KINDS.index(cost)


def _stacked(*parts: Any) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.stack(parts)
    simple = isinstance(parts[0], bool | int | float | str | None)
    if not simple or any(part != parts[0] for part in parts):
        raise ArgumentError(
            "samples=... stacks tensors, also in tuples, lists and dicts, and the model returned a "
            f"{type(parts[0]).__name__} that differs between draws: call the model once for each"
        )
    return parts[0]


def _batch_size(args: Any, kwargs: Any) -> int:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ArgumentError("sample='example' needs a tensor input whose dimension 0 is the batch")
