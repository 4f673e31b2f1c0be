"""The plan of a compaction: the units that stay and the gates that are folded in. No weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hardconcrete.compaction.apply import apply_plan
from hardconcrete.compaction.architecture import classes_of
from hardconcrete.compaction.configuration import Configuration
from hardconcrete.compaction.plan_values import refuse_bad_values
from hardconcrete.compaction.verify import in_one_line
from hardconcrete.errors import ArgumentError
from hardconcrete.units.configuration import shapes_of

KEY = "_hardconcrete_plan"
"""The name of a compacted model's plan in its ``__dict__``, where torch does not look."""


@dataclass(frozen=True)
class KeptUnits:
    """The units of a group that stay.

    Args:
        units: how many units the group had.
        kept: the indices of those that stay.
    """

    units: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A cut of a parameter or buffer along a dimension.

    Args:
        tensor: its dotted name.
        dim: the dimension.
        size: how many indices it had.
        kept: the indices that stay.
    """

    tensor: str
    dim: int
    size: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """Gates that are folded into a parameter before it is cut.

    Args:
        parameter: its dotted name.
        dim: the dimension with one gate for each index; None where every entry has a gate.
        values: the values of the gates.
    """

    parameter: str
    dim: int | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class CompactionPlan:
    """How to make a dense model of the same class small.

    Args:
        model: name of the model's class.
        groups: the units that stay in each group.
        cuts: what stays of each parameter and buffer.
        scales: the gates that are folded in.
        selections: the inputs that stay, for each module that selects some of its inputs.
        attributes: the new values of integers that are sizes, by module path and name.
        form: ``"module"`` or ``"graph"``.
        inputs: shapes and dtypes of the example inputs, for tracing again.
        kept_inputs: for each module whose inputs the caller selects, the indices among the
            flattened features of the model's input.
        modules: a digest of the classes of all modules of the dense model.
        fixed_sizes: whether the graph form takes the sizes of the example inputs only, at any batch
            size.
        configurations: the new numbers of each object that a module is built from, such as
            ``"config"``.

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
    groups: Mapping[str, KeptUnits]
    cuts: tuple[Cut, ...]
    scales: tuple[Scale, ...] = ()
    selections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    form: str = "module"
    inputs: Any = None
    kept_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    modules: str = ""
    fixed_sizes: bool = False
    configurations: Mapping[str, Configuration] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.model}, as {self.form}{' for one size' if self.fixed_sizes else ''}"]
        lines += [f"{name}: {len(kept.kept)} of {kept.units}" for name, kept in self.groups.items()]
        lines += [f"{name}: selects {len(kept)} inputs" for name, kept in self.selections.items()]
        lines += [
            f"{name}: takes {len(kept)} inputs, which you select"
            for name, kept in self.kept_inputs.items()
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompactionPlan":
        """The plan from its text."""
        try:
            plan = cls._from_content(json.loads(text))
            refuse_bad_values(plan)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"this text is no plan, as plan.to_json() writes one ({in_one_line(error)})"
            ) from error
        return plan

    @classmethod
    def _from_content(cls, content: Any) -> "CompactionPlan":
        kept_inputs = content.get("kept_inputs", content.get("given", {}))  # the key in older files
        return cls(
            content["model"],
            {
                name: KeptUnits(k["units"], tuple(k["kept"]))
                for name, k in content["groups"].items()
            },
            tuple(Cut(**{**cut, "kept": tuple(cut["kept"])}) for cut in content["cuts"]),
            tuple(Scale(**{**s, "values": tuple(s["values"])}) for s in content["scales"]),
            {name: tuple(kept) for name, kept in content["selections"].items()},
            dict(content["attributes"].items()),
            content["form"],
            content["inputs"],
            {name: tuple(kept) for name, kept in kept_inputs.items()},
            content.get("modules", ""),
            content.get("fixed_sizes", False),
            {
                path: Configuration(c["numbers"], tuple(c["not_described"]))
                for path, c in content.get("configurations", {}).items()
            },
        )

    @staticmethod
    def of(model: nn.Module) -> "CompactionPlan":
        """The plan that a compacted model carries."""
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"a {type(model).__name__} is no model, and carries no plan")
        plan = model.__dict__.get(KEY)
        if not isinstance(plan, CompactionPlan):
            raise ArgumentError(
                f"this {type(model).__name__} carries no plan: it was not made by hc.compact, "
                "hc.load or plan.apply"
            )
        return plan

    def after(self, first: "CompactionPlan") -> "CompactionPlan":
        """Both plans as one, for the dense model of the first.

        So a model that was compacted twice loads into the dense model from its constructor. Some
        plans cannot be joined: those in graph form, those of layers that select inputs, and gates
        on single weights of a layer that the first plan cut. Then the result is this plan.
        """
        if not isinstance(first, CompactionPlan):
            raise ArgumentError(f"first is a {type(first).__name__}, not a CompactionPlan")
        if not self._joins(first):
            return self
        earlier = {(cut.tensor, cut.dim): cut for cut in first.cuts}
        cuts = earlier | {(cut.tensor, cut.dim): _joined(cut, earlier) for cut in self.cuts}
        return replace(
            self,
            groups={**first.groups, **_joined_groups(first.groups, self.groups)},
            cuts=tuple(cuts.values()),
            scales=(*first.scales, *(_spread(scale, earlier) for scale in self.scales)),
            attributes={**first.attributes, **self.attributes},
            configurations=_joined_configurations(first.configurations, self.configurations),
            modules=first.modules,
        )

    def _joins(self, first: "CompactionPlan") -> bool:
        """Whether both plans are in module form and cut whole indices only."""
        for plan in (first, self):
            if plan.form != "module" or plan.selections or plan.kept_inputs:
                return False
        whole = {scale.parameter for scale in self.scales if scale.dim is None}
        return not any(cut.tensor in whole for cut in first.cuts)

    def apply(self, model: nn.Module, example_inputs: Any = None, kwargs: Any = None) -> nn.Module:
        """A small copy of a dense model of the same class, with its weights scaled and cut.

        The plan is checked against the model first: its tensors, sizes, modules and attributes.

        Args:
            model: a dense model, as its constructor makes it; it does not change.
            example_inputs: needed for a plan in graph form: the model is traced again.
            kwargs: keyword inputs of the same call.
        """
        small = apply_plan(self, model, example_inputs, kwargs)
        before = model.__dict__.get(KEY)
        if isinstance(before, CompactionPlan) and before.made(model):
            return self.after(before).put_on(small)
        return self.put_on(small)

    def put_on(self, small: nn.Module) -> nn.Module:
        """Attach the plan to a small model, and return the model."""
        small.__dict__[KEY] = self
        return small

    def made(self, model: nn.Module) -> bool:
        """Whether a model is the result of this plan and its layers did not change since."""
        shapes = shapes_of(model)
        return self.modules == classes_of(model) and all(
            cut.tensor in shapes and shapes[cut.tensor][cut.dim] == len(cut.kept)
            for cut in self.cuts
        )


