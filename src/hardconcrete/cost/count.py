"""Count the cost of one forward of a model.

The count runs on a copy of the model on the meta device, where tensors have shapes and no data. It
needs no memory and does not touch your model. Attention and recurrent layers are counted as matrix
products there, not as fused kernels. A forward that needs data (``.item()``, a mask as an index, a
device by name) is counted on the model itself.

A multiply-add counts as one. Padding, masks and biases do not matter: a convolution counts each
weight at each position, attention each pair of positions.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from hardconcrete.cost.key_values import KeyValues
from hardconcrete.errors import ArgumentError
from hardconcrete.graph.example_inputs import as_inputs
from hardconcrete.graph.model_state import buffers_kept, in_mode, no_fast_path

aten = torch.ops.aten


MACS: dict[Any, Callable[..., int]] = {
    aten.mv: lambda matrix, *_, **__: matrix.numel(),
    aten.addmv: lambda _, matrix, *__, **___: matrix.numel(),
    aten.dot: lambda vector, *_, **__: vector.numel(),
    aten.vdot: lambda vector, *_, **__: vector.numel(),
    aten.addbmm: lambda _, left, right, **__: left.numel() * right.shape[-1],
    aten._addmm_activation: lambda _, left, right, **__: left.numel() * right.shape[-1],
    aten._int_mm: lambda left, right, **_: left.numel() * right.shape[-1],
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_fused_attention_overrideable,
        ),
        lambda q, k, v, *_, **__: q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]),
    ),
}
"""Multiply-adds of operators that ``torch.utils.flop_counter`` lacks, or counts only on some
devices. The others come from there; add yours with its ``register_flop_formula``."""

WITHOUT_MACS = re.compile(
    r"""  # normalisation, pooling, losses, and resampling with fixed weights
    \w*norm\w* | \w*pool\w* | \w*softmax\w* | (native|fused)_dropout | \w*loss\w* | upsample\w*
    # reductions and order
    | sum | nansum | mean | prod | (std|var)(_mean)? | (arg|a)?(max|min) | aminmax | all | any
    | logsumexp | logcumsumexp | cum\w+ | dist | count_nonzero | trace | nan(mean|median)
    | median | mode | sort | argsort | topk | kthvalue | unique\w* | searchsorted | bucketize
    | hist\w+ | bincount | isin | nonzero\w* | segment_reduce
    # movement
    | \w*copy\w* | clone | lift\w* | cat | stack | chunk_cat | block_diag | where | gather | take
    | (\w+_)?pad(ded)?(\dd|_\w+)? | (unsafe_)?(masked_)?(index|split|view)\w* | embedding | put
    | masked_(fill|scale|scatter|select) | scatter\w* | \w+_scatter | repeat\w* | roll | flip
    | rot90 | set | resize\w* | pixel_\w+ | channel_shuffle | im2col | col2im | tri[lu](_indices)?
    | diag_embed | to_\w+
    # creation and chance
    | (new_)?(empty|zeros|ones|full|rand|randn|randint)(_\w+)? | zero | fill | arange | range
    | linspace | logspace | eye | scalar_tensor | randperm | \w+_window | efficientzerotensor
    | bernoulli | multinomial | poisson | exponential | uniform | random | cauchy | geometric
    # pointwise operators that torch does not tag, and questions about tensors
    | abs | add_relu | eq | ne | [gl][et] | rsub | floor_divide | complex | polar | celu | gelu
    | glu | hardswish | mish | threshold | log_sigmoid_forward | rrelu\w* | prelu\w* | gcd | lcm
    | binary_cross_entropy\w* | thnn_fused_\w+_cell | local_scalar_dense | equal | allclose
    | is_\w+ | \w*assert\w* | linalg_check_errors | sym_\w+ | record_stream | fused_sdp_choice
    """,
    re.VERBOSE,
)
"""ATen operators without multiply-adds by convention, without leading and trailing underscores.
Operators that torch tags as pointwise, and views, are recognised without this list."""


@dataclass(frozen=True)
class Count:
    """The cost of one forward.

    Args:
        params: entries of all parameters. A shared parameter counts once; buffers do not count.
        macs: multiply-adds of dense layers, convolutions, matrix products and attention for these
            inputs. A batch of 64 has 64 times as many as one example.
        weight_bytes: bytes of all parameters and buffers; for sparse tensors, of their values.
        activation_bytes: bytes of the results of all operators, without views and in-place
            results. It measures memory traffic, not peak memory. On the meta device attention
            counts as unfused, with its scores.
        uncounted: operators without a known rule that may have multiply-adds; ``macs`` lacks them.
            Pointwise operators, normalisation, pooling, reductions and movement have no
            multiply-adds by convention and are not listed.
        kv_bytes: bytes of the keys and values of all attention for one token of one example, which
            a cache holds. Examples lie along dimension 0 of the first input, and each key of a
            layer is a token. Grouped queries count once per key. 0 without attention that has a
            softmax; None where keys could not be told from queries.

    Example:
        >>> print(Count(431_080, 2_293_000, 1_724_320, 111_488))
        431,080 parameters, 2,293,000 MACs, 1.7 MB of weights, 111 kB of activations
    """

    params: int
    macs: int
    weight_bytes: int
    activation_bytes: int
    uncounted: tuple[str, ...] = ()
    kv_bytes: int | None = 0

    def __str__(self) -> str:
        weights, activations = map(readable_bytes, (self.weight_bytes, self.activation_bytes))
        text = f"{self.params:,} parameters, {self.macs:,} MACs, {weights} of weights, "
        text += f"{activations} of activations"
        if self.kv_bytes:
            text += f", {readable_bytes(self.kv_bytes)} of keys and values per token"
        return text + (f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else "")


def count(model: nn.Module, inputs: Any = None, kwargs: Mapping[str, Any] | None = None) -> Count:
    """Count parameters, multiply-adds and bytes of one forward, in evaluation mode.

    The model does not change: mode, buffers, hooks and random state stay as they are. Its hooks
    run, because they can be part of what it computes.

    Args:
        model: any plain module, on any device, including the meta device.
        inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs. The count
            is for these.
        kwargs: keyword inputs of the same call.

    Example:
        >>> import torch
        >>> layer = torch.nn.Conv2d(3, 8, 5, stride=2)
        >>> result = count(layer, torch.zeros(1, 3, 9, 9))
        >>> result.params, result.macs                    # 8 (3 25 + 1), and 3 3 positions, 8 3 25
        (608, 5400)
    """
    _check(model)
    args, keywords = as_inputs(inputs, kwargs)
    with torch.inference_mode(False):  # it decomposes fewer operators
        tally = _on_meta(model, args, keywords) or _on_itself(model, args, keywords)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return Count(
        params=sum(parameter.numel() for parameter in parameters),
        macs=tally.macs,
        weight_bytes=sum(map(_bytes, chain(parameters, buffers))),
        activation_bytes=tally.activation_bytes,
        uncounted=tuple(tally.uncounted),
        kv_bytes=tally.key_values.bytes_per_token(_examples(args, keywords)),
    )


def readable_bytes(size: int) -> str:
    """Format a number of bytes with about three digits, in powers of 1000.

    Example:
        >>> readable_bytes(999), readable_bytes(1_724_320), readable_bytes(25_000_000_000)
        ('999 B', '1.7 MB', '25 GB')
    """
    value, units = float(size), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while value >= 999.5 and unit != "GB":
        value, unit = value / 1000, next(units)
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:,.0f} {unit}"


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts.

    Example:
        >>> tensors_in((torch.zeros(2), {"scale": 3, "mask": [torch.ones(1)]}))
        [tensor([0., 0.]), tensor([1.])]
    """
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Tally(TorchDispatchMode):
    """Sums the costs of all operators that run inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = 0
        self.activation_bytes = 0
        self.uncounted: dict[str, None] = {}  # in the order of the forward
        self.key_values = KeyValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = getattr(func, "_overloadpacket", func)
        known = _is_known(operator, args)
        if not known and isinstance(func, torch._ops.OpOverload) and func.namespace != "prim":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if known:
            self.macs += _macs(operator, args, kwargs, result)
        elif not _without_macs(func):
            self.uncounted[str(operator)] = None
        self.activation_bytes += _new_bytes((args, kwargs), result)
        self.key_values.follow(func, (args, kwargs), result)
        return result


class _Einsums(TorchFunctionMode):
    """Counts einsums that torch runs as elementwise products and sums."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self.tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.tally.macs
        result = func(*args, **(kwargs or {}))
        if self.tally.macs == before:
            if func is torch.einsum:
                self.tally.macs += _contracted(*args)
            elif func is aten.einsum.default:  # in a traced graph
                self.tally.macs += _contracted(args[0], *args[1])
        return result


