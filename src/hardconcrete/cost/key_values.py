"""Find the keys and values of attention, which a cache holds for each token.

A product of two tensors, then a softmax, then a product with a third tensor is attention. The
third tensor has the values. The keys are the factor of the first product whose positions the last
product sums over. Fused attention names both.

A copy counts as what it copies, so grouped queries count their keys once, before they are expanded.
The same rules run on the tensors of a forward and on the nodes of a traced graph.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hardconcrete.graph.propagate import LabelledGraph, concrete_shape, operator_name
from hardconcrete.graph.values import Value

FUSED = "scaled_dot_product"
"""Part of the names of fused attention, whose first tensors are query, key and value."""

SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "addmm", "linear", "mv", "addmv", "einsum")
COPIES = ("index_select", "index", "repeat_interleave")
"""Operators of two tensors that copy parts of the first one."""


@dataclass(frozen=True, eq=False)
class Source:
    """The tensor with the fewest entries that another one is a copy of.

    Args:
        tensor: ``id`` of it.
        entries: how many it has.
        bytes: of all of them.
        learned: whether it depends on parameters alone, so that no cache holds it.
    """

    tensor: int
    entries: int
    bytes: int
    learned: bool


@dataclass(frozen=True)
class Product:
    """A product of two tensors: their sources, and how many positions each gives the result."""

    factors: tuple[Source, Source]
    positions: tuple[int, int]


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Args:
        source: what it is a copy of.
        product: the product that it is computed from, if it may be the scores of attention.
        softmaxed: whether a softmax was taken since.
    """

    source: Source
    product: Product | None = None
    softmaxed: bool = False


