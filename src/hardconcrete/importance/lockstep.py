"""Calls of a model on all batches, in lockstep: all pause at each layer that is re-fitted.

Each call runs in its own thread, and only one of all threads runs at a time. So every batch passes
through the model once, and a weight is re-fitted before any call uses it. On a GPU the threads ask
the calling thread to compute, because cuBLAS and cuDNN keep some 70 MB for each thread.
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
from hardconcrete.importance.layer_calls import LayerCall
from hardconcrete.importance.norm_and_addition import ADDITIONS, BatchNormCall, shortcut_of
from hardconcrete.importance.parse_calls import ParameterNames, layer_call_of
from hardconcrete.importance.recording import CallInterceptor, RecordedLayer

MAX_COMPUTE_THREADS = 8
"""CPU threads that one call computes with. OpenMP keeps as many for each call."""


@dataclass(eq=False)
class PausedLayer:
    """The layer at which a call is paused.

    Args:
        call: the layer's inputs and weight.
        output: its output, or the sum if it feeds an addition. None before it is computed.
        norm: the batch norm between the layer and the addition.
        shortcut: the other operand of the addition.
    """

    call: LayerCall
    output: Tensor | None = None
    norm: BatchNormCall | None = None
    shortcut: Tensor | None = None


ComputeFunction = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a torch function with its arguments, in this thread or another."""


