"""Groups of units: what lives or dies as one, with every axis of a parameter that it owns."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.graph.labels import Reason
from hardconcrete.graph.propagate import LabelledGraph, concrete_shape, propagate
from hardconcrete.graph.propagation_state import ContractionRecord
from hardconcrete.graph.trace import as_args, trace

Place = tuple[str, int]
"""Name and dimension of a parameter or buffer."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A dimension of a parameter or buffer, and the unit that owns each of its indices.

    Args:
        tensor: dotted name of the parameter or buffer.
        dim: its dimension.
        units: for every index the number of the unit that owns it, or -1.
        gated: whether the gate multiplies it; otherwise it is only cut when the unit goes.
    """

    tensor: str
    dim: int
    units: Tensor
    gated: bool

    def __str__(self) -> str:
        return f"{self.tensor}[{self.dim}]"


@dataclass(frozen=True, eq=False)
class UnitGroup:
    """Units of one kind that own the same axes.

    Args:
        name: path of the module that makes them.
        kind: "neuron", "feature map", "embedding dimension" or "input feature".
        units: how many there are.
        axes: all that they own.
        parameters: how many parameters go with one unit.
        macs: how many multiply-adds per example go with one unit.

    Example:
        >>> import torch, hardconcrete as hc
        >>> from hardconcrete.paper.models import LeNet5
        >>> conv2 = hc.find_groups(LeNet5(), torch.zeros(2, 1, 28, 28))["conv2"]
        >>> conv2.kind, conv2.units, conv2.parameters   # 20 * 25 + 1, and 16 columns of fc1
        ('feature map', 50, 8501)
        >>> [str(axis) for axis in conv2.gated]
        ['fc1.weight[1]']
    """

    name: str
    kind: str
    units: int
    axes: tuple[Axis, ...]
    parameters: int
    macs: int

    @property
    def gated(self) -> tuple[Axis, ...]:
        """The axes that gates multiply: the input side of whatever reads the units."""
        return tuple(axis for axis in self.axes if axis.gated)

    @property
    def coupled(self) -> tuple[Axis, ...]:
        """The axes that are only cut."""
        return tuple(axis for axis in self.axes if not axis.gated)


@dataclass(frozen=True)
class Fixed:
    """Units that cannot be removed, and why."""

    name: str
    units: int
    reason: Reason

    def __str__(self) -> str:
        return f"{self.name}: {self.units} fixed: {self.reason}"


@dataclass(frozen=True, eq=False)
class Structure:
    """The units of a model: a sequence of its groups, by place or by name.

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
    """

    model: str
    groups: tuple[UnitGroup, ...]
    fixed: tuple[Fixed, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all groups."""
        return tuple(group.name for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    def __getitem__(self, key: int | str) -> UnitGroup:
        if isinstance(key, int):
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
        return "\n".join(lines)


def _branch(group: UnitGroup, head: str, indent: str) -> list[str]:
    return [
        f"{head}{group.name}: {group.units:,} {group.kind}s, each {group.parameters:,} "
        f"parameters and {group.macs:,} MACs",
        f"{indent}├─ gated by   {', '.join(map(str, group.gated))}",
        f"{indent}└─ cut along  {', '.join(map(str, group.coupled))}",
    ]


def find_groups(
    model: nn.Module,
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    input_features: bool = False,
) -> Structure:
    """Find the units of a model that can be removed, and say what is fixed and why.

    The model is traced with ``torch.export`` and left as it is.

    Args:
        model: any module that can be traced, also on meta tensors.
        example_inputs: a tensor, or a tuple of positional inputs, the model can be called with.
        kwargs: keyword inputs of the same call.
        input_features: count dimension 1 of the model's own inputs as units, too.

    Example:
        >>> import torch, hardconcrete as hc
        >>> from hardconcrete.paper.models import LeNet5
        >>> [(g.name, g.units) for g in hc.find_groups(LeNet5(), torch.zeros(2, 1, 28, 28))]
        [('conv1', 20), ('conv2', 50), ('fc1', 500)]
    """
    graph = trace(model, as_args(example_inputs), kwargs)
    found = propagate(graph, model, input_features=input_features)
    return describe(found, model, batch_of(found))


def batch_of(found: LabelledGraph) -> int:
    """Examples in the traced inputs."""
    for node in found.values:
        example = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(example, Tensor) and example.dim():
            return concrete_shape(example)[0]
    return 1


def describe(found: LabelledGraph, model: nn.Module, batch: int) -> Structure:
    """The result of a walk, in the words of the user."""
    builder = _Builder(found, model, batch)
    return Structure(type(model).__name__, builder.groups(), builder.fixed())


class _Builder:
    def __init__(self, found: LabelledGraph, model: nn.Module, batch: int) -> None:
        self.batch = batch
        self.labels = found.state.labels
        self.contractions = found.state.contractions
        self.why = self.labels.why_fixed()
        self.roots = found.roots()
        self.shapes = {name: value.shape for name, value in found.tensors.items()}
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.read: dict[Place, set[int]] = defaultdict(set)
        self.made: dict[int, tuple[int, str, int]] = {}
        self.makers: dict[Place, tuple[str, Tensor]] = {}
        self.shares: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for order, contraction in enumerate(self.contractions):
            self._note(order, contraction)
        for (name, dim), roots in self.roots.items():
            if name.startswith("input:"):
                self._note_made(-1, (name, dim), roots)

    def _note(self, order: int, contraction: ContractionRecord) -> None:
        """Which axes read which units, where units are made first, and what they cost there."""
        for axis, labels in contraction.reads:
            self.read[axis].update(self.labels.find(labels).flatten().tolist())
        for axis, labels in contraction.makes:
            self._note_made(order, axis, self.labels.find(labels).flatten())
        for labels in contraction.parts:
            for root, count in _counted(self.labels.find(labels)):
                self.shares[root].append((order, count / labels.numel()))

    def _note_made(self, order: int, axis: Place, roots: Tensor) -> None:
        name = producer(axis[0])
        self.makers.setdefault(axis, (name, roots))
        for place, root in enumerate(roots.tolist()):
            self.made.setdefault(root, (order, name, place))

    def groups(self) -> tuple[UnitGroup, ...]:
        """Units with the same axes, in the order in which they are made."""
        owned: dict[int, list[tuple[Place, int]]] = defaultdict(list)
        for axis, roots in self.roots.items():
            for root, count in _counted(roots):
                owned[root].append((axis, count))
        read = set().union(*self.read.values())
        alike: dict[Any, list[int]] = defaultdict(list)
        for root, (order, name, _) in sorted(self.made.items(), key=lambda item: item[1]):
            if root not in self.why and root in read:
                alike[order, name, tuple(owned[root])].append(root)
        alike = {key: members for key, members in alike.items() if len(members) > 1}
        found = []
        for (order, name, axes), members in alike.items():
            first, last = self.made[members[0]][2], self.made[members[-1]][2]
            span = "" if self._makes_only(name, set(members)) else f"[{first}:{last + 1}]"
            found.append(self._group(name + span, order, [axis for axis, _ in axes], members))
        return tuple(found)

    def _makes_only(self, name: str, roots: set[int]) -> bool:
        """Whether all that a module makes and that can be removed is one group."""
        made = {
            root for own, found in self.makers.values() if own == name for root in found.tolist()
        }
        return made - self.why.keys() <= roots

    def _group(self, name: str, order: int, axes: list[Place], roots: list[int]) -> UnitGroup:
        first, numbers = roots[0], {root: number for number, root in enumerate(roots)}
        found = tuple(
            Axis(
                tensor,
                dim,
                _numbered(self.roots[tensor, dim], numbers),
                first in self.read.get((tensor, dim), ()),
            )
            for tensor, dim in axes
            if not tensor.startswith("input:")
        )
        kind = "input feature" if order < 0 else self.contractions[order].kind
        return UnitGroup(name, kind, len(roots), found, self._parameters(found), self._macs(first))

    def _parameters(self, axes: tuple[Axis, ...]) -> int:
        """Entries of parameters that unit 0 owns along one axis or another."""
        left: dict[str, int] = {}
        for axis in axes:
            if axis.tensor in self.parameters:
                size = self.shapes[axis.tensor][axis.dim]
                entries = left.get(axis.tensor, prod(self.shapes[axis.tensor]))
                left[axis.tensor] = entries // size * (size - int((axis.units == 0).sum()))
        return sum(prod(self.shapes[name]) - entries for name, entries in left.items())

    def _macs(self, root: int) -> int:
        """Multiply-adds per example that need the unit, all others being there."""
        left: dict[int, float] = defaultdict(lambda: 1.0)
        for order, share in self.shares[root]:
            left[order] *= 1 - share
        gone = (self.contractions[order].macs * (1 - rest) for order, rest in left.items())
        return round(sum(gone) / self.batch)

    def fixed(self) -> tuple[Fixed, ...]:
        """What is made by parameters and cannot be removed, once for each reason."""
        counts: Counter[tuple[str, Reason]] = Counter()
        for name, roots in self.makers.values():
            for root, count in _counted(roots):
                if root in self.why:
                    counts[name, self.why[root]] += count
        return tuple(Fixed(name, units, reason) for (name, reason), units in counts.items())


def _counted(roots: Tensor) -> Iterator[tuple[int, int]]:
    """Each label with the number of its places."""
    found, counts = roots.unique(return_counts=True)
    return zip(found.tolist(), counts.tolist(), strict=True)


def _numbered(roots: Tensor, numbers: dict[int, int]) -> Tensor:
    """The unit of each index, -1 where it is none of the known; one by one is no slower."""
    units = [numbers.get(root, -1) for root in roots.tolist()]
    return torch.tensor(units, dtype=torch.int64)


def producer(parameter: str) -> str:
    """The module that a parameter speaks for; a raw parameter speaks for itself."""
    path, _, attribute = parameter.partition(".parametrizations.")
    if attribute:
        return path
    path, _, attribute = parameter.rpartition(".")
    return path if attribute == "weight" and path else parameter
