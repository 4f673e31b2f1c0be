"""Values of a graph as the walk sees them: shapes, and which indices belong to which label."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Component:
    """One independent way in which indices of a tensor belong to units.

    Args:
        labels: integers that broadcast to the tensor: each dimension is full, or 1 where the
            labels do not depend on it.
        axis: name and dimension of the parameter that these labels come from.
        faithful: whether the tensor is zero wherever that parameter is, so that a gate there acts
            here.
    """

    labels: Tensor
    axis: tuple[str, int] | None = None
    faithful: bool = True

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions along which the labels differ."""
        return tuple(dim for dim, size in enumerate(self.labels.shape) if size > 1)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph.

    Args:
        shape: its concrete shape for the example inputs.
        components: what is known of its dimensions; those without are rigid.
        weight: whether it is computed from parameters, buffers and constants alone.
        why: what makes it rigid, in words.
    """

    shape: tuple[int, ...]
    components: tuple[Component, ...] = ()
    weight: bool = False
    why: str = ""

    def along(self, dim: int) -> tuple[Component, ...]:
        """The components that vary along a dimension."""
        return tuple(part for part in self.components if dim in part.dims)

    def with_components(self, components: Sequence[Component]) -> "Value":
        """The same tensor, known otherwise."""
        return replace(self, components=tuple(components))

    def aligned(self, rank: int) -> "Value":
        """With leading dimensions of size 1, as broadcasting has them."""
        return self.placed(range(rank - len(self.shape), rank), rank)

    def placed(self, dims: Sequence[int], rank: int) -> "Value":
        """With its dimensions put at ``dims`` among ``rank``, all others of size 1."""
        order = sorted(range(len(dims)), key=lambda k: dims[k])

        def place(shape: Sequence[int]) -> tuple[int, ...]:
            sizes = [1] * rank
            for k, dim in enumerate(dims):
                sizes[dim] = shape[k]
            return tuple(sizes)

        parts = [
            replace(part, labels=part.labels.permute(order).reshape(place(part.labels.shape)))
            for part in self.components
        ]
        return Value(place(self.shape), tuple(parts), self.weight, self.why)
