"""Slow, obviously right answers to compare with, and eyes on what a gated model does."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import hardconcrete as hc


def multiplied(parameter: Tensor, dim: int | None, z: Tensor) -> Tensor:
    """A parameter times its gates, one unit after the other."""
    z = z.to(parameter.dtype)
    if dim is None:
        rows = [entry * gate for entry, gate in zip(parameter.flatten(), z, strict=True)]
        return torch.stack(rows).reshape(parameter.shape)
    return torch.stack([p * gate for p, gate in zip(parameter.unbind(dim), z, strict=True)], dim)


def by_hand(plain: nn.Module, gated: hc.GatedModel, z: Tensor, *inputs: Any) -> Any:
    """What ``plain`` gives when its weights are multiplied by hand, without the library."""
    weights = dict(plain.named_parameters())
    for group in gated.groups:
        for axis in group.gated:
            own = z[group.start : group.start + group.units]
            weights[axis.tensor] = multiplied(weights[axis.tensor], axis.dim, own)
    return functional_call(plain, weights, inputs)


def next_draw(gated: hc.GatedModel, *shape: int) -> Tensor:
    """The gates that the next call will draw; the random state stays where it is."""
    with torch.random.fork_rng():
        return gated.gates.draw(shape)


def gradients(loss: Tensor, *models: nn.Module) -> list[Tensor]:
    """Gradients of all parameters, 0 where there is none."""
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def open_all(gated: hc.GatedModel) -> hc.GatedModel:
    """Every gate at exactly 1, drawn or read out."""
    nn.init.constant_(gated.gates.log_alpha, 100.0)
    return gated


def spread(gated: hc.GatedModel) -> hc.GatedModel:
    """Gates that are shut, open and between, drawn or read out."""
    nn.init.uniform_(gated.gates.log_alpha, -3.0, 3.0)
    return gated


def anatomy(model: nn.Module) -> list[Any]:
    """Everything that putting gates on a model could change."""
    return [
        (name, module, type(module), module.training, sorted(module.__dict__))
        for name, module in model.named_modules()
    ] + [
        (name, id(p), p.requires_grad, p.detach().clone().flatten().tolist())
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves the model, and the state of random numbers, as it was."""
    before, state = anatomy(model), torch.get_rng_state()
    yield
    assert anatomy(model) == before
    assert torch.equal(torch.get_rng_state(), state)


class Products(TorchDispatchMode):
    """The shapes of all elementwise products computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor:
            self.shapes.add(tuple(result.shape))
        return result


def assert_as_by_hand(model: nn.Module, sites: list[hc.Site | str], x: Tensor) -> None:
    """Outputs and the gradients of weights, input and gates, in training and evaluation."""
    plain = copy.deepcopy(model)
    gated = spread(hc.attach_gates(model, x.detach(), sites=sites))
    for training in (True, False):
        gated.train(training), plain.train(training)
        z = next_draw(gated) if training else gated.gates.readout()
        expected, found = by_hand(plain, gated, z, x), gated(x)
        torch.testing.assert_close(found, expected)
        slope = torch.randn_like(expected)
        inputs = [x] if x.requires_grad else []
        ours = [*gated.model.parameters(), *inputs, gated.gates.log_alpha]
        theirs = [*plain.parameters(), *inputs, gated.gates.log_alpha]
        torch.testing.assert_close(
            torch.autograd.grad((found * slope).sum(), ours, materialize_grads=True),
            torch.autograd.grad((expected * slope).sum(), theirs, materialize_grads=True),
            rtol=1e-5,
            atol=1e-5,
        )
