"""What one forward runs: every operator, with the sizes of its tensors that gates can change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hardconcrete.cost.example_inputs import Inputs, batch_size, resampled
from hardconcrete.cost.ledger_writer import LedgerWriter
from hardconcrete.graph.propagate import concrete_shape, module_path, propagate
from hardconcrete.graph.trace import trace
from hardconcrete.graph.values import Value

aten = torch.ops.aten

READERS = ("conv1d", "conv2d", "linear")
"""Operators of layers that can select among their inputs."""


@dataclass(frozen=True)
class Width:
    """A size that depends on gates.

    Args:
        row: its number among the sizes of the ledger.
        dense: what it is with all gates open.
    """

    row: int
    dense: int


@dataclass(frozen=True)
class Spec:
    """A tensor without data: sizes, some of them widths."""

    shape: tuple[int | Width, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def memory(self) -> Tensor:
        """Numbers for the dense tensor; integers are 0, valid as any index."""
        size = prod(n.dense if isinstance(n, Width) else n for n in self.shape)
        make = torch.rand if self.dtype.is_floating_point else torch.zeros
        return make(size, dtype=self.dtype, device=self.device)

    def made(self, sizes: dict[Width, int]) -> Tensor:
        """A tensor with these sizes, in the memory of the dense one."""
        shape = [sizes[n] if isinstance(n, Width) else n for n in self.shape]
        return self.memory[: prod(shape)].view(shape)


@dataclass(frozen=True)
class Operation:
    """One operator of a forward, which can be run at other widths.

    Args:
        module: path of the module it happens in.
        target: the operator.
        args: its arguments, with a ``Spec`` for every tensor.
        kwargs: those by keyword.
        selects: whether it only runs where less is read than arrives, its two widths.
    """

    module: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    selects: bool = False

    @property
    def widths(self) -> tuple[Width, ...]:
        """Its different widths, in the order of its arguments."""
        specs = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Spec)]
        found = [size for spec in specs for size in spec.shape if isinstance(size, Width)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def name(self) -> str:
        """What runs, with letters for widths: equal names take equal time.

        Example:
            >>> cpu = torch.device("cpu")
            >>> x = Spec((8, Width(3, 20)), torch.float32, cpu)
            >>> weight = Spec((Width(4, 10), Width(3, 20)), torch.float32, cpu)
            >>> Operation("fc", aten.linear.default, (x, weight), {}).name
            'linear.default(float32[8,a20], float32[b10,a20])'
        """
        letters = dict(zip(self.widths, ascii_lowercase, strict=False))

        def worded(spec: Spec) -> str:
            sizes = [
                f"{letters.get(n, '?')}{n.dense}" if isinstance(n, Width) else str(n)
                for n in spec.shape
            ]
            return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(sizes)}]"

        given = [*self.args, *(f"{key}={value}" for key, value in self.kwargs.items())]
        words = [_written(tree_map_only(Spec, worded, part)) for part in given]
        return f"{str(self.target).removeprefix('aten.')}({', '.join(words)})"

    def at(self, sizes: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with its widths at these sizes, filled with numbers."""
        known = dict(zip(self.widths, sizes, strict=True))
        args, kwargs = tree_map_only(Spec, lambda s: s.made(known), (self.args, self.kwargs))
        return self._regrouped(args), kwargs

    def _regrouped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A depthwise convolution has as many groups as maps."""
        x = self.args[0] if self.args else None
        if not str(self.target).startswith("aten.conv") or len(args) < 7:
            return args
        maps = x.shape[1] if isinstance(x, Spec) else None
        if isinstance(maps, Width) and args[6] == maps.dense:
            return (*args[:6], args[0].shape[1], *args[7:])
        return args


def _written(part: Any) -> str:
    return f"[{', '.join(map(_written, part))}]" if isinstance(part, list | tuple) else str(part)


def operations(
    writer: LedgerWriter, model: nn.Module, example: Inputs, batch: int
) -> list[Operation]:
    """Every operator that runs in one forward at a batch size, in order, views too.

    Args:
        writer: of the ledger, made with as many examples, but at least two.
        model: without gates.
        example: inputs.
        batch: the number of examples.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> example = (torch.zeros(2, 4),), {}
        >>> writer = Writer(model, example, {("2.weight", 1): torch.arange(6)})
        >>> [one.name for one in operations(writer, model, example, batch=1)][1:]
        ['relu.default(float32[1,a6])', 'linear.default(float32[1,a6], float32[2,a6], float32[2])']
    """
    shapes = _shapes(writer, model, example, batch)

    def spec(node: fx.Node) -> Any:
        tensor = node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return tensor
        sizes = _sizes(writer, writer.walk.values.get(node), shapes[node])
        return Spec(sizes, tensor.dtype, tensor.device)

    found: list[Operation] = []
    for node in writer.walk.values:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), spec)
            one = Operation(module_path(node), node.target, tuple(args), dict(kwargs))
            found += _selecting(writer, one)
    return found


def _shapes(
    writer: LedgerWriter, model: nn.Module, example: Inputs, batch: int
) -> dict[fx.Node, tuple[int, ...]]:
    """Of the result of every node. One example is not traced as such: it is where two leads to."""
    own = {
        node: concrete_shape(node.meta["val"])
        for node in writer.walk.values
        if isinstance(node.meta.get("val"), Tensor)
    }
    if batch > 1:
        return own
    three = resampled(example, batch_size(example), 3)
    others = propagate(trace(model, *three), model).values
    more = [concrete_shape(n.meta["val"]) for n in others if isinstance(n.meta.get("val"), Tensor)]
    return {
        node: tuple(2 * n - m for n, m in zip(shape, other, strict=True))
        for (node, shape), other in zip(own.items(), more, strict=True)
    }


def _sizes(writer: LedgerWriter, value: Any, shape: tuple[int, ...]) -> tuple[int | Width, ...]:
    if not isinstance(value, Value):
        return shape
    sizes: list[int | Width] = list(shape)
    for part in value.components:
        roots = writer.walk.state.labels.find(part.labels).flatten()
        for dim in part.dims:
            known = isinstance(sizes[dim], Width) or len(roots) != shape[dim]
            if not known and any(map(writer.alive.unit, roots.tolist())):
                sizes[dim] = Width(writer.row(roots), shape[dim])
    return tuple(sizes)


def _selecting(writer: LedgerWriter, one: Operation) -> list[Operation]:
    """Before a layer that selects among its inputs, that it does so."""
    found = writer.selection(one.module) if one.target._opname in READERS else None
    if found is None:
        return [one]
    x, weight = one.args[:2]
    dim = len(x.shape) - 1 - (len(weight.shape) - 2)
    dense = x.shape[dim] if isinstance(x.shape[dim], int) else x.shape[dim].dense
    arriving, read = (Width(row, dense) for row in found)
    index = Spec((read,), torch.int64, x.device)
    whole = replace(x, shape=_with(x.shape, dim, arriving))
    chosen = replace(x, shape=_with(x.shape, dim, read))
    cut = replace(weight, shape=_with(weight.shape, 1, read))
    gather = Operation(one.module, aten.index_select.default, (whole, dim, index), {}, True)
    return [gather, replace(one, args=(chosen, cut, *one.args[2:]))]


def _with(shape: tuple[int | Width, ...], dim: int, size: Width) -> tuple[int | Width, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