Cuts = Mapping[tuple[str, int], Cut]
"""The cuts of an earlier plan, by tensor and dimension."""


def _joined(cut: Cut, earlier: Cuts) -> Cut:
    """A second cut, as a cut of the dense tensor."""
    before = earlier.get((cut.tensor, cut.dim))
    if before is None:
        return cut
    return replace(cut, size=before.size, kept=tuple(before.kept[k] for k in cut.kept))


def _joined_groups(
    first: Mapping[str, KeptUnits], second: Mapping[str, KeptUnits]
) -> dict[str, KeptUnits]:
    """The groups of the second plan, with the numbers that the units have in the first."""
    joined = dict(second)
    for name, now in second.items():
        before = first.get(name)
        if before is not None and len(before.kept) == now.units:
            joined[name] = KeptUnits(before.units, tuple(before.kept[k] for k in now.kept))
    return joined


def _joined_configurations(
    first: Mapping[str, Configuration], second: Mapping[str, Configuration]
) -> dict[str, Configuration]:
    """The numbers of both plans. The second says whether they are complete."""
    joined = {**first, **second}
    for path in first.keys() & second.keys():
        numbers = {**first[path].numbers, **second[path].numbers}
        joined[path] = replace(second[path], numbers=numbers)
    return joined


def _spread(scale: Scale, earlier: Cuts) -> Scale:
    """Gates of a tensor that was cut, for the dense one: 1 for each removed index."""
    before = None if scale.dim is None else earlier.get((scale.parameter, scale.dim))
    if before is None:
        return scale
    values = [1.0] * before.size
    for index, value in zip(before.kept, scale.values, strict=True):
        values[index] = value
    return replace(scale, values=tuple(values))
