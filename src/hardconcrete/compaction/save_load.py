"""Compacted models in files: tensors and plan in one safetensors file. Nothing is unpickled."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.errors import ArgumentError, CompactionError, DataError

FORMAT = "hardconcrete.compacted"
VERSION = "1"


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
    plan = CompactionPlan.of(small).to_json()
    tensors = _tensors_of(small)
    about = {"format": FORMAT, "version": VERSION, "plan": plan}
    about["sha256"] = _digest(tensors, plan)
    target = Path(path)
    if not target.parent.is_dir():
        raise DataError(f"{target} cannot be written: {target.parent} is not a folder")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, about)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


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
    tensors, plan = _read(Path(path))
    if plan.model != type(dense_model).__name__:
        raise CompactionError(
            f"{path} holds a {plan.model}, and dense_model is a {type(dense_model).__name__}"
        )
    device = next((p.device for p in dense_model.parameters()), torch.device("cpu"))
    args, kwargs = _zeros_like(plan.inputs, device)
    small = plan.apply(dense_model, tuple(args), kwargs)
    _fill(Path(path), small, tensors)
    return small


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


def _digest(tensors: dict[str, Tensor], plan: str) -> str:
    digest = hashlib.sha256(plan.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], CompactionPlan]:
    """Tensors and plan of a file, if it is complete and unaltered."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; pass a file that hc.save wrote")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{path} is truncated or no safetensors file ({error})") from error
    if about.get("format") != FORMAT:
        raise DataError(f"{path} was not written by hc.save: it carries no plan")
    if about.get("version") != VERSION:
        raise DataError(
            f"{path} has version {about.get('version')} of the format, and this hardconcrete reads "
            f"version {VERSION}; use the release that wrote it, or save it again"
        )
    if _digest(tensors, about.get("plan", "")) != about.get("sha256"):
        raise DataError(f"{path} was altered: its content does not match its checksum")
    try:
        return tensors, CompactionPlan.from_json(about["plan"])
    except (KeyError, ArgumentError) as error:
        raise DataError(f"{path} carries a plan that cannot be read ({error})") from error


def _zeros_like(described: Any, device: torch.device) -> Any:
    """Example inputs with the recorded shapes and types."""
    if isinstance(described, list):
        return [_zeros_like(part, device) for part in described]
    if isinstance(described, dict) and described.keys() == {"shape", "dtype"}:
        dtype = getattr(torch, described["dtype"])
        return torch.zeros(described["shape"], dtype=dtype, device=device)
    if isinstance(described, dict) and described.keys() == {"tuple"}:
        return tuple(_zeros_like(part, device) for part in described["tuple"])
    if isinstance(described, dict):
        return {name: _zeros_like(part, device) for name, part in described.items()}
    return described


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
        aliases = [alias for alias, first_name in names.items() if first_name == name]
        _set_tensor(small, aliases, state[name], tensor)
    _refuse_unfilled(small)


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
