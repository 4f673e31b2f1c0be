"""Milliseconds by width: operators are timed, and gates look their times up."""

from hardconcrete.cost.latency.table import LatencyTable, measure_latency

__all__ = ["LatencyTable", "measure_latency"]
