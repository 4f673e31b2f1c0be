"""Tracing a model into a graph of ATen operators, without changing anything in it."""

import inspect
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hardconcrete.errors import TraceError
from hardconcrete.graph.model_state import in_mode, no_fast_path

ALONE = threading.RLock()
"""One trace at a time: torch.export and its switches are of the whole process."""


def as_args(example_inputs: Any) -> tuple[Any, ...]:
    """Positional inputs, from a tuple or list of them or from a single one."""
    many = isinstance(example_inputs, tuple | list)
    return tuple(example_inputs) if many else (example_inputs,)


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
    any_batch: bool = False,
) -> fx.GraphModule:
    """The model as a graph; its parameters are the model's own.

    Of an output that torch.export does not know, such as the cache of a language model, the graph
    returns the tensors inside. With ``any_batch`` the graph stands for the model, so it is refused.

    Args:
        model: what is traced; its own modes do not matter.
        args: positional example inputs.
        kwargs: example inputs by keyword.
        training: as the model computes in training.
        any_batch: let the graph run at any batch size, which takes three times as long.
    """
    args, kwargs = at_least_two(tree_map(_trainable, (args, dict(kwargs or {}))))
    dynamic = _dynamic(model, args, kwargs) if any_batch else None
    opened = nullcontext() if any_batch else _outputs_opened(model)
    try:
        with ALONE, _undisturbed(model, training), _quiet(), _quick(any_batch), opened:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
        return program.module(check_guards=False)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be traced by torch.export: {_in_words(error)}"
            f"{_about_keywords(args)}"
        ) from error


def _in_words(error: Exception) -> str:
    """What went wrong, and what to do where the forward decides by its data."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "need to register a pytree" in lines[0]:
        return (
            f"{lines[0].split(', which')[0]}. A graph returns tensors, and lists, tuples and dicts "
            "of them: let the model return such outputs (a language model returns no cache with "
            "model.config.use_cache = False)"
        )
    if "data-dependent" not in str(error):
        return lines[0]
    return (
        f"{lines[0]}. A forward that decides by the values of its data (an `if` on a tensor, "
        ".item()) has no one graph: use torch.where or torch.cond, or gate explicit sites "
        "(sites=['fc1:in'])"
    )


def _about_keywords(args: tuple[Any, ...]) -> str:
    """What to do where inputs by keyword may have been passed as the example inputs."""
    if len(args) == 1 and (args[0] is None or hasattr(args[0], "keys")):
        return ". Inputs by keyword go into kwargs: example_inputs=(), kwargs=batch"
    return ""


@contextmanager
def _outputs_opened(model: nn.Module) -> Iterator[None]:
    """While this lasts, the model returns the tensors inside an object instead of the object."""

    def opened(_: nn.Module, __: Any, output: Any) -> Any:
        return tree_map(lambda leaf: leaf if _is_simple(leaf) else _tensors_in(leaf), output)

    handle = model.register_forward_hook(opened)
    try:
        yield
    finally:
        handle.remove()


def _is_simple(leaf: Any) -> bool:
    """Whether a graph can return it."""
    return isinstance(leaf, Tensor | bool | int | float | complex | str | None)


def _tensors_in(thing: Any) -> list[Tensor]:
    """All tensors that an object holds, wherever they are.

    Example:
        >>> from types import SimpleNamespace
        >>> _tensors_in(SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(2), seen=3)]))
        [tensor([1., 1.])]
    """
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(one: Any) -> None:
        for leaf in tree_leaves(one):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and not isinstance(leaf, type | nn.Module):
                seen.add(id(leaf))
                visit(list(leaf) if isinstance(leaf, set | frozenset) else _attributes(leaf))

    visit(thing)
    return found


def _attributes(thing: Any) -> list[Any]:
    """The values of an object's attributes, also where its class lists them in slots."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    values = [getattr(thing, name) for name in names if hasattr(thing, name)]
    return [*values, *getattr(thing, "__dict__", {}).values()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracebacks that torch logs before it raises what we put in words.

    And without one for every node, which nobody reads and which take time; older versions of torch
    do not have the switch.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled, getattr(fx.config, "do_not_emit_stack_traces", False)
    logger.disabled = fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        logger.disabled, fx.config.do_not_emit_stack_traces = before


@contextmanager
def _quick(any_batch: bool) -> Iterator[None]:
    """Without Python code for graphs that only lead to another one.

    And, where sizes are symbols, without remembering what each operator gives: hardly any comes
    again. Other versions of torch may not have these switches.
    """
    from torch._dynamo import config
    from torch.fx import _lazy_graph_module as graphs

    with ExitStack() as switches:
        if hasattr(graphs, "_use_lazy_graph_module"):
            switches.enter_context(graphs._use_lazy_graph_module(True))
        if any_batch and hasattr(config, "fake_tensor_cache_enabled"):
            switches.enter_context(config.patch(fake_tensor_cache_enabled=False))
        yield


def _trainable(leaf: Any) -> Any:
    """A copy of what was made in inference mode, which has no gradients outside of it."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def at_least_two(inputs: Any) -> Any:
    """Inputs whose batch is no single example: a traced size of 1 would be taken for a constant."""
    leaves, spec = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors or any(len(tensor) != 1 for tensor in tensors):
        return inputs
    twice = [
        torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf in leaves
    ]
    return tree_unflatten(twice, spec)


def _dynamic(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Dimension 0 of every tensor may vary, as far as the model lets it."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return tree_map(
        lambda leaf: (
            {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None
        ),
        dict(bound),
    )


@contextmanager
def _undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """In one mode, whatever mode the model is in; random numbers and switches as before."""
    random, warned = torch.random.fork_rng(devices=[]), warnings.catch_warnings()
    with in_mode(model, training), no_fast_path(), random, torch.enable_grad(), warned:
        # recurrent layers list their weights a second time, which export takes for a change
        warnings.filterwarnings("ignore", "The tensor attribute")
        yield
