"""The units of a model, found by tracing it."""

from hardconcrete.units.analysis import Analysis, analyze, find_groups
from hardconcrete.units.axis import Axis
from hardconcrete.units.group import Group
from hardconcrete.units.grouping import Fixed
from hardconcrete.units.savings import Savings, Share

__all__ = ["Analysis", "Axis", "Fixed", "Group", "Savings", "Share", "analyze", "find_groups"]