def _contracted(equation: Any, *operands: Any) -> int:
    """Multiply-adds of an einsum that sums over indices of both tensors; 0 if it does not.

    An index of only one tensor that the result lacks is summed before, so it does not count.
    """
    if not isinstance(equation, str) or len(operands) != 2:
        return 0
    operand_letters, arrow, result = equation.replace(" ", "").partition("->")
    first, second = operand_letters.split(",")
    shared = {*first} & {*second} - {*result}
    if not shared or not arrow or "." in operand_letters:
        return 0
    sizes = dict(zip(first, operands[0].shape, strict=True))
    sizes |= dict(zip(second, operands[1].shape, strict=True))
    return math.prod(sizes[letter] for letter in {*result} | shared)


def _is_known(operator: Any, args: Any) -> bool:
    """Whether a formula applies. Formulas are for dense tensors only."""
    has_formula = operator in MACS or operator in flop_registry or _is_grouped(operator)
    return has_formula and all(tensor.layout is torch.strided for tensor in tensors_in(args))


def _grouped_macs(left: Tensor, right: Tensor) -> int:
    """Of rows in groups, each group times its matrix, as experts compute them."""
    return left.numel() * right.shape[-1] // (len(left) if left.dim() > right.dim() else 1)


def _is_grouped(operator: Any) -> bool:
    """Whether an operator is a product in groups: torch's, or one that stands for it."""
    return str(operator).rpartition(".")[2].strip("_").startswith("grouped_mm")


