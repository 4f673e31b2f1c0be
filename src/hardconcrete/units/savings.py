"""How much of a model could be removed, and what the units that are fixed keep there."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hardconcrete.graph.labels import Labels
from hardconcrete.graph.propagation_state import ContractionRecord
from hardconcrete.units.axis import Place
from hardconcrete.units.relations import Relations

MIN_SHARE_SHOWN = 0.005
"""A reason that keeps a smaller share of every cost is not printed."""

STAYS, GOES = 0, 1
"""The class of a label that nothing is known of, and of one that a group can lose."""


@dataclass(frozen=True)
class Share:
    """A share of a model's multiply-adds and parameters, from 0 to 1.

    Example:
        >>> print(Share(macs=0.664, params=0.32))
        66% of the MACs and 32% of the parameters
    """

    macs: float
    params: float

    def __str__(self) -> str:
        return f"{self.macs:.0%} of the MACs and {self.params:.0%} of the parameters"


@dataclass(frozen=True)
class Savings:
    """The largest possible saving, with one unit left in every group.

    Args:
        largest: what goes then, with all that goes with it.
        kept_by: by reason, what would go on top of it if the units that are fixed for this reason
            could all be removed, the largest share first.
    """

    largest: Share
    kept_by: Mapping[str, Share]

    def __str__(self) -> str:
        lines = [f"at most {self.largest} can go"]
        shown = {why: more for why, more in self.kept_by.items() if _is_shown(more)}
        lines += ["what fixed units keep, by reason"] * bool(shown)
        for k, (why, more) in enumerate(shown.items()):
            lines.append(f"{'└─' if k == len(shown) - 1 else '├─'} {more}: {why}")
        return "\n".join(lines)


def _is_shown(more: Share) -> bool:
    return max(more.macs, more.params) >= MIN_SHARE_SHOWN


def savings_of(
    model: nn.Module,
    labels: Labels,
    relations: Relations,
    contractions: Sequence[ContractionRecord],
    groups: Iterable[Sequence[int]],
) -> Savings:
    """The largest saving of a model, from its labels alone: nothing is run.

    Args:
        model: its parameters are counted.
        labels: the labels of its dimensions.
        relations: the unit at each index of its tensors.
        contractions: what its multiply-adds run over.
        groups: the roots of the units of each group.
    """
    reasons: dict[str, int] = {}
    class_of = torch.full((labels.size,), STAYS)
    for root, reason in labels.why_fixed().items():
        class_of[root] = reasons.setdefault(reason.cause, len(reasons) + 2)
    for roots in groups:
        class_of[torch.tensor(roots[1:], dtype=torch.int64)] = GOES
    sizes = _Sizes(labels, class_of, len(reasons) + 2)
    macs = [(each.macs, [sizes.of(part) for part in each.parts]) for each in contractions]
    params = _parameter_sizes(model, relations, sizes)
    dense = _total(macs, ()), _total(params, ())

    def share(classes: Sequence[int]) -> Share:
        rest = _total(macs, classes), _total(params, classes)
        return Share(*(1 - a / b if b else 0.0 for a, b in zip(rest, dense, strict=True)))

    largest = share([GOES])
    kept_by: dict[str, Share] = {}
    for cause, number in reasons.items():
        more = share([GOES, number])
        kept_by[cause] = Share(more.macs - largest.macs, more.params - largest.params)
    ordered = sorted(kept_by.items(), key=lambda item: -max(item[1].macs, item[1].params))
    return Savings(largest, dict(ordered))


Product = tuple[float, list[Tensor]]
"""A number, and for each dimension that it runs over the part of its indices in each class."""


class _Sizes:
    """The part of the indices of a dimension that is in each class."""

    def __init__(self, labels: Labels, class_of: Tensor, classes: int) -> None:
        self.labels, self.class_of, self.classes = labels, class_of, classes

    def of(self, labels: Tensor) -> Tensor:
        classes = self.class_of[self.labels.find(labels).flatten()]
        counts = torch.bincount(classes, minlength=self.classes)
        return counts.double() / max(labels.numel(), 1)


def _parameter_sizes(model: nn.Module, relations: Relations, sizes: _Sizes) -> list[Product]:
    """The entries of each parameter, with the classes of its dimensions."""
    dims: dict[str, list[Place]] = defaultdict(list)
    for name, dim in relations.roots:
        dims[name].append((name, dim))
    return [
        (tensor.numel(), [sizes.of(relations.roots[place]) for place in dims[name]])
        for name, tensor in model.named_parameters()
    ]


def _total(products: Iterable[Product], classes: Sequence[int]) -> float:
    """The sum of the products without the indices of these classes."""
    removed = list(classes)
    return sum(
        number * prod(max(0.0, 1 - float(part[removed].sum())) for part in parts)
        for number, parts in products
    )
