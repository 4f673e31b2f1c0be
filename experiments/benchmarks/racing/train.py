"""Training with SGD; on a GPU every step is the replay of one CUDA graph."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from benchmarks.racing.checkpoint import Checkpoint, State
from benchmarks.racing.data import Data
from benchmarks.racing.networks import to_device
from benchmarks.racing.schedules import SCHEDULES
from benchmarks.racing.settings import Recipe
from hardconcrete.gating import cacheable
from hardconcrete_paper.training.stacked_learners import start_compilers

BATCH = 128
MOMENTUM = 0.9
ADAMW_DECAY = 0.05
"""Decoupled weight decay of transformers, as in DeiT."""
EAGER_STEPS = 3
"""Steps before a capture: cuDNN and the optimiser make there what they keep."""
MAX_STEPS_AHEAD = 50
"""Steps that are queued on a GPU at most, so that a training can stop in time."""
TEST_BATCH = 1000

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From the model, the images and the labels to a scalar."""


def cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The plain loss."""
    return F.cross_entropy(model(images), labels)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for the sizes at hand; another process finds the code in the cache on disk."""
    return torch.compile(function, dynamic=False, options=cacheable())


class NesterovSGD(torch.optim.SGD):
    """SGD with Nesterov momentum whose rate is a tensor, so that a CUDA graph can change it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        """One update, as ``torch.optim.SGD(nesterov=True)`` does it."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            velocity = [self.state[p]["momentum_buffer"] for p in params]
            change = torch._foreach_add(
                [p.grad for p in params], params, alpha=group["weight_decay"]
            )
            torch._foreach_mul_(velocity, group["momentum"])
            torch._foreach_add_(velocity, change)
            torch._foreach_add_(change, velocity, alpha=group["momentum"])
            torch._foreach_mul_(change, group["lr"].neg())
            torch._foreach_add_(params, change)


