"""What was measured, as tables and pictures."""

from hardconcrete.report.environment import environment
from hardconcrete.report.importing import example_input, import_model
from hardconcrete.report.measure import Report, measure
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

__all__ = [
    "BLUE",
    "COLOURS",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "VERMILION",
    "Drawing",
    "Report",
    "check_plotting",
    "environment",
    "example_input",
    "gate_histograms",
    "import_model",
    "kept_inputs",
    "measure",
    "pareto",
    "save_figure",
    "units_over_time",
]
