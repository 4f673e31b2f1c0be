"""The units of a model, found by tracing it."""

from hardconcrete.structure.groups import Axis, Fixed, Structure, UnitGroup, find_groups

__all__ = ["Axis", "Fixed", "Structure", "UnitGroup", "find_groups"]
