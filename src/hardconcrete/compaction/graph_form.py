"""The graph form: the traced graph with every size in it recomputed from the units that stay."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from hardconcrete.compaction.module_form import fold
from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.planner import kept_indices, size_after_cuts
from hardconcrete.compaction.verify import Inputs
from hardconcrete.errors import CompactionError
from hardconcrete.graph.propagate import (
    INNER_GRAPH_OPERATORS,
    LabelledGraph,
    first_names,
    named_tensors,
    operator_name,
    propagate,
)
from hardconcrete.graph.trace import trace
from hardconcrete.graph.values import Value
from hardconcrete.units.liveness import Liveness
from hardconcrete.units.relations import Relations


class _Specs:
    """How inputs and outputs are nested in each mode: the same for all copies of a model."""

    def __init__(self) -> None:
        self.inputs: dict[bool, Any] = {}
        self.outputs: dict[bool, Any] = {}

    def __deepcopy__(self, _: Any) -> "_Specs":
        return self


class CompactedGraph(nn.Module):
    """A traced model with smaller tensors, under the names they had; for any batch size.

    It follows ``train()`` and ``eval()`` like the model it was made from, as a whole: a layer that
    was in evaluation inside a model in training is not told apart. It is saved with ``hc.save``,
    not pickled.
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
        """How the inputs are nested; the generated code asks for it under this name."""
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


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, made if it is not there."""
    path, _, attribute = name.rpartition(".")
    for part in filter(None, path.split(".")):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root, attribute


def cut_graph(plan: CompactionPlan, model: nn.Module, example: Inputs) -> nn.Module:
    """A dense model as a graph, cut and scaled."""
    dense = copy.deepcopy(model)
    small = CompactedGraph(dense)
    known = {*named_tensors(small), *(f"{path}.kept_inputs" for path in plan.selections)}
    graphs = {False: trace(dense, *example, any_batch=True)}
    seen = _rewrite(plan, dense, graphs[False], small)
    try:
        graphs[True] = trace(dense, *example, training=True, any_batch=True)
        _rewrite(plan, dense, graphs[True], small, seen)
    except Exception:  # a model may have no graph in training mode: then this one is for inference
        graphs.pop(True, None)
    for training, graph in graphs.items():
        _take_constants(graph, small, known)
        small._forwards[training] = type(fx.GraphModule(graph, graph.graph)).forward
        small._specs.inputs[training] = graph._in_spec
        small._specs.outputs[training] = graph._out_spec
    fold(plan, dense)
    for path, kept in plan.selections.items():
        module = small.get_submodule(path)
        device = named_tensors(dense)[f"{path}.weight"].device
        module.register_buffer("kept_inputs", torch.tensor(kept, device=device))
    return small


def _rewrite(
    plan: CompactionPlan,
    dense: nn.Module,
    graph: fx.GraphModule,
    small: nn.Module,
    seen: set[str] | None = None,
) -> set[str]:
    """Rewrite a graph, in place; the names of the tensors that it reads."""
    names, found = first_names(dense), propagate(graph, dense)
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr" and node.users}
    _Rewriter(plan, found, _dead_by_plan(plan, found, seen), graph, small).run()
    return {names.get(name, name) for name in used}


def _dead_by_plan(plan: CompactionPlan, found: LabelledGraph, seen: set[str] | None) -> Liveness:
    """The dead, as a plan has them: labels with no index that stays in tensors that it has seen."""
    liveness = Liveness(found, Relations(found), {})
    removed: set[int] = set()
    staying: set[int] = set()
    unseen: set[int] = set()
    cuts = {(cut.tensor, cut.dim): cut for cut in plan.cuts}
    for place, roots in liveness.roots.items():
        if place in cuts:
            keeps = torch.zeros(len(roots), dtype=torch.bool)
            keeps[torch.tensor(cuts[place].kept, dtype=torch.int64)] = True
            removed |= set(roots[~keeps].tolist())
            staying |= set(roots[keeps].tolist())
        elif seen is None or place[0] in seen:
            staying |= set(roots.tolist())
        else:
            unseen |= set(roots.tolist())
    liveness.dead = removed - staying
    if liveness.dead & unseen:
        raise CompactionError("layers that are used in training only read units that went")
    return liveness


def _take_constants(graph: fx.GraphModule, small: nn.Module, known: set[str]) -> None:
    """Tensors written into the forward belong to no module: keep them beside the others.

    Each graph gets names of its own: with the same name the two modes may mean other constants.
    """
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target not in known:
            constant = operator.attrgetter(node.target)(graph)
            if isinstance(constant, Tensor):
                node.target = _kept_beside(graph, small, node.target, constant)
    graph.recompile()


def _kept_beside(graph: fx.GraphModule, small: nn.Module, wanted: str, constant: Tensor) -> str:
    """Register a tensor that is no part of the state, under a free name."""
    name = f"_{wanted.replace('.', '_')}"
    while hasattr(small, name):
        name += "_"
    small.register_buffer(name, constant, persistent=False)
    graph.register_buffer(name, constant)
    return name


class _Rewriter:
    def __init__(
        self,
        plan: CompactionPlan,
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
                raise CompactionError("a block under no_grad or autocast has no graph form")
            self._rewrite(node, name)
        self._select()
        self.graph.graph.lint()
        self.graph.recompile()

    def _rewrite(self, node: fx.Node, name: str) -> None:
        if name in SIZED:
            self._sizes(node, SIZED[name])
            if name == "view":  # eager kernels may lay results out otherwise than tracing thinks
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

    def _value(self, node: fx.Node) -> Value:
        return self.found.values[node]  # type: ignore[no-any-return]

    def _sizes(self, node: fx.Node, argument: str) -> None:
        """Constants in the shape of a result."""
        result = self._value(node)
        sizes = list(get(node, argument))
        rank = len(result.shape) - len(sizes) + 1
        first = get(node, "dim") % rank if argument == "sizes" else 0
        new = [
            size
            if isinstance(size, fx.Node) or size == -1
            else size_after_cuts(self.liveness, result, first + k)
            for k, size in enumerate(sizes)
        ]
        put(node, argument, new)

    def _split(self, node: fx.Node) -> None:
        """Pieces of the sizes that they have now."""
        pieces = self.found.values[node]
        source: Any = get(node, "self")
        rank = len(self._value(source).shape)
        dim = get(node, "dim") % rank
        sizes = [size_after_cuts(self.liveness, piece, dim) for piece in pieces]
        node.target = torch.ops.aten.split_with_sizes.default
        node.args, node.kwargs = (source, sizes, dim), {}

    def _slice(self, node: fx.Node, name: str) -> None:
        source: Any = get(node, "self")
        value = self._value(source)
        dim = get(node, "dim") % len(value.shape)
        if not value.components_along(dim):
            return
        size, start = value.shape[dim], get(node, "start") or 0
        if name == "narrow":
            chosen = torch.arange(size)[start : start + get(node, "length")]
        else:
            chosen = torch.arange(size)[slice(start, get(node, "end"), get(node, "step"))]
        self.take(node, source, dim, chosen)

    def take(self, node: fx.Node, source: fx.Node, dim: int, chosen: Tensor) -> None:
        """Those of the chosen indices that stay, at their new places."""
        kept = kept_indices(self.liveness, self._value(source), dim)
        places = (kept.cumsum(0) - 1)[chosen[kept[chosen]]]
        start = int(places[0]) if len(places) else 0
        if torch.equal(places, torch.arange(start, start + len(places))):
            node.target = torch.ops.aten.slice.Tensor
            node.args, node.kwargs = (source, dim, start, start + len(places)), {}
            return
        name = f"places_{node.name}"
        device = next((p.device for p in self.small.parameters() if not p.is_meta), None)
        self.graph.register_buffer(name, places.to(device))
        with self.graph.graph.inserting_before(node):
            index = self.graph.graph.get_attr(name)
        node.target = torch.ops.aten.index_select.default
        node.args, node.kwargs = (source, dim, index), {}

    def _select_index(self, node: fx.Node) -> None:
        source: Any = get(node, "self")
        value = self._value(source)
        dim = get(node, "dim") % len(value.shape)
        kept = kept_indices(self.liveness, value, dim)
        index = get(node, "index") % value.shape[dim]
        put(node, "index", int(kept[:index].sum()))

    def _pad(self, node: fx.Node) -> None:
        result = self._value(node)
        pads = list(get(node, "pad"))
        for k in range(0, len(pads), 2):
            dim = len(result.shape) - 1 - k // 2
            if result.components_along(dim):
                kept = kept_indices(self.liveness, result, dim)
                pads[k], pads[k + 1] = (
                    int(kept[: pads[k]].sum()),
                    int(kept[len(kept) - pads[k + 1] :].sum()),
                )
        put(node, "pad", pads)

    def _groups(self, node: fx.Node) -> None:
        """A depthwise convolution has as many groups as maps."""
        groups = get(node, "groups")
        value = self._value(node.args[0])  # type: ignore[arg-type]
        weight = self._value(get(node, "weight"))
        channel = len(value.shape) - len(weight.shape) + 1
        if groups > 1 and groups == value.shape[channel]:
            put(node, "groups", size_after_cuts(self.liveness, value, channel))

    def _select(self) -> None:
        """Layers that read some of their inputs only."""
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
            chosen = self.graph.graph.call_function(select, (source, dim, index))
        user.update_arg(0, chosen)


SIZED = {
    **dict.fromkeys(["view", "expand", "_unsafe_view", "new_zeros", "new_ones", "new_full",
                     "zeros", "ones", "full", "empty", "new_empty", "broadcast_to"], "size"),
    "reshape": "shape",
    "unflatten": "sizes",
}  # fmt: skip
"""Operators that are told the shape of their result, and the argument that tells it."""

SPLITS = (
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
)  # fmt: skip


def _position(node: fx.Node, name: str) -> int:
    target: Any = node.target
    return [argument.name for argument in target._schema.arguments].index(name)


def get(node: fx.Node, name: str) -> Any:
    """An argument of a node by its name in the schema."""
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
