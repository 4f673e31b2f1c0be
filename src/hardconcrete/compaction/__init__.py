"""From a gated model to a plain, smaller one that computes the same."""

from hardconcrete.compaction.compact import compact
from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.save_load import load, save
from hardconcrete.compaction.shrink import shrink

__all__ = ["CompactionPlan", "compact", "load", "save", "shrink"]
