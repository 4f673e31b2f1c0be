"""Arguments and results of a call of a gated model."""

import inspect
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.errors import ArgumentError

SAMPLES = Parameter("samples", Parameter.KEYWORD_ONLY, default=None, annotation=int | None)


def signed_class(kind: Any, model: nn.Module) -> Any:
    """A class of gated models whose ``forward`` has the signature of the model's forward.

    Trainers use it to drop unused columns of a data set. ``inspect`` reads signatures from classes.
    """
    kind = getattr(kind, "unsigned", kind)
    try:
        signature = _with_samples(inspect.signature(model.forward))
    except (TypeError, ValueError):  # forwards that are not written in Python have none
        return kind
    try:
        found = _signed.get((kind, signature))
        if found is None:
            found = _signed[kind, signature] = _signed_class(kind, signature)
    except TypeError:  # a default that cannot be hashed
        return _signed_class(kind, signature)
    return found


_signed: WeakValueDictionary[tuple[Any, Signature], Any] = WeakValueDictionary()
"""The classes in use. A default of a signature may hold the model: no class outlives its models."""


def _with_samples(signature: Signature) -> Signature:
    """With ``self``, and ``samples=`` where the model has no parameter of that name."""
    parameters = [*signature.parameters.values()]
    if "samples" not in signature.parameters:
        last = len(parameters)
        if parameters and parameters[-1].kind is Parameter.VAR_KEYWORD:
            last -= 1
        parameters.insert(last, SAMPLES)
    return signature.replace(parameters=[Parameter("self", Parameter.POSITIONAL_ONLY), *parameters])


def _signed_class(kind: Any, signature: Signature) -> Any:
    plain: Any = kind.forward
    forward: Any = FunctionType(
        plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__kwdefaults__, forward.__doc__ = plain.__kwdefaults__, plain.__doc__
    forward.__qualname__, forward.__module__ = plain.__qualname__, plain.__module__
    forward.__signature__ = signature
    members = {"forward": forward, "unsigned": kind, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, "__doc__": kind.__doc__})


def stack(*outputs: Any) -> Any:
    """One leaf of the outputs of several draws."""
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs)
    simple = isinstance(outputs[0], bool | int | float | str | None)
    if not simple or any(output != outputs[0] for output in outputs):
        raise ArgumentError(
            "samples=... stacks tensors, also in tuples, lists and dicts, and the model returned a "
            f"{type(outputs[0]).__name__} that differs between draws: call the model once for each"
        )
    return outputs[0]


def examples_in(args: Any, kwargs: Any) -> int:
    """The batch size of a call."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ArgumentError("sample='example' needs a tensor input whose dimension 0 is the batch")
