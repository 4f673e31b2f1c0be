"""Latency: operators are timed at many widths, and gates give the widths."""

from hardconcrete.cost.latency.table import LatencyTable

__all__ = ["LatencyTable"]
