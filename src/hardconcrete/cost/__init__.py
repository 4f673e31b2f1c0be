"""What a model costs: parameters, multiply-adds, memory and time."""

from hardconcrete.cost.count import Count, count
from hardconcrete.cost.expected import KINDS
from hardconcrete.cost.latency import LatencyTable
from hardconcrete.cost.timing import interleaved, undisturbed

__all__ = ["KINDS", "Count", "LatencyTable", "count", "interleaved", "undisturbed"]
