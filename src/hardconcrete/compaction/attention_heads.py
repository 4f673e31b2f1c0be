"""``nn.MultiheadAttention`` with fewer heads than its width has room for, which torch refuses."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.compaction.forward_swap import swap_forward

Projection = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def set_heads(module: Any) -> None:
    """Set the sizes of an attention layer to those of its tensors, in place.

    A layer that torch's forward does not compute gets an equivalent forward. Its class is then a
    subclass, and its state has the same names.
    """
    width, values = module.out_proj.weight.shape
    queries = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    rows = _query_rows(module)
    if rows == values == width == queries.shape[1] == module.embed_dim:
        return
    module.num_heads, module.embed_dim = rows // module.head_dim, width
    if module.in_proj_weight is None:
        module.kdim, module.vdim = (
            weight.shape[1] for weight in (module.k_proj_weight, module.v_proj_weight)
        )
    else:
        module.kdim = module.vdim = module.in_proj_weight.shape[1]
    if type(module).forward is nn.MultiheadAttention.forward:
        swap_forward(module, "Pruned", _attend)
        module._qkv_same_embed_dim = False  # else an encoder layer runs a kernel for all heads


def has_fewer_heads(module: nn.Module) -> bool:
    """Whether an attention layer has another forward, because heads were removed."""
    return type(module).forward is _attend


def keep_padding(module: nn.Module) -> None:
    """Let an encoder compute padding like other tokens, where heads were removed inside it.

    Its nested tensors are for layers with torch's kernel.
    """
    if isinstance(module, nn.TransformerEncoder) and any(map(has_fewer_heads, module.modules())):
        module.use_nested_tensor = False


def _query_rows(module: Any) -> int:
    """The number of features of all queries."""
    if module.in_proj_weight is None:
        return len(module.q_proj_weight)
    rows: int = len(module.in_proj_weight) - module.out_proj.weight.shape[1]
    return rows // 2


def _rows(module: Any) -> list[int]:
    """The numbers of features of queries, keys and values."""
    return [_query_rows(module), _query_rows(module), module.out_proj.weight.shape[1]]


def _attend(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As ``nn.MultiheadAttention``, whose docstring explains the arguments."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    if query is key is value and self.in_proj_weight is not None:
        joint = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        projected = joint.split(_rows(self), -1)
    else:
        pairs = zip((query, key, value), _projections(self), strict=True)
        projected = tuple(F.linear(each, *projection) for each, projection in pairs)
    q, k, v = (_batch_first(self, each, batched) for each in projected)
    if self.bias_k is not None:
        k, v = (
            torch.cat([each, bias.expand(len(each), 1, -1)], 1)
            for each, bias in ((k, self.bias_k), (v, self.bias_v))
        )
    q, k, v = (_by_head(self, each) for each in (q, k, v))
    if self.add_zero_attn:
        k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask(q, k, attn_mask, key_padding_mask)
    dropout = self.dropout if self.training else 0.0
    if need_weights:
        scores = (q / self.head_dim**0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hint)
    output = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
    if not need_weights:
        return _input_layout(self, output, batched), None
    weights = weights.mean(1) if average_attn_weights else weights
    return _input_layout(self, output, batched), weights if batched else weights.squeeze(0)


def _batch_first(module: Any, tensor: Tensor, batched: bool) -> Tensor:
    if not batched:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _input_layout(module: Any, output: Tensor, batched: bool) -> Tensor:
    if not batched:
        return output.squeeze(0)
    return output if module.batch_first else output.transpose(0, 1)


def _projections(module: Any) -> list[Projection]:
    """Weights and biases for queries, keys and values."""
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(_rows(module))
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else bias.split(_rows(module))
    return list(zip(weights, biases, strict=True))


def _by_head(module: Any, tensor: Tensor) -> Tensor:
    """From [batch, time, features] to [batch, heads, time, features of a head]."""
    heads = module.num_heads
    size = tensor.shape[-1] // heads if heads else module.head_dim
    by_head: Tensor = tensor.unflatten(-1, (heads, size)).transpose(1, 2)
    return by_head


def _mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Both masks as one that is added to the scores, of shape [batch, heads, time, time]."""
    batch, heads = query.shape[:2]
    masks = []
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, heads, *attn_mask.shape[1:])
        masks.append(_additive(attn_mask, query))
    if padding is not None:
        masks.append(_additive(padding.view(batch, 1, 1, -1), query))
    padded = [F.pad(mask, (0, key.shape[2] - mask.shape[-1])) for mask in masks]
    return sum(padded[1:], padded[0]) if padded else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
