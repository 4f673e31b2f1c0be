"""The plan of a compaction: which units stay and what is folded in. It holds no weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hardconcrete.errors import ArgumentError

KEY = "_hardconcrete_plan"
"""Where a compacted model keeps its plan: in its ``__dict__``, unseen by the module system."""


def classes_of(model: nn.Module) -> str:
    """A digest of where a model has modules of which class."""
    lines = [f"{path} {type(module).__name__}" for path, module in model.named_modules()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kept:
    """What stays of a group of units."""

    units: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The indices that stay along a dimension of a parameter or buffer."""

    tensor: str
    dim: int
    size: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """Gates that are folded into a parameter, one per index of a dimension, before it is cut."""

    parameter: str
    dim: int | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class CompactionPlan:
    """All that is needed to make a dense model of the same class small.

    Args:
        model: name of the model's class.
        groups: what stays of each group.
        cuts: what stays of each parameter and buffer.
        scales: the gates that are folded in.
        selections: for modules that read some of their inputs only, which ones.
        attributes: integers of modules that are sizes, and what they become.
        form: ``"module"`` or ``"graph"``, once it was applied.
        inputs: shapes and dtypes of the example inputs, for tracing again.
        given: for modules that the caller gives only the features they keep, which of the flattened
            features of the model's input these are.
        modules: a digest of the classes of all modules of the dense model.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([5.0, -5.0, 5.0]))
        >>> plan = hc.CompactionPlan.of(hc.compact(gated))
        >>> print(plan)
        Sequential, as module
        0: 2 of 3
        >>> hc.CompactionPlan.from_json(plan.to_json()) == plan
        True
    """

    model: str
    groups: Mapping[str, Kept]
    cuts: tuple[Cut, ...]
    scales: tuple[Scale, ...] = ()
    selections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    form: str = "module"
    inputs: Any = None
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    modules: str = ""

    def __str__(self) -> str:
        lines = [f"{self.model}, as {self.form}"]
        lines += [f"{name}: {len(kept.kept)} of {kept.units}" for name, kept in self.groups.items()]
        lines += [f"{name}: selects {len(kept)} inputs" for name, kept in self.selections.items()]
        lines += [f"{name}: is given {len(kept)} inputs" for name, kept in self.given.items()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompactionPlan":
        """The plan from its text."""
        try:
            return cls._from_content(json.loads(text))
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ArgumentError(
                f"this text is no plan, as plan.to_json() writes one ({error!r})"
            ) from error

    @classmethod
    def _from_content(cls, content: Any) -> "CompactionPlan":
        return cls(
            content["model"],
            {name: Kept(k["units"], tuple(k["kept"])) for name, k in content["groups"].items()},
            tuple(Cut(**{**cut, "kept": tuple(cut["kept"])}) for cut in content["cuts"]),
            tuple(Scale(**{**s, "values": tuple(s["values"])}) for s in content["scales"]),
            {name: tuple(kept) for name, kept in content["selections"].items()},
            content["attributes"],
            content["form"],
            content["inputs"],
            {name: tuple(kept) for name, kept in content.get("given", {}).items()},
            content.get("modules", ""),
        )

    @staticmethod
    def of(model: nn.Module) -> "CompactionPlan":
        """The plan that a compacted model carries."""
        plan = model.__dict__.get(KEY)
        if not isinstance(plan, CompactionPlan):
            raise ArgumentError(
                f"this {type(model).__name__} carries no plan: it was not made by hc.compact, "
                "hc.load or plan.apply"
            )
        return plan

    def after(self, first: "CompactionPlan") -> "CompactionPlan":
        """Both cuts as one plan for the model that the first one was made for.

        A model that was made small twice is then loaded into the dense model as its constructor
        makes it. Where the two cannot be joined the result is this plan, for the model that the
        first one gave: plans in graph form, layers that select inputs, and gates on single weights
        of a layer that was cut before.
        """
        if not self._joins(first):
            return self
        stayed = {(cut.tensor, cut.dim): cut for cut in first.cuts}
        cuts = stayed | {(cut.tensor, cut.dim): _joined(cut, stayed) for cut in self.cuts}
        return replace(
            self,
            groups={**first.groups, **_joined_groups(first.groups, self.groups)},
            cuts=tuple(cuts.values()),
            scales=(*first.scales, *(_spread(scale, stayed) for scale in self.scales)),
            attributes={**first.attributes, **self.attributes},
            modules=first.modules,
        )

    def _joins(self, first: "CompactionPlan") -> bool:
        """Whether both are about modules that are cut along dimensions alone."""
        for plan in (first, self):
            if plan.form != "module" or plan.selections or plan.given:
                return False
        whole = {scale.parameter for scale in self.scales if scale.dim is None}
        return not any(cut.tensor in whole for cut in first.cuts)

    def apply(self, model: nn.Module, example_inputs: Any = None, kwargs: Any = None) -> nn.Module:
        """A small copy of a dense model of the same class, its own weights scaled and cut.

        Args:
            model: a dense model, as its constructor makes it; it is left as it is.
            example_inputs: needed for a plan in graph form, which is traced again.
            kwargs: keyword inputs of the same call.
        """
        from hardconcrete.compaction.apply import apply_plan

        return apply_plan(self, model, example_inputs, kwargs)


Stayed = Mapping[tuple[str, int], Cut]
"""What an earlier plan left, by tensor and dimension."""


def _joined(cut: Cut, stayed: Stayed) -> Cut:
    """A cut of what an earlier one left, as a cut of the whole."""
    before = stayed.get((cut.tensor, cut.dim))
    if before is None:
        return cut
    return replace(cut, size=before.size, kept=tuple(before.kept[k] for k in cut.kept))


def _joined_groups(first: Mapping[str, Kept], second: Mapping[str, Kept]) -> dict[str, Kept]:
    """The groups of the second plan, in units of the first one's where it has them."""
    joined = dict(second)
    for name, now in second.items():
        before = first.get(name)
        if before is not None and len(before.kept) == now.units:
            joined[name] = Kept(before.units, tuple(before.kept[k] for k in now.kept))
    return joined


def _spread(scale: Scale, stayed: Stayed) -> Scale:
    """Gates of what an earlier cut left; what it took is multiplied by 1."""
    before = None if scale.dim is None else stayed.get((scale.parameter, scale.dim))
    if before is None:
        return scale
    values = [1.0] * before.size
    for index, value in zip(before.kept, scale.values, strict=True):
        values[index] = value
    return replace(scale, values=tuple(values))
