"""Parameter groups of a gated model for an optimizer."""

import math
from numbers import Real
from typing import Any

from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.gating.gated_model import GatedModel

ParameterGroup = tuple[str, list[nn.Parameter], float, float]
"""Name, parameters, learning rate and weight decay."""


def parameter_groups(
    gated: GatedModel, lr: float, gate_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of ``torch.optim``.

    Gates never decay, and may have another learning rate. Weights that decay in an
    ``L0Penalty(weight_decay=...)`` do not decay here: build the penalty first. Without decay and
    ``gate_lr`` the gates join the weights: each group costs the optimizer time.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> groups = hc.parameter_groups(gated, lr=1e-3, gate_lr=1e-2, weight_decay=5e-4)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 0.001, 0.0005), ('gates', 0.01, 0.0)]
        >>> optimizer = torch.optim.Adam(groups)
    """
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"parameter_groups takes what attach_gates returned, not a {type(gated).__name__}"
        )
    for name, value in {"lr": lr, "gate_lr": gate_lr, "weight_decay": weight_decay}.items():
        _refuse_no_rate(name, value)
    plain, penalised = _split_by_decay(gated)
    gates = [parameter for parameter in gated.gates.parameters() if parameter.requires_grad]
    decayed = {id(parameter) for parameter in plain} if weight_decay else set()
    named = gated.model.named_parameters(remove_duplicate=False)
    gated.decay.by_optimizer = frozenset(name for name, p in named if id(p) in decayed)
    groups: tuple[ParameterGroup, ...] = (
        ("weights", plain, lr, weight_decay),
        ("weights decayed by the penalty", penalised, lr, 0.0),
        ("gates", gates, lr if gate_lr is None else gate_lr, 0.0),
    )
    if weight_decay == 0 and gate_lr in (None, lr):
        groups = (("weights and gates", plain + penalised + gates, lr, 0.0),)
    return [
        {"name": name, "params": parameters, "lr": rate, "weight_decay": decay}
        for name, parameters, rate, decay in groups
        if parameters
    ]


def _split_by_decay(gated: GatedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights that learn: those without, and those with weight decay in a penalty."""
    named = dict(gated.model.named_parameters(remove_duplicate=False))
    in_penalty = {id(named[name]) for name in gated.decayed_by_penalty}
    learned = [parameter for parameter in gated.model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in learned if id(parameter) not in in_penalty]
    return plain, [parameter for parameter in learned if id(parameter) in in_penalty]


def _refuse_no_rate(name: str, value: object) -> None:
    """Refuse what optimizers check in their defaults, and not in groups."""
    if value is None and name == "gate_lr":
        return
    number = isinstance(value, Real | Tensor) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ArgumentError(f"{name}={value!r} must be a number, neither negative nor infinite")
