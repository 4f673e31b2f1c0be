"""One recorded call of a model: its contractions in order, and what each may be re-fitted to."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hardconcrete.importance.chains import ADDITIONS, DROPOUTS, Norm, shortcut_of
from hardconcrete.importance.contractions import Contraction
from hardconcrete.importance.readers import Parameters, read_contraction

COMPOSITES = (F.multi_head_attention_forward,)
"""Functions written in Python, with contractions inside."""

NORM, SUM = "-> batch norm", "-> sum"
"""Readers that a step may end in; no function has such a name."""


class CallMode(TorchFunctionMode):
    """Sees every torch function that a model calls, and those inside composite functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand the call to ``see``; of a composite function, the calls that it makes."""
        if func not in COMPOSITES:
            return self.see(func, args, kwargs or {})
        with self:
            return _unchecked(func)(*args, **(kwargs or {}))

    def see(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and note what is needed of it."""
        raise NotImplementedError


def _unchecked(function: FunctionType) -> FunctionType:
    """The same function, which does not ask for modes before it begins."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    unchecked = FunctionType(code, names, function.__name__, defaults, closure)
    unchecked.__kwdefaults__ = function.__kwdefaults__
    return unchecked


@dataclass(frozen=True)
class Step:
    """A contraction of the model's call, with what follows it at once.

    Args:
        name: of its weight.
        has_bias: whether it has a bias that nothing else reads.
        norm: name of the running mean of the batch norm that alone reads the results.
        to_sum: one addition alone reads the results, or what that norm makes of them.
        reason: why it is not re-fitted, if it is not.
    """

    name: str
    has_bias: bool = False
    norm: str | None = None
    to_sum: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Recording:
    """What a call of a model does.

    Args:
        steps: its contractions, in order.
        readers: for every parameter the other functions that read it.
        largest: bytes of the inputs and results of its largest contraction.
    """

    steps: Sequence[Step]
    readers: Mapping[str, Sequence[str]]
    largest: int = 0


@dataclass
class _Call:
    """What is noted of a contraction while the model runs.

    Args:
        weight: name of its parameter.
        memory: the first and last entry that the weight has of it, for views.
        bias: name of its parameter.
        norm: name of the running mean of a batch norm that reads the results.
        readers: functions that read the results, and those that read the norm's.
    """

    weight: str
    memory: range
    bias: str | None
    norm: str | None = None
    readers: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))


class Recorder(CallMode):
    """Records a call of a model in evaluation; keeps no activation alive.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> with torch.no_grad(), Recorder(model) as recorder:
        ...     _ = model(torch.ones(1, 3))
        >>> [step.name for step in recorder.recording().steps]
        ['0.weight', '2.weight']
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = Parameters(model)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._calls: list[_Call] = []
        self._readers: dict[str, list[str]] = defaultdict(list)
        self._norms: Counter[str] = Counter()
        self._largest = 0
        self._results: Any = WeakTensorKeyDictionary()  # tensor: (number of its call, is normed)

    def see(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and note who reads which parameter and which results."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call = read_contraction(function, args, kwargs, self._parameters)
        output = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not outputs:  # a shape, a device
            return output
        self._note_parameters(function, tensors, outputs, call)
        for tensor in tensors:
            if tensor in self._results and not (function in DROPOUTS and output is tensor):
                self._note_reader(function, args, kwargs, tensor, output)
        if call is not None:
            self._note_contraction(call, output)
        return output

    def _note_parameters(
        self, function: Any, tensors: list[Tensor], outputs: list[Tensor], call: Contraction | None
    ) -> None:
        """Which parameters a function reads, other than to contract or to view them."""
        read = [t for t in tensors if call is None or (t is not call.weight and t is not call.bias)]
        views = {self._parameters.name_of(output) for output in outputs}
        for name in {self._parameters.name_of(tensor) for tensor in read} - views:
            if name is not None:
                self._readers[name].append(_name(function))

    def _note_contraction(self, call: Contraction, output: Tensor) -> None:
        self._largest = max(self._largest, call.inputs.nbytes + output.nbytes)
        bias = None if call.bias is None else self._parameters.name_of(call.bias)
        self._results[output] = (len(self._calls), False)
        self._calls.append(_Call(call.name, _memory(call.weight), bias))

    def _note_reader(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Tensor,
        output: Any,
    ) -> None:
        """What a function does with the results of a contraction."""
        number, is_normed = self._results[tensor]
        call, reader = self._calls[number], _name(function)
        if function is F.batch_norm and not is_normed:
            if (mean := self._mean(args, kwargs, tensor)) is not None:
                reader, call.norm = NORM, mean
                self._norms[mean] += 1
                self._results[output] = (number, True)
        elif function in ADDITIONS and number == len(self._calls) - 1:
            same_shape = isinstance(output, Tensor) and output.shape == tensor.shape
            if same_shape and shortcut_of(args, kwargs, tensor) is not None:
                reader = SUM
                if output is tensor:  # added in place: from here on it is the sum
                    del self._results[tensor]
        call.readers[is_normed].append(reader)

    def _mean(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> str | None:
        """The name of the running mean, if the norm normalises this tensor by it."""
        norm = Norm.of(args, kwargs)
        if norm is None or norm.input is not tensor:
            return None
        return self._buffers.get(id(norm.mean))

    def recording(self) -> Recording:
        """What was recorded."""
        steps = [self._step(call) for call in self._calls]
        return Recording(steps, dict(self._readers), self._largest)

    def _step(self, call: _Call) -> Step:
        biases = Counter(other.bias for other in self._calls)
        has_bias = call.bias is not None and biases[call.bias] == 1
        after, after_norm = call.readers
        norm = call.norm if after == [NORM] and self._norms[call.norm or ""] == 1 else None
        return Step(
            name=call.weight,
            has_bias=has_bias and call.bias not in self._readers,
            norm=norm,
            to_sum=(after_norm if norm else after) == [SUM],
            reason=self._reason(call),
        )

    def _reason(self, call: _Call) -> str | None:
        """Why a contraction cannot be re-fitted."""
        same = [other.memory for other in self._calls if other.weight == call.weight]
        times = sum(
            memory.start < call.memory.stop and call.memory.start < memory.stop for memory in same
        )
        if times > 1:
            return f"it is used {times} times in a call"
        if others := self._readers.get(call.weight):
            return f"{others[0]} reads it, too"
        return None


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or str(function)


def _memory(tensor: Tensor) -> range:
    """From a tensor's first entry in memory to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    start = tensor.storage_offset()
    return range(start, start + 1 + sum((size - 1) * stride for size, stride in pairs))