class Trainer:
    """A training whose steps are taken one at a time or all at once.

    Between two steps a method may change the model's values in place. If it changes its tensors,
    it calls ``finish`` before and ``recapture`` after that.

    Args:
        model: trained in place.
        data: its images.
        recipe: how it is trained.
        loss: from the model, images and labels to a scalar.
        budget: its step follows every step.
        checkpoint: where the training continues from, and when it stops.
        before_update: called between the gradients and the update, outside any CUDA graph.
        after_step: called with the number of every step once it is done.
        parameters: those that the optimizer moves; all of them by default.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        recipe: Recipe,
        *,
        loss: Loss = cross_entropy,
        budget: hc.Budget | None = None,
        checkpoint: Checkpoint | None = None,
        before_update: Callable[[], None] | None = None,
        after_step: Callable[[int], None] | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        self.data, self.recipe, self.steps, self.loss = data, recipe, recipe.steps, loss
        self.device, self.budget = data.device, budget
        self.checkpoint = Checkpoint() if checkpoint is None else checkpoint
        self.before_update, self.after_step = before_update, after_step
        self.on_gpu = self.device.type == "cuda"
        if recipe.compiled:
            start_compilers(self.device)
        self.crops = data.crops(self.steps, BATCH, recipe.seed)
        self.rates = SCHEDULES[recipe.schedule](self.steps, recipe.peak_lr).to(self.device)
        self.rate = torch.zeros((), device=self.device)
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.loss_sum = torch.zeros((), device=self.device)
        self.done, self.seconds_before, self.start = 0, 0.0, time.perf_counter()
        self.stream = _side_stream() if self.on_gpu else None
        self.reached: torch.cuda.Event | None = None
        self.model = to_device(model, self.device)
        self.optimizer = self._optimizer(parameters or list(self.model.parameters()))
        if state := self.checkpoint.load(self.device):
            self._restore(state)
        self.recapture()

    def seconds(self) -> float:
        """How long it took so far, in all its pieces."""
        return self.seconds_before + time.perf_counter() - self.start

    def state(self) -> State:
        """All that the training changes."""
        parameters = self.optimizer.param_groups[0]["params"]
        moments = {
            index: dict(self.optimizer.state[parameter])
            for index, parameter in enumerate(parameters)
            if self.optimizer.state[parameter]
        }
        return {
            "done": self.done,
            "seconds": self.seconds(),
            "loss_sum": self.loss_sum,
            "model": self.model.state_dict(),
            "moments": moments,
            "budget": self.budget.state_dict() if self.budget else {},
        }

    def _restore(self, state: State) -> None:
        """Continue from a state. Units that were removed there are removed here first."""
        self.model.load_state_dict(state["model"])
        parameters = self.optimizer.param_groups[0]["params"]
        for index, moments in state["moments"].items():
            self.optimizer.state[parameters[index]].update(moments)
        if self.budget:
            self.budget.load_state_dict(state["budget"])
        self.done, self.seconds_before = state["done"], state["seconds"]
        self.number.fill_(self.done)
        self.loss_sum.copy_(state["loss_sum"])

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = NesterovSGD(
            parameters,
            lr=0.1,
            momentum=MOMENTUM,
            weight_decay=self.recipe.weight_decay,
            nesterov=True,
        )
        if self.recipe.optimizer == "adamw":
            optimizer = torch.optim.AdamW(
                parameters, lr=0.1, weight_decay=ADAMW_DECAY, capturable=self.on_gpu
            )
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        return optimizer

    def recapture(self, model: nn.Module | None = None) -> None:
        """After parameters were replaced: the next steps run eagerly, then a new graph.

        Args:
            model: trained from now on, with a new optimiser; by default the model stays, and so
                does the optimiser's state, which must then fit the parameters.
        """
        if model is not None:
            self.model = to_device(model, self.device)
            self.optimizer = self._optimizer(list(self.model.parameters()))
        self._lay_out()
        self.eager_left = EAGER_STEPS
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.optimizer.zero_grad(set_to_none=True)
        self.forward = self._forward
        if self.recipe.compiled:
            torch._dynamo.reset()  # what was compiled for a larger network
            self.forward = compiled(self._forward)

    def _lay_out(self) -> None:
        """What was cut or loaded may be laid out otherwise, which convolutions are slow with."""
        self.model = to_device(self.model, self.device)
        for parameter, state in self.optimizer.state.items():
            for name, moment in state.items():
                if moment.shape == parameter.shape and moment.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter.detach()).copy_(moment)

    def run(self, until: int | None = None) -> None:
        """All steps that are left, or those before a number."""
        self.model.train()
        for step in range(self.done, self.steps if until is None else until):
            self._step()
            self.done = step + 1
            if self.budget:
                self.budget.step()
            if self.after_step:
                self.after_step(step)
            if self.on_gpu and self.done % MAX_STEPS_AHEAD == 0:
                self._wait()
            self.checkpoint.after_step(self.state)

    def _wait(self) -> None:
        """For the step at which this was called last."""
        if self.reached is not None:
            self.reached.synchronize()
        self.reached = torch.cuda.Event(blocking=True)  # other processes need the core
        self.reached.record()

    def finish(self) -> None:
        """Wait for the device, and give the memory of graphs and gradients back."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.graphs.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self) -> None:
        if not self.on_gpu:
            self._eager_step()
        elif self.eager_left:
            self.eager_left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._eager_step()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if not self.graphs:
                self._capture()
            self._replay()

    def _eager_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self._cudnn():
            self._gradients()
        if self.before_update:
            self.before_update()
        self._update()

    def _replay(self) -> None:
        for number, graph in enumerate(self.graphs):
            if number and self.before_update:
                self.before_update()
            graph.replay()

    def _capture(self) -> None:
        """One graph for the step, or two where something happens in between."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self._gradients, self._update]
        if not self.before_update:
            parts = [self._gradients_and_update]
        torch.cuda.synchronize()
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with (
                self._cudnn(),
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                part()
            self.graphs.append(graph)

    def _gradients_and_update(self) -> None:
        self._gradients()
        self._update()

    def _gradients(self) -> None:
        images, labels = self.data.batch(self.crops, self.number)
        loss = self.forward(images, labels)
        loss.backward()
        self.loss_sum += loss.detach()

    def _forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            return self.loss(self.model, images, labels)

    def _cudnn(self) -> AbstractContextManager[None]:
        """The fastest kernels: of all that cuDNN has in a long training, else of its first ten."""
        limit = 0 if self.recipe.compiled else 10
        return torch.backends.cudnn.flags(
            enabled=True, benchmark=True, benchmark_limit=limit, allow_tf32=True
        )

    def _update(self) -> None:
        self.rate.copy_(self.rates.index_select(0, self.number)[0])
        self.number += 1
        self.optimizer.step()

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.on_gpu:
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def _side_stream() -> torch.cuda.Stream:
    """Not the default one, which cannot be captured."""
    current = torch.cuda.current_stream()
    return torch.cuda.Stream() if current == torch.cuda.default_stream() else current


def train(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    checkpoint: Checkpoint,
    *,
    before_update: Callable[[], None] | None = None,
) -> float:
    """Train a model in place; returns the seconds it took."""
    trainer = Trainer(model, data, recipe, checkpoint=checkpoint, before_update=before_update)
    trainer.run()
    trainer.finish()
    return trainer.seconds()


@torch.no_grad()
def error(model: nn.Module, data: Data) -> float:
    """Percentage of wrong answers on the images to test on, in full precision."""
    was_training = model.training
    model = to_device(model, data.device).eval()
    wrong = torch.zeros((), dtype=torch.long, device=data.device)
    pairs = zip(data.test_images.split(TEST_BATCH), data.test_labels.split(TEST_BATCH), strict=True)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for images, labels in pairs:
            wrong += (model(data.normalise(images)).argmax(1) != labels).sum()
    model.train(was_training)
    return 100 * int(wrong) / len(data.test_labels)
