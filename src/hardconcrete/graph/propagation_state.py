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
        heads: of a product of activations, labels that several of them have, and those of a
            dimension that was split off from one it sums over.
        reads: parameter axis and labels of the units it sums over. Gates can sit there.
        makes: parameter axis and labels of its output units.
    """

    module: str
    kind: str
    macs: int
    parts: tuple[Tensor, ...] = ()
    heads: tuple[Tensor, ...] = ()
    reads: tuple[tuple[tuple[str, int], Tensor], ...] = ()
    makes: tuple[tuple[tuple[str, int], Tensor], ...] = ()


@dataclass(frozen=True)
class SharedEntries:
    """A tensor that is combined with a larger one, so each of its entries is used several times.

    An example is a rotary embedding, which all heads use. If whole heads are removed it keeps its
    size; if the same head dimensions are removed from all heads it loses them, too.

    Args:
        large: labels of the larger tensor.
        small: labels of the other one, along some of the dimensions of the larger one.
        reason: what to say where it keeps its size.
    """

    large: Tensor
    small: Tensor
    reason: Reason


@dataclass
class PropagationState:
    """The labels and contractions of one graph, and the operator that is processed now."""

    labels: Labels = field(default_factory=Labels)
    contractions: list[ContractionRecord] = field(default_factory=list)
    shared_entries: list[SharedEntries] = field(default_factory=list)
    call: OperatorCall | None = None

    def reason(self, text: str) -> Reason:
        """A reason that names the current operator."""
        if self.call is None:
            return Reason(text, "", "output")
        return Reason(text, self.call.module, self.call.operator)

    def combined_with(self, rigid: Value) -> Reason:
        """The reason of units that are combined with a tensor that cannot shrink."""
        text = "it is combined with a tensor that cannot shrink"
        return replace(self.reason(text), because=rigid.why_rigid)

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
                known = self.labels.reason_at(int(labels))
                self.labels.fix(labels, self.reason(text))
                why = why or (known or self.reason(text)).cause
            else:
                smaller = labels.numel() < part.labels.numel()
                parts.append(replace(part, labels=labels.clone() if smaller else labels))
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

    def merged(
        self, values: Sequence[Value], shape: Sequence[int], *, at_once: bool = False
    ) -> list[Component]:
        """Components of tensors of one rank that are combined elementwise.

        Args:
            values: the tensors.
            shape: shape of the result.
            at_once: unite labels along some dimensions of a component with that component now, and
                not after all other operators (see ``settle_shared_entries``).
        """
        merged: list[Component] = []
        for value in values:
            for part in self._one_component_per_dim(value).components:
                merged = self._united(merged, part, at_once)
        for value in map(self.simplified, values) if at_once else values:
            merged = [self._fix_where_rigid(value, part) for part in merged]
        return list(self.simplified(Value(tuple(shape), tuple(merged))).components)

    def _one_component_per_dim(self, value: Value) -> Value:
        """Where components share a dimension, as after a flatten, keep the largest one.

        It is the one that the most indices belong to. With one key and value for all query heads it
        is that of the heads, not of the value's features. Copies come last.
        """
        dims = [dim for part in value.components for dim in part.dims]
        if len(set(dims)) == len(dims):
            return value
        text, taken = "other units lie along the same dimension", set[int]()
        parts: list[Component] = []
        originals = [part for part in value.components if not part.copies]
        if len(originals) > 1:
            originals.sort(key=self._size, reverse=True)
        for part in (*originals, *(part for part in value.components if part.copies)):
            parts += self.keep_whole(value.with_components([part]), sorted(taken), text).components
            taken |= set(part.dims)
        return value.with_components(parts)

    def _size(self, part: Component) -> tuple[int, int]:
        """How many indices of parameters belong to its units, and how many units it has."""
        units = self.labels.find(part.labels).unique()
        return self.labels.count_united(units), len(units)

    def _united(self, known: list[Component], part: Component, at_once: bool) -> list[Component]:
        """Add a component. Unite it with those that share a dimension with it."""
        separate = []
        for other in known:
            if at_once:
                other, part = self._without_equal(other), self._without_equal(part)
            small, large = sorted((other, part), key=lambda each: len(each.dims))
            if not set(other.dims) & set(part.dims):
                separate.append(other)
            elif set(small.dims) < set(large.dims) and not at_once:
                text = "entries of this tensor are used by several units"
                shared = SharedEntries(large.labels, small.labels, self.reason(text))
                self.shared_entries.append(shared)
                follows = large.zero_with_parameter and small.zero_with_parameter
                part = Component(large.labels, None, follows)
            else:
                self.labels.unite(other.labels, part.labels)
                labels, _ = torch.broadcast_tensors(other.labels, part.labels)
                axis = other.axis if other.axis == part.axis else None
                part = Component(
                    labels, axis, other.zero_with_parameter and part.zero_with_parameter
                )
        return [*separate, part]

    def _without_equal(self, part: Component) -> Component:
        """The component without the dimensions along which all labels are equal."""
        labels = self.labels.find(part.labels)
        for dim in part.dims if len(part.dims) > 1 else ():
            first = labels.narrow(dim, 0, 1)
            labels = first if (labels == first).all() else labels
        return replace(part, labels=labels)

    def settle_shared_entries(self) -> None:
        """Decide for tensors that are used by several units whether they lose entries with them.

        A tensor whose dimension stays in the larger one keeps its size. In other cases its labels
        are united with those of the larger one. Cases that other operators decide come first.
        """
        waiting = self.shared_entries
        while waiting:
            undecided = [each for each in waiting if not self._settled(each)]
            if len(undecided) == len(waiting):
                first, *undecided = waiting
                self.labels.unite(first.large, first.small)
            waiting = undecided
        self.shared_entries = []

    def _settled(self, entries: SharedEntries) -> bool:
        """Settle one case, unless units of the larger tensor vary along both kinds of dimension."""
        small = self._without_equal(Component(entries.small))
        large = self._without_equal(Component(entries.large))
        along = set(large.dims) & set(Component(entries.small).dims)
        if along and set(large.dims) - along:
            return False
        if along:
            self.labels.unite(entries.large, entries.small)
        else:
            for dim in small.dims:
                self.labels.unite(small.labels, small.labels.narrow(dim, 0, 1))
            self.labels.fix(small.labels, entries.reason)
            self.labels.mark_zero_lost(entries.large)
        return True

    def _fix_where_rigid(self, value: Value, part: Component) -> Component:
        """Fix a component where the other tensor has full size and no labels: it cannot shrink."""
        for dim in part.dims:
            if value.shape[dim] > 1 and not value.components_along(dim):
                self.labels.unite(part.labels, part.labels.narrow(dim, 0, 1))
                if len(part.dims) == 1:
                    self.labels.fix(part.labels, self.combined_with(value))
        return part
