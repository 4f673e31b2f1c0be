"""Products of parameters and gates, without a second copy of the parameters.

Operators save their factors for backward. Of a product of a weight and its gates that would be a
second copy of the weight. Two things avoid it: gates that are all 1 give the weight itself, and in
modules without children the product is computed again in backward.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., Any]


class _OpenGates(torch.autograd.Function):
    """A parameter times gates that are all 1: the parameter, with the gradient of the gates."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(parameter, z)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        parameter, z = ctx.saved_tensors
        (slope,) = gradients
        dz = (slope * parameter).sum_to_size(z.shape) if ctx.needs_input_grad[1] else None
        return slope * z if torch.is_grad_enabled() else slope, dz  # for gradients of gradients


def times_open_gates(parameter: Tensor, z: Tensor) -> Tensor:
    """``parameter * z`` where all gates are 1."""
    if not z.requires_grad:
        return parameter
    if torch._C._functorch.maybe_current_level() is not None:
        return parameter * z
    result: Tensor = _OpenGates.apply(parameter, z)  # type: ignore[no-untyped-call]
    return result


def times_gates(parameter: Tensor, z: Tensor) -> Tensor:
    """``parameter * z``, which a forward of ``recomputes_products`` saves as its factors."""
    product = parameter * z
    now = _running.forward
    if now is not None and product.requires_grad and type(product) is Tensor:
        now.add(product, parameter, z)
    return product


def recomputes_products(forward: Forward) -> Forward:
    """A forward of a module without children that computes such products again in backward.

    Not where other hooks are in force, such as those of activation checkpointing, or a transform
    of ``torch.func``: they decide themselves what is saved. Compiled code recomputes by itself.
    """

    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _may_recompute():
            return forward(*args, **kwargs)
        outer = _running.forward
        with _Recomputing() as _running.forward:
            try:
                return forward(*args, **kwargs)
            finally:
                _running.forward = outer

    return recomputing


def _may_recompute() -> bool:
    hooks = torch._C._autograd
    return (
        torch.is_grad_enabled()
        and hooks._saved_tensors_hooks_is_enabled()
        and hooks._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.maybe_current_level() is None
    )


class _Recomputing:
    """The products of one forward; the hooks are there from the first one on."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._hooks: graph.saved_tensors_hooks | None = None

    def __enter__(self) -> "_Recomputing":
        return self

    def __exit__(self, *_: object) -> None:
        self._products.clear()  # the graph keeps the hooks
        if self._hooks is not None:
            self._hooks.__exit__()

    def add(self, product: Tensor, parameter: Tensor, z: Tensor) -> None:
        """Save this product as its factors from now on."""
        if self._hooks is None:
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()
        before = next((factors for known, factors in self._products if known is parameter), None)
        self._products.append((product, (*(before or (parameter,)), z)))

    def _pack(self, saved: Tensor) -> "_Saved":
        for product, factors in self._products:
            same = saved.data_ptr() == product.data_ptr() and saved.numel() == product.numel()
            if same and product.numel():
                return _Saved(factors, (saved.size(), saved.stride()))
        return _Saved((saved,))


class _Saved:
    """A tensor that backward needs, or factors of which it is the product."""

    __slots__ = ("_factors", "_layout", "_versions")

    def __init__(self, factors: tuple[Tensor, ...], layout: Any = None) -> None:
        self._factors = tuple(each.detach() for each in factors)  # with their version counters
        self._versions = [each._version for each in factors]
        self._layout = layout

    def tensor(self) -> Tensor:
        """The tensor; refused where it was changed since, as torch does."""
        if [each._version for each in self._factors] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {[*self._factors[0].shape]} or its gates "
                "changed between forward and backward; call backward before optimizer.step()"
            )
        result = self._factors[0]
        with torch.no_grad():
            for z in self._factors[1:]:
                result = result * z
        return result if self._layout is None else result.as_strided(*self._layout)


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()


class _Running(threading.local):
    forward: _Recomputing | None = None


_running = _Running()
"""The forward that runs now in this thread."""
