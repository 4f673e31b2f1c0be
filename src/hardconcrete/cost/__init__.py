"""The cost of a model: parameters, multiply-adds, bytes and milliseconds."""

from hardconcrete.cost.count import Count, count
from hardconcrete.cost.latency import LatencyTable
from hardconcrete.cost.latency.timing import first_quintile, interleaved
from hardconcrete.cost.ledger import KINDS

__all__ = ["KINDS", "Count", "LatencyTable", "count", "first_quintile", "interleaved"]
