"""cuDNN's trials for the gradients of convolutions, while a network is being compiled.

In benchmark mode cuDNN tries its kernels on each new convolution. It remembers the choice for the
thread. Gradients are computed in a thread of their own, which is idle until the first step. There
the trials run while the compiler works, which saves seconds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Convolutions(TorchDispatchMode):
    """Inside, convolutions are remembered, each kind once.

    Example:
        >>> with Convolutions() as seen:
        ...     y = torch.nn.Conv2d(3, 4, 3)(torch.zeros(2, 3, 8, 8))
        >>> [[*gradient.shape] for gradient, *_ in seen.kinds.values()]
        [[2, 4, 6, 6]]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: dict[Any, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and remember it if it is a convolution."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            x, weight, _, *how = args
            kind = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, str(how))
            if kind not in self.kinds:
                self.kinds[kind] = [*map(torch.zeros_like, (result, x, weight)), *how]
        return result

    def differentiate(self) -> None:
        """Compute the gradients of each kind, of its input and of its weight."""
        for gradient, x, weight, *how in self.kinds.values():
            torch.ops.aten.convolution_backward(
                gradient, x, weight, None, *how, [True, True, False]
            )


class _Backward(torch.autograd.Function):
    """A function that runs where gradients are computed."""

    @staticmethod
    def forward(context: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        context.work = work
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.work()
        return gradient, None


@contextmanager
def tried(forward: Callable[[], Any], device: torch.device) -> Iterator[None]:
    """While this lasts, and at its end, gradients of a forward's convolutions are tried."""
    with torch.no_grad(), Convolutions() as seen:
        forward()

    def work() -> None:
        start = torch.zeros((), device=device, requires_grad=True)
        _Backward.apply(start, seen.differentiate).backward()  # type: ignore[no-untyped-call]
        seen.kinds.clear()  # a step needs the memory

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
