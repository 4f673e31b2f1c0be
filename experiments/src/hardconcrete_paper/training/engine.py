"""The training loop of the experiments: several networks side by side, data on the device.

On a CPU the networks take their steps in turn. On a GPU a step is captured once as a CUDA graph and
then replayed; networks that differ in their seed only are stacked and step as one.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hardconcrete.demo import Prepare, scaled
from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.training.cudnn_trials import tried
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.processes import agreed
from hardconcrete_paper.training.stacked_learners import StackedLearners

WARM_UP = 3
"""Steps before capture. They create the optimizer's state, and are undone."""


class Engine:
    """Trains learners together, epoch by epoch.

    Args:
        learners: the networks, with the same epochs and batch size.
        data: what they are trained on.
        stacked: whether they step as one; they must differ in their seed only.
        compiled: whether a GPU runs compiled code; it takes some seconds to get ready.
        prepare: makes of a batch of images what the networks take.

    Example:
        >>> import torch
        >>> from hardconcrete.demo.data import Images
        >>> from hardconcrete_paper.training.learner import Recipe
        >>> from hardconcrete.demo import MLP
        >>> data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
        >>> learner = Learner("dense", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=4))
        >>> [epoch for epoch in Engine([learner], data)]
        [1, 2]
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        data: Images,
        *,
        stacked: bool = False,
        compiled: bool = True,
        prepare: Prepare = scaled,
    ) -> None:
        recipes = {(learner.recipe.epochs, learner.recipe.batch_size) for learner in learners}
        if len(recipes) != 1:
            raise ArgumentError("learners trained together need the same epochs and batch size")
        self.learners, self.done = learners, 0
        self.seconds = 0.0
        self.epochs = learners[0].recipe.epochs
        device = learners[0].device
        self._data = data.images.to(device), data.labels.to(device)
        self._parts = [learners] if stacked else [[learner] for learner in learners]
        self._settings: Any = {"prepare": prepare, "compiled": compiled and device.type == "cuda"}
        self.build()

    def build(self) -> None:
        """Prepare a step of the present learners, at the start and after each shrink."""
        start = time.perf_counter()
        if self._settings["compiled"]:
            torch._dynamo.reset()  # drop code for larger networks: torch keeps few versions
        self.stacks = [StackedLearners(part, *self._data, **self._settings) for part in self._parts]
        self.steps = self.stacks[0].steps
        with _uncollected():
            self._step = self._prepare(self.learners[0].device)
        self.seconds_to_build = time.perf_counter() - start

    def __iter__(self) -> Iterator[int]:
        """Train an epoch, then yield its number."""
        while self.done < self.epochs:
            start = time.perf_counter()
            for stack in self.stacks:
                stack.begin_epoch(self.done)
            for _ in range(self.steps):
                self._step()
            self.losses = [loss for stack in self.stacks for loss in _means(stack)]
            self.done += 1
            for learner in self.learners:
                learner.end_epoch(self.done, self.steps)
            pays = agreed(self._worth(time.perf_counter() - start))
            remaining = self.epochs - self.done if self._settings["compiled"] else 0
            shrunk = [learner.shrink(pays, remaining) for learner in self.learners if pays < 1]
            if any(shrunk):
                self.build()
            self.seconds += time.perf_counter() - start
            yield self.done

    def _worth(self, seconds: float) -> float:
        """The part of the multiply-adds that a shrink must save to be worth its time.

        Half of the saved multiply-adds are saved time. A shrink must bring in twice its cost.
        """
        if self.done == self.epochs:
            return 1.0
        if not self._settings["compiled"]:
            return 0.1
        remaining = (self.epochs - self.done) * seconds
        return min(1.0, max(0.1, 2 * self.seconds_to_build / (0.5 * remaining)))

    def _prepare(self, device: torch.device) -> Callable[[], None]:
        """Create the optimizers' state, restore the learners, and capture a step on a GPU."""
        before = [_clones(learner.state()) for learner in self.learners]
        for stack in self.stacks:
            stack.begin_epoch(0)
        step = self._captured() if device.type == "cuda" else self._in_turn
        if device.type == "cpu":
            step()
        for stack in self.stacks:
            stack.share_state()
        for learner, state in zip(self.learners, before, strict=True):
            created = {name: torch.zeros_like(value) for name, value in learner.state().items()}
            learner.restore({**created, **state})
        return step

    def _in_turn(self) -> None:
        for stack in self.stacks:
            stack.step()

    def _tried(self) -> AbstractContextManager[None]:
        """While steps are compiled, cuDNN chooses convolutions for their gradients."""

        def forward() -> None:
            for stack in self.stacks:
                stack.evaluate()

        return tried(forward, self.learners[0].device)

    def _captured(self) -> Callable[[], None]:
        """A step of all stacks as one graph."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        for learner in self.learners:
            graph.register_generator_state(learner.generator)
        stream.wait_stream(torch.cuda.current_stream())
        fastest = self.learners[0].recipe.bf16  # or, as far as there are any, kernels that repeat
        with (
            torch.backends.cudnn.flags(
                enabled=True,
                benchmark=fastest,
                benchmark_limit=0,  # try all kernels of cuDNN, not the first ten
                deterministic=not fastest,
                allow_tf32=True,
            ),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "TensorFloat32")  # float32 is intended
            with torch.cuda.stream(stream), self._tried() if fastest else nullcontext():
                for _ in range(WARM_UP):
                    self._in_turn()
                    for stack in self.stacks:
                        stack.done.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            # Where processes share a network, NCCL asks the device about itself in another thread.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._in_turn()
        return graph.replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch off garbage collection, which takes a tenth of the time of compiling."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _means(stack: StackedLearners) -> list[float]:
    return (stack.loss / stack.steps).tolist()


def _clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}
