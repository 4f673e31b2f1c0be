"""Small models that take only the features they keep, and leave the selecting to the caller."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.compaction.input_selection import stop_selecting
from hardconcrete.compaction.plan import KEY, CompactionPlan
from hardconcrete.compaction.verify import TOLERANCE, Inputs
from hardconcrete.errors import CompactionError
from hardconcrete.graph.model_state import in_mode


def without_selection(small: nn.Module, example: Inputs) -> nn.Module:
    """The same model for inputs of which the caller has selected the features; in place."""
    plan = CompactionPlan.of(small)
    x = _only_input(small, example)
    paths = [path for path in plan.selections if _reads_the_input(small, path, x)]
    if len(paths) != 1:
        raise CompactionError(
            f"{type(small).__name__} has {len(paths)} layers that select from the model's input, "
            "so it cannot be given the features of one; leave kept_inputs_only=False"
        )
    (path,) = paths
    kept = plan.selections[path]
    with in_mode(small, training=False), torch.no_grad():
        expected = small(x)
        stop_selecting(small.get_submodule(path))
        gap = (small(x.flatten(1)[:, list(kept)]) - expected).abs().max() / expected.abs().max()
    if not gap <= TOLERANCE.get(x.dtype, 1e-5):
        raise CompactionError(f"{path} gives something else when its inputs are selected outside")
    rest = {name: places for name, places in plan.selections.items() if name != path}
    small.__dict__[KEY] = replace(plan, selections=rest, given={**plan.given, path: kept})
    return small


def _only_input(small: nn.Module, example: Inputs) -> Tensor:
    """Random numbers in the shape of the only input."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or example[1] or CompactionPlan.of(small).form != "module":
        raise CompactionError(
            "kept_inputs_only needs a model with one tensor as its input, in module form"
        )
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    return torch.randn(
        tensors[0].shape, generator=generator, device=tensors[0].device, dtype=tensors[0].dtype
    )


def _reads_the_input(small: nn.Module, path: str, x: Tensor) -> bool:
    """Whether a layer is called with the flattened input of the model."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: Any) -> None:
        seen.append(inputs[0])

    handle = small.get_submodule(path).register_forward_pre_hook(keep)
    try:
        with in_mode(small, training=False), torch.no_grad():
            small(x)
    finally:
        handle.remove()
    flat = x.flatten(1)
    return len(seen) == 1 and seen[0].shape == flat.shape and torch.equal(seen[0], flat)
