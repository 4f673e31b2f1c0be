"""Propagation: label all parameters, and carry the labels through every operator."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.graph.operators import RULES
from hardconcrete.graph.operators.creation import CONSTANT
from hardconcrete.graph.operators.pointwise import pointwise
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

ASSERT_OPERATORS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")
"""Operators without a result that only check a property of their arguments."""

INNER_GRAPH_OPERATORS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that run an inner graph: a block under no_grad or autocast."""


@dataclass
class LabelledGraph:
    """A graph with labels for all its tensors.

    Args:
        state: labels and contractions.
        values: the labelled result of every node.
        tensors: the labelled parameters and buffers that the graph reads, by their first name.
    """

    state: PropagationState = field(default_factory=PropagationState)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    tensors: dict[str, Value] = field(default_factory=dict)

    def roots(self) -> dict[tuple[str, int], Tensor]:
        """The root of each index along each dimension of the parameters and buffers."""
        return {
            (name, dim): self.state.labels.find(part.labels.reshape(-1))
            for name, value in self.tensors.items()
            for part in value.components
            for dim in part.dims
        }


def propagate(
    graph: fx.GraphModule, model: nn.Module, *, input_features: bool = False
) -> LabelledGraph:
    """Label all parameters and unite labels until every unit can be cut out of every tensor.

    Args:
        graph: the traced model.
        model: its parameters and buffers are labelled.
        input_features: label the features of the inputs too, along dimension 1.
    """
    labelled = LabelledGraph()
    names = first_names(model)
    owners = named_tensors(model)

    def read(target: str) -> Value:
        name = names.get(target, target)
        if name not in labelled.tensors:
            tensor = owners.get(name)
            if tensor is None:
                constant: Any = operator.attrgetter(target)(graph)
                return Value(tuple(constant.shape), (), True, CONSTANT)
            labelled.tensors[name] = _new_value(labelled.state, name, tensor)
        return labelled.tensors[name]

    _GraphVisitor(labelled, read, input_features).run(graph, None)
    labelled.state.settle_shared_entries()
    _make_all_sliceable(labelled)
    return labelled


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(model).items()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, shared ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _new_value(state: PropagationState, name: str, tensor: Tensor) -> Value:
    """Label a parameter or buffer: each index of each dimension gets a label."""
    parts = []
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            labels = state.labels.fresh(size)
            shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
            gateable = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            parts.append(Component(labels.reshape(shape), (name, dim) if gateable else None))
    return Value(tuple(tensor.shape), tuple(parts), True)


