"""What a model costs: parameters, multiply-adds, memory and time."""

from hardconcrete.cost.count import Count, count
from hardconcrete.cost.latency import LatencyTable

__all__ = ["Count", "LatencyTable", "count"]
