"""The operators of one forward, and which sizes of their tensors depend on gates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hardconcrete.cost.example_inputs import batch_size, resampled
from hardconcrete.cost.ledger_writer import LedgerWriter
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.graph.propagate import concrete_shape, module_path, propagate
from hardconcrete.graph.trace import trace
from hardconcrete.graph.values import Value

aten = torch.ops.aten

SELECTING_OPERATORS = ("conv1d", "conv2d", "linear")
"""Operators of the layers that can select among their inputs."""


@dataclass(frozen=True)
class Width:
    """A size that depends on gates.

    Args:
        row: the axis of the ledger that has this size.
        dense: the size with all gates open.
    """

    row: int
    dense: int


@dataclass(frozen=True)
class TensorSpec:
    """The shape, dtype and device of a tensor. Some of its sizes are widths."""

    shape: tuple[int | Width, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def memory(self) -> Tensor:
        """Flat data for the dense tensor: random floats, or integers of 0, a valid index."""
        size = prod(n.dense if isinstance(n, Width) else n for n in self.shape)
        make = torch.rand if self.dtype.is_floating_point else torch.zeros
        return make(size, dtype=self.dtype, device=self.device)

    def tensor(self, sizes: dict[Width, int]) -> Tensor:
        """A tensor with these sizes, in the memory of the dense tensor."""
        shape = [sizes[n] if isinstance(n, Width) else n for n in self.shape]
        return self.memory[: prod(shape)].view(shape)


@dataclass(frozen=True)
class Operation:
    """One operator of a forward, which can run at other widths.

    Args:
        module: path of the module that calls it.
        target: the operator.
        args: its positional arguments, with a ``TensorSpec`` for each tensor.
        kwargs: its keyword arguments, likewise.
        selects: whether it is a selection of inputs. It runs only if its second width, the inputs
            read, is smaller than its first, the inputs that arrive.
    """

    module: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    selects: bool = False

    @property
    def widths(self) -> tuple[Width, ...]:
        """The distinct widths of its arguments, in order."""
        specs = [
            leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec)
        ]
        widths = [size for spec in specs for size in spec.shape if isinstance(size, Width)]
        return tuple(dict.fromkeys(widths))

    @cached_property
    def name(self) -> str:
        """The operator and its arguments, with letters for widths. Equal names take equal time.

        Example:
            >>> cpu = torch.device("cpu")
            >>> x = TensorSpec((8, Width(3, 20)), torch.float32, cpu)
            >>> weight = TensorSpec((Width(4, 10), Width(3, 20)), torch.float32, cpu)
            >>> Operation("fc", aten.linear.default, (x, weight), {}).name
            'linear.default(float32[8,a20], float32[b10,a20])'
        """
        letters = dict(zip(self.widths, ascii_lowercase, strict=False))

        def as_text(spec: TensorSpec) -> str:
            sizes = [
                f"{letters.get(n, '?')}{n.dense}" if isinstance(n, Width) else str(n)
                for n in spec.shape
            ]
            return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(sizes)}]"

        arguments = [*self.args, *(f"{key}={value}" for key, value in self.kwargs.items())]
        texts = [_as_text(tree_map_only(TensorSpec, as_text, part)) for part in arguments]
        return f"{str(self.target).removeprefix('aten.')}({', '.join(texts)})"

    def at(self, sizes: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, with tensors of numbers whose widths have these sizes."""
        known = dict(zip(self.widths, sizes, strict=True))
        args, kwargs = tree_map_only(
            TensorSpec, lambda s: s.tensor(known), (self.args, self.kwargs)
        )
        return self._with_groups(args), kwargs

    def _with_groups(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Set the number of groups of a depthwise convolution to the number of its maps."""
        x = self.args[0] if self.args else None
        if not str(self.target).startswith("aten.conv") or len(args) < 7:
            return args
        maps = x.shape[1] if isinstance(x, TensorSpec) else None
        if isinstance(maps, Width) and args[6] == maps.dense:
            return (*args[:6], args[0].shape[1], *args[7:])
        return args


def _as_text(part: Any) -> str:
    return f"[{', '.join(map(_as_text, part))}]" if isinstance(part, list | tuple) else str(part)


def operations(
    writer: LedgerWriter, model: nn.Module, example: ExampleInputs, batch: int
) -> list[Operation]:
    """All operators of one forward at a batch size, in order, views included.

    Args:
        writer: the ledger writer of the model, made for this batch size, or for 2 if it is 1.
        model: the model without gates.
        example: positional and keyword inputs.
        batch: the batch size.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> example = (torch.zeros(2, 4),), {}
        >>> writer = LedgerWriter(model, example, {("2.weight", 1): torch.arange(6)})
        >>> [one.name for one in operations(writer, model, example, batch=1)][1:]
        ['relu.default(float32[1,a6])', 'linear.default(float32[1,a6], float32[2,a6], float32[2])']
    """
    shapes = _shapes(writer, model, example, batch)

    def spec(node: fx.Node) -> Any:
        tensor = node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return tensor
        sizes = _sizes(writer, writer.labelled.values.get(node), shapes[node])
        return TensorSpec(sizes, tensor.dtype, tensor.device)

    result: list[Operation] = []
    for node in writer.labelled.values:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), spec)
            operation = Operation(module_path(node), node.target, tuple(args), dict(kwargs))
            result += _with_selection(writer, operation)
    return result


def _shapes(
    writer: LedgerWriter, model: nn.Module, example: ExampleInputs, batch: int
) -> dict[fx.Node, tuple[int, ...]]:
    """The shape of the result of each node.

    A batch of 1 cannot be traced. Its shapes are extrapolated from batches of 2 and 3.
    """
    traced = {
        node: concrete_shape(node.meta["val"])
        for node in writer.labelled.values
        if isinstance(node.meta.get("val"), Tensor)
    }
    if batch > 1:
        return traced
    three = resampled(example, batch_size(example), 3)
    nodes = propagate(trace(model, *three), model).values
    more = [concrete_shape(n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    return {
        node: tuple(2 * n - m for n, m in zip(shape, other, strict=True))
        for (node, shape), other in zip(traced.items(), more, strict=True)
    }


def _sizes(writer: LedgerWriter, value: Any, shape: tuple[int, ...]) -> tuple[int | Width, ...]:
    if not isinstance(value, Value):
        return shape
    sizes: list[int | Width] = list(shape)
    for part in value.components:
        roots = writer.labelled.state.labels.find(part.labels).flatten()
        for dim in part.dims:
            known = isinstance(sizes[dim], Width) or len(roots) != shape[dim]
            if not known and any(map(writer.alive.unit, roots.tolist())):
                sizes[dim] = Width(writer.row(roots), shape[dim])
    return tuple(sizes)


def _with_selection(writer: LedgerWriter, operation: Operation) -> list[Operation]:
    """The operator, after an index_select if its layer selects among its inputs."""
    selects = operation.target._opname in SELECTING_OPERATORS
    selection = writer.selection(operation.module) if selects else None
    if selection is None:
        return [operation]
    x, weight = operation.args[:2]
    dim = len(x.shape) - 1 - (len(weight.shape) - 2)
    dense = x.shape[dim] if isinstance(x.shape[dim], int) else x.shape[dim].dense
    arriving, read = (Width(row, dense) for row in selection)
    index = TensorSpec((read,), torch.int64, x.device)
    whole = replace(x, shape=_replace_size(x.shape, dim, arriving))
    chosen = replace(x, shape=_replace_size(x.shape, dim, read))
    cut = replace(weight, shape=_replace_size(weight.shape, 1, read))
    gather = Operation(operation.module, aten.index_select.default, (whole, dim, index), {}, True)
    return [gather, replace(operation, args=(chosen, cut, *operation.args[2:]))]


def _replace_size(shape: tuple[int | Width, ...], dim: int, size: Width) -> tuple[int | Width, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
