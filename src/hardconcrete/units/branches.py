"""Groups that can lose all their units: the model still gets from its inputs to its outputs.

These are the insides of branches: of a residual block, an attention, one of several towers. What
is left of a branch is a constant, the biases behind it. A group on the only way through the model
keeps a unit, since all outputs would become constants.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from hardconcrete.graph.operators.reduction import REDUCE_DIM
from hardconcrete.graph.operators.sampling import POOLING, RESIZING_AND_PADDING
from hardconcrete.graph.propagate import operator_name
from hardconcrete.graph.values import Value
from hardconcrete.units.analysis import Analysis

REFUSE_EMPTY = frozenset(
    [
        *POOLING,
        *(f"{pool}_with_indices" for pool in POOLING),
        *RESIZING_AND_PADDING,
        *(set(REDUCE_DIM) - {"sum", "nansum", "mean"}),
        "instance_norm",
        "group_norm",
        "_weight_norm",
        "_weight_norm_interface",
        "pixel_shuffle",
        "pixel_unshuffle",
    ]
)
"""Operators that torch does not compute for tensors without entries."""


def groups_that_can_go(analysis: Analysis) -> frozenset[str]:
    """Names of groups that can all lose all their units together, found in the order of groups.

    Example:
        >>> import hardconcrete as hc
        >>> class Residual(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.stem, self.up, self.down, self.head = (
        ...             torch.nn.Linear(*sizes) for sizes in [(4, 5), (5, 9), (9, 5), (5, 3)]
        ...         )
        ...     def forward(self, x):
        ...         x = self.stem(x)
        ...         return self.head(x + self.down(self.up(x).relu()))
        >>> sorted(groups_that_can_go(hc.find_groups(Residual(), torch.zeros(2, 4))))
        ['up']
    """
    paths = _Paths(analysis)
    chosen: set[str] = set()
    for name in analysis.names:
        if paths.remain_without({*chosen, name}):
            chosen.add(name)
    return frozenset(chosen)


class _Paths:
    """The way of data from the inputs to the outputs of a traced model."""

    def __init__(self, analysis: Analysis) -> None:
        labels = analysis.labelled.state.labels
        number = torch.full((labels.size,), -1)
        self.numbers = {name: k for k, name in enumerate(analysis.names)}
        for name, roots in analysis.units_by_root.items():
            number[torch.tensor(roots, dtype=torch.int64)] = self.numbers[name]
        self.nodes = list(analysis.labelled.values)
        self.output = next(iter(self.nodes[0].graph.find_nodes(op="output")))
        self.dims = {
            node: [_groups_along(number[labels.find(part.labels)]) for part in _parts(value)]
            for node, value in analysis.labelled.values.items()
        }
        self.dense = self._reached(set())

    def remain_without(self, names: set[str]) -> bool:
        """Whether all outputs still depend on the inputs, and torch computes what is left."""
        closed = {self.numbers[name] for name in names}
        return self._reached(closed) == self.dense and not any(
            operator_name(node.target) in REFUSE_EMPTY and self._has_empty(node, closed)
            for node in self.nodes
            if node.op == "call_function"
        )

    def _has_empty(self, node: fx.Node, closed: set[int]) -> bool:
        return any(self._is_empty(argument, closed) for argument in node.all_input_nodes)

    def _is_empty(self, node: fx.Node, closed: set[int]) -> bool:
        """Whether a dimension of a result has units of these groups only."""
        return any(groups <= closed for groups in self.dims.get(node, ()))

    def _reached(self, closed: set[int]) -> list[bool]:
        """Whether each output depends on the inputs, through tensors that have entries."""
        reached: set[fx.Node] = set()
        for node in self.nodes:
            from_input = node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
            reads_input = any(argument in reached for argument in node.all_input_nodes)
            if (from_input or reads_input) and not self._is_empty(node, closed):
                reached.add(node)
        return [leaf in reached for leaf in tree_leaves(self.output.args[0])]


def _parts(value: Any) -> Iterator[Any]:
    """The components of a result; of several results, none: those that follow have theirs."""
    if isinstance(value, Value):
        yield from value.components


def _groups_along(numbers: Tensor) -> frozenset[int]:
    """The groups of all units along a dimension; -1 stands for units without a group."""
    return frozenset(numbers.unique().tolist())
