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
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., Any]


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation runs."""
    transform = torch._C._functorch.maybe_current_level() is not None
    return transform or forward_ad._current_level >= 0


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
    result: Tensor = _OpenGates.apply(parameter, z)  # type: ignore[no-untyped-call]
    return result


def times_gates(parameter: Tensor, z: Tensor) -> Tensor:
    """``parameter * z``, which a forward of ``recomputes_products`` saves as its factors."""
    product = parameter * z
    now = _running.forward
    if now is not None and product.requires_grad and not _will_be_cast(product):
        now.add(product, parameter, z)
    return product


def _will_be_cast(product: Tensor) -> bool:
    """Whether autocast saves a copy in another precision, as of a weight without gates."""
    autocast = torch.is_autocast_enabled(product.device.type)
    return autocast and product.dtype == torch.float32


def recomputes_products(forward: Forward) -> Forward:
    """A forward of a module without children that computes such products again in backward.

    Not where other hooks are in force, such as those of activation checkpointing, or a transform
    of ``torch.func``: they decide themselves what is saved. Compiled code recomputes by itself.
    """

    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        outer, now = _running.forward, _Recomputing()
        _running.forward = now
        try:
            return forward(*args, **kwargs)
        finally:
            _running.forward = outer
            if now.hooks is not None:
                now.close()

    return recomputing


def _may_recompute() -> bool:
    hooks: Any = torch._C._autograd
    return (
        hooks._saved_tensors_hooks_is_enabled()
        and hooks._top_saved_tensors_default_hooks(True) is None
        and not is_transformed()
    )


class _Recomputing:
    """The products of one forward, and the hooks that save them, from the first one on."""

    def __init__(self) -> None:
        self.hooks: saved_tensors_hooks | None = None
        self._products: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    @_disable_dynamo
    def add(self, product: Tensor, parameter: Tensor, z: Tensor) -> None:
        """Save this product as its factors from now on."""
        if self.hooks is None:
            if not _may_recompute() or type(product) is not Tensor:
                return
            self.hooks = saved_tensors_hooks(self._pack, _unpack)
            self.hooks.__enter__()
        before = next((factors for known, factors in self._products if known is parameter), None)
        self._products.append((product, (*(before or (parameter,)), z)))

    def close(self) -> None:
        """Take the hooks off. The graph keeps them, so they must not keep the products."""
        self.hooks.__exit__()  # type: ignore[union-attr]
        self._products.clear()

    def _pack(self, saved: Tensor) -> "_Saved":
        for product, factors in self._products:
            same = saved.data_ptr() == product.data_ptr() and saved.numel() == product.numel()
            if same and product.numel():
                return _Saved(factors, (saved.size(), saved.stride()))
        return _Saved((saved,))


class _Saved:
    """A tensor that backward needs, or factors of which it is the product."""

    __slots__ = ("_layout", "_versions", "factors")

    def __init__(self, factors: tuple[Tensor, ...], layout: Any = None) -> None:
        self.factors = tuple(each.detach() for each in factors)  # with their version counters
        self._versions = [each._version for each in factors]
        self._layout = layout

    def tensor(self) -> Tensor:
        """The tensor; refused where it was changed since, as torch does."""
        if [each._version for each in self.factors] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {[*self.factors[0].shape]} or its gates "
                "changed between forward and backward; call backward before optimizer.step()"
            )
        result = self.factors[0]
        with torch.no_grad():
            for z in self.factors[1:]:
                result = result * z
        return result if self._layout is None else result.as_strided(*self._layout)


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()


class _Running(threading.local):
    forward: _Recomputing | None = None


_running = _Running()
"""The forward that runs now in this thread."""
