"""Trace a model into a graph of ATen operators without changing the model."""

import inspect
import logging
import operator
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hardconcrete.errors import TraceError
from hardconcrete.graph.model_state import in_mode, no_cache, no_fast_path

Sizes = Literal["fixed", "any batch", "any"]

TRACE_LOCK = threading.RLock()
"""Held during a trace, because torch.export and its switches are global to the process."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
    sizes: Sizes = "fixed",
) -> fx.GraphModule:
    """Return the model as a graph that shares the model's parameters.

    A language model is traced without its cache, if its configuration has ``use_cache``. If
    torch.export does not support an output, the graph returns the tensors inside it. Unless sizes
    are fixed such an output is an error, because the graph then replaces the model.

    Args:
        model: the model; whether it is in training or evaluation mode does not matter.
        args: positional example inputs.
        kwargs: keyword example inputs.
        training: trace the forward in training mode.
        sizes: which sizes of the inputs the graph takes: those of the examples, ``"any batch"``
            along dimension 0, or ``"any"`` along all dimensions where the model allows it. Tracing
            for other sizes takes three times as long.
    """
    args, kwargs = at_least_two_examples(_distinct((args, dict(kwargs or {}))))
    dynamic = sizes != "fixed"
    unpacked = nullcontext() if dynamic else _outputs_unpacked(model)
    try:
        dynamic_shapes = _dynamic_shapes(model, args, kwargs, sizes) if dynamic else None
        settings = _export_settings(model, training)
        with TRACE_LOCK, settings, _quiet_logs(), _faster_export(dynamic), unpacked:
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
        return _without_unused(program.module(check_guards=False))
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be traced by torch.export: {_explanation(error)}"
            f"{_mapping_hint(model, args, kwargs)}"
        ) from error


def _without_unused(graph: fx.GraphModule) -> fx.GraphModule:
    """Erase operators whose results nothing uses, such as the mean of weights over all heads.

    An operator that reads a parameter stays, because your forward calls its layer.
    """
    nodes = len(graph.graph.nodes)
    for node in reversed(list(graph.graph.nodes)):
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        pure = target is operator.getitem or (
            schema is not None and bool(schema.returns) and not schema.is_mutable
        )
        if not node.users and pure and all(n.op != "get_attr" for n in node.all_input_nodes):
            graph.graph.erase_node(node)
    if len(graph.graph.nodes) < nodes:
        graph.recompile()
    return graph


def _explanation(error: Exception) -> str:
    """The first line of an error of torch.export, with advice for the common causes."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "need to register a pytree" in lines[0]:
        return (
            f"{lines[0].split(', which')[0]}. A graph returns tensors, and lists, tuples and dicts "
            "of them: let the model return such outputs (many language models return no cache with "
            "use_cache=False among their inputs)"
        )
    if "data-dependent" not in str(error):
        return lines[0]
    return (
        f"{lines[0]}. The forward depends on values of its data (an `if` on a tensor, .item()), so "
        "one graph cannot represent it: use torch.where or torch.cond, or gate explicit sites "
        "(sites=['fc1:in']). Experts that a Hugging Face model computes in a loop can be traced "
        "after model.set_experts_implementation('batched_mm')"
    )


def _mapping_hint(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Advice where a mapping, which stands for keyword inputs, may be a single input."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        if kwargs and not args:
            return ". For a model that takes one mapping pass it in a tuple, (batch,)"
    return ""


@contextmanager
def _outputs_unpacked(model: nn.Module) -> Iterator[None]:
    """Make the model return the tensors inside an unsupported object instead of the object."""

    def unpacked(_: nn.Module, __: Any, output: Any) -> Any:
        return tree_map(lambda leaf: leaf if _can_be_returned(leaf) else _tensors_in(leaf), output)

    handle = model.register_forward_hook(unpacked)
    try:
        yield
    finally:
        handle.remove()


def _can_be_returned(leaf: Any) -> bool:
    """Whether torch.export supports this leaf as an output."""
    return isinstance(leaf, Tensor | bool | int | float | complex | str | None)


def _tensors_in(thing: Any) -> list[Tensor]:
    """All tensors inside an object, at any depth.

    Example:
        >>> from types import SimpleNamespace
        >>> _tensors_in(SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(2), seen=3)]))
        [tensor([1., 1.])]
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def visit(part: Any) -> None:
        for leaf in tree_leaves(part):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif id(leaf) not in seen and not isinstance(leaf, type | nn.Module):
                seen.add(id(leaf))
                visit(list(leaf) if isinstance(leaf, set | frozenset) else _attributes(leaf))

    visit(thing)
    return tensors


def _attributes(thing: Any) -> list[Any]:
    """The values of an object's attributes, slots included."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
    names = [name for entry in slots for name in ((entry,) if isinstance(entry, str) else entry)]
    values = [getattr(thing, name) for name in names if hasattr(thing, name)]
    return [*values, *getattr(thing, "__dict__", {}).values()]


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Disable the tracebacks that torch logs before it raises, and those stored for each node.

    Storing them takes time. Older versions of torch do not have that switch.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled, getattr(fx.config, "do_not_emit_stack_traces", False)
    logger.disabled = fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        logger.disabled, fx.config.do_not_emit_stack_traces = before


@contextmanager
def _faster_export(dynamic: bool) -> Iterator[None]:
    """Generate no Python code for intermediate graphs.

    With symbolic sizes, also disable the cache of operator results, which has hardly any hits.
    Other versions of torch may lack these switches.
    """
    from torch._dynamo import config
    from torch.fx import _lazy_graph_module as graphs

    with ExitStack() as switches:
        if hasattr(graphs, "_use_lazy_graph_module"):
            switches.enter_context(graphs._use_lazy_graph_module(True))
        if dynamic and hasattr(config, "fake_tensor_cache_enabled"):
            switches.enter_context(config.patch(fake_tensor_cache_enabled=False))
        yield


def _distinct(inputs: Any) -> Any:
    """Clone a tensor that occurs again, and one made in inference mode, which autograd refuses.

    Some forwards ask ``query is key``. The graph must hold for other inputs, too.
    """
    seen: set[int] = set()

    def distinct(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (id(leaf) not in seen and not leaf.is_inference()):
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    return tree_map(distinct, inputs)


def at_least_two_examples(inputs: Any) -> Any:
    """Repeat the inputs if their batch is 1: export would treat a size of 1 as a constant."""
    leaves, spec = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors or any(len(tensor) != 1 for tensor in tensors):
        return inputs
    doubled = [
        torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf in leaves
    ]
    return tree_unflatten(doubled, spec)


def _dynamic_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Sizes
) -> Any:
    """Let dimension 0 of every tensor vary, or all dimensions, where the model allows it."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return None
        dims = range(leaf.dim() if sizes == "any" else 1)
        return {dim: torch.export.Dim.AUTO for dim in dims if leaf.shape[dim] > 1}

    return tree_map(shape, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))


@contextmanager
def _export_settings(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode and switches for an export. Restore them and the random state afterwards."""
    random_state, warned = torch.random.fork_rng(devices=[]), warnings.catch_warnings()
    mode, uncached = in_mode(model, training), no_cache(model)
    with mode, uncached, no_fast_path(), random_state, torch.enable_grad(), warned:
        # recurrent layers list their weights twice, and export warns of a changed attribute
        warnings.filterwarnings("ignore", "The tensor attribute")
        yield
