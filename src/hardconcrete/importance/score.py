"""The importance of a unit: how much the loss would grow without it.

Appendix A of the paper puts a spike and a slab on every unit. Removing unit j moves its gate from
z_j = 1 to 0. To second order, with the empirical Fisher information in place of the Hessian and a
gradient near zero, the loss of N examples then grows by N/2 times the mean of (dL/dz_j)^2, where

    dL/dz_j = sum of theta * dL/dtheta over all that gate j multiplies.

So this mean is the evidence for the unit, and lambda times its cost is the price: see
docs/importance.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.arguments import refuse_no_count
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, attach_gates
from hardconcrete.graph.model_state import buffers_kept, detached_copy, in_mode
from hardconcrete.importance.batches import Loss, batch_size, check_loss, keep_batches

DEFAULT_EXAMPLES = 2048
"""Examples that importance is measured on, unless you pass another number."""

PRINTED_FRACTION = 0.9
"""The report says how many units hold this fraction of their group's importance."""


@dataclass(frozen=True, eq=False)
class Importance:
    """How much each unit matters, by group: the mean over batches of (dL/dz)^2.

    Args:
        values: for each group by name, one number per unit.
        examples: the number of examples that were used.

    Example:
        >>> result = Importance({"fc1": torch.tensor([0.0, 3.0, 1.0])}, examples=8)
        >>> result["fc1"].tolist(), result.order("fc1").tolist()
        ([0.0, 3.0, 1.0], [0, 2, 1])
        >>> print(result)
        group  units     share   least      median     most       90% in
        fc1        3    100.0%   0.00e+00   1.00e+00   3.00e+00   2
        Measured on 8 examples.
    """

    values: Mapping[str, Tensor]
    examples: int

    def __getitem__(self, group: str) -> Tensor:
        if group not in self.values:
            known = ", ".join(self.values)
            raise ArgumentError(f"there is no group {group!r}; there are {known}")
        return self.values[group]

    def order(self, group: str) -> Tensor:
        """The units of a group, the least important first."""
        return self[group].argsort(stable=True)

    def flat(self) -> Tensor:
        """All units in one tensor, in the order of the groups."""
        return torch.cat([*self.values.values()])

    def __str__(self) -> str:
        width = max(map(len, [*self.values, "group"]))
        columns = "units     share   least      median     most      "
        head = f"{'group':<{width}}  {columns} {PRINTED_FRACTION:.0%} in"
        total = float(self.flat().sum())
        rows = [f"{name:<{width}}  {_row(values, total)}" for name, values in self.values.items()]
        return "\n".join([head, *rows, f"Measured on {self.examples:,} examples."])


def _row(values: Tensor, total: float) -> str:
    """The columns of one group."""
    share = float(values.sum()) / total if total else 0.0
    return (
        f"{len(values):>5}  {share:>8.1%}   {values.min():<9.2e}  {values.median():<9.2e}  "
        f"{values.max():<9.2e}  {_units_with(values, PRINTED_FRACTION)}"
    )


def _units_with(values: Tensor, fraction: float) -> int:
    """The smallest number of units that hold this fraction of a group's importance."""
    ranked = values.sort(descending=True).values.cumsum(0)
    return int((ranked < fraction * ranked[-1]).sum()) + 1


def importance(
    model: nn.Module, batches: Iterable[Any], loss: Loss, *, examples: int = DEFAULT_EXAMPLES
) -> Importance:
    """Measure how much every unit of a model matters to a loss.

    The model is run in evaluation mode and is not changed. In a gated model the units that the
    readout closes stay closed. Any other model is copied, and the copy gets a gate on each unit.

    Args:
        model: a ``GatedModel``, or any module that ``find_groups`` can trace.
        batches: an iterable of your batches. The first ones are used, until they hold ``examples``.
        loss: calls the model on a batch and returns a scalar.
        examples: how many examples to use.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        >>> x = torch.randn(64, 4)
        >>> result = hc.importance(model, x.split(16), lambda model, x: model(x).square().mean())
        >>> len(result["0"]), result.examples
        (3, 64)
    """
    refuse_no_count(examples=examples)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"importance takes a module, not a {type(model).__name__}")
    if not callable(loss):
        raise ArgumentError(f"loss is a {type(loss).__name__}; it takes a function(model, batch)")
    with torch.inference_mode(False):
        kept = keep_batches(batches, examples)
        gated = model if isinstance(model, GatedModel) else _gated_copy(model, kept[0], loss)
        is_open = gated.gates.is_open().to(gated.gates.dtype)
        values = measure_importance(gated, kept, loss, is_open)
    return Importance(gated.by_group(values), sum(map(batch_size, kept)))


def measure_importance(
    gated: GatedModel, batches: Iterable[Any], loss: Loss, is_open: Tensor
) -> Tensor:
    """The mean over batches of (dL/dz)^2 at gates of 0 and 1, in the order of the bank.

    Args:
        gated: run in evaluation mode, and not changed.
        batches: read once.
        loss: calls the model inside ``gated`` on a batch and returns a scalar.
        is_open: the value of every gate, 0 or 1.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 10.0]]))
        >>> gated = hc.attach_gates(layer, torch.zeros(1, 2), sites=[":in"])
        >>> batches = [torch.ones(1, 2), 2 * torch.ones(1, 2)]
        >>> measure_importance(gated, batches, lambda model, x: model(x).sum(), torch.ones(2))
        tensor([  2.5000, 250.0000], dtype=torch.float64)
    """
    total, count = torch.zeros_like(is_open, dtype=torch.float64), 0
    with in_mode(gated, training=False), buffers_kept(gated.model), torch.enable_grad():
        for batch in batches:
            z = is_open.detach().clone().requires_grad_()
            with gated.gates.holding(None, z):
                value = check_loss(loss(gated.model, batch))
            (gradient,) = torch.autograd.grad(value, z)
            total += gradient.double().square()
            count += 1
    return total / count


def _gated_copy(model: nn.Module, batch: Any, loss: Loss) -> GatedModel:
    """A copy with open gates. It is traced with the inputs that ``loss`` passes to the model."""
    args, kwargs = first_call(model, batch, loss)
    return attach_gates(detached_copy(model, model.parameters()), args, kwargs)


def first_call(model: nn.Module, batch: Any, loss: Loss) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``loss`` calls the model with.

    Example:
        >>> first_call(nn.Identity(), torch.zeros(2), lambda model, x: model(x).sum())
        ((tensor([0., 0.]),), {})
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with in_mode(model, training=False), buffers_kept(model), torch.no_grad():
            loss(model, batch)
    finally:
        handle.remove()
    if not calls:
        raise ArgumentError("loss(model, batch) did not call the model that was passed to it")
    return calls[0]
