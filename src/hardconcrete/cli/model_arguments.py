"""The model and the example input that arguments of the command line name."""

import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError


def import_model(name: str) -> nn.Module:
    """The model of ``package.module:factory``, where the factory may also be a module.

    Example:
        >>> type(import_model("hardconcrete.demo:MLP")).__name__
        'MLP'
    """
    path, colon, attribute = name.partition(":")
    if not colon or not path or not attribute:
        raise ArgumentError(f"{name!r} must be written package.module:factory")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        factory = importlib.import_module(path)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except Exception as error:  # importing runs any code
        raise ArgumentError(f"{name} cannot be imported: {error!r}") from error
    try:
        model = factory if isinstance(factory, nn.Module) else factory()  # type: ignore[operator]
    except Exception as error:  # the factory runs any code
        raise ArgumentError(f"{name} cannot be called without arguments: {error!r}") from error
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name} gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def example_input(text: str) -> Tensor:
    """Zeros of a shape, ``1,3,32,32``, with an optional dtype, ``2,16:int64``.

    Example:
        >>> example_input("2,3:int64")
        tensor([[0, 0, 0],
                [0, 0, 0]])
    """
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1 or not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"--input {text!r} must be a shape such as 1,3,32,32 or 2,16:int64")
    return torch.zeros(shape, dtype=dtype)
