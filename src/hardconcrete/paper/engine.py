"""The training loop of the experiments: several networks side by side, data on the device.

On a CPU the networks take their steps in turn. On a GPU the steps of all of them are captured once
as parallel branches of one CUDA graph, which is then replayed: five small networks take little
longer than one. Everything that a step reads or writes therefore stays in place.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete.paper.datasets import Images

WARM_UP = 3
"""Steps before capture: they create the optimiser's state, and are undone."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        epochs: passes over the data.
        batch_size: examples per step; a last, smaller batch is left out.
        lr: learning rate of Adam.
        gate_lr: that of the gates, if another.
        averaging: decay per step of the running average of weights and gates.
    """

    epochs: int = 200
    batch_size: int = 100
    lr: float = 1e-3
    gate_lr: float | None = None
    averaging: float = 0.999


class Learner:
    """One network in training, with its optimiser, its averages and its own randomness.

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
        self.name, self.seed, self.recipe, self.penalty = name, seed, recipe, penalty
        self.model = model.train()
        self.device = next(model.parameters()).device
        self._update_average = get_ema_multi_avg_fn(recipe.averaging)
        self.average = AveragedModel(model, multi_avg_fn=self._update_average).eval()
        self._averaging = (
            list(self.average.module.parameters()),
            list(model.parameters()),
            self.average.n_averaged,
        )
        self.optimizer = torch.optim.Adam(
            _parameter_groups(model, recipe), fused=True, capturable=self.device.type == "cuda"
        )
        on_gpu = self.device.type == "cuda"
        self._objective = torch.compile(self._loss) if on_gpu else self._loss
        self.generator = torch.Generator(self.device)
        if isinstance(model, hc.GatedModel):
            model.gates.generator = self.generator
        self.loss = torch.zeros((), device=self.device)
        self.count = torch.zeros(1, dtype=torch.long, device=self.device)

    def load(self, data: Images) -> None:
        """Take the training data to the device, pixels in [0, 1]."""
        if len(data) < self.recipe.batch_size:
            raise ArgumentError(f"{len(data)} examples are less than a batch")
        self.images = data.images.to(self.device).float().div_(255)
        self.labels = data.labels.to(self.device)
        self.steps = len(data) // self.recipe.batch_size
        self.order = torch.zeros(
            self.steps, self.recipe.batch_size, dtype=torch.long, device=self.device
        )

    def begin_epoch(self, epoch: int) -> None:
        """Seed everything random of this epoch, so that a resumed run needs no random state."""
        seed = 2 * (self.seed * 1_000_003 + epoch)  # an odd one for the order, of its own stream
        self.generator.manual_seed(seed)
        shuffle = torch.Generator().manual_seed(seed + 1)
        order = torch.randperm(len(self.labels), generator=shuffle)
        self.order.copy_(order[: self.order.numel()].view_as(self.order))
        self.count.zero_()
        self.loss.zero_()

    def step(self) -> None:
        """One step on the next batch."""
        batch = self.order.index_select(0, self.count).flatten()
        images, labels = (part.index_select(0, batch) for part in (self.images, self.labels))
        # The gates are drawn outside of what is compiled, which cannot use a generator of its own.
        with self.model.draw() if isinstance(self.model, hc.GatedModel) else nullcontext():
            loss = self._objective(images, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self._update_average(*self._averaging)
        self.count.add_(1)
        self.loss.add_(loss.detach())

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(images), labels)
        return loss if self.penalty is None else loss + self.penalty()

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
        return self.average.module


class Engine:
    """Trains learners together, epoch by epoch.

    Example:
        >>> import torch
        >>> from hardconcrete.paper.datasets import Images
        >>> from hardconcrete.paper.models import MLP
        >>> data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
        >>> learner = Learner("dense", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=4))
        >>> [epoch for epoch in Engine([learner], data)]
        [1, 2]
    """

    def __init__(self, learners: Sequence[Learner], data: Images, done: int = 0) -> None:
        recipes = {(learner.recipe.epochs, learner.recipe.batch_size) for learner in learners}
        if len(recipes) != 1:
            raise ArgumentError("learners trained together need the same epochs and batch size")
        self.learners, self.done = learners, done
        self.seconds = 0.0
        self.epochs = learners[0].recipe.epochs
        for learner in learners:
            learner.load(data)
        self._step = self._prepare()

    def __iter__(self) -> Iterator[int]:
        """Train an epoch, then yield its number."""
        while self.done < self.epochs:
            start = time.perf_counter()
            for learner in self.learners:
                learner.begin_epoch(self.done)
            for _ in range(self.learners[0].steps):
                self._step()
            self.losses = [(learner.loss / learner.steps).item() for learner in self.learners]
            self.seconds += time.perf_counter() - start
            self.done += 1
            yield self.done

    def _prepare(self) -> Callable[[], None]:
        """Create the optimisers' state, undo that, and capture a step where there is a GPU."""
        before = [_clones(learner.state()) for learner in self.learners]
        on_gpu = self.learners[0].device.type == "cuda"
        for learner in self.learners:
            learner.begin_epoch(0)
        step = self._captured() if on_gpu else self._in_turn()
        for learner, state in zip(self.learners, before, strict=True):
            created = {name: torch.zeros_like(value) for name, value in learner.state().items()}
            learner.restore({**created, **state})
        return step

    def _in_turn(self) -> Callable[[], None]:
        def step() -> None:
            for learner in self.learners:
                learner.step()

        step()
        return step

    def _captured(self) -> Callable[[], None]:
        """One graph with a branch per learner, so that small kernels of several run at once."""
        trunk = torch.cuda.Stream()
        branches = [torch.cuda.Stream() for _ in self.learners]

        def step() -> None:
            for learner, branch in zip(self.learners, branches, strict=True):
                branch.wait_stream(trunk)
                with torch.cuda.stream(branch):
                    learner.step()
            for branch in branches:
                trunk.wait_stream(branch)

        graph = torch.cuda.CUDAGraph()
        for learner in self.learners:
            graph.register_generator_state(learner.generator)
        trunk.wait_stream(torch.cuda.current_stream())
        with (
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=True),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "TensorFloat32")  # float32 is meant
            with torch.cuda.stream(trunk):
                for _ in range(WARM_UP):
                    step()
                    for learner in self.learners:
                        learner.count.zero_()
            torch.cuda.current_stream().wait_stream(trunk)
            with torch.cuda.graph(graph, stream=trunk):
                step()
        return graph.replay


def error_rate(model: nn.Module, data: Images, batch_size: int = 1000) -> float:
    """Percentage of wrong answers, in evaluation mode.

    Example:
        >>> import torch
        >>> from hardconcrete.paper.datasets import Images
        >>> blank = torch.zeros(4, 1, 1, 3, dtype=torch.uint8)
        >>> data = Images(blank, torch.tensor([0, 0, 0, 1]), "blank")
        >>> error_rate(torch.nn.Flatten(), data)
        25.0
    """
    training = model.training
    model.eval()
    device = next(chain(model.parameters(), [torch.zeros(())])).device
    wrong = 0
    with torch.no_grad():
        for start in range(0, len(data), batch_size):
            images = data.images[start : start + batch_size].to(device).float() / 255
            labels = data.labels[start : start + batch_size].to(device)
            wrong += int((model(images).argmax(1) != labels).sum())
    model.train(training)
    return 100 * wrong / len(data)


def _parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    if isinstance(model, hc.GatedModel):
        return hc.parameter_groups(model, recipe.lr, recipe.gate_lr)
    return [{"params": list(model.parameters()), "lr": recipe.lr}]


def _clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}
