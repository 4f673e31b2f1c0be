"""Compacted models in files: tensors and plan in one safetensors file. Nothing is unpickled."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.plan_values import DTYPES, refuse_large_inputs
from hardconcrete.errors import ArgumentError, CompactionError, DataError
from hardconcrete.files import TensorFile, as_path
from hardconcrete.graph.propagate import named_tensors

SMALL_MODEL = TensorFile("hardconcrete.compacted", "1", "plan", "hc.save")

MAX_PLAN_BYTES = 2**20
"""The longest plan for a model without tensors."""

MAX_PLAN_BYTES_PER_TENSOR = 2**12
"""What each tensor of the dense model may add: its names, and where it is cut and scaled."""

MAX_PLAN_BYTES_PER_ENTRY = 64
"""What each entry of a tensor may add: its index along two dimensions, and a gate."""


def save(path: str | os.PathLike[str], small: nn.Module) -> None:
    """Write a compacted model to a file. If the write is interrupted, the old file stays.

    Example:
        >>> import tempfile, torch, hardconcrete as hc
        >>> make = lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> small = hc.compact(hc.attach_gates(make(), torch.randn(2, 4)))
        >>> file = f"{tempfile.mkdtemp()}/small.safetensors"
        >>> hc.save(file, small)
        >>> x = torch.randn(5, 4)
        >>> torch.equal(hc.load(file, make())(x), small(x))
        True
    """
    target = as_path(path)
    plan = CompactionPlan.of(small)
    refuse_large_inputs(plan)
    if not target.parent.is_dir():
        raise DataError(f"{target} cannot be written: {target.parent} is not a folder")
    SMALL_MODEL.write(target, _tensors_of(small), plan.to_json())


def load(path: str | os.PathLike[str], dense_model: nn.Module) -> nn.Module:
    """Read a compacted model: apply the plan to a dense model, and fill in the tensors.

    Args:
        path: a file that ``save`` wrote.
        dense_model: a model from the same constructor. Its weights do not matter, and it does not
            change.

    Example:
        >>> import torch, hardconcrete as hc
        >>> try:
        ...     hc.load("nowhere.safetensors", torch.nn.Linear(3, 2))
        ... except hc.HardConcreteError as error:
        ...     print(error)
        nowhere.safetensors is not a file; pass a file that hc.save wrote
    """
    source = as_path(path)
    if not isinstance(dense_model, nn.Module):
        raise ArgumentError(f"dense_model is a {type(dense_model).__name__}, not a module")
    tensors, text = SMALL_MODEL.read(source, _longest_header(dense_model))
    plan = _plan_of(source, text)
    if plan.model != type(dense_model).__name__:
        raise CompactionError(
            f"{path} holds a {plan.model}, and dense_model is a {type(dense_model).__name__}"
        )
    args, kwargs = _example_of(source, plan, dense_model)
    small = plan.apply(dense_model, args, kwargs)
    _refuse_other_selections(source, plan, tensors)
    _fill(source, small, tensors)
    return small


def _longest_header(dense_model: nn.Module) -> int:
    """The longest header of a file for a dense model, in bytes. It has the plan in it."""
    tensors = named_tensors(dense_model).values()
    entries = sum(tensor.numel() for tensor in tensors)
    of_tensors = MAX_PLAN_BYTES_PER_TENSOR * len(tensors)
    return MAX_PLAN_BYTES + of_tensors + MAX_PLAN_BYTES_PER_ENTRY * entries


def _plan_of(path: Path, text: str) -> CompactionPlan:
    try:
        plan = CompactionPlan.from_json(text)
        refuse_large_inputs(plan)
    except ArgumentError as error:
        raise DataError(f"{path} carries a plan that cannot be read ({error})") from error
    return plan


def _example_of(
    path: Path, plan: CompactionPlan, dense_model: nn.Module
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Example inputs for a plan in graph form; the module form needs none."""
    if plan.form != "graph":
        return None, {}
    device = next((p.device for p in dense_model.parameters()), torch.device("cpu"))
    match _zeros_like(plan.inputs, device):
        case [list(args), dict(kwargs)]:
            return tuple(args), kwargs
        case _:
            raise DataError(f"{path} carries a plan in graph form without example inputs")


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state with every tensor once: the constructor ties tensors again."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CompactionError(
                f"{name} is a {type(tensor).__name__}: a file holds tensors only, so a model with "
                "extra state cannot be saved"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors


def _zeros_like(described: Any, device: torch.device) -> Any:
    """Example inputs with the recorded shapes and types."""
    if isinstance(described, list):
        return [_zeros_like(part, device) for part in described]
    if isinstance(described, dict) and described.keys() == {"shape", "dtype"}:
        return torch.zeros(described["shape"], dtype=DTYPES[described["dtype"]], device=device)
    if isinstance(described, dict) and described.keys() == {"tuple"}:
        return tuple(_zeros_like(part, device) for part in described["tuple"])
    if isinstance(described, dict):
        return {name: _zeros_like(part, device) for name, part in described.items()}
    return described


def _refuse_other_selections(path: Path, plan: CompactionPlan, tensors: dict[str, Tensor]) -> None:
    """Refuse indices of selecting layers that are not those of the plan, which were checked."""
    for layer, kept in plan.selections.items():
        index = tensors.get(f"{layer}.kept_inputs")
        if index is None or index.tolist() != list(kept):
            raise DataError(
                f"{path} carries a plan that cannot be read ({layer} selects other inputs in it "
                "than in the tensors)"
            )


def _fill(path: Path, small: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the tensors of a model, each in the type that it was saved in."""
    state = small.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    missing, extra = (
        sorted(set(names.values()) - tensors.keys()),
        sorted(tensors.keys() - set(names)),
    )
    if missing or extra:
        raise CompactionError(
            f"{path} is for another architecture: {(missing + extra)[0]} is "
            f"{'not in the file' if missing else 'not in the model'}"
        )
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            raise CompactionError(
                f"{path} is for another architecture: {name} has the shape {list(tensor.shape)} in "
                f"the file and {list(state[name].shape)} in the model"
            )
        if _kind_of_number(state[name]) != _kind_of_number(tensor):
            raise CompactionError(
                f"{path} is for another architecture: {name} is {tensor.dtype} in the file and "
                f"{state[name].dtype} in the model"
            )
        aliases = [alias for alias, first_name in names.items() if first_name == name]
        _set_tensor(small, aliases, state[name], tensor)
    _refuse_unfilled(small)


def _kind_of_number(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Whole, real, complex or a truth; a file may have another precision than the model."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _set_tensor(model: nn.Module, aliases: list[str], old: Tensor, tensor: Tensor) -> None:
    """Fill a tensor, or replace it under all its names where it is on the meta device."""
    if not old.is_meta:
        old.data = tensor.to(old.device)
        return
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, old.requires_grad)
    for alias in aliases:
        path, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(path), attribute, tensor)


def _refuse_unfilled(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CompactionError(
                f"{name} is on the meta device and not in the file, since it is not persistent; "
                "build the dense model on a real device"
            )
