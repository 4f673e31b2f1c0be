"""A plain training loop, for a dense network and for one with gates."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.demo.data import Images
from hardconcrete.demo.evaluation import scaled
from hardconcrete.objective import Penalty


@dataclass(frozen=True)
class Setting:
    """What the demo does with a data set.

    Args:
        side: width and height of its images.
        hidden: sizes of the hidden layers.
        lam: lambda times the number of examples.
        epochs: passes over the training images.
        batch_size: examples per step; a last, smaller batch is left out.
        lr: learning rate of the weights.
        gate_lr: learning rate of the gates.
        averaging: decay per step of the running average of weights and gates.
    """

    side: int
    hidden: tuple[int, int]
    lam: float
    epochs: int
    batch_size: int = 100
    lr: float = 1e-3
    gate_lr: float = 2e-2
    averaging: float = 0.99

    @property
    def sizes(self) -> dict[str, int]:
        """Units by group."""
        return dict(zip(("fc1:in", "fc2:in", "fc3:in"), (self.side**2, *self.hidden), strict=True))


class Trainee:
    """A network in training: Adam, and a running average of its weights and gates.

    Args:
        name: for the display.
        model: a plain module or a ``GatedModel``.
        setting: how it is trained.

    Attributes:
        penalty: is added to the cross-entropy, and takes its step after the optimizer's.

    Example:
        >>> model, setting = nn.Linear(4, 2), Setting(2, (3, 3), lam=0.1, epochs=1, batch_size=2)
        >>> data = Images(torch.zeros(5, 4, dtype=torch.uint8), torch.zeros(5).long(), "blank")
        >>> trainee = Trainee("dense", model, setting)
        >>> loss = trainee.train_epoch(data)
        >>> trainee.averaged
        Linear(in_features=4, out_features=2, bias=True)
    """

    def __init__(self, name: str, model: nn.Module, setting: Setting) -> None:
        self.name, self.model, self.setting = name, model.train(), setting
        self.penalty: Penalty | None = None
        self._average = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(setting.averaging)
        ).eval()
        groups = [{"params": [*model.parameters()], "lr": setting.lr}]
        if isinstance(model, hc.GatedModel):
            groups = hc.parameter_groups(model, lr=setting.lr, gate_lr=setting.gate_lr)
        self.optimizer = torch.optim.Adam(groups, fused=True)

    @property
    def budget(self) -> hc.Budget | None:
        """The penalty, if it is a budget."""
        return self.penalty if isinstance(self.penalty, hc.Budget) else None

    @property
    def averaged(self) -> nn.Module:
        """The network with averaged weights and gates: it is counted and tested."""
        return self._average.module

    def train_epoch(self, data: Images) -> float:
        """Take a step on every batch, in random order; the mean loss."""
        losses = [self._step(data.take(batch)) for batch in self._batches(len(data))]
        return torch.stack(losses).mean().item()

    def _batches(self, examples: int) -> Iterator[Tensor]:
        size = self.setting.batch_size
        yield from torch.randperm(examples)[: examples // size * size].split(size)

    def _step(self, batch: Images) -> Tensor:
        loss = F.cross_entropy(self.model(scaled(batch.images)), batch.labels)
        if self.penalty is not None:
            loss = loss + self.penalty()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.penalty is not None:
            self.penalty.step()
        self._average.update_parameters(self.model)
        return loss.detach()
