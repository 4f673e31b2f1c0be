"""Verification: the outputs of a small model against those of the model it was made from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hardconcrete.compaction.input_sizes import FixedSizeError, another_batch, other_lengths
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.graph.model_state import in_mode, no_fast_path

RELATIVE_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest difference, as a fraction of the output's scale, by the coarsest type in use."""

ENTRIES_AT_ONCE = 1 << 20
"""So many entries are compared at once, in float64."""

DEFAULT_TOLERANCE = 1e-5
"""The same for models without a floating-point type."""


def difference(reference: nn.Module, small: nn.Module, inputs: ExampleInputs) -> float:
    """The largest difference of two models' outputs, as a multiple of the tolerance."""
    worst, tolerance = 0.0, tolerance_of(reference, inputs)
    first = [(inputs, _outputs(reference, inputs))]
    for example, expected in chain(first, _more_examples(reference, inputs)):
        try:
            actual = _outputs(small, example)
        except FixedSizeError:  # it refuses this size wherever it is called
            continue
        if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in actual]:
            return float("inf")
        for a, b in zip(expected, actual, strict=True):
            limit = max(tolerance, RELATIVE_TOLERANCE.get(a.dtype, 0.0))
            worst = max(worst, _relative_difference(a, b) / limit)
    return worst


def _more_examples(
    reference: nn.Module, inputs: ExampleInputs
) -> Iterator[tuple[ExampleInputs, list[Tensor]]]:
    """Another batch size, random numbers and other lengths, with the outputs of the reference.

    Example inputs of zeros hide differences. A model skips the sizes that it does not take.
    """
    others = (another_batch(inputs),), (random_inputs(inputs),), *other_lengths(inputs)
    for alternatives in others:
        for example in alternatives:
            outputs = _finite_outputs(reference, example)
            if outputs is not None:
                yield example, outputs
                break


def _finite_outputs(model: nn.Module, inputs: ExampleInputs) -> list[Tensor] | None:
    """The outputs, if the model takes these inputs and all outputs are finite."""
    try:
        outputs = _outputs(model, inputs)
    except Exception:  # a forward may fail in any way for inputs that it was not made for
        return None
    return outputs if all(bool(t.is_meta or t.isfinite().all()) for t in outputs) else None


def random_inputs(inputs: ExampleInputs) -> ExampleInputs:
    """Normal random numbers in all floating-point inputs."""
    generator = torch.Generator().manual_seed(0)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator).to(leaf)

    return tree_map(drawn, inputs)  # type: ignore[no-any-return]


def tolerance_of(model: nn.Module, inputs: ExampleInputs) -> float:
    """The difference that rounding explains.

    Outputs can have a finer type than the tensors they are computed from. Under autocast only the
    outputs of the layers show the type of the computation.
    """
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    types = {t.dtype for t in tensors if isinstance(t, Tensor)}
    types |= {*_layer_outputs(model, inputs, lambda output: output.dtype).values()}
    types &= RELATIVE_TOLERANCE.keys()
    return max((RELATIVE_TOLERANCE[dtype] for dtype in types), default=DEFAULT_TOLERANCE)


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, as a fraction of the scale of what is expected."""
    if expected.is_meta or not expected.numel():
        return 0.0
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    scale, gap = 1e-12, 0.0
    parts = (t.flatten().split(ENTRIES_AT_ONCE) for t in (expected, actual))
    for a, b in ((a.double(), b.double()) for a, b in zip(*parts, strict=True)):
        finite = a[a.isfinite()]
        scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
        differ = (a != b) & ~(a.isnan() & b.isnan())
        if differ.any():
            worst = float((a - b)[differ].abs().max())
            gap = max(gap, float("inf") if worst != worst else worst)
    return gap / scale


def _outputs(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    args, kwargs = tree_map(_detached_copy, inputs)
    switches = in_mode(model, training=False), no_fast_path(), _fixed_random_state()
    with torch.no_grad(), switches[0], switches[1], switches[2], full_precision():
        results = model(*args, **kwargs)
    return [leaf for leaf in _leaves(results) if isinstance(leaf, Tensor)]


def _leaves(results: Any) -> list[Any]:
    leaves = tree_leaves(results)
    if len(leaves) == 1 and hasattr(leaves[0], "to_tuple"):
        return tree_leaves(leaves[0].to_tuple())
    return leaves


def _detached_copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _fixed_random_state() -> Iterator[None]:
    """Every model draws the same random numbers, and the random state stays as it was."""
    initialized = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if initialized else []
    # torch.manual_seed records the stack for each device that is not in use, which takes longer
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


def in_one_line(error: Exception) -> str:
    """The class of an error, and the first line of its message if it has one.

    Example:
        >>> in_one_line(ValueError("no such head")), in_one_line(AssertionError())
        ('ValueError: no such head', 'AssertionError')
    """
    line = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def first_difference(reference: nn.Module, small: nn.Module, inputs: ExampleInputs) -> str:
    """The first layer, in the order of execution, whose output of the same shape differs."""
    tolerance = tolerance_of(reference, inputs)
    expected = _layer_outputs(reference, inputs, Tensor.detach)
    actual = _layer_outputs(small, inputs, Tensor.detach)
    if not actual:
        return "a graph has no layers to look into"
    for path, output in expected.items():
        other = actual.get(path)
        if other is None:
            return f"{path} was not reached"
        if output.shape == other.shape and _relative_difference(output, other) > tolerance:
            return f"{path} differs"
    return "no single layer of the same shape differs before the output"


def _layer_outputs(
    model: nn.Module, inputs: ExampleInputs, keep: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """What to keep of the first output of each layer; of a forward that fails, of those before."""
    outputs: dict[str, Any] = {}
    handles = []
    for path, module in model.named_modules():

        def record(_: Any, __: Any, output: Any, path: str = path) -> None:
            if isinstance(output, Tensor):
                outputs.setdefault(path, keep(output))

        if not list(module.children()):
            handles.append(module.register_forward_hook(record))
    try:
        _outputs(model, inputs)
    except Exception:  # the layers that were reached before it failed are the answer
        return outputs
    finally:
        for handle in handles:
            handle.remove()
    return outputs