@dataclass
class _GraphVisitor:
    """Visits the nodes of a graph and applies the rule of each operator."""

    labelled: LabelledGraph
    read: Callable[[str], Value]
    input_features: bool

    def run(self, graph: fx.GraphModule, inputs: list[Any] | None) -> Any:
        """Visit every node. An inner graph takes the inputs of the node that calls it."""
        remaining = iter(inputs or [])
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                value = next(remaining) if inputs is not None else self._input(node)
            elif node.op == "get_attr":
                target: Any = operator.attrgetter(node.target)(graph)
                inner = isinstance(target, nn.Module)
                value = target if inner else self.read(node.target)
            elif node.op == "output":
                return self._output(node, outermost=inputs is None)
            else:
                value = self._call_result(node)
            self.labelled.values[node] = value
        return None

    def _input(self, node: fx.Node) -> Any:
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            return example
        shape = concrete_shape(example)
        value = Value(shape, why_rigid=f"the model's input {node.target}")
        if self.input_features and example.is_floating_point() and len(shape) > 1:
            state = self.labelled.state
            labels = state.labels.fresh(shape[1])
            sizes = [-1 if d == 1 else 1 for d in range(len(shape))]
            value = Value(shape, (Component(labels.reshape(sizes)),))
            self.labelled.tensors[f"input:{node.target}"] = value
        return value

    def _output(self, node: fx.Node, *, outermost: bool) -> Any:
        results = self._values_of(node.args[0])
        if outermost:
            self.labelled.state.call = None
            for leaf in tree_leaves(results, is_leaf=lambda x: isinstance(x, Value)):
                if isinstance(leaf, Value):
                    self.labelled.state.fix(leaf, "the model's output")
        return results

    def _call_result(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            container = self.labelled.values[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            return container[index] if isinstance(container, list | tuple) else container
        name = operator_name(node.target)
        if name in INNER_GRAPH_OPERATORS:
            arguments = [self._values_of(argument) for argument in node.args]
            first = next(k for k, a in enumerate(arguments) if isinstance(a, fx.GraphModule))
            return self.run(arguments[first], arguments[first + 1 :])
        if not isinstance(node.target, torch._ops.OpOverload) or name == "sym_size":
            return self._fix_without_rule(node, name)
        if name in ASSERT_OPERATORS:
            return None
        return self._apply_rule(node, name)

    def _apply_rule(self, node: fx.Node, name: str) -> Any:
        call = self._operator_call(node, name)
        state = self.labelled.state
        state.call = call
        rule = RULES.get(name)
        if rule is None and torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            rule = pointwise
        if rule is None:
            return self._fix_without_rule(node, name)
        if not call.values and not call.shapes:
            return None
        try:
            return rule(state, call)
        except Exception as error:  # the rule does not cover this use of the operator
            return self._fix_without_rule(
                node, name, f"its rule does not know this use of it ({error!r})"
            )

    def _fix_without_rule(
        self, node: fx.Node, name: str, text: str = "this operator has no rule"
    ) -> Any:
        """Fix the units of all arguments: without a rule, nothing about the result is known."""
        example = node.meta.get("val")
        state = self.labelled.state
        arguments = self._values_of([*node.args, *node.kwargs.values()])
        values = [v for v in tree_leaves(arguments, is_leaf=_is_value) if isinstance(v, Value)]
        state.call = OperatorCall(name, {}, (), module_path(node), torch.empty)
        if name != "sym_size":
            for value in values:
                state.fix(value, text)
        if isinstance(example, list | tuple):
            return [Value(concrete_shape(e)) if isinstance(e, Tensor) else e for e in example]
        return Value(concrete_shape(example)) if isinstance(example, Tensor) else concrete(example)

    def _operator_call(self, node: fx.Node, name: str) -> OperatorCall:
        target: Any = node.target
        passed = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
        passed |= node.kwargs
        arguments = {
            argument.name: self._values_of(passed[argument.name])
            if argument.name in passed
            else argument.default_value
            for argument in target._schema.arguments
        }
        example = node.meta.get("val")
        examples = example if isinstance(example, list | tuple) else [example]
        shapes = tuple(concrete_shape(e) for e in examples if isinstance(e, Tensor))
        return OperatorCall(name, arguments, shapes, module_path(node), target)

    def _values_of(self, argument: Any) -> Any:
        """Replace every node inside an argument by its result."""
        if isinstance(argument, fx.Node):
            return self.labelled.values[argument]
        if isinstance(argument, list | tuple):
            return [self._values_of(part) for part in argument]
        if isinstance(argument, dict):
            return {key: self._values_of(part) for key, part in argument.items()}
        return argument


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def operator_name(target: Any) -> str:
    """The name without overload and without the underscore of in-place operators.

    ``aten.relu_.default`` is ``relu``.
    """
    name = str(getattr(target, "_opname", None) or getattr(target, "__name__", target))
    inplace = name.endswith("_") and not name.endswith("__")
    return name[:-1] if inplace else name


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that called the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    return "" if path.startswith("_empty") else str(path)


def concrete(number: Any) -> Any:
    """The value of a symbolic size for the example inputs; 2 for a size that depends on data."""
    if not isinstance(number, torch.SymInt):
        return number
    if number.node.hint is not None:
        return number.node.hint
    symbols: Any = number.node.expr
    return int(symbols.subs(dict.fromkeys(symbols.free_symbols, 2)))


def concrete_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor for the example inputs, without symbols."""
    return tuple(concrete(size) for size in tensor.shape)


def _make_all_sliceable(labelled: LabelledGraph) -> None:
    """Make all tensors sliceable. Repeat, since labels united in one tensor lie in others too."""
    changed = True
    while changed:
        changed = False
        for value in _all_values(labelled):
            parts = labelled.state.simplified(value).components
            if any(len(part.dims) > 1 for part in parts):
                labelled.state.make_sliceable(value)
                changed = True
    simplified = labelled.state.simplified
    labelled.values = {
        node: _map_values(simplified, value) for node, value in labelled.values.items()
    }


def _map_values(change: Callable[[Value], Value], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_map_values(change, part) for part in value]
    return change(value) if isinstance(value, Value) else value


def _all_values(labelled: LabelledGraph) -> list[Value]:
    results = [*labelled.values.values(), *labelled.tensors.values()]
    return [v for v in tree_leaves(results, is_leaf=_is_value) if isinstance(v, Value)]
