"""The cost of a model: parameters, multiply-adds, bytes and milliseconds."""

from hardconcrete.cost.count import Count, count
from hardconcrete.cost.latency import LatencyTable

__all__ = ["Count", "LatencyTable", "count"]
