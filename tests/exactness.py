"""What must hold for every network: closed units do nothing, and the small model is the same."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

import hardconcrete as hc

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def with_random_gates(model: nn.Module, inputs: Inputs, seed: int = 0) -> hc.GatedModel:
    """Gates of which some are shut, some fully open and some in between."""
    return at_random(hc.attach_gates(model, *inputs(2)), seed)


def at_random(gated: hc.GatedModel, seed: int = 0) -> hc.GatedModel:
    """The same, for gates that are there already."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn = torch.randn(len(gated.gates.log_alpha), generator=generator)
        gated.gates.log_alpha.copy_(3 * drawn)
    return gated


def outputs(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """All tensors that a model returns."""
    args, kwargs = inputs
    with torch.no_grad():
        results = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest difference, as a part of the output's scale."""
    assert [t.shape for t in first] == [t.shape for t in second]
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if a.numel():
            scale = max(float(a.double().abs().max()), 1e-12)
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    return worst


def perturbed(gated: hc.GatedModel) -> hc.GatedModel:
    """A copy in which all that shut units own is random."""
    other = copy.deepcopy(gated)
    names = {
        **dict(other.model.named_parameters(remove_duplicate=False)),
        **dict(other.model.named_buffers(remove_duplicate=False)),
    }
    values = gated.gate_values()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for group in gated.analysis or ():
            shut = torch.cat([values[group.name] == 0, torch.tensor([False])])
            for axis in group.axes:
                tensor = names[axis.tensor]
                own = shut[axis.units].nonzero().flatten()
                size = list(tensor.shape)
                size[axis.dim] = len(own)
                noise = 1 + torch.rand(size, generator=generator).to(tensor.dtype)
                tensor.data.index_copy_(axis.dim, own, noise)
    return other


def assert_exact(model: nn.Module, inputs: Inputs, seed: int = 0, tolerance: float = 1e-5) -> Any:
    """A model with random gates has a compact one that is the same; it is returned."""
    return assert_compacts(with_random_gates(model, inputs, seed), inputs, tolerance)


def assert_compacts(gated: hc.GatedModel, inputs: Inputs, tolerance: float = 1e-5) -> Any:
    """Perturbation oracle, then gated against compact in both modes and two batch sizes."""
    gated.freeze_gates()
    other = perturbed(gated)
    three = inputs(3)
    moved = apart(outputs(gated.eval(), three), outputs(other.eval(), three))
    assert moved <= tolerance, f"what shut units own moves the output by {moved:.3g}"
    small = hc.compact(gated)
    for training in (False, True):
        reference = copy.deepcopy(gated).train(training)
        copied = copy.deepcopy(small).train(training)
        for module in (*reference.modules(), *copied.modules()):
            if isinstance(module, _DropoutNd):
                module.p = 0.0
        for batch in (2, 5):
            some = inputs(batch)
            gap = apart(outputs(reference, some), outputs(copied, some))
            assert gap <= tolerance, f"training={training}, batch={batch}: differs by {gap:.3g}"
    return small
