"""The plan of a compaction: which units stay and what is folded in. It holds no weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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

    def apply(self, model: nn.Module, example_inputs: Any = None, kwargs: Any = None) -> nn.Module:
        """A small copy of a dense model of the same class, its own weights scaled and cut.

        Args:
            model: a dense model, as its constructor makes it; it is left as it is.
            example_inputs: needed for a plan in graph form, which is traced again.
            kwargs: keyword inputs of the same call.
        """
        from hardconcrete.compaction.apply import applied

        return applied(self, model, example_inputs, kwargs)
