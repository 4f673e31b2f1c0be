"""One recorded call of a model: its layers in order, and what each can be re-fitted to."""

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

from hardconcrete.importance.layer_calls import LayerCall
from hardconcrete.importance.norm_and_addition import (
    ADDITIONS,
    DROPOUTS,
    BatchNormCall,
    shortcut_of,
)
from hardconcrete.importance.parse_calls import ParameterNames, layer_call_of

COMPOSITES = (F.multi_head_attention_forward,)
"""Functions written in Python that call layers inside."""

BATCH_NORM, ADDITION = "-> batch norm", "-> addition"
"""Users of a layer's output that a re-fit can include. No torch function has such a name."""


class CallInterceptor(TorchFunctionMode):
    """Intercepts every torch function that a model calls, also inside composite functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand the call to ``intercept``; for a composite function, the calls that it makes."""
        if func not in COMPOSITES:
            return self.intercept(func, args, kwargs or {})
        with self:
            return _without_mode_check(func)(*args, **(kwargs or {}))

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and return its result."""
        raise NotImplementedError


def _without_mode_check(function: FunctionType) -> FunctionType:
    """A copy of the function that runs its body without dispatching to modes first."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    unchecked = FunctionType(code, names, function.__name__, defaults, closure)
    unchecked.__kwdefaults__ = function.__kwdefaults__
    return unchecked


@dataclass(frozen=True)
class RecordedLayer:
    """A layer of the model's call, with the norm and the addition that directly follow it.

    Args:
        name: the name of its weight.
        has_bias: whether it has a bias that nothing else uses.
        norm: the running mean of the batch norm that is the only user of the output.
        feeds_addition: whether one addition is the only user of the output, or of that norm's.
        skip_reason: why the layer is not re-fitted, if it is not.
    """

    name: str
    has_bias: bool = False
    norm: str | None = None
    feeds_addition: bool = False
    skip_reason: str | None = None


@dataclass(frozen=True)
class Recording:
    """The layers of a call, and what else uses their parameters.

    Args:
        layers: in the order of the call.
        users: for each parameter, the names of the other functions that use it.
        max_layer_bytes: bytes of the inputs and outputs of the largest layer.
    """

    layers: Sequence[RecordedLayer]
    users: Mapping[str, Sequence[str]]
    max_layer_bytes: int = 0


@dataclass
class _LayerNotes:
    """Notes on one layer while the model runs.

    Args:
        weight: name of its parameter.
        memory: the range of memory entries that the weight covers, to compare views.
        bias: name of its parameter.
        norm: the running mean of a batch norm that uses the output.
        users: the functions that use the output.
        norm_users: the functions that use the norm's output.
    """

    weight: str
    memory: range
    bias: str | None
    norm: str | None = None
    users: list[str] = field(default_factory=list)
    norm_users: list[str] = field(default_factory=list)


class Recorder(CallInterceptor):
    """Records a call of a model in evaluation mode, without keeping activations alive.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> with torch.no_grad(), Recorder(model) as recorder:
        ...     _ = model(torch.ones(1, 3))
        >>> [layer.name for layer in recorder.recording().layers]
        ['0.weight', '2.weight']
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = ParameterNames(model)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._notes: list[_LayerNotes] = []
        self._users: dict[str, list[str]] = defaultdict(list)
        self._norms: Counter[str] = Counter()
        self._max_layer_bytes = 0
        self._outputs: Any = WeakTensorKeyDictionary()  # tensor: (number of its layer, is normed)

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and note which parameters and which layers' outputs it uses."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call = layer_call_of(function, args, kwargs, self._names)
        output = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not outputs:  # a shape, a device
            return output
        self._note_parameters(function, tensors, outputs, call)
        for tensor in tensors:
            if tensor in self._outputs and not (function in DROPOUTS and output is tensor):
                self._note_user(function, args, kwargs, tensor, output)
        if call is not None:
            self._note_layer(call, output)
        return output

    def _note_parameters(
        self, function: Any, tensors: list[Tensor], outputs: list[Tensor], call: LayerCall | None
    ) -> None:
        """Note the parameters that a function uses, except as a layer's or to view them."""
        used = [t for t in tensors if call is None or (t is not call.weight and t is not call.bias)]
        views = {self._names.of(output) for output in outputs}
        for name in {self._names.of(tensor) for tensor in used} - views:
            if name is not None:
                self._users[name].append(_name(function))

    def _note_layer(self, call: LayerCall, output: Tensor) -> None:
        self._max_layer_bytes = max(self._max_layer_bytes, call.inputs.nbytes + output.nbytes)
        bias = None if call.bias is None else self._names.of(call.bias)
        self._outputs[output] = (len(self._notes), False)
        self._notes.append(_LayerNotes(call.name, _memory(call.weight), bias))

    def _note_user(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Tensor,
        output: Any,
    ) -> None:
        """Note a function that uses the output of a layer, or of the norm behind it."""
        number, is_normed = self._outputs[tensor]
        notes, user = self._notes[number], _name(function)
        if function is F.batch_norm and not is_normed:
            if (mean := self._running_mean(args, kwargs, tensor)) is not None:
                user, notes.norm = BATCH_NORM, mean
                self._norms[mean] += 1
                self._outputs[output] = (number, True)
        elif function in ADDITIONS and number == len(self._notes) - 1:
            same_shape = isinstance(output, Tensor) and output.shape == tensor.shape
            if same_shape and shortcut_of(args, kwargs, tensor) is not None:
                user = ADDITION
                if output is tensor:  # added in place: from here on it is the sum
                    del self._outputs[tensor]
        (notes.norm_users if is_normed else notes.users).append(user)

    def _running_mean(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor
    ) -> str | None:
        """The name of the running mean, if the batch norm has one and normalises this tensor."""
        norm = BatchNormCall.parse(args, kwargs)
        if norm is None or norm.input is not tensor:
            return None
        return self._buffers.get(id(norm.mean))

    def recording(self) -> Recording:
        """The recorded call."""
        layers = [self._layer(notes) for notes in self._notes]
        return Recording(layers, dict(self._users), self._max_layer_bytes)

    def _layer(self, notes: _LayerNotes) -> RecordedLayer:
        biases = Counter(other.bias for other in self._notes)
        has_bias = notes.bias is not None and biases[notes.bias] == 1
        only_norm = notes.users == [BATCH_NORM] and self._norms[notes.norm or ""] == 1
        norm = notes.norm if only_norm else None
        return RecordedLayer(
            name=notes.weight,
            has_bias=has_bias and notes.bias not in self._users,
            norm=norm,
            feeds_addition=(notes.norm_users if norm else notes.users) == [ADDITION],
            skip_reason=self._skip_reason(notes),
        )

    def _skip_reason(self, notes: _LayerNotes) -> str | None:
        """Why a layer cannot be re-fitted; None if it can."""
        same = [other.memory for other in self._notes if other.weight == notes.weight]
        times = sum(
            memory.start < notes.memory.stop and notes.memory.start < memory.stop for memory in same
        )
        if times > 1:
            return f"it is used {times} times in a call"
        if others := self._users.get(notes.weight):
            return f"{others[0]} uses it, too"
        return None


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or str(function)


def _memory(tensor: Tensor) -> range:
    """From a tensor's first entry in memory to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    start = tensor.storage_offset()
    return range(start, start + 1 + sum((size - 1) * stride for size, stride in pairs))
