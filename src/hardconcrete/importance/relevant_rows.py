"""The rows of a batch that the loss depends on: padding does not count in a re-fit.

The gradient of the loss is zero at the outputs of every layer for a position that is padding, or
that nothing reads. So no mask has to be known, whatever it is called and however it is applied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.graph.model_state import buffers_kept, in_mode
from hardconcrete.importance.batches import Loss, check_loss
from hardconcrete.importance.layer_calls import LayerCall
from hardconcrete.importance.parse_calls import ParameterNames, layer_call_of
from hardconcrete.importance.recording import CallInterceptor

RelevantRows = Mapping[tuple[int, ...], Tensor]
"""By the ``positions`` of a layer's call, a mask of the rows that count, on the CPU.

All layers with the same positions share a mask. A row counts if its gradient is not zero in one of
them, because a ReLU alone can make a gradient zero.
"""


def relevant_rows(model: nn.Module, batch: Any, loss: Loss) -> RelevantRows:
    """The rows that count in a batch.

    Args:
        model: the dense model. It is run in evaluation mode, and not changed.
        batch: passed to ``loss``.
        loss: calls the model and returns a scalar.

    Example:
        >>> x = torch.ones(3, 2)
        >>> rows = relevant_rows(nn.Linear(2, 2), x, lambda model, x: model(x)[:2].sum())
        >>> rows[(3,)].tolist()
        [True, True, False]
    """
    recorder = _GradientRecorder(model)
    with in_mode(model, training=False), buffers_kept(model), torch.enable_grad():
        with recorder:
            value = check_loss(loss(model, batch))
        if recorder.anchors:
            torch.autograd.grad(value, recorder.anchors, allow_unused=True)
    return {key: mask for key, mask in recorder.rows.items() if mask.any()}


class _GradientRecorder(CallInterceptor):
    """Notes, for every layer of a call, the rows whose outputs get a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.rows: dict[tuple[int, ...], Tensor] = {}
        self.anchors: list[Tensor] = []
        self._names = ParameterNames(model)

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call; watch the gradient of a layer's output."""
        call = layer_call_of(function, args, kwargs, self._names)
        output = function(*args, **kwargs)
        if call is None or not torch.is_grad_enabled():
            return output
        anchor = output.new_zeros((), requires_grad=True)  # frozen weights give no gradient
        self.anchors.append(anchor)
        watched = output + anchor
        watched.register_hook(lambda gradient: self._note(call, gradient))
        return watched

    def _note(self, call: LayerCall, gradient: Tensor) -> None:
        index = torch.arange(call.row_count, device=gradient.device)
        has_gradient = (call.output_rows(gradient, index) != 0).flatten(1).any(1).cpu()
        before = self.rows.get(call.positions)
        self.rows[call.positions] = has_gradient if before is None else before | has_gradient
