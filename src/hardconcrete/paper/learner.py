"""One network of an experiment: its weights, optimiser, averages and its own randomness."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.errors import DataError

MARGIN = 1e-6
"""Uniform noise is kept this far from 0 and 1."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        epochs: passes over the data.
        batch_size: examples per step; a last, smaller batch is left out.
        lr: learning rate of Adam.
        gate_lr: that of the gates, if another.
        averaging: decay per step of the running average of weights and gates.
        clamp: log alpha is kept between plus and minus this after each step, as the authors' code
            does with log 100; no bound by default.
        divided_average: the average, which starts at the initial weights, is also divided by
            1 - decay^steps, as the authors' code does.
    """

    epochs: int = 200
    batch_size: int = 100
    lr: float = 1e-3
    gate_lr: float | None = None
    averaging: float = 0.999
    clamp: float | None = None
    divided_average: bool = False


class Objective(nn.Module):
    """What is minimised: cross-entropy plus penalty, with gates made from given noise.

    Example:
        >>> import torch
        >>> objective = Objective(torch.nn.Flatten(), None)
        >>> objective(None, torch.zeros(1, 1, 1, 2), torch.zeros(1, dtype=torch.long))
        tensor(0.6931)
    """

    def __init__(self, model: nn.Module, penalty: Callable[[], Tensor] | None) -> None:
        super().__init__()
        self.model, self.penalty = model, penalty

    def forward(self, noise: Tensor | None, images: Tensor, labels: Tensor) -> Tensor:
        """The loss on a batch; noise is one uniform number per gate, None without gates."""
        if noise is None:
            outputs = self.model(images)
        else:
            gates: Any = self.model.gates
            with gates.holding(gates.distribution().icdf(noise), None):
                outputs = self.model(images)
        loss = F.cross_entropy(outputs, labels)
        return loss if self.penalty is None else loss + self.penalty()


class Learner:
    """One network in training.

    Args:
        name: for the progress display and for files.
        seed: of the order of the data and of the gates; the model was initialised by the caller.
        model: a plain module or a ``GatedModel``.
        recipe: how it is trained.
        penalty: added to the cross-entropy; its lambda is constant.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        model: nn.Module,
        recipe: Recipe,
        penalty: Callable[[], Tensor] | None = None,
    ) -> None:
        self.name, self.seed, self.recipe = name, seed, recipe
        self.model = model.train()
        self.objective = Objective(model, penalty)
        self.device = next(model.parameters()).device
        averaging = get_ema_multi_avg_fn(recipe.averaging)
        self.average = AveragedModel(model, multi_avg_fn=averaging).eval()
        self.optimizer = torch.optim.Adam(
            _parameter_groups(model, recipe), fused=True, capturable=self.device.type == "cuda"
        )
        self.generator = torch.Generator(self.device)
        self.gates = len(model.gates.log_alpha) if isinstance(model, hc.GatedModel) else 0
        self.taken = 0

    def begin_epoch(self, epoch: int, examples: int) -> Tensor:
        """Seed what is random in this epoch; the order of its examples.

        A resumed run needs no random state.
        """
        seed = 2 * (self.seed * 1_000_003 + epoch)  # an odd one for the order, of its own stream
        self.generator.manual_seed(seed)
        shuffle = torch.Generator().manual_seed(seed + 1)
        return torch.randperm(examples, generator=shuffle)

    def fill(self, noise: Tensor) -> None:
        """Draw uniform noise for every gate, in place."""
        noise.uniform_(generator=self.generator).clamp_(MARGIN, 1 - MARGIN)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name; the checkpoint."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        averages = self.average.module.state_dict()
        tensors |= {f"average.{name}": value for name, value in averages.items()}
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        for index, parameter in enumerate(parameters):
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{index}.{key}"] = value
        return tensors

    def restore(self, state: dict[str, Tensor]) -> None:
        """Write a state back, in place."""
        own = self.state()
        for name in own.keys() ^ state.keys():
            raise DataError(f"this checkpoint is of another network: {name} is in one of them only")
        with torch.no_grad():
            for name, value in own.items():
                if value.shape != state[name].shape:
                    raise DataError(
                        f"this checkpoint is of another network: {name} has the shape "
                        f"{list(state[name].shape)}, not {list(value.shape)}"
                    )
                value.copy_(state[name])

    @property
    def averaged(self) -> Any:
        """The network with averaged weights and gates: what is counted and tested."""
        divisor = 1 - self.recipe.averaging**self.taken if self.recipe.divided_average else 1.0
        if divisor in (0.0, 1.0):  # before the first step, and after many
            return self.average.module
        divided = copy.deepcopy(self.average.module)
        with torch.no_grad():
            for parameter in divided.parameters():
                parameter.div_(divisor)
        return divided


def _parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    if isinstance(model, hc.GatedModel):
        return hc.parameter_groups(model, recipe.lr, recipe.gate_lr)
    return [{"params": list(model.parameters()), "lr": recipe.lr}]
