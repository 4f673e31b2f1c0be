"""What a model costs: parameters, multiply-adds and memory."""

from hardconcrete.cost.count import Count, count

__all__ = ["Count", "count"]