def _macs(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    if _is_grouped(operator):
        return _grouped_macs(*args[:2])
    if operator in MACS:
        return MACS[operator](*args, **kwargs)
    flops: int = flop_registry[operator](*args, **kwargs, out_val=result)
    return flops // 2


def _without_macs(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prim"):
        return False
    name = func._schema.name.partition("::")[2].strip("_")
    tagged = {torch.Tag.pointwise, torch.Tag.inplace_view} & {*func.tags}
    return bool(tagged or func.is_view or WITHOUT_MACS.fullmatch(name))


def _new_bytes(inputs: Any, result: Any) -> int:
    """Bytes of the results that share no storage with an input.

    Schemas cannot tell, because some operators return views that they do not declare.
    """
    old = {_memory(tensor) for tensor in tensors_in(inputs)}
    return sum(_bytes(tensor) for tensor in tensors_in(result) if _memory(tensor) not in old)


def _memory(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size()
    return tensor.nbytes


class _WithoutData(TorchFunctionMode):
    """Inside, deepcopy makes a meta tensor of each tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().to("meta")
        return func(*args, **(kwargs or {}))


def _on_meta(model: nn.Module, args: Any, kwargs: Any) -> _Tally | None:
    """Count on a meta copy. None if the model cannot be copied or its forward needs data."""
    try:
        with warnings.catch_warnings(), _WithoutData():
            warnings.simplefilter("ignore")  # copies of exported graphs warn about their internals
            copied = copy.deepcopy(model, {id(p): _empty(p) for p in model.parameters()})
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        return _tally(copied.eval(), args, kwargs)
    except Exception:
        return None


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _on_itself(model: nn.Module, args: Any, kwargs: Any) -> _Tally:
    """Count on the model, and restore its state."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
    with in_mode(model, training=False), buffers_kept(model), no_fast_path():
        return _tally(model, args, kwargs)


def _tally(model: nn.Module, args: Any, kwargs: Any) -> _Tally:
    tensors = chain(model.parameters(), model.buffers(), tensors_in((args, kwargs)))
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    tally = _Tally()
    with torch.random.fork_rng(devices=devices), torch.no_grad(), tally, _Einsums(tally):
        model(*args, **kwargs)
    return tally


def _examples(args: Any, kwargs: Any) -> int:
    """The length of the first tensor; 1 without one."""
    return next((len(x) for x in tensors_in((args, kwargs)) if x.dim() and len(x)), 1)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"count takes an nn.Module, not a {type(model).__name__}")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"{name} has no shape yet: call the model once to give its lazy layers shapes"
            )
