"""The values that a plan may have, wherever it comes from: a file, a text or your code."""

import math
import reprlib
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hardconcrete.errors import ArgumentError

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan

MAX_NESTING = 32
"""How deep example inputs may be nested."""

MAX_DIMS = 64
"""The most dimensions of a tensor, as in torch."""

MAX_SCALES_OF_A_TENSOR = 1024
"""How often a tensor may be multiplied by gates: once for each group whose units it reads."""

MAX_EXAMPLE_BYTES = 2**28
"""The most memory of the example inputs of a plan in graph form, which is traced with them."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.complex64, torch.complex128),
    )
}
"""The types that example inputs may have, by name."""


def refuse_bad_values(plan: "CompactionPlan") -> None:
    """Refuse a plan with a value that no plan has. Whether it is for a model is another check."""
    _expect(plan.form in ("module", "graph"), "form", "'module' or 'graph'", plan.form)
    for name, text in {"model": plan.model, "modules": plan.modules}.items():
        _expect(isinstance(text, str), name, "a text", text)
    for name, group in plan.groups.items():
        _expect(_is_size(group.units), f"units of {name}", "a size", group.units)
        _refuse_bad_indices(group.kept, group.units, f"kept units of {name}")
    for cut in plan.cuts:
        where = f"the cut of {cut.tensor}"
        _expect(isinstance(cut.tensor, str), where, "of a tensor with a name", cut.tensor)
        _expect(_is_size(cut.dim) and _is_size(cut.size), where, "along a dimension", cut)
        _refuse_bad_indices(cut.kept, cut.size, where)
    places = [(cut.tensor, cut.dim) for cut in plan.cuts]
    _expect(len({*places}) == len(places), "cuts", "one for each dimension", places)
    _refuse_bad_scales(plan)
    for name, size in plan.attributes.items():
        _expect(isinstance(name, str) and _is_size(size), f"attribute {name}", "a size", size)
    for path, configuration in plan.configurations.items():
        for name, size in configuration.numbers.items():
            _expect(_is_size(size), f"{name} of {path}", "a size", size)
        names = configuration.not_described
        _expect(all(isinstance(name, str) for name in names), path, "with tensors by name", names)
    _expect(isinstance(plan.fixed_sizes, bool), "fixed_sizes", "True or False", plan.fixed_sizes)
    for what, indices in {**plan.selections, **plan.kept_inputs}.items():
        _refuse_bad_indices(indices, math.inf, f"the selection of {what}")
    _refuse_bad_inputs(plan.inputs)


def _refuse_bad_scales(plan: "CompactionPlan") -> None:
    times: dict[str, int] = {}
    for scale in plan.scales:
        where = f"the scale of {scale.parameter}"
        _expect(isinstance(scale.parameter, str), where, "of a parameter with a name", scale)
        _expect(scale.dim is None or _is_size(scale.dim), where, "along a dimension", scale.dim)
        for value in scale.values:
            number = isinstance(value, int | float) and math.isfinite(value)
            _expect(number, where, "finite numbers", value)
        times[scale.parameter] = times.get(scale.parameter, 0) + 1
        limit = MAX_SCALES_OF_A_TENSOR
        _expect(times[scale.parameter] <= limit, where, f"at most {limit} times", times)


def _refuse_bad_indices(indices: Any, size: float, where: str) -> None:
    """Refuse what is no rising sequence of indices below a size."""
    _expect(isinstance(indices, tuple) and all(map(_is_size, indices)), where, "indices", indices)
    rises = all(a < b for a, b in pairwise(indices))
    inside = not indices or indices[-1] < size
    _expect(rises and inside, where, f"rising indices below {size}", indices)


def _refuse_bad_inputs(part: Any, depth: int = 0) -> None:
    """Refuse example inputs with something other than tensors, numbers and texts in them."""
    _expect(depth <= MAX_NESTING, "inputs", f"nested up to {MAX_NESTING} times", depth)
    if isinstance(part, Mapping) and part.keys() == {"shape", "dtype"}:
        shape, dtype = part["shape"], part["dtype"]
        sizes = isinstance(shape, list | tuple) and all(map(_is_size, shape))
        _expect(sizes and len(shape) <= MAX_DIMS, "shape of an input", "a list of sizes", shape)
        _expect(isinstance(dtype, str) and dtype in DTYPES, "dtype of an input", "known", dtype)
    elif isinstance(part, Mapping | list | tuple):
        for each in part.values() if isinstance(part, Mapping) else part:
            _refuse_bad_inputs(each, depth + 1)
    else:
        plain = isinstance(part, int | float | str | bool | None)
        _expect(plain, "inputs", "tensors, numbers and texts", part)


def refuse_large_inputs(plan: "CompactionPlan") -> None:
    """Refuse a plan in graph form whose example inputs take much memory, before they take it."""
    memory = _bytes_of(plan.inputs)
    if plan.form == "graph" and memory > MAX_EXAMPLE_BYTES:
        raise ArgumentError(
            f"the example inputs of this plan take {memory:,} bytes, and a plan in graph form is "
            f"traced with at most {MAX_EXAMPLE_BYTES:,}: compact the model with fewer examples"
        )


def _bytes_of(part: Any) -> int:
    if isinstance(part, Mapping) and part.keys() == {"shape", "dtype"}:
        return math.prod(part["shape"]) * DTYPES[part["dtype"]].itemsize
    if isinstance(part, Mapping):
        return sum(map(_bytes_of, part.values()))
    return sum(map(_bytes_of, part)) if isinstance(part, list | tuple) else 0


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _expect(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        _refuse(where, expected, found)


def _refuse(where: str, expected: str, found: object) -> NoReturn:
    raise ArgumentError(
        f"{where[:100]} in this plan must be {expected}, and is {reprlib.repr(found)}"
    )
