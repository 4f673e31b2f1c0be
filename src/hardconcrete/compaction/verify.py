"""Proof by comparison: the small model against the gated one, and where they part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hardconcrete.graph.model_state import in_mode

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest difference, as a part of the output's scale, by the coarsest type that is computed in."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def difference(reference: nn.Module, small: nn.Module, inputs: Inputs) -> float:
    """Largest difference of two models' outputs, in units of what is tolerated."""
    worst, tolerance = 0.0, tolerated(reference, inputs)
    for example, first in ((inputs, _outputs(reference, inputs)), *_others(reference, inputs)):
        second = _outputs(small, example)
        if [(t.shape, t.dtype) for t in first] != [(t.shape, t.dtype) for t in second]:
            return float("inf")
        for a, b in zip(first, second, strict=True):
            worst = max(worst, _apart(a, b) / max(tolerance, TOLERANCE.get(a.dtype, 0.0)))
    return worst


def _others(reference: nn.Module, inputs: Inputs) -> Iterator[tuple[Inputs, list[Tensor]]]:
    """More inputs and what the reference makes of them, as far as it can take them.

    Zeros tell little, and a model for one batch size has no other.
    """
    for example in (another_batch(inputs), random_numbers(inputs)):
        outputs = _numbers(reference, example)
        if outputs is not None:
            yield example, outputs


def _numbers(model: nn.Module, inputs: Inputs) -> list[Tensor] | None:
    """Its outputs, if it takes these inputs and all that comes out are numbers."""
    try:
        outputs = _outputs(model, inputs)
    except Exception:  # whatever its forward does with inputs it was not made for
        return None
    return outputs if all(bool(t.is_meta or t.isfinite().all()) for t in outputs) else None


def random_numbers(inputs: Inputs) -> Inputs:
    """Normal numbers in place of all floating-point ones."""
    generator = torch.Generator().manual_seed(0)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator).to(leaf)

    return tree_map(drawn, inputs)  # type: ignore[no-any-return]


def tolerated(model: nn.Module, inputs: Inputs) -> float:
    """What rounding explains: outputs can have a finer type than what they are computed from.

    Under autocast only the outputs of the layers tell in which type they were computed.
    """
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    tensors += _recorded(model, inputs).values()
    known = {t.dtype for t in tensors if isinstance(t, Tensor)} & TOLERANCE.keys()
    return max((TOLERANCE[dtype] for dtype in known), default=1e-5)


def _apart(first: Tensor, second: Tensor) -> float:
    """Largest difference, as a part of the first one's scale."""
    if first.is_meta or not first.numel():
        return 0.0
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not first.is_floating_point():
        return 0.0 if torch.equal(first, second) else float("inf")
    same = (first == second) | (first.isnan() & second.isnan())
    a, b = first[~same].double(), second[~same].double()
    if not a.numel():
        return 0.0
    finite = first[first.isfinite()].double()
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-12)
    gap = float((a - b).abs().max())
    gap = float("inf") if gap != gap else gap
    return gap / scale


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    args, kwargs = tree_map(_copied, inputs)
    with torch.no_grad(), in_mode(model, training=False), _same_random_numbers(), full_precision():
        results = model(*args, **kwargs)
    return [leaf for leaf in _leaves(results) if isinstance(leaf, Tensor)]


def _leaves(results: Any) -> list[Any]:
    leaves = tree_leaves(results)
    if len(leaves) == 1 and hasattr(leaves[0], "to_tuple"):
        return tree_leaves(leaves[0].to_tuple())
    return leaves


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Whoever calls next sees the random state as it was; noise is the same for all models."""
    initialized = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if initialized else []
    # for devices that are not in use torch.manual_seed writes down the stack, which takes longer
    random: Any = torch if torch.accelerator.is_available() else torch.default_generator
    with torch.random.fork_rng(devices=devices):
        random.manual_seed(0)
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32, whose rounding depends on the sizes of a product."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def another_batch(inputs: Inputs) -> Inputs:
    """The same rows, drawn again in another number."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        return inputs
    batch = len(tensors[0])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(batch, (batch + 1,), generator=generator)

    def drawn(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch
        return leaf.index_select(0, rows.to(leaf.device)) if is_batch else leaf

    return tree_map(drawn, inputs)  # type: ignore[no-any-return]


def first_difference(reference: nn.Module, small: nn.Module, inputs: Inputs) -> str:
    """The first layer, in the order of execution, whose output of the same shape differs."""
    seen, tolerance = _recorded(reference, inputs), tolerated(reference, inputs)
    others = _recorded(small, inputs)
    if not others:
        return "a graph has no layers to look into"
    for path, output in seen.items():
        other = others.get(path)
        if other is None:
            return f"{path} was not reached"
        if output.shape == other.shape and _apart(output, other) > tolerance:
            return f"{path} differs"
    return "no single layer of the same shape differs before the output"


def _recorded(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = []
    for path, module in model.named_modules():

        def keep(_: Any, __: Any, output: Any, path: str = path) -> None:
            if isinstance(output, Tensor):
                found.setdefault(path, output.detach())

        if not list(module.children()):
            handles.append(module.register_forward_hook(keep))
    try:
        _outputs(model, inputs)
    except Exception:  # what was reached before it failed is the answer
        return found
    finally:
        for handle in handles:
            handle.remove()
    return found
