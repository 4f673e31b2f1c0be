"""Learners that step as one: every parameter has a leading dimension, one entry per network.

Five small networks then need the kernels of one. The parameters, averages and optimizer states of
the learners are views into the stacked ones. No tensor of a step moves, so a CUDA graph can replay
it.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from hardconcrete.demo import Prepare
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import cacheable
from hardconcrete_paper.training.learner import RANK_STRIDE, Learner
from hardconcrete_paper.training.processes import rank, world

PARTS = 25
"""Weight gradients are summed over so many parts of a batch, because one sum uses few cores."""


class StackedLearners:
    """One learner, or several that differ in their seed only.

    Args:
        learners: what is trained.
        images: uint8 [N, ...] on the learners' device.
        labels: int64 [N].
        prepare: makes the input of the networks from a batch of images.
        compiled: whether the losses and their gradients are compiled, as one graph.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        images: Tensor,
        labels: Tensor,
        *,
        prepare: Prepare,
        compiled: bool,
    ) -> None:
        self.learners, self.images, self.labels = learners, images, labels
        self.prepare = prepare
        first, count = learners[0], len(learners)
        batch = first.recipe.batch_size
        if count > 1 and not _can_be_stacked(first):
            raise ArgumentError("networks with budgets or SGD, or that shrink, cannot be stacked")
        if len(labels) < batch:
            raise ArgumentError(f"{len(labels)} examples are less than a batch")
        self.steps = len(labels) // batch
        self.order = torch.zeros(
            self.steps, count, batch // world(), dtype=torch.long, device=first.device
        )
        self.done = torch.zeros(1, dtype=torch.long, device=first.device)
        self.loss = torch.zeros(count, device=first.device)
        self.noise = self._no_noise() if first.gates else None
        self.parameters = _stacked([learner.model for learner in learners])
        self.averages = _stacked([learner.average.module for learner in learners])
        self._trained = [each for each in self.parameters.values() if each.requires_grad]
        self.optimizers = first.optimizers if count == 1 else [self._optimizer()]
        self._update_average = get_ema_multi_avg_fn(first.recipe.averaging)
        self._compiled: Callable[..., Any] | None = None
        self._compile, self._bf16 = compiled, first.recipe.bf16
        follow = None if first.budget is None else first.budget.step
        self._follow_budget = _compiled(follow) if follow and compiled else follow
        in_parallel = follow is not None and first.device.type == "cuda"
        self._side = torch.cuda.Stream(first.device) if in_parallel else None

    def _no_noise(self) -> Tensor:
        """A tensor for the noise of every network; in one network, of every draw."""
        first = self.learners[0]
        examples = [self.order.shape[-1]] if first.recipe.per_example else []
        draws = max(len(self.learners), first.recipe.draws)
        return torch.zeros(draws, *examples, first.gates, device=first.device)

    def begin_epoch(self, epoch: int) -> None:
        """Seed everything random of this epoch, dropout and augmentation included."""
        for index, learner in enumerate(self.learners):
            order = learner.begin_epoch(epoch, len(self.labels))
            batches = order[: self.steps * learner.recipe.batch_size].view(self.steps, -1)
            self.order[:, index] = batches[:, rank() :: world()]
        seed = epoch + 1_000_003 * sum(learner.seed for learner in self.learners)
        seed += RANK_STRIDE * rank()
        if self.order.is_cuda:  # of the device; a captured step goes on from there
            torch.cuda.manual_seed(seed)
        else:
            self._random = torch.Generator().manual_seed(seed).get_state()
        self.done.zero_()
        self.loss.zero_()

    def step(self) -> None:
        """One step of every learner on its next batch. On a CPU the global random state is kept."""
        if self.order.is_cuda:
            self._step()
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random)
        self._step()
        self._random = torch.get_rng_state()
        torch.set_rng_state(outside)

    def evaluate(self) -> None:
        """Run the first network on the part of a batch that shares one draw of the gates."""
        learner = self.learners[0]
        examples = learner.recipe.batch_size // world() // learner.recipe.draws
        images = self.prepare(self.images[:examples])
        learner.model.eval()
        try:
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self._bf16):
                learner.model(images)
        finally:
            learner.model.train()

    def _step(self) -> None:
        batch = self.order.index_select(0, self.done)[0]
        images = self.prepare(self.images.index_select(0, batch.flatten()))
        labels = self.labels.index_select(0, batch.flatten()).view(batch.shape)
        if len(self.learners) > 1:
            images = images.unflatten(0, batch.shape)
        if self.noise is not None:
            for learner, noise in zip(cycle(self.learners), self.noise, strict=False):
                learner.fill(noise)
        losses, gradients = self._differentiated(self.noise, images, labels)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        gates, *others = reversed(self.optimizers)  # of the gates if they have their own, or of all
        gates.step()
        bounds = self.learners[0].recipe.clamp
        if bounds is not None and self.noise is not None:
            with torch.no_grad():
                self.parameters["gates.log_alpha"].clamp_(*bounds)
        with self._aside():
            if self._follow_budget is not None:
                self._follow_budget()
        for optimizer in others:
            optimizer.step()
        current, averages = list(self.parameters.values()), list(self.averages.values())
        self._update_average(averages, current, self.done)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self.done.add_(1)
        self.loss.add_(losses.detach())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU use a second stream, because a budget has many small kernels."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _differentiated(self, *batch: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The loss of every network, and the gradients of their sum, averaged over processes."""
        losses, gradients = self._computed(*batch)
        gradients = [_alike(*pair) for pair in zip(gradients, self._trained, strict=True)]
        if world() > 1:
            for tensor in (losses, *gradients):
                dist.all_reduce(tensor.div_(world()))
        return losses, gradients

    def _computed(self, *batch: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        def gradients(trained: Any, *batch: Any) -> Any:
            losses = self._losses(*batch)
            return losses.detach(), torch.autograd.grad(losses.sum(), trained)

        if not self._compile:
            return gradients(self._trained, *batch)  # type: ignore[no-any-return]
        if len(self.learners) == 1:
            self._compiled = self._compiled or _compiled(self._losses, combo_kernels=True)
            losses = self._compiled(*batch)
            return losses.detach(), torch.autograd.grad(losses.sum(), self._trained)
        if self._compiled is None:  # traced through vmap and autograd, which dynamo would break at
            self._compiled = _compiled(make_fx(gradients)(self._trained, *batch))
        convolves = any(
            isinstance(module, nn.Conv2d) for module in self.learners[0].model.modules()
        )
        with torch.no_grad(), _rounded_as(convolves and torch.backends.cudnn.allow_tf32):
            return self._compiled(self._trained, *batch)  # type: ignore[no-any-return]

    def _losses(self, noise: Tensor | None, images: Tensor, labels: Tensor) -> Tensor:
        objective = self.learners[0].objective
        if len(self.learners) == 1:
            draws = [None] if noise is None else [*noise]
            parts = zip(draws, images.chunk(len(draws)), labels[0].chunk(len(draws)), strict=True)
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self._bf16):
                return torch.stack([objective(*part) for part in parts]).mean()[None]
        named = {f"model.{name}": value for name, value in self.parameters.items()}

        def loss(state: Any, *batch: Any) -> Any:
            return functional_call(objective, state, batch)

        each: Any = vmap(loss, (0, None if noise is None else 0, 0, 0), randomness="different")
        with ConvolutionsAsProducts():
            return each(named, noise, images, labels)  # type: ignore[no-any-return]

    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the first learner, for the stacked parameters."""
        first = self.learners[0]
        names = {id(parameter): name for name, parameter in first.model.named_parameters()}
        groups = []
        for group in first.optimizers[0].param_groups:
            whole = [self.parameters[names[id(parameter)]] for parameter in group["params"]]
            groups.append({**group, "params": whole})
        return torch.optim.Adam(groups, fused=True, capturable=first.device.type == "cuda")

    def share_state(self) -> None:
        """Give every learner its part of the optimizer's state, once that exists."""
        if len(self.learners) == 1:
            return
        for index, learner in enumerate(self.learners):
            for name, parameter in learner.model.named_parameters():
                state = self.optimizers[0].state[self.parameters[name]]
                learner.optimizers[0].state[parameter] = {
                    key: value[index] if value.dim() else value for key, value in state.items()
                }