class KeyValues:
    """Follows the operators of a forward, and collects the keys and values.

    Attributes:
        found: the keys and values, with the number of their positions.
        unclear: whether there is attention whose keys could not be told from its queries.
    """

    def __init__(self) -> None:
        self.found: dict[Source, int] = {}
        self.unclear = False
        self._origins: Any = WeakTensorKeyDictionary()

    def bytes_per_token(self, examples: int) -> int | None:
        """The bytes of all keys and values at one position of one example; None if unclear."""
        sizes = [divmod(each.bytes, examples * at) for each, at in self.found.items()]
        if self.unclear or any(rest for _, rest in sizes):
            return None
        return sum(size for size, _ in sizes)

    def follow(self, target: Any, arguments: Any, result: Any) -> None:
        """Take note of one operator.

        Args:
            target: the operator.
            arguments: its arguments, in any structure.
            result: its result, likewise.
        """
        leaves = tree_leaves(arguments)
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = operator_name(target)
        if FUSED in name and len(operands) > 2:
            for each in operands[1:3]:
                self._add(self._origin(each).source, concrete_shape(each)[-2])
        elif name in PRODUCTS and results:
            equation = next((leaf for leaf in leaves if isinstance(leaf, str)), None)
            self._multiply(name, operands, equation, results[0])
        elif operands:
            self._carry(target, name, operands, results)

    def alias(self, tensor: Tensor, same: Tensor) -> None:
        """Two objects stand for one tensor, as in a graph that picks one of several results."""
        self._origins[tensor] = self._origin(same)

    def _origin(self, tensor: Tensor) -> Origin:
        known: Origin | None = self._origins.get(tensor)
        if known is None:
            learned = isinstance(tensor, nn.Parameter)
            known = self._origins[tensor] = Origin(_source(tensor, learned))
        return known

    def _new(self, tensor: Tensor, operands: Sequence[Tensor]) -> Source:
        learned = all(self._origin(each).source.learned for each in operands)
        return _source(tensor, bool(operands) and learned)

    def _add(self, source: Source, positions: int) -> None:
        if not source.learned:
            self.found[source] = positions

    def _carry(
        self, target: Any, name: str, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Results come from the same product as the operands, and may be copies of one."""
        origins = [self._origin(each) for each in operands]
        main = next((each for each in origins if each.product or each.softmaxed), origins[0])
        softmaxed = main.softmaxed or name in SOFTMAX
        for each in results:
            source = self._copied(target, name, operands, each) or self._new(each, operands)
            self._origins[each] = Origin(source, main.product, softmaxed)

    def _copied(
        self, target: Any, name: str, operands: Sequence[Tensor], result: Tensor
    ) -> Source | None:
        """What the result is a copy of, or is computed from entry by entry."""
        sources = [self._origin(each).source for each in operands]
        entries = _entries(result)
        if len(operands) == 1 or name in COPIES:
            return sources[0] if sources[0].entries <= entries else None
        if torch.Tag.pointwise not in getattr(target, "tags", ()):
            return None
        largest = max(sources, key=lambda each: each.entries)
        expanded = largest.entries < entries == max(map(_entries, operands))
        return largest if expanded else None

    def _multiply(
        self, name: str, operands: Sequence[Tensor], equation: str | None, result: Tensor
    ) -> None:
        if name in ("baddbmm", "addmm", "addmv"):
            operands = operands[1:]
        if len(operands) < 2:
            return
        first, second = operands[0], operands[1]
        one, two = self._origin(first), self._origin(second)
        source = self._new(result, [first, second])
        if name == "linear" or min(first.dim(), second.dim()) < 3:  # it mixes heads at most
            product, softmaxed = one.product, one.product is not None and one.softmaxed
            self._origins[result] = Origin(source, product, softmaxed)
            return
        outer, summed = _sizes(first, second, equation)
        if one.softmaxed == two.softmaxed:
            self._origins[result] = Origin(source, Product((one.source, two.source), outer))
            return
        weights, values = (one, two) if one.softmaxed else (two, one)
        self._attend(weights.product, values.source, summed)
        self._origins[result] = Origin(source)

    def _attend(self, product: Product | None, values: Source, positions: int) -> None:
        """Add the values, and as keys the factor of the scores that has as many positions.

        Where both have, the keys are not the larger one. A softmax of no product is no attention:
        experts are weighted like that.
        """
        if product is None:
            return
        pairs = [*zip(product.factors, product.positions, strict=True)]
        fitting = [factor for factor, at in reversed(pairs) if at == positions]
        if not fitting:
            self.unclear = True
            return
        self._add(min(fitting, key=lambda each: (each.learned, each.entries)), positions)
        self._add(values, positions)


def _source(tensor: Tensor, learned: bool = False) -> Source:
    entries = _entries(tensor)
    return Source(id(tensor), entries, entries * tensor.element_size(), learned)


def _entries(tensor: Tensor) -> int:
    return prod(concrete_shape(tensor))


def _sizes(first: Tensor, second: Tensor, equation: str | None) -> tuple[tuple[int, int], int]:
    """How many positions each factor gives the result, and how many are summed over."""
    one, two = concrete_shape(first), concrete_shape(second)
    if equation is None or "." in equation or "->" not in equation:
        outer = (one[-2] if len(one) > 1 else 1), (two[-1] if len(two) > 1 else 1)
        return outer, one[-1]
    left, right = equation.replace(" ", "").split("->")[0].split(",")
    kept = equation.replace(" ", "").split("->")[1]
    sizes = {**dict(zip(left, one, strict=True)), **dict(zip(right, two, strict=True))}
    summed = {*left} & {*right} - {*kept}
    of_one, of_two = (
        prod(sizes[each] for each in {*letters} - {*others} if each in kept)
        for letters, others in ((left, right), (right, left))
    )
    return (of_one, of_two), prod(sizes[each] for each in summed)


def key_values(labelled: LabelledGraph) -> tuple[KeyValues, dict[int, Value]]:
    """The keys and values of a traced graph, and the labels of its tensors by their ``id``."""
    known, tensors, labels = KeyValues(), dict[fx.Node, Any](), dict[int, Value]()
    for node, value in labelled.values.items():
        result = node.meta.get("val")
        if node.op == "get_attr" and isinstance(value, Value):
            result = nn.Parameter(torch.empty(value.shape, device="meta"))
        tensors[node] = result
        arguments = fx.map_arg((node.args, node.kwargs), tensors.get)
        if node.target is operator.getitem:
            _alias(known, arguments[0], result)
        elif node.op == "call_function":
            known.follow(node.target, arguments, result)
        pairs = zip(_listed(result), _listed(value), strict=False)
        labels |= {id(a): b for a, b in pairs if isinstance(b, Value)}
    return known, labels


def _alias(known: KeyValues, arguments: Any, result: Any) -> None:
    container, index = arguments
    if isinstance(result, Tensor) and isinstance(container, list | tuple):
        known.alias(result, container[index])


def _listed(result: Any) -> list[Any]:
    return [*result] if isinstance(result, list | tuple) else [result]
