"""A group: units with the same axes of parameters, which are removed one by one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hardconcrete.units.axis import Axis


@dataclass(frozen=True, eq=False)
class Group:
    """Units of one kind that own the same axes.

    Args:
        name: path of the module that makes them (of heads, the attention module), or the site that
            you named.
        kind: "neuron", "feature map", "attention head", "embedding dimension", "input feature" or
            "named site".
        units: how many there are.
        axes: the dimensions of parameters and buffers that they own.
        parameters: how many parameters go with one unit. For a named site: how many weights one
            gate multiplies, the paper's |g|.
        macs: how many multiply-adds per example go with one unit; 0 for a named site.
        index: its place among the groups that have gates.
        start: place of its first gate among all gates.
        removed: how many units ``shrink`` has removed.
        may_empty: whether all its units may go, as the inside of a residual branch can.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Conv2d(1, 50, 5), torch.nn.Flatten(), torch.nn.Linear(800, 9)
        >>> maps = hc.find_groups(torch.nn.Sequential(*layers), torch.zeros(2, 1, 8, 8))["0"]
        >>> maps.kind, maps.units, maps.parameters      # 25 weights, a bias, 16 columns of 9
        ('feature map', 50, 170)
        >>> [str(axis) for axis in maps.gated]
        ['2.weight[1]']
    """

    name: str
    kind: str
    units: int
    axes: tuple[Axis, ...]
    parameters: int
    macs: int = 0
    index: int = -1
    start: int = 0
    removed: int = 0
    may_empty: bool = False

    @property
    def gated(self) -> tuple[Axis, ...]:
        """The axes that gates multiply: the input side of the layers that read the units."""
        return tuple(axis for axis in self.axes if axis.gated)

    @property
    def coupled(self) -> tuple[Axis, ...]:
        """The axes that are only cut."""
        return tuple(axis for axis in self.axes if not axis.gated)

    @property
    def gated_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that its gates multiply."""
        return tuple(dict.fromkeys(axis.tensor for axis in self.gated))

    @property
    def size(self) -> int:
        """|g| in the paper: the weights that count for one gate."""
        return self.parameters

    @property
    def dense_units(self) -> int:
        """The number of units in the dense model."""
        return self.units + self.removed

    @property
    def slice(self) -> slice:
        """Its part of anything that has one entry per gate."""
        return slice(self.start, self.start + self.units)

    @property
    def keeps_one(self) -> bool:
        """Whether compaction keeps at least one unit. Of single weights it may keep none."""
        return not (self.may_empty or self.of_weights)

    @property
    def of_weights(self) -> bool:
        """Whether single weights are its units: these do not change the size of a matrix."""
        return any(axis.dim is None for axis in self.gated)

    def squared_norms(self, model: nn.Module) -> Tensor:
        """Sum of squares of the ungated weights of each unit, the inner sum of eq. 17."""
        return sum(  # type: ignore[return-value]
            axis.squared_norms(raw_parameter(model, axis.tensor), self.units) for axis in self.gated
        )


def raw_parameter(model: nn.Module, name: str) -> Tensor:
    """A parameter as it is trained. As an attribute of a gated module it comes with its gates."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path)._parameters[attribute]  # type: ignore[return-value]


def in_order(groups: Iterable[Group]) -> tuple[Group, ...]:
    """The groups with their gates one after the other."""
    placed: list[Group] = []
    start = 0
    for group in groups:
        placed.append(replace(group, index=len(placed), start=start))
        start += group.units
    return tuple(placed)
