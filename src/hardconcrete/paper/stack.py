"""Learners that step as one: every parameter has a leading dimension, one entry per network.

Five small networks then take the kernels of one. The parameters, averages and optimiser states of
the learners are views into the stacked ones, so that whatever reads a learner sees it as it is.
Nothing that a step reads or writes moves: a CUDA graph can replay it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from hardconcrete.errors import ArgumentError
from hardconcrete.paper.learner import Learner

PARTS = 25
"""Parts of a batch whose weight gradients are summed: one long sum would keep few cores busy."""


class Stack:
    """One learner, or several that differ in nothing but their seed.

    Args:
        learners: what is trained.
        images: float [N, ...] on the learners' device.
        labels: int64 [N].
        compiled: whether the losses and their gradients are compiled, as one graph.
    """

    def __init__(
        self, learners: Sequence[Learner], images: Tensor, labels: Tensor, *, compiled: bool
    ) -> None:
        self.learners, self.images, self.labels = learners, images, labels
        first, count = learners[0], len(learners)
        batch = first.recipe.batch_size
        if len(labels) < batch:
            raise ArgumentError(f"{len(labels)} examples are less than a batch")
        self.steps = len(labels) // batch
        self.order = torch.zeros(self.steps, count, batch, dtype=torch.long, device=first.device)
        self.done = torch.zeros(1, dtype=torch.long, device=first.device)
        self.loss = torch.zeros(count, device=first.device)
        self.noise = torch.zeros(count, first.gates, device=first.device) if first.gates else None
        self.parameters = _stacked([learner.model for learner in learners])
        self.averages = _stacked([learner.average.module for learner in learners])
        self._trained = [each for each in self.parameters.values() if each.requires_grad]
        self.optimizer = first.optimizer if count == 1 else self._optimizer()
        self._update_average = get_ema_multi_avg_fn(first.recipe.averaging)
        self._compiled: Callable[..., Any] | None = None
        self._compile = compiled

    def begin_epoch(self, epoch: int) -> None:
        """Seed everything random of this epoch, dropout included."""
        orders = [learner.begin_epoch(epoch, len(self.labels)) for learner in self.learners]
        for index, order in enumerate(orders):
            self.order[:, index] = order[: self.order[:, index].numel()].view(self.steps, -1)
        if any(isinstance(part, nn.Dropout) for part in self.learners[0].model.modules()):
            torch.manual_seed(epoch + 1_000_003 * sum(learner.seed for learner in self.learners))
        self.done.zero_()
        self.loss.zero_()

    def step(self) -> None:
        """One step of every learner on its next batch."""
        batch = self.order.index_select(0, self.done)[0]
        images, labels = (
            part.index_select(0, batch.flatten()).view(*batch.shape, *part.shape[1:])
            for part in (self.images, self.labels)
        )
        if self.noise is not None:
            for learner, noise in zip(self.learners, self.noise, strict=True):
                learner.fill(noise)
        losses, gradients = self._differentiated(self.noise, images, labels)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        bound = self.learners[0].recipe.clamp
        if bound is not None and self.noise is not None:
            with torch.no_grad():
                self.parameters["gates.log_alpha"].clamp_(-bound, bound)
        current, averages = list(self.parameters.values()), list(self.averages.values())
        self._update_average(averages, current, self.done)
        self.done.add_(1)
        self.loss.add_(losses.detach())

    def _differentiated(self, *batch: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The loss of every network, and the gradients of their sum."""

        def gradients(trained: Any, *batch: Any) -> Any:
            losses = self._losses(*batch)
            found = torch.autograd.grad(losses.sum(), trained)
            # The fused optimiser reads memory, not strides.
            return losses.detach(), [gradient.contiguous() for gradient in found]

        if self._compile and self._compiled is None:  # traced through autograd, without a break
            self._compiled = torch.compile(make_fx(gradients)(self._trained, *batch))
        if self._compiled is None:
            return gradients(self._trained, *batch)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._compiled(self._trained, *batch)  # type: ignore[no-any-return]

    def _losses(self, noise: Tensor | None, images: Tensor, labels: Tensor) -> Tensor:
        objective = self.learners[0].objective
        if len(self.learners) == 1:
            own = None if noise is None else noise[0]
            return objective(own, images[0], labels[0])[None]  # type: ignore[no-any-return]
        named = {f"model.{name}": value for name, value in self.parameters.items()}

        def loss(state: Any, *batch: Any) -> Any:
            return functional_call(objective, state, batch)

        each: Any = vmap(loss, (0, None if noise is None else 0, 0, 0), randomness="different")
        with ConvolutionsAsProducts():
            return each(named, noise, images, labels)  # type: ignore[no-any-return]

    def _optimizer(self) -> torch.optim.Optimizer:
        """The first learner's, for the stacked parameters."""
        first = self.learners[0]
        names = {id(own): name for name, own in first.model.named_parameters()}
        groups = []
        for group in first.optimizer.param_groups:
            whole = [self.parameters[names[id(own)]] for own in group["params"]]
            groups.append({**group, "params": whole})
        return torch.optim.Adam(groups, fused=True, capturable=first.device.type == "cuda")

    def share_state(self) -> None:
        """Give every learner its part of the optimiser's state, once that exists."""
        if len(self.learners) == 1:
            return
        for index, learner in enumerate(self.learners):
            for name, own in learner.model.named_parameters():
                state = self.optimizer.state[self.parameters[name]]
                learner.optimizer.state[own] = {
                    key: value[index] if value.dim() else value for key, value in state.items()
                }


class ConvolutionsAsProducts(TorchFunctionMode):
    """Inside, plain convolutions multiply patches of their input.

    Stacked, a convolution has groups, which libraries run one after the other; a product has not.

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
        if func is torch.conv2d and args[3:] == ((1, 1), (0, 0), (1, 1), 1):
            return _product(*args[:3])
        return func(*args, **(kwargs or {}))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape[2:]
    height, width = x.shape[2] - rows + 1, x.shape[3] - columns + 1
    parts = math.gcd(len(x), PARTS)
    x = x.unflatten(0, (parts, -1)).transpose(1, 2)  # part, channel, image, row, column
    shifted = [
        x[..., row : row + height, column : column + width]
        for row in range(rows)
        for column in range(columns)
    ]
    patches = torch.stack(shifted, 2).flatten(3).flatten(1, 2)
    result: Tensor = torch.bmm(weight.flatten(1).expand(parts, -1, -1), patches)
    if bias is not None:
        result = result + bias[:, None]
    return result.view(parts, len(weight), -1, height, width).transpose(1, 2).flatten(0, 1)


def _stacked(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of several models as one each, into which their own become views."""
    if len(models) == 1:
        return dict(models[0].named_parameters())
    named = [dict(model.named_parameters()) for model in models]
    found = {}
    for name, first in named[0].items():
        own = [parameters[name] for parameters in named]
        whole = nn.Parameter(torch.stack([part.detach() for part in own]), first.requires_grad)
        for part, view in zip(own, whole.detach(), strict=True):
            part.data = view
        found[name] = whole
    return found
