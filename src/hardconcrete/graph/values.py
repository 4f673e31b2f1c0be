"""Tensors of a graph during label propagation: their shapes, and the labels of their indices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Component:
    """Labels along some dimensions of a tensor.

    A tensor has several components if its dimensions are labelled independently, as the rows and
    the columns of a weight.

    Args:
        labels: integers that broadcast to the tensor. A dimension along which labels do not vary
            has size 1, any other its full size.
        axis: name and dimension of the parameter that the labels come from.
        zero_with_parameter: whether the tensor is zero wherever that parameter is zero. Only then
            a gate on the parameter closes the unit here.
        copies: whether its indices are copies, made by an expand.
    """

    labels: Tensor
    axis: tuple[str, int] | None = None
    zero_with_parameter: bool = True
    copies: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions along which the labels vary."""
        return tuple(dim for dim, size in enumerate(self.labels.shape) if size > 1)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph.

    Args:
        shape: shape for the example inputs, without symbols.
        components: labels of its dimensions. A dimension without a component cannot shrink.
        from_parameters: whether it depends only on parameters, buffers and constants.
        why_rigid: why a dimension cannot shrink, in words.
        chosen: whether it holds matrices of a parameter, which data choose along the first
            dimension: the weights of the experts for each row.
    """

    shape: tuple[int, ...]
    components: tuple[Component, ...] = ()
    from_parameters: bool = False
    why_rigid: str = ""
    chosen: bool = False

    def components_along(self, dim: int) -> tuple[Component, ...]:
        """The components whose labels vary along a dimension."""
        return tuple(part for part in self.components if dim in part.dims)

    def with_components(self, components: Sequence[Component]) -> "Value":
        """The same tensor with other labels."""
        return replace(self, components=tuple(components))

    def with_rank(self, rank: int) -> "Value":
        """With leading dimensions of size 1, as in broadcasting."""
        return self.at_dims(range(rank - len(self.shape), rank), rank)

    def at_dims(self, dims: Sequence[int], rank: int) -> "Value":
        """With its dimensions moved to ``dims`` of ``rank``, and size 1 elsewhere."""
        order = sorted(range(len(dims)), key=lambda k: dims[k])

        def spread(shape: Sequence[int]) -> tuple[int, ...]:
            sizes = [1] * rank
            for k, dim in enumerate(dims):
                sizes[dim] = shape[k]
            return tuple(sizes)

        parts = [
            replace(part, labels=part.labels.permute(order).reshape(spread(part.labels.shape)))
            for part in self.components
        ]
        return Value(spread(self.shape), tuple(parts), self.from_parameters, self.why_rigid)
