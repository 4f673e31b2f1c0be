"""Models with NaN in them, which equals NaN in a comparison of outputs and would pass it."""

from torch import nn

from hardconcrete.errors import CompactionError
from hardconcrete.gating import GatedModel
from hardconcrete.graph.model_state import nan_tensors

MAX_NAMES = 3
"""How many tensors a message names."""


def refuse_nan(model: nn.Module) -> None:
    """Refuse a model with NaN in its gates, parameters or buffers.

    Infinite numbers pass: masks of attention have them.
    """
    if isinstance(model, GatedModel):
        for parameter, values in model.gates.gate_parameters().items():
            groups = [n for n, part in model.by_group(values).items() if part.isnan().any()]
            _refuse(f"{parameter} is not a number in", groups)
        model = model.model
    _refuse("there is NaN in", nan_tensors(model))


def _refuse(what: str, names: list[str]) -> None:
    if names:
        shown, more = ", ".join(names[:MAX_NAMES]), len(names) - MAX_NAMES
        shown += f" and {more} more" if more > 0 else ""
        raise CompactionError(f"{what} {shown}: go back to the last checkpoint")
