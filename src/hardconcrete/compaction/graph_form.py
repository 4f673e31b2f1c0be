"""The graph form: the traced graph, with its sizes computed again for the kept units."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from hardconcrete.compaction.input_sizes import refuse_other_sizes_in
from hardconcrete.compaction.kept_sizes import kept_indices, size_after_cuts
from hardconcrete.compaction.module_form import copied_for_cuts, fold
from hardconcrete.errors import CompactionError
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.graph.propagate import (
    INNER_GRAPH_OPERATORS,
    LabelledGraph,
    first_names,
    named_tensors,
    operator_name,
    propagate,
)
from hardconcrete.graph.trace import Sizes, trace
from hardconcrete.graph.values import Value
from hardconcrete.units.liveness import Liveness
from hardconcrete.units.relations import Relations

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan


class _Specs:
    """How inputs and outputs are nested in each mode. All copies of a model share it."""

    def __init__(self) -> None:
        self.inputs: dict[bool, Any] = {}
        self.outputs: dict[bool, Any] = {}

    def __deepcopy__(self, _: Any) -> "_Specs":
        return self


class CompactedGraph(nn.Module):
    """A traced model with smaller tensors under their old names, for any batch size and length.

    A size that is a constant in the graph is checked: inputs of another one are refused.

    ``train()`` and ``eval()`` apply to the model as a whole: a layer cannot stay in evaluation mode
    inside a model in training. Save it with ``hc.save``; it cannot be pickled.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.training = source.training
        persistent = source.state_dict(keep_vars=True).keys()
        for name, parameter in source.named_parameters(remove_duplicate=False):
            path, attribute = _owner(self, name)
            path.register_parameter(attribute, parameter)
        for name, buffer in source.named_buffers(remove_duplicate=False):
            path, attribute = _owner(self, name)
            path.register_buffer(attribute, buffer, persistent=name in persistent)
        self._forwards: dict[bool, Callable[..., Any]] = {}
        self._specs = _Specs()

    @property
    def _in_spec(self) -> Any:
        """How the inputs are nested. The code that torch generates reads this name."""
        return self._specs.inputs[self.training]

    @property
    def _out_spec(self) -> Any:
        return self._specs.outputs[self.training]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The graph of the present mode."""
        if self.training not in self._forwards:
            raise CompactionError(
                "this graph is for inference: its model could not be traced in training mode; "
                "call eval() first"
            )
        return self._forwards[self.training](self, *args, **kwargs)

    def set_graph(self, training: bool, graph: fx.GraphModule) -> None:
        """Compute this graph in training or in evaluation mode."""
        self._forwards[training] = type(fx.GraphModule(graph, graph.graph)).forward
        self._specs.inputs[training] = graph._in_spec
        self._specs.outputs[training] = graph._out_spec


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor; it is made where it does not exist."""
    path, _, attribute = name.rpartition(".")
    for part in filter(None, path.split(".")):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root, attribute


def cut_graph(plan: "CompactionPlan", model: nn.Module, example: ExampleInputs) -> nn.Module:
    """The graph of a dense model, cut and scaled."""
    with copied_for_cuts(model) as dense:
        return _cut_graph(plan, dense, example)


def _cut_graph(plan: "CompactionPlan", dense: nn.Module, example: ExampleInputs) -> nn.Module:
    """The graph of a model. Its parameters become the cut ones."""
    small = CompactedGraph(dense)
    named = {*named_tensors(small), *(f"{path}.kept_inputs" for path in plan.selections)}
    sizes: Sizes = "any batch" if plan.fixed_sizes else "any"
    graphs = {False: trace(dense, *example, sizes=sizes)}
    read = _rewrite(plan, dense, graphs[False], small)
    try:
        graphs[True] = trace(dense, *example, training=True, sizes=sizes)
        _rewrite(plan, dense, graphs[True], small, read)
    except Exception:  # without a graph in training mode, this one is for inference
        graphs.pop(True, None)
    for training, graph in graphs.items():
        _register_constants(graph, small, named)
        small.set_graph(training, graph)
    fold(plan, dense)
    for path, kept in plan.selections.items():
        module = small.get_submodule(path)
        device = named_tensors(dense)[f"{path}.weight"].device
        module.register_buffer("kept_inputs", torch.tensor(kept, device=device))
    return small


def _rewrite(
    plan: "CompactionPlan",
    dense: nn.Module,
    graph: fx.GraphModule,
    small: nn.Module,
    read: set[str] | None = None,
) -> set[str]:
    """Rewrite a graph, in place, and return the names of the tensors that it reads.

    Args:
        plan: the plan.
        dense: the model.
        graph: its graph in one mode.
        small: gets the tensors of the graph.
        read: the tensors that the graph of the other mode reads.
    """
    names, found = first_names(dense), propagate(graph, dense)
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr" and node.users}
    _Rewriter(plan, found, _liveness_of(plan, found, read), graph, small).run()
    return {names.get(name, name) for name in used}


