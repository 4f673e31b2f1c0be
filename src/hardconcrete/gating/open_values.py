"""The value that each gate has in a model where its unit stays."""

import torch
from torch import Tensor

from hardconcrete.gating.gated_model import GatedModel


@torch.no_grad()
def open_values(gated: GatedModel) -> Tensor:
    """The readout of every gate, or its mean E[z] where the readout is 0.

    A mean that underflows becomes the smallest number above 0: the unit stays.

    Example:
        >>> import hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(3, 2), torch.zeros(1, 3), sites=[":in"])
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([5.0, -9.0, -90.0]))
        >>> gated.gates.readout().tolist()
        [1.0, 0.0, 0.0]
        >>> bool((open_values(gated) > 0).all())
        True
    """
    readout = gated.gates.readout()
    mean = gated.gates.distribution().mean.to(readout.dtype)
    return torch.where(readout > 0, readout, mean.clamp(min=torch.finfo(mean.dtype).tiny))
