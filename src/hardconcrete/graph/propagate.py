"""A walk over a graph: labels for all parameters, carried through every operator."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.graph.operators import RULES
from hardconcrete.graph.operators.pointwise import pointwise
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

SILENT = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")
INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Blocks under no_grad or autocast: a graph of their own inside the graph."""


@dataclass
class LabelledGraph:
    """What a walk found.

    Args:
        scope: labels and contractions.
        values: what is known of the result of every node.
        tensors: parameters and buffers that are read, by their first name.
    """

    scope: Scope = field(default_factory=Scope)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    tensors: dict[str, Value] = field(default_factory=dict)

    def roots(self) -> dict[tuple[str, int], Tensor]:
        """What each index along each dimension of a parameter or buffer is one with."""
        return {
            (name, dim): self.scope.labels.find(part.labels.reshape(-1))
            for name, value in self.tensors.items()
            for part in value.components
            for dim in part.dims
        }


def propagate(
    graph: fx.GraphModule, model: nn.Module, *, input_features: bool = False
) -> LabelledGraph:
    """Carry labels through the graph until no tensor has units that cannot be cut out of it."""
    found = LabelledGraph()
    names = first_names(model)
    owners = named_tensors(model)

    def read(target: str) -> Value:
        name = names.get(target, target)
        if name not in found.tensors:
            tensor = owners.get(name)
            if tensor is None:
                constant: Any = operator.attrgetter(target)(graph)
                return Value(tuple(constant.shape), (), True)
            found.tensors[name] = _labelled(found.scope, name, tensor)
        return found.tensors[name]

    _Propagation(found, read, input_features).run(graph, None)
    _make_rectangular(found)
    return found


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the first name that the same tensor has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(model).items()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _labelled(scope: Scope, name: str, tensor: Tensor) -> Value:
    """A parameter or buffer: every index of every dimension on its own."""
    parts = []
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            labels = scope.labels.fresh(size)
            shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
            gateable = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            parts.append(Component(labels.reshape(shape), (name, dim) if gateable else None))
    return Value(tuple(tensor.shape), tuple(parts), True)


