"""Calls of a model on all batches, side by side: all wait where one weight is to be re-fitted.

Each call runs in a thread of its own, which waits; only one of all threads runs at a time. So every
batch passes through the model once, and a weight is re-fitted before anything has used it. On a GPU
the threads let the calling thread compute: cuBLAS and cuDNN keep some 70 MB for each thread.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.errors import CompactionError
from hardconcrete.importance.batches import Loss
from hardconcrete.importance.chains import ADDITIONS, Norm, shortcut_of
from hardconcrete.importance.contractions import Contraction
from hardconcrete.importance.readers import Parameters, read_contraction
from hardconcrete.importance.recording import CallMode, Step

MAX_COMPUTE_THREADS = 8
"""Threads that one call computes with on the CPU: OpenMP keeps as many for each call."""


@dataclass(eq=False)
class Stop:
    """Where a call waits.

    Args:
        contraction: with its inputs.
        output: the results; of a step that ends in a sum, the sum. None before they are computed.
        norm: the batch norm between the results and the sum.
        shortcut: what the sum adds.
    """

    contraction: Contraction
    output: Tensor | None = None
    norm: Norm | None = None
    shortcut: Tensor | None = None


Computed = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a torch function, in whichever thread."""


@dataclass(eq=False)
class _Request:
    """A torch function that a thread asks the calling one to call.

    Args:
        function: with its arguments.
        casts: the types of autocast, by kind of device, where it is on.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casts: dict[str, torch.dtype]

    def answer(self) -> Any:
        """The result, or what was raised."""
        with torch.no_grad(), _casting(self.casts):
            try:
                return self.function(*self.args, **self.kwargs)
            except BaseException as error:
                return error


class _End(BaseException):
    """Ends a call that is not needed any more."""


class LabelledGraph(CallMode):
    """One call of ``loss(model, batch)``, in a thread that waits at each step to re-fit.

    Args:
        model: without gates, in evaluation mode.
        batch: for ``loss``.
        loss: calls the model.
        steps: the contractions that are expected.
        after: wait when the step has been computed, with its output, as for the dense model;
            otherwise before, and compute it with the weight as it is then.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss, steps: Sequence[Step], *, after: bool
    ) -> None:
        super().__init__()
        self._model, self._batch, self._loss, self._steps = model, batch, loss, steps
        self._after = after
        self._parameters = Parameters(model)
        self._number = 0
        self._pending: _Pending | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._asks = _is_on_accelerator(model)
        self._resume: SimpleQueue[Any] = SimpleQueue()
        self._report: SimpleQueue[Stop | _Request | BaseException | None] = SimpleQueue()

    def advance(self) -> Stop | None:
        """Go on to the next stop; None at the end of the call."""
        if self._thread is None:
            context, enter = contextvars.copy_context(), _thread_state()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, enter), daemon=True
            )
            self._thread.start()
        else:
            self._resume.put(None)
        while isinstance(report := self._report.get(), _Request):
            self._resume.put(report.answer())
        if isinstance(report, BaseException):
            raise report
        return report

    def end(self) -> None:
        """Let the thread leave the call where it is, and everything after."""
        self._ended = True
        self._resume.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, enter: Callable[[], ExitStack]) -> None:
        """What the thread does."""
        try:
            with enter(), torch.no_grad(), self:
                self._loss(self._model, self._batch)
            if self._number != len(self._steps):
                raise _other_call(self._steps[self._number].name, "nothing")
            self._report.put(None)
        except _End:
            return
        except BaseException as error:
            self._report.put(error)

    def _wait(self, stop: Stop) -> None:
        if not self._ended:
            self._report.put(stop)
            self._resume.get()
        if self._ended:
            raise _End

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, on an accelerator in the calling thread."""
        if not self._asks or self._ended or getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        self._report.put(_Request(function, args, kwargs, _casts()))
        answer = self._resume.get()
        if self._ended:
            raise _End
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def see(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and wait where a step begins, or ends."""
        call = read_contraction(function, args, kwargs, self._parameters)
        if call is not None:
            return self._contract(call, function, args, kwargs)
        pending = self._pending
        if pending is not None and function is F.batch_norm:
            norm = Norm.of(args, kwargs)
            if norm is not None and norm.input is pending.tail:
                return pending.run(self._compute, function, args, kwargs, norm)
        if pending is not None and function in ADDITIONS:
            shortcut = shortcut_of(args, kwargs, pending.tail)
            if shortcut is not None:
                return self._add(pending, shortcut, function, args, kwargs)
        return self._compute(function, args, kwargs)

    def _contract(
        self, call: Contraction, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        step = self._next(call.name)
        if step.reason is not None:
            return self._compute(function, args, kwargs)  # type: ignore[no-any-return]
        if step.to_sum:
            self._pending = _Pending(call)
            return self._pending.run(self._compute, function, args, kwargs)
        if not self._after:
            self._wait(Stop(call))
        output: Tensor = self._compute(function, args, kwargs)
        if self._after:
            self._wait(Stop(call, output))
        return output

    def _next(self, name: str) -> Step:
        """The step that begins here."""
        expected = self._steps[self._number].name if self._number < len(self._steps) else "nothing"
        if name != expected or self._pending is not None:
            raise _other_call(expected if self._pending is None else "an addition", name)
        self._number += 1
        return self._steps[self._number - 1]

    def _add(
        self,
        pending: "_Pending",
        shortcut: Tensor,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The end of a step: what comes before the sum is computed again with the new weight."""
        self._pending = None
        if not self._after:
            self._wait(Stop(pending.contraction, None, pending.norm, shortcut))
            pending.repeat(self._compute)
        output: Tensor = self._compute(function, args, kwargs)
        if self._after:
            self._wait(Stop(pending.contraction, output, pending.norm))
        return output


class _Pending:
    """A contraction whose results are on their way to a sum."""

    def __init__(self, contraction: Contraction) -> None:
        self.contraction = contraction
        self.norm: Norm | None = None
        self._done: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []

    @property
    def tail(self) -> Tensor:
        """What the results have become."""
        return self._done[-1][-1]

    def run(
        self,
        compute: Computed,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        norm: Norm | None = None,
    ) -> Tensor:
        output: Tensor = compute(function, args, kwargs)
        self._done.append((function, args, kwargs, output))
        self.norm = norm
        return output

    def repeat(self, compute: Computed) -> None:
        """Put new results in the place of the old."""
        torch.clear_autocast_cache()  # it may hold the old weight
        for function, args, kwargs, output in self._done:
            output.copy_(compute(function, args, kwargs))


def _other_call(expected: str, name: str) -> CompactionError:
    return CompactionError(
        f"re-fitting needs the same layers in every call: {expected} was expected, and {name} "
        "came; the forward of the model depends on its inputs"
    )


def _thread_state() -> Callable[[], ExitStack]:
    """Brings into a thread what torch keeps for each: autocast, devices, stream and threads."""
    device, threads, casts = torch.get_default_device(), torch.get_num_threads(), _casts()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    stream = torch.accelerator.current_stream() if accelerator else None

    def enter() -> ExitStack:
        stack = ExitStack()
        if stream is not None:
            torch.accelerator.set_stream(stream)  # and its device
        if threads > MAX_COMPUTE_THREADS:
            torch.set_num_threads(MAX_COMPUTE_THREADS)
        if device.type != "cpu":
            stack.enter_context(device)
        stack.enter_context(_casting(casts))
        return stack

    return enter


@cache
def _kinds() -> list[str]:
    """Kinds of devices that may autocast; asked for with every function."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([accelerator.type] if accelerator else [])]


def _casts() -> dict[str, torch.dtype]:
    """The types of autocast, by kind of device, where it is on in this thread."""
    return {k: torch.get_autocast_dtype(k) for k in _kinds() if torch.is_autocast_enabled(k)}


def _casting(casts: Mapping[str, torch.dtype]) -> ExitStack:
    """The same autocast here, and no other."""
    stack = ExitStack()
    for kind in _kinds():
        dtype, enabled = casts.get(kind), kind in casts
        cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        stack.enter_context(cast)
    return stack


def _is_on_accelerator(model: nn.Module) -> bool:
    return any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters())


@contextmanager
def walking(walks: Sequence[LabelledGraph]) -> Iterator[None]:
    """When this ends, no thread is left, whatever happened."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        for walk in walks:
            walk.end()
        for walk in walks:
            walk.join()
        if threads > MAX_COMPUTE_THREADS:
            torch.set_num_threads(threads)