@dataclass(eq=False)
class _FunctionCall:
    """A torch function that a thread asks the calling thread to call.

    Args:
        function: the torch function, with its arguments.
        autocast_dtypes: the dtype of autocast for each device type that has it on.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast_dtypes: dict[str, torch.dtype]

    def run(self) -> Any:
        """The result, or the exception that was raised."""
        with torch.no_grad(), _autocast(self.autocast_dtypes):
            try:
                return self.function(*self.args, **self.kwargs)
            except BaseException as error:
                return error


class _CallEnded(BaseException):
    """Leaves a call that is not needed any more."""


class PausableCall(CallInterceptor):
    """One call of ``loss(model, batch)``, in a thread that pauses at each layer to re-fit.

    Args:
        model: without gates, in evaluation mode.
        batch: the batch to call ``loss`` with.
        loss: calls the model.
        layers: the layers that the call is expected to reach, in order.
        pause_after: True pauses when the layer has been computed, with its output (the dense
            model). False pauses before, and then computes it with the weight as it is by then.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        layers: Sequence[RecordedLayer],
        *,
        pause_after: bool,
    ) -> None:
        super().__init__()
        self._model, self._batch, self._loss, self._layers = model, batch, loss, layers
        self._pause_after = pause_after
        self._names = ParameterNames(model)
        self._reached = 0
        self._before_addition: _LayerBeforeAddition | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._computes_elsewhere = _is_on_accelerator(model)
        self._to_thread: SimpleQueue[Any] = SimpleQueue()
        self._from_thread: SimpleQueue[PausedLayer | _FunctionCall | BaseException | None] = (
            SimpleQueue()
        )

    def advance(self) -> PausedLayer | None:
        """Run to the next pause; None at the end of the call."""
        if self._thread is None:
            context, enter = contextvars.copy_context(), _copy_thread_state()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, enter), daemon=True
            )
            self._thread.start()
        else:
            self._to_thread.put(None)
        while isinstance(message := self._from_thread.get(), _FunctionCall):
            self._to_thread.put(message.run())
        if isinstance(message, BaseException):
            raise message
        return message

    def end(self) -> None:
        """Make the thread leave the call at its pause."""
        self._ended = True
        self._to_thread.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, enter: Callable[[], ExitStack]) -> None:
        """The body of the thread."""
        try:
            with enter(), torch.no_grad(), self:
                self._loss(self._model, self._batch)
            if self._reached != len(self._layers):
                raise _unexpected_layer(self._layers[self._reached].name, "nothing")
            self._from_thread.put(None)
        except _CallEnded:
            return
        except BaseException as error:
            self._from_thread.put(error)

    def _pause(self, layer: PausedLayer) -> None:
        if not self._ended:
            self._from_thread.put(layer)
            self._to_thread.get()
        if self._ended:
            raise _CallEnded

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function; on an accelerator, in the calling thread."""
        is_attribute = getattr(function, "__name__", "") == "__get__"
        if not self._computes_elsewhere or self._ended or is_attribute:
            return function(*args, **kwargs)
        self._from_thread.put(_FunctionCall(function, args, kwargs, _autocast_dtypes()))
        answer = self._to_thread.get()
        if self._ended:
            raise _CallEnded
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call; pause at a layer, or at the addition that it feeds."""
        call = layer_call_of(function, args, kwargs, self._names)
        if call is not None:
            return self._call_layer(call, function, args, kwargs)
        before = self._before_addition
        if before is not None and function is F.batch_norm:
            norm = BatchNormCall.parse(args, kwargs)
            if norm is not None and norm.input is before.output:
                return before.run(self._compute, function, args, kwargs, norm)
        if before is not None and function in ADDITIONS:
            shortcut = shortcut_of(args, kwargs, before.output)
            if shortcut is not None:
                return self._add(before, shortcut, function, args, kwargs)
        return self._compute(function, args, kwargs)

    def _call_layer(
        self, call: LayerCall, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        layer = self._next_layer(call.name)
        if layer.skip_reason is not None:
            return self._compute(function, args, kwargs)  # type: ignore[no-any-return]
        if layer.feeds_addition:
            self._before_addition = _LayerBeforeAddition(call)
            return self._before_addition.run(self._compute, function, args, kwargs)
        if not self._pause_after:
            self._pause(PausedLayer(call))
        output: Tensor = self._compute(function, args, kwargs)
        if self._pause_after:
            self._pause(PausedLayer(call, output))
        return output

    def _next_layer(self, name: str) -> RecordedLayer:
        """The recorded layer that is called now."""
        layers, number = self._layers, self._reached
        expected = layers[number].name if number < len(layers) else "nothing"
        if self._before_addition is not None:
            raise _unexpected_layer("an addition", name)
        if name != expected:
            raise _unexpected_layer(expected, name)
        self._reached += 1
        return layers[number]

    def _add(
        self,
        before: "_LayerBeforeAddition",
        shortcut: Tensor,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Add the shortcut; before that, recompute the layer and its norm with the new weight."""
        self._before_addition = None
        if not self._pause_after:
            self._pause(PausedLayer(before.call, None, before.norm, shortcut))
            before.recompute(self._compute)
        output: Tensor = self._compute(function, args, kwargs)
        if self._pause_after:
            self._pause(PausedLayer(before.call, output, before.norm))
        return output


class _LayerBeforeAddition:
    """A layer that feeds an addition, and the functions called since: itself and its norm."""

    def __init__(self, call: LayerCall) -> None:
        self.call = call
        self.norm: BatchNormCall | None = None
        self._computed: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []

    @property
    def output(self) -> Tensor:
        """The output of the layer, or of the norm behind it."""
        return self._computed[-1][-1]

    def run(
        self,
        compute: ComputeFunction,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        norm: BatchNormCall | None = None,
    ) -> Tensor:
        output: Tensor = compute(function, args, kwargs)
        self._computed.append((function, args, kwargs, output))
        self.norm = norm
        return output

    def recompute(self, compute: ComputeFunction) -> None:
        """Overwrite the outputs, in place, with what the functions compute now."""
        torch.clear_autocast_cache()  # it may hold the old weight
        for function, args, kwargs, output in self._computed:
            output.copy_(compute(function, args, kwargs))


def _unexpected_layer(expected: str, name: str) -> CompactionError:
    return CompactionError(
        f"re-fitting needs the same layers in every call: {expected} was expected, and {name} "
        "came; the forward of the model depends on its inputs"
    )


def _copy_thread_state() -> Callable[[], ExitStack]:
    """A function that brings torch's thread-local state of this thread into another."""
    device, threads = torch.get_default_device(), torch.get_num_threads()
    autocast_dtypes = _autocast_dtypes()
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
        stack.enter_context(_autocast(autocast_dtypes))
        return stack

    return enter


@cache  # asked for with every function that is called
def _device_types() -> list[str]:
    """The device types that may have autocast on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([accelerator.type] if accelerator else [])]


def _autocast_dtypes() -> dict[str, torch.dtype]:
    """The dtype of autocast for each device type that has it on in this thread."""
    enabled = [kind for kind in _device_types() if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in enabled}


def _autocast(dtypes: Mapping[str, torch.dtype]) -> ExitStack:
    """Turn autocast on for these device types and off for all others."""
    stack = ExitStack()
    for kind in _device_types():
        dtype, enabled = dtypes.get(kind), kind in dtypes
        cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        stack.enter_context(cast)
    return stack


def _is_on_accelerator(model: nn.Module) -> bool:
    return any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters())


@contextmanager
def ending_threads(calls: Sequence[PausableCall]) -> Iterator[None]:
    """On leaving, also by an exception, end the threads of all calls."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        for call in calls:
            call.end()
        for call in calls:
            call.join()
        if threads > MAX_COMPUTE_THREADS:
            torch.set_num_threads(threads)
