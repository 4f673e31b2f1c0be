"""The state that the rules of all operators share: labels, and which units each operator reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hardconcrete.graph.labels import Labels, Reason
from hardconcrete.graph.values import Component, Value

ONLY_TOGETHER = "all of these indices can only be removed together"


@dataclass(frozen=True)
class OperatorCall:
    """One operator of the graph, with its arguments by the names of its schema."""

    operator: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    module: str
    target: Callable[..., Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that only some overloads have."""
        return self.arguments.get(name, default)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """All tensors among the arguments, lists of tensors included."""
        tensors: list[Value] = []
        for argument in self.arguments.values():
            parts = argument if isinstance(argument, list | tuple) else [argument]
            tensors += [part for part in parts if isinstance(part, Value)]
        return tensors


@dataclass(frozen=True)
class ContractionRecord:
    """A sum over units, such as a dense layer: which units it reads, and which it makes.

    Args:
        module: path of the module that calls the operator.
        kind: the noun for its output units.
        macs: multiply-adds for the example inputs.
        parts: labels of all dimensions that it runs over, one tensor per component.
        reads: parameter axis and labels of the units it sums over. Gates can sit there.
        makes: parameter axis and labels of its output units.
    """

    module: str
    kind: str
    macs: int
    parts: tuple[Tensor, ...] = ()
    reads: tuple[tuple[tuple[str, int], Tensor], ...] = ()
    makes: tuple[tuple[tuple[str, int], Tensor], ...] = ()


@dataclass
class PropagationState:
    """The labels and contractions of one graph, and the operator that is processed now."""

    labels: Labels = field(default_factory=Labels)
    contractions: list[ContractionRecord] = field(default_factory=list)
    call: OperatorCall | None = None

    def reason(self, text: str) -> Reason:
        """A reason that names the current operator."""
        if self.call is None:
            return Reason(text, "", "output")
        return Reason(text, self.call.module, self.call.operator)

    def fix(self, value: Value, text: str) -> None:
        """Forbid the removal of any index of this tensor."""
        for part in value.components:
            self.labels.fix(part.labels, self.reason(text))

    def keep_whole(self, value: Value, dims: Sequence[int], text: str) -> Value:
        """Forbid these dimensions to shrink: unite all labels along them."""
        wanted = {dim % len(value.shape) for dim in dims} if value.shape else set()
        parts = []
        for part in value.components:
            for dim in wanted & set(part.dims):
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
            parts.append(part)
        return self.simplified(value.with_components(parts), text)

    def simplified(self, value: Value, text: str = ONLY_TOGETHER) -> Value:
        """Drop the dimensions of components along which all labels are equal.

        A component without dimensions has one label for the whole tensor, which is then fixed.
        """
        parts, why = [], value.why_rigid
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
        return replace(value, components=tuple(parts), why_rigid=why)

    def make_sliceable(self, value: Value) -> Value:
        """Unite labels until each component varies along one dimension only.

        Only whole slices can be cut out of a tensor. The longest dimension keeps its labels.
        """
        for part in self.simplified(value).components:
            longest = max(part.dims, key=lambda dim: part.labels.shape[dim])
            for dim in set(part.dims) - {longest}:
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
        return self.simplified(value)

    def merged(self, values: Sequence[Value], shape: Sequence[int]) -> list[Component]:
        """Components of tensors of one rank that are combined elementwise."""
        merged: list[Component] = []
        for value in values:
            for part in self._one_component_per_dim(value).components:
                merged = self._united(merged, part)
        for value in values:
            merged = [self._fix_where_rigid(value, part) for part in merged]
        return list(self.simplified(Value(tuple(shape), tuple(merged))).components)

    def _one_component_per_dim(self, value: Value) -> Value:
        """Where components share a dimension, as after a flatten, keep the one with most units."""
        dims = [dim for part in value.components for dim in part.dims]
        if len(set(dims)) == len(dims):
            return value
        text, taken = "other units lie along the same dimension", set[int]()
        parts: list[Component] = []
        for part in sorted(value.components, key=self._unit_count, reverse=True):
            parts += self.keep_whole(value.with_components([part]), sorted(taken), text).components
            taken |= set(part.dims)
        return value.with_components(parts)

    def _unit_count(self, part: Component) -> int:
        return len(self.labels.find(part.labels).unique())

    def _united(self, known: list[Component], part: Component) -> list[Component]:
        """Add a component. Unite it with those that share a dimension with it."""
        separate = []
        for other in known:
            if not set(other.dims) & set(part.dims):
                separate.append(other)
            else:
                self.labels.unite(other.labels, part.labels)
                labels, _ = torch.broadcast_tensors(other.labels, part.labels)
                axis = other.axis if other.axis == part.axis else None
                part = Component(
                    labels, axis, other.zero_with_parameter and part.zero_with_parameter
                )
        return [*separate, part]

    def _fix_where_rigid(self, value: Value, part: Component) -> Component:
        """Fix a component where the other tensor has full size and no labels: it cannot shrink."""
        for dim in part.dims:
            if value.shape[dim] > 1 and not value.components_along(dim):
                why = f": {value.why_rigid}" if value.why_rigid else ""
                text = f"it is combined with a tensor that cannot shrink{why}"
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
                if len(part.dims) == 1:
                    self.labels.fix(part.labels, self.reason(text))
        return part
