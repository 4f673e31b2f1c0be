"""Other sizes of the inputs, such as another length: to verify a model with, or to refuse."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from hardconcrete.errors import CompactionError
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.graph.propagate import concrete


class FixedSizeError(CompactionError):
    """A graph is called with inputs of a size that it was not traced for."""


def another_batch(inputs: ExampleInputs) -> ExampleInputs:
    """The same rows, drawn with replacement, one row more."""
    tensors = _tensors(inputs)
    if not tensors:
        return inputs
    batch = len(tensors[0])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(batch, (batch + 1,), generator=generator)

    def drawn(leaf: Tensor) -> Tensor:
        is_batch = leaf.dim() and len(leaf) == batch
        return leaf.index_select(0, rows.to(leaf.device)) if is_batch else leaf

    return tree_map_only(Tensor, drawn, inputs)  # type: ignore[no-any-return]


def other_lengths(inputs: ExampleInputs) -> Iterator[tuple[ExampleInputs, ExampleInputs]]:
    """For each size along other dimensions than the batch, inputs one longer and one shorter.

    All dimensions of that size change together, as those of tokens and their mask.

    Example:
        >>> [(longer, _)] = other_lengths(((torch.zeros(2, 5), torch.zeros(5, 5)), {}))
        >>> [tuple(x.shape) for x in longer[0]]
        [(2, 6), (6, 6)]
    """
    tensors = _tensors(inputs)
    batch = len(tensors[0]) if tensors else 0
    sizes = [size for t in tensors for size in t.shape[1:]]
    for size in dict.fromkeys(size for size in sizes if size > 1):
        yield tuple(_resized(inputs, batch, size, size + step) for step in (1, -1))  # type: ignore[misc]


def _resized(inputs: ExampleInputs, batch: int, before: int, after: int) -> ExampleInputs:
    """Repeat or cut all dimensions of one size, except the batch."""

    def resized(leaf: Tensor) -> Tensor:
        for dim, size in enumerate(leaf.shape):
            if size == before and (dim > 0 or size != batch):
                indices = torch.arange(after, device=leaf.device) % before
                leaf = leaf.index_select(dim, indices)
        return leaf

    return tree_map_only(Tensor, resized, inputs)  # type: ignore[no-any-return]


def _tensors(inputs: ExampleInputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]


def refuse_other_sizes_in(graph: fx.GraphModule) -> None:
    """Let a graph check the sizes of its inputs that are constants in it, except the batch."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        example = node.meta.get("val")
        shape = example.shape if isinstance(example, Tensor) else ()
        fixed = {dim: concrete(size) for dim, size in enumerate(shape) if dim and _is_fixed(size)}
        if fixed:
            with graph.graph.inserting_after(inputs[-1]):
                arguments: Any = node, str(node.target), fixed
                graph.graph.call_function(refuse_other_sizes, arguments)


def _is_fixed(size: int | torch.SymInt) -> bool:
    """Whether a size is a constant; some are known to be one only at the end of the trace."""
    return isinstance(size, int) or bool(size.node.expr.is_number)


def refuse_other_sizes(tensor: Tensor, name: str, fixed: dict[int, int]) -> None:
    """Refuse a tensor whose size along some dimension is not the one of the example inputs."""
    for dim, size in fixed.items():
        if tensor.shape[dim] != size:
            raise FixedSizeError(
                f"{name} has size {tensor.shape[dim]} along dimension {dim}, and this graph was "
                f"traced for {size}; compact with example inputs of that size, or with "
                "form='module' for all sizes"
            )
