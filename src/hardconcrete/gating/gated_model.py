"""A model with gates: drawn for each call in training, read out in evaluation."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hardconcrete.cost.latency.table import LatencyTable
from hardconcrete.cost.ledger import Ledger
from hardconcrete.errors import ArgumentError
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.calls import examples_in, signed_class, stack
from hardconcrete.gating.checkpointing import refuse_inside_draw
from hardconcrete.gating.costs import CostTables, GatedCosts
from hardconcrete.gating.decay import DecayOwners
from hardconcrete.gating.groups import gate_targets
from hardconcrete.gating.select_groups import SelectedGroups
from hardconcrete.gating.shrunk_states import remove_units
from hardconcrete.gating.summary import print_summary
from hardconcrete.units import Analysis, Group, analyze

WRAPPED = ("model", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes that are not looked up on the model, so that tools which unwrap keep the gates."""


class GatedModel(nn.Module):
    """What ``attach_gates`` returns: your model and its gates.

    Call it like your model. In training each call draws one z for all its examples (or one per
    example). In evaluation the readout applies, also where ``gated.model`` is called directly.
    ``gated.forward`` has the signature of your model's forward, and attributes that are unknown
    here are looked up on your model, such as ``gated.config``.

    Attributes:
        model: your module, its state_dict keys and parameters unchanged.
        gates: the bank, with the parameters of all gates, such as ``gates.log_alpha``.
        groups: what is gated, in the order of the bank.
        analysis: the groups of the dense model, and what is fixed and why; None where you named
            sites only.
        overruled: groups found by tracing that have no gates because a named site overlaps them.
        cost_tables: the ledger and the latencies that ``costs`` has made so far.
        decay: who decays the gated weights.

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

    shrink_history: object | None = None
    """What ``shrink`` removed: a ``ShrinkHistory`` of ``hardconcrete.compaction``."""

    def __init__(
        self,
        model: nn.Module,
        gates: GateBank,
        selected: SelectedGroups,
        sample: str,
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.gates = gates
        self.groups = selected.groups
        self.analysis = selected.analysis
        self.overruled = selected.overruled
        self.sample = sample
        self.cost_tables, self.decay = CostTables(), DecayOwners()
        self._example = example
        self._latest = selected.analysis
        self.__class__ = signed_class(type(self), model)

    @property
    def decayed_by_penalty(self) -> frozenset[str]:
        """Names of the parameters that decay in a penalty."""
        names = (name for group in self.groups for name in group.gated_parameters)
        return frozenset(names if self.decay.penalties else ())

    def regroup(self, groups: tuple[Group, ...], ledger: Ledger | None = None) -> None:
        """Set the groups and costs of the gates, as ``shrink`` does after it removed units."""
        self.groups, self._latest, self.cost_tables.ledger = groups, None, ledger

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs that the gates were attached with, positional and by keyword."""
        device = self.gates.device
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self._example)  # type: ignore[no-any-return]

    def forward(self, *args: Any, samples: int | None = None, **kwargs: Any) -> Any:
        """Call the model under one draw; or under ``samples=L`` draws, and stack the outputs."""
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
                "name: pass the model's argument by position"
            )
        outputs = [self._drawn(args, kwargs) for _ in range(samples)]
        return tree_map(stack, *outputs)

    def _drawn(self, args: Any, kwargs: Any) -> Any:
        with self._holding(examples_in(args, kwargs) if self.sample == "example" else None):
            return self.model(*args, **kwargs)

    @contextmanager
    def draw(self, batch_size: int | None = None) -> Iterator[None]:
        """Draw once for everything inside, such as other methods of the model than its forward.

        Args:
            batch_size: needed with ``sample="example"``.
        """
        with self._holding(batch_size):
            yield

    def _holding(self, batch_size: int | None) -> AbstractContextManager[None]:
        if self.sample == "example" and self.training and batch_size is None:
            raise ArgumentError("with sample='example' a draw needs the batch size: draw(64)")
        if not self.training:  # every module reads the gates itself: threads share no state
            return nullcontext()
        shape = () if batch_size is None or self.sample == "batch" else (batch_size,)
        return self.gates.holding(self.gates.draw(shape), None, self.gates.open_groups())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the example inputs, too: the model may be traced with them again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._example = tree_map(lambda x: fn(x) if isinstance(x, Tensor) else x, self._example)
        self.cost_tables.to(self.gates.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatedModel":
        """Copy tensors of the last call without their graph, which cannot be copied.

        Groups, traces and tables never change, so copies share them.
        """
        for record in (self.groups, self.cost_tables.ledger, self.cost_tables.latency):
            memo[id(record)] = record
        for value in [value for module in self.modules() for value in vars(module).values()]:
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Without the signature, which ``__setstate__`` adds."""
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__class__ = signed_class(type(self), self.model)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles name the class without the signature of this model."""
        kind = getattr(type(self), "unsigned", type(self))
        return _new, (kind,), self.__getstate__()

    def __getattr__(self, name: str) -> Any:
        """Look up unknown attributes on the model."""
        parts = self.__dict__.get("_modules", {})
        if name in parts:  # faster than nn.Module.__getattr__; each call reads several
            return parts[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in WRAPPED or name.startswith("__"):
                raise
        try:
            return getattr(self.model, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither the GatedModel nor its model, a {type(self.model).__name__}, has an "
                f"attribute {name!r}"
            ) from error

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write what is gated into the metadata of the state, where torch keeps versions."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata["gates"] = gate_targets(self.model, self.groups)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Remove the units that the saved model had removed, then load."""
        if any(f"{prefix}gates.{name}" in state_dict for name in self.gates.names):
            self._refuse_others(local_metadata.get("gates", []))
        current, saved = self.gates.original, state_dict.get(f"{prefix}gates.original")
        if saved is not None and (current is None or not torch.equal(current.cpu(), saved.cpu())):
            remove_units(self, saved)
        elif saved is None and current is not None:
            raise ArgumentError(
                "this state has units that were removed here: load it into a new dense model, with "
                "gates attached as before"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _refuse_others(self, saved: list[list[str]]) -> None:
        """Refuse a state whose gates belong to other units."""
        for here, other in zip(gate_targets(self.model, self.groups), saved, strict=False):
            if here != other:
                raise ArgumentError(
                    f"the gates of {', '.join(other)} in this state would become those of "
                    f"{', '.join(here)}: attach gates to the same sites in the same order, or load "
                    "{**state}, which does not say whose they are"
                )

    def open_probability(self) -> dict[str, Tensor]:
        """P(open) of every unit, by group (eq. 6)."""
        return self.by_group(self.gates.open_probability())

    def gate_values(self) -> dict[str, Tensor]:
        """The test-time value of every gate, by group: the readout."""
        return self.by_group(self.gates.readout())

    def by_group(self, values: Tensor) -> dict[str, Tensor]:
        """Split a tensor with one entry per gate, by the names of the groups."""
        return {group.name: values[..., group.slice] for group in self.groups}

    def units_left(self) -> tuple[int, ...]:
        """How many gates of each group are open by the readout, as the paper counts them."""
        return tuple(int(is_open.sum()) for is_open in self.by_group(self.gates.is_open()).values())

    def analyze(self, plain: nn.Module) -> Analysis:
        """The analysis of the model without its gates; the latest one as long as it fits."""
        if self._latest is None or not self._latest.fits(plain):
            self._latest = analyze(plain, *self.example)
        return self._latest

    @property
    def costs(self) -> GatedCosts:
        """What the model costs, expected and delivered."""
        return GatedCosts(self, self.cost_tables)

    @property
    def ledger(self) -> Ledger:
        """Costs by gates. The first access traces the model."""
        return self.costs.ledger

    @property
    def latency(self) -> LatencyTable:
        """Times by gates. The first access measures them with default settings."""
        return self.costs.latency

    def measure_latency(
        self, *, batch: int | None = None, repeats: int | None = None, fresh: bool = False
    ) -> LatencyTable:
        """Time every operator over a grid of widths, for ``expected("latency_ms")`` from now on.

        The operators run on this device in evaluation mode, with the present number of threads.
        Earlier times of such a machine come from the cache, ``~/.cache/hardconcrete/latency``.

        Args:
            batch: examples in a call. The default is that of the example inputs.
            repeats: timed calls of each operator at each grid point. By default three passes of at
                least five calls and three seconds, of which the fastest counts.
            fresh: measure again even if the cache has the times.
        """
        return self.costs.measure_latency(batch=batch, repeats=repeats, fresh=fresh)

    def expected(self, cost: str) -> Tensor:
        """The mean cost over draws of the gates, in float64, differentiable.

        A weight counts when its input unit and its output unit are open. With gates of 0 and 1 the
        cost is the ``count`` of the compacted model. Otherwise the mean includes draws in which a
        group loses all units; this is exact for up to twelve such groups. It is an approximation
        where named sites gate one of several layers that read or make a unit, and of bytes where
        layers select among their inputs. Single weights (``"fc1:each"``) save nothing until all
        weights of a unit are closed, because the matrix stays dense.

        Args:
            cost: ``"params"``; ``"macs"``, for all examples of the inputs that the gates were
                attached with, as ``count`` does; ``"weight_bytes"``; ``"kv_bytes"``, keys and
                values of attention for one token; ``"group_size"``, the paper's uncoupled number of
                weights, |g| for each open gate; or ``"latency_ms"``,
                milliseconds at the expected widths, from the table of ``measure_latency``.

        Example:
            >>> import torch, hardconcrete as hc
            >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
            >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
            >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([-2.0, 9.0, 9.0]))
            >>> round(gated.expected("params").item(), 2), gated.delivered("params").item()
            (18.81, 23.0)
        """
        return self.costs.expected(cost)

    def delivered(self, cost: str) -> Tensor:
        """The present cost of the compacted model, by the readout of the gates.

        Args:
            cost: as for ``expected``. The two differ while gates are undecided.
        """
        return self.costs.delivered(cost)

    def freeze_gates(self, frozen: bool = True) -> None:
        """Fix the gates at their readout, in training too, to fine-tune the open units."""
        self.gates.freeze(frozen)

    def summary(self) -> None:
        """Print a table of the groups: units, weights per unit, and how open they are."""
        print_summary(self)


def _new(kind: type[GatedModel]) -> GatedModel:
    return kind.__new__(kind)
