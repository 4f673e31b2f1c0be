"""The inputs that a model is traced, verified and measured with."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hardconcrete.arguments import as_kwargs
from hardconcrete.errors import ArgumentError

ExampleInputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional inputs, and inputs by keyword."""


def as_inputs(example_inputs: Any, kwargs: Mapping[str, Any] | None = None) -> ExampleInputs:
    """Positional and keyword inputs of a call.

    Args:
        example_inputs: a tuple or list of positional inputs, a single one, or a mapping of keyword
            inputs, such as the ``BatchEncoding`` of a tokenizer. None if all are in ``kwargs``.
        kwargs: keyword inputs of the same call.

    Example:
        >>> as_inputs(1), as_inputs((1, 2), {"scale": 3})
        (((1,), {}), ((1, 2), {'scale': 3}))
        >>> as_inputs({"ids": 1}, {"scale": 3}), as_inputs(None, {"ids": 1})
        (((), {'ids': 1, 'scale': 3}), ((), {'ids': 1}))
    """
    inputs = _as_inputs(example_inputs, kwargs)
    _refuse_no_examples(inputs)
    return inputs


def _as_inputs(example_inputs: Any, kwargs: object) -> ExampleInputs:
    keywords = as_kwargs(kwargs)
    if example_inputs is None and kwargs is None:
        raise ArgumentError(
            "example inputs are missing: pass a tensor, a tuple of positional inputs, or a mapping "
            "of keyword inputs"
        )
    if example_inputs is None:
        return (), keywords
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), keywords
    if not isinstance(example_inputs, Mapping):
        return (example_inputs,), keywords
    twice = sorted(example_inputs.keys() & keywords.keys())
    if twice:
        raise ArgumentError(
            f"example_inputs and kwargs both have {', '.join(twice)}: leave it out of one"
        )
    return (), {**example_inputs, **keywords}


def _refuse_no_examples(inputs: ExampleInputs) -> None:
    """Refuse example inputs without a row: costs are those of one example."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    if first is not None and len(first) == 0:
        raise ArgumentError(
            f"the example inputs have no rows: the first one has the shape {list(first.shape)}; "
            "pass at least one example"
        )