def _can_be_stacked(learner: Learner) -> bool:
    """Whether networks like this one can step together."""
    recipe = learner.recipe
    plain = recipe.optimizer == "adam" and recipe.draws == 1 and not recipe.shrink
    return plain and learner.budget is None


def start_compilers(device: torch.device) -> None:
    """Start the processes that compile kernels for a GPU.

    They take seconds to start. Until then kernels are compiled one after the other.
    """
    if device.type == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function, compiled for the present sizes; a network that has shrunk is compiled again.

    A run that continues in another process uses torch's cache. The compiler is imported at the
    first call. This takes seconds, in which cuDNN already runs.
    """

    @functools.cache
    def code() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, options={**cacheable(), **options})

    return lambda *inputs: code()(*inputs)


def _alike(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the layout of its parameter, because fused optimizers ignore strides."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


@contextmanager
def _rounded_as(tf32: bool) -> Iterator[None]:
    """Matrix products in TF32 where convolutions use it: some replace convolutions."""
    if not tf32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ConvolutionsAsProducts(TorchFunctionMode):
    """Inside, plain convolutions multiply patches of their input.

    A stacked convolution has groups, which libraries run one after the other. A product has none.

    Example:
        >>> import torch
        >>> x, convolution = torch.randn(2, 3, 9, 8), torch.nn.Conv2d(3, 4, 5)
        >>> with ConvolutionsAsProducts():
        ...     y = convolution(x)
        >>> torch.allclose(y, convolution(x), atol=1e-5)
        True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A product instead of a convolution without stride, padding, dilation and groups."""
        plain = func is torch.conv2d and args[3:] == ((1, 1), (0, 0), (1, 1), 1)
        if plain and args[0].dim() == 4:
            return _product(*args[:3])
        return func(*args, **(kwargs or {}))


class _Patches(torch.autograd.Function):
    """The patches of all windows; one kernel, and one for the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, columns: int) -> Tensor:
        """Of [part, channel, image, row, column]; the window comes after the channel."""
        x = x.contiguous()
        height, width = x.shape[3] - rows + 1, x.shape[4] - columns + 1
        part, channel, image, row, column = x.stride()
        shape = (*x.shape[:2], rows, columns, x.shape[2], height, width)
        return x.as_strided(shape, (part, channel, row, column, image, row, column)).contiguous()

    @staticmethod
    def setup_context(_: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: the gradient has all the sizes."""

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        """Every entry of a window adds to the pixel that it read."""
        rows, columns = gradient.shape[2:4]
        added = [
            functional.pad(seen, (column, columns - 1 - column, row, rows - 1 - row))
            for row, line in enumerate(gradient.unbind(2))
            for column, seen in enumerate(line.unbind(2))
        ]
        return sum(added), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape[2:]
    height, width = x.shape[2] - rows + 1, x.shape[3] - columns + 1
    parts = math.gcd(len(x), PARTS)
    x = x.unflatten(0, (parts, -1)).transpose(1, 2)  # part, channel, image, row, column
    patches = _Patches.apply(x, rows, columns).flatten(1, 3).flatten(2)  # type: ignore[no-untyped-call]
    result: Tensor = torch.bmm(weight.flatten(1).expand(parts, -1, -1), patches)
    if bias is not None:
        result = result + bias[:, None]
    return result.view(parts, len(weight), -1, height, width).transpose(1, 2).flatten(0, 1)


def _stacked(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Stacked parameters of several models. The models' parameters become views into them."""
    if len(models) == 1:
        return dict(models[0].named_parameters())
    named = [dict(model.named_parameters()) for model in models]
    stacked = {}
    for name, first in named[0].items():
        parts = [parameters[name] for parameters in named]
        whole = nn.Parameter(torch.stack([part.detach() for part in parts]), first.requires_grad)
        for part, view in zip(parts, whole.detach(), strict=True):
            part.data = view
        stacked[name] = whole
    return stacked
