"""What an optimiser needs to know of a gated model."""

import math
from numbers import Real
from typing import Any

from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.gating.gated_model import GatedModel

Settings = tuple[str, list[nn.Parameter], float, float]
"""Name, parameters, learning rate and weight decay of a group."""


def parameter_groups(
    gated: GatedModel, lr: float, gate_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any ``torch.optim`` optimiser.

    Gates never decay, and may have a learning rate of their own. Parameters whose decay an
    ``L0Penalty(weight_decay=...)`` carries get none here: build the penalty first. Without
    decay or a rate of their own the gates join the weights: each group costs the optimiser time.

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
    named = dict(gated.model.named_parameters(remove_duplicate=False))
    carried = {id(named[name]) for name in gated.decayed_by_penalty}
    trained = [parameter for parameter in gated.model.parameters() if parameter.requires_grad]
    penalised = [parameter for parameter in trained if id(parameter) in carried]
    plain = [parameter for parameter in trained if id(parameter) not in carried]
    gates = [parameter for parameter in gated.gates.parameters() if parameter.requires_grad]
    decayed = {id(parameter) for parameter in plain} if weight_decay else set()
    names = (name for name, parameter in named.items() if id(parameter) in decayed)
    gated.decayed_by_optimizer = frozenset(names)
    settings: tuple[Settings, ...] = (
        ("weights", plain, lr, weight_decay),
        ("weights decayed by the penalty", penalised, lr, 0.0),
        ("gates", gates, lr if gate_lr is None else gate_lr, 0.0),
    )
    if weight_decay == 0 and gate_lr in (None, lr):
        settings = (("weights and gates", plain + penalised + gates, lr, 0.0),)
    return [
        {"name": name, "params": parameters, "lr": rate, "weight_decay": decay}
        for name, parameters, rate, decay in settings
        if parameters
    ]


def _refuse_no_rate(name: str, value: object) -> None:
    """Refuse what optimisers check of their defaults, and not of groups."""
    if value is None and name == "gate_lr":
        return
    number = isinstance(value, Real | Tensor) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ArgumentError(f"{name}={value!r} must be a number, neither negative nor infinite")
