"""The analysis of a model: its graph, its units, and what is fixed and why."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.graph.example_inputs import as_inputs
from hardconcrete.graph.fingerprint import fingerprint, fingerprint_of_inputs
from hardconcrete.graph.propagate import LabelledGraph, concrete_shape, propagate
from hardconcrete.graph.trace import trace
from hardconcrete.units.group import Group
from hardconcrete.units.grouping import Fixed, Grouping
from hardconcrete.units.relations import Relations
from hardconcrete.units.savings import Savings, savings_of


@dataclass(frozen=True, eq=False)
class Analysis:
    """The units of a model: a sequence of its groups, by position or by name.

    It never changes, so all copies of a model share one. It holds no weights. A pickle keeps the
    groups and drops the graph.

    Args:
        model: name of the model's class.
        groups: the units that can be removed.
        fixed: the units that cannot, and why.
        labelled: the traced graph with its labels; None after unpickling.
        savings: the largest share of the model that could be removed, and what keeps the rest.
        relations: what reads and what makes each unit; None after unpickling.
        seen: fingerprint of the model.
        inputs: fingerprint of the example inputs.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> found = hc.find_groups(model, torch.zeros(2, 4))
        >>> found.names, found["0"].units, found["0"].parameters
        (('0',), 3, 7)
        >>> print(found)
        Sequential: 3 units in 1 group
        └─ 0: 3 neurons, each 7 parameters and 6 MACs
           ├─ gated by   2.weight[1]
           └─ cut along  0.weight[0], 0.bias[0]
        fixed
        └─ 2: 2 fixed: the model's output (output in the model itself)
        at most 67% of the MACs and 61% of the parameters can go
        what fixed units keep, by reason
        ├─ 22% of the MACs and 17% of the parameters: the model's input input
        └─ 11% of the MACs and 17% of the parameters: the model's output (output)
        >>> found.savings.largest.params    # 14 of 23, with one unit left
        0.6086956521739131
    """

    model: str
    groups: tuple[Group, ...]
    fixed: tuple[Fixed, ...]
    savings: Savings
    labelled: LabelledGraph
    relations: Relations
    seen: Any
    inputs: Any

    def fits(self, model: nn.Module) -> bool:
        """Whether a model still has these modules, settings and tensors, so that this holds.

        Example:
            >>> import hardconcrete as hc
            >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            >>> found = hc.find_groups(model, torch.zeros(2, 4))
            >>> found.fits(model)
            True
            >>> model[1] = nn.Linear(3, 5)
            >>> found.fits(model)
            False
        """
        return self.seen is not None and bool(fingerprint(model) == self.seen)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all groups."""
        return tuple(group.name for group in self.groups)

    @cached_property
    def units_by_root(self) -> dict[str, list[int]]:
        """The root of every unit of each group."""
        return {group.name: self.relations.units_of(group) for group in self.groups}

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __getitem__(self, key: int | str) -> Group:
        if type(key) is int and -len(self.groups) <= key < len(self.groups):
            return self.groups[key]
        for group in self.groups:
            if group.name == key:
                return group
        raise ArgumentError(f"there is no group {key!r}; there are {', '.join(self.names)}")

    def __str__(self) -> str:
        units = sum(group.units for group in self.groups)
        count = f"{len(self.groups)} group{'s' * (len(self.groups) != 1)}"
        lines = [f"{self.model}: {units:,} units in {count}"]
        for k, group in enumerate(self.groups):
            last = k == len(self.groups) - 1
            lines += _branch(group, "└─ " if last else "├─ ", "   " if last else "│  ")
        lines += ["fixed"] * bool(self.fixed)
        for k, fixed in enumerate(self.fixed):
            lines.append(f"{'└─' if k == len(self.fixed) - 1 else '├─'} {fixed}")
        return "\n".join([*lines, str(self.savings)])

    def __deepcopy__(self, _: Any) -> "Analysis":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the graph, which cannot be pickled."""
        return Analysis, (self.model, self.groups, self.fixed, self.savings, None, None, None, None)


def _branch(group: Group, head: str, indent: str) -> list[str]:
    return [
        f"{head}{group.name}: {group.units:,} {group.kind}s, each {group.parameters:,} "
        f"parameters and {group.macs:,} MACs",
        f"{indent}├─ gated by   {', '.join(map(str, group.gated))}",
        f"{indent}└─ cut along  {', '.join(map(str, group.coupled))}",
    ]


def find_groups(
    model: nn.Module,
    example_inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    input_features: bool = False,
) -> Analysis:
    """Find the units of a model that can be removed, and say what is fixed and why.

    The model is traced with ``torch.export`` and left as it is. ``attach_gates`` uses the same
    analysis when you call it next with this model and such inputs.

    Args:
        model: any module that can be traced, also on meta tensors.
        example_inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs (a
            dict, a ``BatchEncoding``) that the model can be called with.
        kwargs: keyword inputs of the same call.
        input_features: count dimension 1 of the model's inputs as units, too.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> found = hc.find_groups(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> [(group.name, group.units) for group in found]
        [('0', 3)]
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"find_groups takes a module, not a {type(model).__name__}")
    if not isinstance(input_features, bool):
        raise ArgumentError(f"input_features={input_features!r} must be True or False")
    args, keywords = as_inputs(example_inputs, kwargs)
    return analyze(model, args, keywords, input_features=input_features)


_latest: tuple["weakref.ref[nn.Module]", bool, Analysis] | None = None
"""The model that was analyzed last, whether its inputs counted as units, and the result."""


def analyze(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    input_features: bool = False,
) -> Analysis:
    """The analysis of a model. The latest one is used again where it still fits."""
    global _latest
    inputs = fingerprint_of_inputs(args, kwargs or {})
    latest = _latest  # once: a collection of garbage, or another thread, may forget it meanwhile
    if latest is not None:
        known, with_features, analysis = latest
        same = known() is model and with_features == input_features and analysis.inputs == inputs
        if same and analysis.fits(model):
            return analysis
    analysis = _analyzed(model, args, kwargs, input_features, inputs)
    _latest = weakref.ref(model, _forget), input_features, analysis
    return analysis


def _forget(gone: "weakref.ref[nn.Module]") -> None:
    """Free the graph of a model that was deleted."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is gone:
        _latest = None


def _analyzed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    input_features: bool,
    inputs: Any,
) -> Analysis:
    graph = trace(model, args, kwargs)
    with torch.inference_mode(False), _on_the_cpu():  # others use the result outside of both
        labelled = propagate(graph, model, input_features=input_features)
        relations = Relations(labelled)
        grouping = Grouping(labelled, relations, model, batch_of(labelled))
        groups, fixed = grouping.groups(), grouping.fixed()
        roots = [relations.units_of(group) for group in groups]
        state = labelled.state
        savings = savings_of(model, state.labels, relations, state.contractions, roots)
    graph.graph.owning_module = None  # it holds the model's parameters
    seen = fingerprint(model)
    return Analysis(type(model).__name__, groups, fixed, savings, labelled, relations, seen, inputs)


def batch_of(labelled: LabelledGraph) -> int:
    """Examples in the traced inputs."""
    for node in labelled.values:
        example = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(example, Tensor) and example.dim():
            return concrete_shape(example)[0]
    return 1


def _on_the_cpu() -> AbstractContextManager[object]:
    """Make tensors on the CPU; without a switch if that is so, as it slows every operator."""
    device = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == device else device
