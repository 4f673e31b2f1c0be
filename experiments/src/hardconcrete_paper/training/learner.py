"""One network of an experiment: weights, optimizer, averages and random numbers."""

import copy
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.errors import CompactionError, DataError
from hardconcrete_paper.training.processes import rank

RANK_STRIDE = 1_000_000_007
"""Difference of the seeds of processes that train one network, so that they draw other gates."""

MARGIN = 1e-6
"""Uniform noise is kept this far from 0 and 1."""

SHRUNK = ("gates.original", "gates.checks", ".kept_inputs")
"""The ends of names that the state of a network has only after ``shrink`` was called."""

UNREACHABLE_SAVING = 0.999
"""A fraction of the multiply-adds that no shrink saves."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        epochs: passes over the data.
        batch_size: examples per step; a last, smaller batch is left out.
        lr: learning rate of the weights, and of the gates unless they have another.
        gate_lr: learning rate of the gates, which then use Adam, outside the schedule.
        optimizer: of the weights: ``"adam"``, or ``"sgd"`` with Nesterov's momentum of 0.9.
        weight_decay: of the weights that do not decay in a penalty.
        milestones: epochs at whose beginning the learning rate is divided by five.
        swa: epochs after which the learning rate stays as it is, and the weights that are tested
            are the mean of the running average over the epochs since; never if None (stochastic
            weight averaging, Izmailov et al. 2018).
        draws: gates drawn for a batch, each for its part of the examples.
        per_example: whether gates are drawn for each example instead.
        shrink: remove units that were closed for so many epochs in a row; never if 0.
        round_to: the remaining widths are then multiples of this.
        bf16: whether matrix products and convolutions are computed in bfloat16.
        averaging: decay per step of the running average of weights and gates.
        clamp: log alpha is kept between these two after each step, as the authors' code does with
            minus and plus log 100; no bounds by default.
        divided_average: the average, which starts at the initial weights, is also divided by
            1 - decay^steps, as the authors' code does.
    """

    epochs: int = 200
    batch_size: int = 100
    lr: float = 1e-3
    gate_lr: float | None = None
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    swa: int | None = None
    draws: int = 1
    per_example: bool = False
    shrink: int = 0
    round_to: int = 1
    bf16: bool = False
    averaging: float = 0.999
    clamp: tuple[float, float] | None = None
    divided_average: bool = False

    def rate(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0.

        Example:
            >>> recipe = Recipe(lr=0.1, milestones=(60, 120))
            >>> [round(recipe.rate(epoch), 6) for epoch in (59, 60, 120)]
            [0.1, 0.02, 0.004]
            >>> round(Recipe(lr=0.1, milestones=(60, 120), swa=120).rate(120), 6)
            0.02
        """
        if self.swa is not None:
            epoch = min(epoch, self.swa - 1)
        return self.lr * 0.2 ** sum(epoch >= milestone for milestone in self.milestones)


class Objective(nn.Module):
    """The loss: cross-entropy plus penalties, with gates from uniform noise.

    Example:
        >>> import torch
        >>> objective = Objective(torch.nn.Flatten())
        >>> objective(None, torch.zeros(1, 1, 1, 2), torch.zeros(1, dtype=torch.long))
        tensor(0.6931)
    """

    def __init__(self, model: nn.Module, *penalties: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.penalties = model, penalties

    def forward(self, noise: Tensor | None, images: Tensor, labels: Tensor) -> Tensor:
        """The loss on a batch.

        Noise is one uniform number per gate, or per example and gate; None without gates.
        """
        if noise is None:
            outputs = self.model(images)
        else:
            gates: Any = self.model.gates
            with gates.holding(gates.distribution().icdf(noise), None):
                outputs = self.model(images)
        loss = F.cross_entropy(outputs, labels)
        for penalty in self.penalties:
            loss = loss + penalty()
        return loss


class Learner:
    """One network in training.

    Args:
        name: for the progress display and for files.
        seed: of the order of the data and of the gates; the model was initialised by the caller.
        model: a plain module or a ``GatedModel``.
        recipe: how it is trained.
        penalties: added to the cross-entropy. Lambdas are constant. A budget takes its step after
            the optimizer.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        model: nn.Module,
        recipe: Recipe,
        *penalties: Callable[[], Tensor],
    ) -> None:
        self.name, self.seed, self.recipe = name, seed, recipe
        self.model = model.train()
        self.objective = Objective(model, *penalties)
        self.budget = next((each for each in penalties if isinstance(each, hc.Budget)), None)
        self.device = next(model.parameters()).device
        averaging = get_ema_multi_avg_fn(recipe.averaging)
        self.average = AveragedModel(model, multi_avg_fn=averaging).eval()
        self.mean = None if recipe.swa is None else AveragedModel(self.average.module).eval()
        self.optimizers = _optimizers(model, recipe, self.device)
        self.generator = torch.Generator(self.device)
        self.gates = len(model.gates.log_alpha) if isinstance(model, hc.GatedModel) else 0
        self.taken = 0
        self._savings = 0.0, 0.0  # what could be removed after the last two epochs

    def begin_epoch(self, epoch: int, examples: int) -> Tensor:
        """Seed the random numbers of this epoch; returns the order of its examples.

        A resumed run needs no random state.
        """
        for group in chain.from_iterable(each.param_groups for each in self.optimizers):
            if group["scheduled"]:
                group["lr"].fill_(self.recipe.rate(epoch))
        seed = 2 * (
            self.seed * 1_000_003 + epoch
        )  # the order uses the odd seed, so that the streams differ
        self.generator.manual_seed(seed + RANK_STRIDE * rank())
        shuffle = torch.Generator().manual_seed(seed + 1)
        return torch.randperm(examples, generator=shuffle)

    def end_epoch(self, done: int, steps: int) -> None:
        """Count the steps, and update the mean over epochs."""
        self.taken = done * steps
        if self.mean is not None and done > self.recipe.swa:  # type: ignore[operator]
            self.mean.update_parameters(self.average.module)

    def fill(self, noise: Tensor) -> None:
        """Draw uniform noise for every gate, in place."""
        noise.uniform_(generator=self.generator).clamp_(MARGIN, 1 - MARGIN)

    def shrink(self, pays: float = 0.1, left: int = 0) -> bool:
        """Remove units that have stayed closed, if that saves the fraction ``pays`` of the MACs.

        It waits while so many units close in each epoch that waiting saves more. Under a budget the
        readout decides which units are closed.
        """
        if not self.recipe.shrink or not self.gates:
            return False
        before, last = self._savings
        waits = left > 0 and (last == 0 or (last - before) * left > last)
        how: Any = {"checks": self.recipe.shrink, "round_to": self.recipe.round_to}
        how["pays"] = UNREACHABLE_SAVING if waits else pays
        how["below"] = 0.01 if self.budget is None else "readout"
        copies = list(self._averages().values())
        try:
            report = hc.shrink(self.model, self.optimizers, averages=copies, **how)  # type: ignore[arg-type]
        except CompactionError as error:  # the training continues without shrinking
            warnings.warn(f"{self.name} goes on as it is: {error}", hc.HardConcreteWarning, 2)
            self.recipe = replace(self.recipe, shrink=0)
            return False
        self._savings = (0.0, 0.0) if report else (last, report.saved)
        self._refresh()
        return bool(report)

    def _refresh(self) -> None:
        """Count the gates again, and call the penalties before they are compiled."""
        self.gates = len(self.model.gates.log_alpha)  # type: ignore[union-attr, arg-type]
        for penalty in self.objective.penalties:
            penalty()

    def shrink_as(self, state: dict[str, Tensor]) -> None:
        """Remove the units that a saved learner had removed, so that its state fits."""
        if "model.gates.checks" not in state and "model.gates.original" not in state:
            return
        for mark, model in self._networks().items():
            part = {k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)}
            different = model.state_dict().keys() ^ part.keys()
            _refuse_another_network({name for name in different if not name.endswith(SHRUNK)})
            try:
                model.load_state_dict(part)
            except RuntimeError as error:  # of torch, if shapes differ
                why = " ".join(str(error).split())
                raise DataError(f"this checkpoint is of another network: {why}") from error
        self._refresh()
        for optimizer in self.optimizers:
            for parameter, tensors in optimizer.state.items():
                for key, value in tensors.items():
                    if value.dim() and value.shape != parameter.shape:
                        tensors[key] = torch.zeros_like(parameter)

    def _averages(self) -> dict[str, nn.Module]:
        """The averages, by the prefix of their tensors in a checkpoint."""
        averages = {"average.": self.average.module}
        return averages if self.mean is None else {**averages, "mean.": self.mean.module}

    def _networks(self) -> dict[str, nn.Module]:
        """The trained network and its averages."""
        return {"model.": self.model, **self._averages()}

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name; the checkpoint."""
        tensors = {
            mark + name: value
            for mark, model in self._networks().items()
            for name, value in model.state_dict().items()
        }
        if self.mean is not None:
            tensors["epochs_in_mean"] = self.mean.n_averaged
        for optimizer in self.optimizers:
            kind = type(optimizer).__name__
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            for index, parameter in enumerate(parameters):
                for key, value in optimizer.state[parameter].items():
                    tensors[f"{kind}.{index}.{key}"] = value
        if self.budget is not None:
            state = self.budget.state_dict()
            tensors |= {f"budget.{name}": value for name, value in state.items()}
        return tensors

    def restore(self, state: dict[str, Tensor]) -> None:
        """Write a state back, in place."""
        self.shrink_as(state)
        tensors = self.state()
        _refuse_another_network(tensors.keys() ^ state.keys())
        for name, value in tensors.items():
            if value.shape != state[name].shape or value.dtype != state[name].dtype:
                raise DataError(
                    f"this checkpoint is of another network: {name} is {state[name].dtype} "
                    f"{list(state[name].shape)}, not {value.dtype} {list(value.shape)}"
                )
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(state[name])
        if self.budget is not None:
            mark = "budget."
            tensors = {k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)}
            self.budget.load_state_dict(tensors)

    @property
    def averaged(self) -> Any:
        """The network with averaged weights and gates, which is counted and tested."""
        model: Any = self.average.module
        if self.mean is not None and self.mean.n_averaged > 0:
            model = self.mean.module
            if self.gates:  # a long mean would open gates that have closed since
                running: Any = self.average.module
                model.gates.log_alpha.data.copy_(running.gates.log_alpha)
        for buffer, current in zip(model.buffers(), self.model.buffers(), strict=True):
            buffer.copy_(current)
        divisor = 1 - self.recipe.averaging**self.taken if self.recipe.divided_average else 1.0
        if divisor in (0.0, 1.0):  # before the first step, and after many
            return model
        divided = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in divided.parameters():
                parameter.div_(divisor)
        return divided


def _refuse_another_network(names: Collection[str]) -> None:
    """Refuse names that either the network or its checkpoint lacks."""
    for name in sorted(names):
        raise DataError(f"this checkpoint is of another network: {name} is in one of them only")


def _optimizers(
    model: nn.Module, recipe: Recipe, device: torch.device
) -> list[torch.optim.Optimizer]:
    """The optimizer of the weights, and another for the gates if they have a learning rate.

    Learning rates are tensors, because a replayed graph reads them from memory.
    """
    if isinstance(model, hc.GatedModel):
        groups = hc.parameter_groups(model, recipe.lr, recipe.gate_lr, recipe.weight_decay)
    else:
        everything = {"params": list(model.parameters()), "weight_decay": recipe.weight_decay}
        groups = [{**everything, "lr": recipe.lr, "name": "weights"}]
    for group in groups:
        group["scheduled"] = group["name"] != "gates" or recipe.gate_lr is None
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    adam = [group for group in groups if recipe.optimizer == "adam" or not group["scheduled"]]
    sgd = [group for group in groups if group not in adam]
    made: list[torch.optim.Optimizer] = []
    if sgd:
        made.append(torch.optim.SGD(sgd, momentum=0.9, nesterov=True, fused=True))
    if adam:
        made.append(torch.optim.Adam(adam, fused=True, capturable=device.type == "cuda"))
    return made