def _liveness_of(plan: "CompactionPlan", found: LabelledGraph, read: set[str] | None) -> Liveness:
    """The units that a plan removes: those without a kept index in the tensors it cuts.

    A tensor that only the graph in training reads has no cuts, although its units may be removed.
    """
    liveness = Liveness(found, Relations(found), {})
    removed: set[int] = set()
    unread: set[int] = set()  # by layers that select their inputs; others may read them
    staying: set[int] = set()
    unknown: set[int] = set()
    cuts = {(cut.tensor, cut.dim): cut for cut in plan.cuts}
    for place, roots in liveness.roots.items():
        if place in cuts:
            keeps = torch.zeros(len(roots), dtype=torch.bool)
            keeps[torch.tensor(cuts[place].kept, dtype=torch.int64)] = True
            selects = place[1] == 1 and place[0].removesuffix(".weight") in plan.selections
            (unread if selects else removed).update(roots[~keeps].tolist())
            staying |= set(roots[keeps].tolist())
        elif read is None or place[0] in read:
            staying |= set(roots.tolist())
        else:
            unknown |= set(roots.tolist())
    if removed & staying:
        raise CompactionError("the cuts of the plan disagree about which units are removed")
    liveness.dead = removed | (unread - staying)
    if liveness.dead & unknown:
        raise CompactionError("layers that are used in training only read units that were removed")
    return liveness


def _register_constants(graph: fx.GraphModule, small: nn.Module, named: set[str]) -> None:
    """Register the tensors that are written into a forward and belong to no module.

    Each graph has separate names: the two modes can use one name for different constants.
    """
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target not in named:
            constant = operator.attrgetter(node.target)(graph)
            if isinstance(constant, Tensor):
                node.target = _registered(graph, small, node.target, constant)
            elif isinstance(constant, fx.GraphModule):
                node.target = _added(graph, small, node.target, constant)
    graph.recompile()


def _added(graph: fx.GraphModule, small: nn.Module, wanted: str, inner: fx.GraphModule) -> str:
    """Add an inner graph, which has no parameters, and return its name."""
    name = f"_{wanted.replace('.', '_')}"
    while hasattr(small, name):
        name += "_"
    small.add_module(name, inner)
    graph.add_module(name, inner)
    return name


def _registered(graph: fx.GraphModule, small: nn.Module, wanted: str, constant: Tensor) -> str:
    """Register a tensor that is no part of the state, and return its name."""
    name = f"_{wanted.replace('.', '_')}"
    while hasattr(small, name):
        name += "_"
    small.register_buffer(name, constant, persistent=False)
    graph.register_buffer(name, constant)
    return name


