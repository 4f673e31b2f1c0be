"""What the rules of all operators share: uniting, keeping rigid, and noting who reads whom."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hardconcrete.graph.labels import Labels, Reason
from hardconcrete.graph.values import Component, Value

TIED = "all of these indices live or die together"


@dataclass(frozen=True)
class Call:
    """One operator of the graph, its arguments by the names of its schema."""

    operator: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    module: str
    target: Callable[..., Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not all overloads have."""
        return self.arguments.get(name, default)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the only result."""
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """All tensors among the arguments."""
        found: list[Value] = []
        for argument in self.arguments.values():
            parts = argument if isinstance(argument, list | tuple) else [argument]
            found += [part for part in parts if isinstance(part, Value)]
        return found


@dataclass(frozen=True)
class Contraction:
    """A sum over units: the operator that reads some units and makes others.

    Args:
        module: path of the module it happens in.
        kind: what its outputs are called.
        macs: multiply-adds for the example inputs.
        parts: labels of each independent set of dimensions that it runs over.
        reads: parameter axis and labels of what is summed over, where gates can sit.
        makes: parameter axis and labels of the units it produces.
    """

    module: str
    kind: str
    macs: int
    parts: tuple[Tensor, ...] = ()
    reads: tuple[tuple[tuple[str, int], Tensor], ...] = ()
    makes: tuple[tuple[tuple[str, int], Tensor], ...] = ()


@dataclass
class Scope:
    """The state of one walk over a graph."""

    labels: Labels = field(default_factory=Labels)
    contractions: list[Contraction] = field(default_factory=list)
    call: Call | None = None

    def reason(self, text: str) -> Reason:
        """A reason that names the present operator."""
        if self.call is None:
            return Reason(text, "", "output")
        return Reason(text, self.call.module, self.call.operator)

    def fix(self, value: Value, text: str) -> None:
        """Nothing of this tensor may be removed."""
        for part in value.components:
            self.labels.fix(part.labels, self.reason(text))

    def rigid(self, value: Value, dims: Sequence[int], text: str) -> Value:
        """These dimensions may not shrink: what lies along them becomes one."""
        wanted = {dim % len(value.shape) for dim in dims} if value.shape else set()
        parts = []
        for part in value.components:
            for dim in wanted & set(part.dims):
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
            parts.append(part)
        return self.settled(value.with_components(parts), text)

    def settled(self, value: Value, text: str = TIED) -> Value:
        """Drop dimensions along which labels are the same; what is left with none is fixed."""
        parts, why = [], value.why
        for part in value.components:
            labels = self.labels.find(part.labels)
            for dim in part.dims:
                first = labels.narrow(dim, 0, 1)
                labels = first if (labels == first).all() else labels
            if labels.numel() == 1:
                self.labels.fix(labels, self.reason(text))
                why = why or f"{text} ({self.reason(text).operator})"
            else:
                parts.append(replace(part, labels=labels))
        return replace(value, components=tuple(parts), why=why)

    def rectangular(self, value: Value) -> Value:
        """Only whole indices of one dimension can be cut out of a tensor: unite what is finer."""
        for part in self.settled(value).components:
            longest = max(part.dims, key=lambda dim: part.labels.shape[dim])
            for dim in set(part.dims) - {longest}:
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
        return self.settled(value)

    def merged(self, values: Sequence[Value], shape: Sequence[int]) -> list[Component]:
        """Components of tensors that are combined index by index; all have the same rank."""
        merged: list[Component] = []
        for value in values:
            for part in self._untangled(value).components:
                merged = self._joined(merged, part)
        for value in values:
            merged = [self._only_along(value, part) for part in merged]
        return list(self.settled(Value(tuple(shape), tuple(merged))).components)

    def _untangled(self, value: Value) -> Value:
        """Where a dimension has two kinds of units, as after a flatten, the fewer are given up."""
        dims = [dim for part in value.components for dim in part.dims]
        if len(set(dims)) == len(dims):
            return value
        text, taken = "other units lie along the same dimension", set[int]()
        parts: list[Component] = []
        for part in sorted(value.components, key=self._count, reverse=True):
            parts += self.rigid(value.with_components([part]), sorted(taken), text).components
            taken |= set(part.dims)
        return value.with_components(parts)

    def _count(self, part: Component) -> int:
        return len(self.labels.find(part.labels).unique())

    def _joined(self, known: list[Component], part: Component) -> list[Component]:
        """One more component: it becomes one with those that share a dimension with it."""
        apart = []
        for other in known:
            if not set(other.dims) & set(part.dims):
                apart.append(other)
            else:
                self.labels.unite(other.labels, part.labels)
                labels, _ = torch.broadcast_tensors(other.labels, part.labels)
                axis = other.axis if other.axis == part.axis else None
                part = Component(labels, axis, other.faithful and part.faithful)
        return [*apart, part]

    def _only_along(self, value: Value, part: Component) -> Component:
        """Where a tensor is full and knows no units, nothing can be removed."""
        for dim in part.dims:
            if value.shape[dim] > 1 and not value.along(dim):
                why = f": {value.why}" if value.why else ""
                text = f"it is combined with a tensor that cannot shrink{why}"
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
                if len(part.dims) == 1:
                    self.labels.fix(part.labels, self.reason(text))
        return part