@dataclass
class _Propagation:
    found: LabelledGraph
    read: Callable[[str], Value]
    input_features: bool

    def run(self, graph: fx.GraphModule, inputs: list[Any] | None) -> Any:
        """Visit every node; inner graphs get their inputs from the node that calls them."""
        given = iter(inputs or [])
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                value = next(given) if inputs is not None else self._input(node)
            elif node.op == "get_attr":
                target: Any = operator.attrgetter(node.target)(graph)
                inner = isinstance(target, nn.Module)
                value = target if inner else self.read(node.target)
            elif node.op == "output":
                return self._output(node, outermost=inputs is None)
            else:
                value = self._called(node)
            self.found.values[node] = value
        return None

    def _input(self, node: fx.Node) -> Any:
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            return example
        shape = concrete_shape(example)
        value = Value(shape, why=f"the model's input {node.target}")
        if self.input_features and example.is_floating_point() and len(shape) > 1:
            scope = self.found.scope
            labels = scope.labels.fresh(shape[1])
            sizes = [-1 if d == 1 else 1 for d in range(len(shape))]
            value = Value(shape, (Component(labels.reshape(sizes)),))
            self.found.tensors[f"input:{node.target}"] = value
        return value

    def _output(self, node: fx.Node, *, outermost: bool) -> Any:
        results = self._looked_up(node.args[0])
        if outermost:
            self.found.scope.call = None
            for leaf in tree_leaves(results, is_leaf=lambda x: isinstance(x, Value)):
                if isinstance(leaf, Value):
                    self.found.scope.fix(leaf, "the model's output")
        return results

    def _called(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            container = self.found.values[node.args[0]]  # type: ignore[index]
            place: Any = node.args[1]
            return container[place] if isinstance(container, list | tuple) else container
        name = operator_name(node.target)
        if name in INLINED:
            arguments = [self._looked_up(argument) for argument in node.args]
            at = next(k for k, a in enumerate(arguments) if isinstance(a, fx.GraphModule))
            return self.run(arguments[at], arguments[at + 1 :])
        if not isinstance(node.target, torch._ops.OpOverload) or name == "sym_size":
            return self._unknown(node, name)
        if name in SILENT:
            return None
        return self._by_rule(node, name)

    def _by_rule(self, node: fx.Node, name: str) -> Any:
        call = self._call(node, name)
        scope = self.found.scope
        scope.call = call
        rule = RULES.get(name)
        if rule is None and torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            rule = pointwise
        if rule is None:
            return self._unknown(node, name)
        if not call.values and not call.shapes:
            return None
        try:
            return rule(scope, call)
        except Exception as error:  # a use of the operator that its rule does not foresee
            return self._unknown(node, name, f"its rule does not know this use of it ({error!r})")

    def _unknown(self, node: fx.Node, name: str, text: str = "this operator has no rule") -> Any:
        """Nothing is guessed: numbers stay numbers, units of tensors are fixed."""
        example = node.meta.get("val")
        scope = self.found.scope
        arguments = self._looked_up([*node.args, *node.kwargs.values()])
        values = [v for v in tree_leaves(arguments, is_leaf=_is_value) if isinstance(v, Value)]
        scope.call = Call(name, {}, (), module_path(node), torch.empty)
        if name != "sym_size":
            for value in values:
                scope.fix(value, text)
        if isinstance(example, list | tuple):
            return [Value(concrete_shape(e)) if isinstance(e, Tensor) else e for e in example]
        return Value(concrete_shape(example)) if isinstance(example, Tensor) else concrete(example)

    def _call(self, node: fx.Node, name: str) -> Call:
        target: Any = node.target
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
        given |= node.kwargs
        arguments = {
            argument.name: self._looked_up(given[argument.name])
            if argument.name in given
            else argument.default_value
            for argument in target._schema.arguments
        }
        example = node.meta.get("val")
        examples = example if isinstance(example, list | tuple) else [example]
        shapes = tuple(concrete_shape(e) for e in examples if isinstance(e, Tensor))
        return Call(name, arguments, shapes, module_path(node), target)

    def _looked_up(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.found.values[argument]
        if isinstance(argument, list | tuple):
            return [self._looked_up(part) for part in argument]
        if isinstance(argument, dict):
            return {key: self._looked_up(part) for key, part in argument.items()}
        return argument


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def operator_name(target: Any) -> str:
    """``aten.relu_.default`` is relu: what works in place has the same rule."""
    name = str(getattr(target, "_opname", None) or getattr(target, "__name__", target))
    inplace = name.endswith("_") and not name.endswith("__")
    return name[:-1] if inplace else name


def module_path(node: fx.Node) -> str:
    """The module whose forward called the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    return "" if path.startswith("_empty") else str(path)


def concrete(number: Any) -> Any:
    """A symbolic number as it was for the example; 2 stands for a size that the data decide."""
    if not isinstance(number, torch.SymInt):
        return number
    if number.node.hint is not None:
        return number.node.hint
    symbols: Any = number.node.expr
    return int(symbols.subs(dict.fromkeys(symbols.free_symbols, 2)))


def concrete_shape(tensor: Tensor) -> tuple[int, ...]:
    """A shape without symbols."""
    return tuple(concrete(size) for size in tensor.shape)


def _make_rectangular(found: LabelledGraph) -> None:
    """Until nothing changes, for what is united in one tensor is finer than allowed in another."""
    changed = True
    while changed:
        changed = False
        for value in _all_values(found):
            parts = found.scope.settled(value).components
            if any(len(part.dims) > 1 for part in parts):
                found.scope.rectangular(value)
                changed = True
    settled = found.scope.settled
    found.values = {node: _mapped(settled, value) for node, value in found.values.items()}


def _mapped(change: Callable[[Value], Value], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(change, part) for part in value]
    return change(value) if isinstance(value, Value) else value


def _all_values(found: LabelledGraph) -> list[Value]:
    results = [*found.values.values(), *found.tensors.values()]
    return [v for v in tree_leaves(results, is_leaf=_is_value) if isinstance(v, Value)]
