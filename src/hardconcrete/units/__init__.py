"""The units of a model, found by tracing it."""

from hardconcrete.units.group import Axis, Fixed, Structure, UnitGroup, find_groups

__all__ = ["Axis", "Fixed", "Structure", "UnitGroup", "find_groups"]
