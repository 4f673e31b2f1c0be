"""Three tiny families of gates: what nobody learns, one parameter per gate, and two."""

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import hardconcrete as hc
from hardconcrete.objective import Penalty
from hardconcrete.sparsifiers import GateParameters, Sparsifier

Shape = tuple[int, ...]


def penalty_of(gated: hc.GatedModel, optimizer: torch.optim.Optimizer) -> Penalty:
    """The method's own penalty, or the L0 norm."""
    if not gated.gates.family.has_penalty:
        return hc.L0Penalty(gated, 0.1 / 1000, weight_decay=1e-3)
    return hc.MethodPenalty(gated, examples=1000, optimizer=optimizer)


class FixedMask(Sparsifier):
    """Gates of 0 and 1 that somebody else chose."""

    readouts = ("mask",)
    fixed = ("mask",)
    constant = True

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        return {"mask": torch.ones_like(droprate, dtype=torch.float32)}

    def sample(
        self,
        parameters: GateParameters,
        shape: Shape = (),
        generator: object = None,  # noqa: ARG002
    ) -> Tensor:
        return parameters["mask"].expand(*shape, -1)

    def open_probability(self, parameters: GateParameters) -> Tensor:
        return parameters["mask"]

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        return parameters["mask"]

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        return {"mask": is_open.float()}


class StraightThrough(nn.Module, Sparsifier):
    """Bernoulli gates; the gradient of a sample is that of its mean (Bengio et al. 2013).

    All gates share a scale of their logits, which is learned.
    """

    readouts = ("binary", "mean")
    location = "logits"

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        return {"logits": -torch.logit(droprate).float()}

    def spread(self, parameters: GateParameters) -> None:
        parameters["logits"].add_(0.01 * torch.randn_like(parameters["logits"]))

    def open_probability(self, parameters: GateParameters) -> Tensor:
        return torch.sigmoid(self.log_scale.exp() * parameters["logits"])

    def sample(
        self,
        parameters: GateParameters,
        shape: Shape = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        p = self.open_probability(parameters).expand(*shape, -1)
        z = (torch.rand(p.shape, device=p.device, generator=generator) < p).float()
        return z + (p - p.detach())

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        p = self.open_probability(parameters)
        return p if rule == "mean" else (p > 0.5).float()

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        return {"logits": torch.where(is_open, 20.0, -20.0)}


class RectifiedNormal(Sparsifier):
    """A normal variable with its own deviation for each gate, rectified to [0, 1]."""

    readouts = ("median", "mean")
    location = "center"

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        deviation = torch.full_like(droprate, 0.3, dtype=torch.float32)
        center = -0.3 * Normal(0.0, 1.0).icdf(droprate).float()
        return {"log_deviation": deviation.log(), "center": center}

    def law(self, parameters: GateParameters) -> hc.Rectified:
        deviation = parameters["log_deviation"].exp()
        return hc.Rectified(Normal(parameters["center"], deviation, validate_args=False))

    def sample(
        self,
        parameters: GateParameters,
        shape: Shape = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.law(parameters).rsample(shape, generator=generator)

    def open_probability(self, parameters: GateParameters) -> Tensor:
        return self.law(parameters).open_probability

    def mean(self, parameters: GateParameters) -> Tensor:
        return self.law(parameters).mean

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        return self.law(parameters).readout(rule)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        center = torch.where(is_open, 2.0, -1.0)
        return {"log_deviation": torch.full_like(center, -3.0), "center": center}