class _Rewriter:
    def __init__(
        self,
        plan: "CompactionPlan",
        found: LabelledGraph,
        liveness: Liveness,
        graph: fx.GraphModule,
        small: nn.Module,
    ) -> None:
        self.plan, self.found, self.liveness, self.graph, self.small = (
            plan,
            found,
            liveness,
            graph,
            small,
        )

    def run(self) -> None:
        """Rewrite every node that has sizes in it."""
        for node in list(self.graph.graph.nodes):
            if node.op != "call_function":
                continue
            name = operator_name(node.target)
            if name in INNER_GRAPH_OPERATORS:
                self._refuse_cuts_inside(node)
            self._rewrite(node, name)
        self._select_inputs()
        refuse_other_sizes_in(self.graph)
        self.graph.graph.lint()
        self.graph.recompile()

    def _rewrite(self, node: fx.Node, name: str) -> None:
        if name in SIZED:
            self._sizes(node, SIZED[name])
            if name == "view":  # eager kernels may return other strides than traced ones
                node.target = torch.ops.aten.reshape.default
        elif name in SPLITS:
            self._split(node)
        elif name in ("slice", "narrow"):
            self._slice(node, name)
        elif name == "select":
            self._select_index(node)
        elif name in ("constant_pad_nd", "pad"):
            self._pad(node)
        elif name.startswith("conv") or name == "_convolution":
            self._groups(node)
            self._empty_conv(node)
        elif name == "group_norm":
            result = self._value(node)
            after = size_after_cuts(self.liveness, result, 1)
            put(node, "num_groups", get(node, "num_groups") * after // result.shape[1])
        elif name in NORMS and not size_after_cuts(self.liveness, self._value(node), 1):
            node.replace_all_uses_with(get(node, "input"))
            self.graph.graph.erase_node(node)

    def _refuse_cuts_inside(self, node: fx.Node) -> None:
        """An inner graph stays as it is, so nothing in it may have lost units."""
        for argument in node.all_input_nodes:
            is_read = argument.op == "get_attr"
            inner: Any = operator.attrgetter(str(argument.target))(self.graph) if is_read else None
            for each in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
                if self._has_cuts(self.found.values.get(each)):
                    raise CompactionError(
                        "a block under no_grad or autocast, from which units are removed, has no "
                        "graph form"
                    )

    def _has_cuts(self, value: Any) -> bool:
        """Whether a result, or one of several, loses indices."""
        if isinstance(value, list | tuple):
            return any(map(self._has_cuts, value))
        dead = torch.tensor(sorted(self.liveness.dead), dtype=torch.int64)
        find = self.found.state.labels.find
        return isinstance(value, Value) and any(
            bool(torch.isin(find(part.labels), dead).any()) for part in value.components
        )

    def _value(self, node: fx.Node) -> Value:
        return self.found.values[node]  # type: ignore[no-any-return]

    def _loses(self, node: fx.Node, dim: int) -> bool:
        """Whether a dimension loses indices. Other dimensions may have symbolic sizes."""
        return not kept_indices(self.liveness, self._value(node), dim).all()

    def _sizes(self, node: fx.Node, argument: str) -> None:
        """Replace the constants in the shape of a result."""
        result = self._value(node)
        sizes = list(get(node, argument))
        rank = len(result.shape) - len(sizes) + 1
        first = get(node, "dim") % rank if argument == "sizes" else 0
        new: list[Any] = []
        for k, size in enumerate(sizes):
            after = size_after_cuts(self.liveness, result, first + k)
            if isinstance(size, fx.Node):
                new.append(self._fraction(node, size, after, result.shape[first + k]))
            else:
                new.append(size if size == -1 else after)
        if 0 in new and new[0] == -1:
            new[0] = self._leading_size(node, result.shape[0])
        put(node, argument, new)

    def _leading_size(self, user: fx.Node, wanted: int) -> Any:
        """The product of leading sizes of what is reshaped: -1 is ambiguous without entries."""
        source: Any = get(user, "self")
        count, shape = 1, self._value(source).shape
        with self.graph.graph.inserting_before(user):
            size: Any = 1
            for dim, before in enumerate(shape):
                if count == wanted:
                    break
                count *= before
                each = self.graph.graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
                size = self.graph.graph.call_function(operator.mul, (size, each))
        return size if count == wanted else -1

    def _fraction(self, user: fx.Node, size: fx.Node, after: int, before: int) -> fx.Node:
        """A size that is a multiple of the batch, such as batch times heads, after the cuts."""
        if after == before:
            return size
        with self.graph.graph.inserting_before(user):
            times = self.graph.graph.call_function(operator.mul, (size, after))
            return self.graph.graph.call_function(operator.floordiv, (times, before))

    def _split(self, node: fx.Node) -> None:
        """Split into pieces of the sizes after the cuts."""
        pieces = self.found.values[node]
        source: Any = get(node, "self")
        rank = len(self._value(source).shape)
        dim = get(node, "dim") % rank
        if not self._loses(source, dim):
            return
        sizes = [size_after_cuts(self.liveness, piece, dim) for piece in pieces]
        node.target = torch.ops.aten.split_with_sizes.default
        node.args, node.kwargs = (source, sizes, dim), {}

    def _slice(self, node: fx.Node, name: str) -> None:
        source: Any = get(node, "self")
        value = self._value(source)
        dim = get(node, "dim") % len(value.shape)
        if not self._loses(source, dim):
            return
        size, start = value.shape[dim], get(node, "start") or 0
        if name == "narrow":
            indices = torch.arange(size)[start : start + get(node, "length")]
        else:
            indices = torch.arange(size)[slice(start, get(node, "end"), get(node, "step"))]
        self.select(node, source, dim, indices)

    def select(self, node: fx.Node, source: fx.Node, dim: int, indices: Tensor) -> None:
        """Select the kept ones of some indices, at their new positions."""
        kept = kept_indices(self.liveness, self._value(source), dim)
        positions = (kept.cumsum(0) - 1)[indices[kept[indices]]]
        start = int(positions[0]) if len(positions) else 0
        if torch.equal(positions, torch.arange(start, start + len(positions))):
            node.target = torch.ops.aten.slice.Tensor
            node.args, node.kwargs = (source, dim, start, start + len(positions)), {}
            return
        name = f"positions_{node.name}"
        device = next((p.device for p in self.small.parameters() if not p.is_meta), None)
        self.graph.register_buffer(name, positions.to(device))
        with self.graph.graph.inserting_before(node):
            index = self.graph.graph.get_attr(name)
        node.target = torch.ops.aten.index_select.default
        node.args, node.kwargs = (source, dim, index), {}

    def _select_index(self, node: fx.Node) -> None:
        source: Any = get(node, "self")
        value = self._value(source)
        dim = get(node, "dim") % len(value.shape)
        if not self._loses(source, dim):
            return
        kept = kept_indices(self.liveness, value, dim)
        index = get(node, "index") % value.shape[dim]
        put(node, "index", int(kept[:index].sum()))

    def _pad(self, node: fx.Node) -> None:
        result = self._value(node)
        pads = list(get(node, "pad"))
        for k in range(0, len(pads), 2):
            dim = len(result.shape) - 1 - k // 2
            if self._loses(node, dim):
                kept = kept_indices(self.liveness, result, dim)
                pads[k], pads[k + 1] = (
                    int(kept[: pads[k]].sum()),
                    int(kept[len(kept) - pads[k + 1] :].sum()),
                )
        put(node, "pad", pads)

    def _groups(self, node: fx.Node) -> None:
        """Set the groups of a depthwise convolution to its number of maps."""
        groups = get(node, "groups")
        value = self._value(node.args[0])  # type: ignore[arg-type]
        weight = self._value(get(node, "weight"))
        channel = len(value.shape) - len(weight.shape) + 1
        if groups > 1 and groups == value.shape[channel]:
            put(node, "groups", size_after_cuts(self.liveness, value, channel))

    def _empty_conv(self, node: fx.Node) -> None:
        """Replace a convolution without maps, which torch refuses, by its bias everywhere."""
        weight, result = self._value(get(node, "weight")), self._value(node)
        after = [size_after_cuts(self.liveness, weight, dim) for dim in (0, 1)]
        channel = len(result.shape) - len(weight.shape) + 1
        if all(after) or channel != 1:
            return
        source, bias = get(node, "input"), get(node, "bias")
        sizes: list[Any] = [size_after_cuts(self.liveness, result, 1), *result.shape[2:]]
        aten, graph = torch.ops.aten, self.graph.graph
        with graph.inserting_before(node):
            batch = graph.call_function(aten.sym_size.int, (source, 0))
            made = graph.call_function(aten.new_zeros.default, (source, [batch, *sizes]))
            if bias is not None:
                shape = [sizes[0], *[1] * (len(weight.shape) - 2)]
                along = graph.call_function(aten.view.default, (bias, shape))
                made = graph.call_function(aten.add.Tensor, (made, along))
        self.found.values[made] = result
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    def _select_inputs(self) -> None:
        """Let layers read some of their inputs only."""
        for node in list(self.graph.graph.nodes):
            path = str(node.target).removesuffix(".weight")
            if node.op == "get_attr" and node.target == f"{path}.weight":
                for user in list(node.users) if path in self.plan.selections else ():
                    self._select_before(user, path)

    def _select_before(self, user: fx.Node, path: str) -> None:
        source: Any = user.args[0]
        spatial = len(self._value(get(user, "weight")).shape) - 2
        dim = len(self._value(source).shape) - 1 - spatial
        self.graph.get_submodule(path).register_buffer("kept_inputs", torch.zeros(1))
        with self.graph.graph.inserting_before(user):
            index = self.graph.graph.get_attr(f"{path}.kept_inputs")
            select = torch.ops.aten.index_select.default
            selected = self.graph.graph.call_function(select, (source, dim, index))
        user.update_arg(0, selected)


SIZED = {
    **dict.fromkeys(["view", "expand", "_unsafe_view", "new_zeros", "new_ones", "new_full",
                     "zeros", "ones", "full", "empty", "new_empty", "broadcast_to"], "size"),
    "reshape": "shape",
    "unflatten": "sizes",
}  # fmt: skip
"""Operators with the shape of their result among their arguments, and the name of that one."""

NORMS = ("batch_norm", "instance_norm")
"""Norms with separate statistics for each channel, which torch refuses without channels."""

SPLITS = (
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
)  # fmt: skip


def _position(node: fx.Node, name: str) -> int:
    target: Any = node.target
    return [argument.name for argument in target._schema.arguments].index(name)


def get(node: fx.Node, name: str) -> Any:
    """The argument of a node with this name in the schema."""
    target: Any = node.target
    place = _position(node, name)
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, target._schema.arguments[place].default_value)


def put(node: fx.Node, name: str, value: Any) -> None:
    """Replace an argument of a node."""
    place = _position(node, name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)
