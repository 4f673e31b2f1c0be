"""Measurements of models, as tables and plots."""

from hardconcrete.report.comparison import Report
from hardconcrete.report.environment import environment
from hardconcrete.report.measure import measure
from hardconcrete.report.pareto import pareto
from hardconcrete.report.plots import (
    BLUE,
    COLOURS,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    Drawing,
    check_plotting,
    gate_histograms,
    kept_inputs,
    save_figure,
    units_over_time,
)
from hardconcrete.report.posterior_bits import PosteriorBits, posterior_bits

__all__ = [
    "BLUE",
    "COLOURS",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "VERMILION",
    "Drawing",
    "PosteriorBits",
    "Report",
    "check_plotting",
    "environment",
    "gate_histograms",
    "kept_inputs",
    "measure",
    "pareto",
    "posterior_bits",
    "save_figure",
    "units_over_time",
]
