"""What a model costs: parameters, multiply-adds, memory and time."""

from hardconcrete.cost.count import Count, count
from hardconcrete.cost.latency import LatencyTable
from hardconcrete.cost.latency.timing import interleaved, undisturbed
from hardconcrete.cost.ledger import KINDS

__all__ = ["KINDS", "Count", "LatencyTable", "count", "interleaved", "undisturbed"]
