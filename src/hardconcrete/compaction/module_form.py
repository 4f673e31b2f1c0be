"""The module form: your own classes with smaller tensors, and attributes that match them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hardconcrete.compaction.attention_heads import keep_padding, set_heads
from hardconcrete.compaction.configuration import refuse_files, set_numbers
from hardconcrete.compaction.empty_layers import allow_empty
from hardconcrete.compaction.input_selection import select_inputs
from hardconcrete.graph.model_state import in_mode
from hardconcrete.graph.propagate import named_tensors

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan

Cutter = Callable[[Tensor, int, Tensor], None]
"""Keeps some indices of a dimension of a tensor, in place."""


def cut_out(tensor: Tensor, dim: int, kept: Tensor) -> None:
    """Keep these indices, and no gradient."""
    tensor.data = tensor.data.index_select(dim, kept)
    tensor.grad = None


def cut_copy(plan: "CompactionPlan", model: nn.Module) -> nn.Module:
    """A copy of a dense model, cut and scaled."""
    with copied_for_cuts(model) as small:
        cut_module(plan, small)
    return small


@contextmanager
def copied_for_cuts(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of a model that is about to be cut. What was not cut is copied at the end.

    So there is never a second model of the dense size.
    """
    parameters = [*model.parameters()]
    copies: list[Any] = [type(each)(each.data, each.requires_grad) for each in parameters]
    pairs = [*zip(parameters, copies, strict=True)]
    yield copy.deepcopy(model, {id(before): after for before, after in pairs})
    for before, after in pairs:
        if after.untyped_storage()._cdata == before.untyped_storage()._cdata:
            after.data = after.data.clone()


def cut_module(plan: "CompactionPlan", model: nn.Module, cut: Cutter = cut_out) -> None:
    """Cut and scale a model in place."""
    with in_mode(model, training=False):  # weights may be computed, and in training change state
        before = {module: _sizes(module) for module in model.modules()}
        fold(plan, model, cut)
        for module, sizes in before.items():
            _update_sizes(module, sizes)
            allow_empty(module)
        for module in before:
            keep_padding(module)
    for name, size in plan.attributes.items():
        _set_attribute(model, name, size)
    set_numbers(plan, model)
    refuse_files(plan, model)
    for path, kept in plan.selections.items():
        select_inputs(model.get_submodule(path), kept)


def _set_attribute(model: nn.Module, name: str, size: int) -> None:
    """Set an integer of a module, or of its configuration, which then becomes its own."""
    path, _, attribute = name.rpartition(".")
    holder: Any = model
    for part in path.split(".") if path else ():
        inner = getattr(holder, part)
        if not isinstance(inner, nn.Module):
            inner = vars(holder)[part] = copy.copy(inner)
        holder = inner
    vars(holder)[attribute] = size


def fold(plan: "CompactionPlan", model: nn.Module, cut: Cutter = cut_out) -> None:
    """Multiply gates into the weights and cut, in place. Tied tensors stay tied."""
    tensors = named_tensors(model)
    with torch.no_grad():
        for scale in plan.scales:
            parameter = tensors[scale.parameter]
            values = torch.tensor(scale.values, dtype=torch.float32, device=parameter.device)
            shape = parameter.shape if scale.dim is None else _along(parameter, scale.dim)
            parameter.data = parameter.data * values.reshape(shape).to(parameter.dtype)
        for each in plan.cuts:
            tensor = tensors[each.tensor]
            cut(tensor, each.dim, torch.tensor(each.kept, dtype=torch.int64, device=tensor.device))


def _along(parameter: Tensor, dim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(parameter.dim())]


def _sizes(module: nn.Module) -> tuple[int, ...]:
    """The shape of a convolution's weight before it is cut."""
    weight = getattr(module, "weight", None) if isinstance(module, _ConvNd) else None
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _update_sizes(module: Any, before: tuple[int, ...]) -> None:
    """Set the sizes among a layer's attributes to those of its tensors."""
    for kind, adapt in ADAPTERS:
        if isinstance(module, kind):
            adapt(module, before)
    if is_transposed_linear(module):
        module.nx, module.nf = module.weight.shape


def is_transposed_linear(module: Any) -> bool:
    """Whether a module is the ``Conv1D`` of Hugging Face: a dense layer with ``weight[nx, nf]``."""
    shape = getattr(getattr(module, "weight", None), "shape", ())
    return type(module).__name__ == "Conv1D" and len(shape) == 2 and hasattr(module, "nf")


def _linear(module: Any, _: tuple[int, ...]) -> None:
    module.out_features, module.in_features = module.weight.shape


def _conv(module: Any, before: tuple[int, ...]) -> None:
    now = tuple(module.weight.shape)
    per_group = before[0] // module.groups if isinstance(module, _ConvTransposeNd) else before[1]
    if module.groups > 1 and per_group == 1:  # depthwise: a map is a group
        module.groups = module.groups * now[0] // before[0]
    wide, narrow = now[0], now[1] * module.groups
    transposed = isinstance(module, _ConvTransposeNd)
    module.in_channels, module.out_channels = (wide, narrow) if transposed else (narrow, wide)


def _norm(module: Any, _: tuple[int, ...]) -> None:
    per_channel = module.weight if module.weight is not None else module.running_mean
    if per_channel is not None:
        module.num_features = len(per_channel)


def _group_norm(module: Any, _: tuple[int, ...]) -> None:
    if module.weight is not None:  # whole groups go, and the others keep their width
        per_group = module.num_channels // module.num_groups
        module.num_channels = len(module.weight)
        module.num_groups = module.num_channels // per_group


def _prelu(module: Any, _: tuple[int, ...]) -> None:
    module.num_parameters = len(module.weight)


def _attention(module: Any, _: tuple[int, ...]) -> None:
    set_heads(module)


def _embedding(module: Any, _: tuple[int, ...]) -> None:
    module.num_embeddings, module.embedding_dim = module.weight.shape


ADAPTERS: list[tuple[type[nn.Module], Callable[[Any, tuple[int, ...]], None]]] = [
    (nn.Linear, _linear),
    (_ConvNd, _conv),
    (_NormBase, _norm),
    (nn.GroupNorm, _group_norm),
    (nn.PReLU, _prelu),
    (nn.Embedding, _embedding),
    (nn.EmbeddingBag, _embedding),
    (nn.MultiheadAttention, _attention),
]
"""What sets the sizes of each kind of layer."""
