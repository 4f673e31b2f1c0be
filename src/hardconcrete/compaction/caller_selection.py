"""Small models that take only the input features they keep: the caller selects them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.compaction.input_selection import read_all_inputs
from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.verify import DEFAULT_TOLERANCE, RELATIVE_TOLERANCE
from hardconcrete.errors import CompactionError
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.graph.model_state import in_mode


def let_caller_select(small: nn.Module, example: ExampleInputs) -> nn.Module:
    """The same model, in place, for inputs whose features the caller has selected."""
    plan = CompactionPlan.of(small)
    x = _random_input(small, example)
    paths = [path for path in plan.selections if _reads_the_input(small, path, x)]
    if len(paths) != 1:
        raise CompactionError(
            f"{type(small).__name__} has {len(paths)} layers that select from the model's input, "
            "so the caller cannot select for one of them; leave kept_inputs_only=False"
        )
    (path,) = paths
    kept = plan.selections[path]
    with in_mode(small, training=False), torch.no_grad():
        expected = small(x)
        read_all_inputs(small.get_submodule(path))
        gap = (small(x.flatten(1)[:, list(kept)]) - expected).abs().max() / expected.abs().max()
    if not gap <= RELATIVE_TOLERANCE.get(x.dtype, DEFAULT_TOLERANCE):
        raise CompactionError(
            f"{path} has other outputs when the caller selects its inputs; leave "
            "kept_inputs_only=False"
        )
    selections = {name: indices for name, indices in plan.selections.items() if name != path}
    kept_inputs = {**plan.kept_inputs, path: kept}
    return replace(plan, selections=selections, kept_inputs=kept_inputs).put_on(small)


def _random_input(small: nn.Module, example: ExampleInputs) -> Tensor:
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
    """Whether a layer is called once, with the flattened input of the model."""
    inputs_of_layer: list[Tensor] = []

    def record(_: nn.Module, inputs: Any) -> None:
        inputs_of_layer.append(inputs[0])

    handle = small.get_submodule(path).register_forward_pre_hook(record)
    try:
        with in_mode(small, training=False), torch.no_grad():
            small(x)
    finally:
        handle.remove()
    flat = x.flatten(1)
    if len(inputs_of_layer) != 1:
        return False
    return inputs_of_layer[0].shape == flat.shape and torch.equal(inputs_of_layer[0], flat)
