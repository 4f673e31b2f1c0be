"""``hardconcrete demo``: a network learns in a minute which of its units to drop."""

from hardconcrete.demo.display import Display, Status, status
from hardconcrete.demo.evaluation import Prepare, answers, error_rate, scaled
from hardconcrete.demo.figure2 import figure2
from hardconcrete.demo.network import MLP, initialise
from hardconcrete.demo.run import Demo, find_data, run_demo

__all__ = [
    "MLP",
    "Demo",
    "Display",
    "Prepare",
    "Status",
    "answers",
    "error_rate",
    "figure2",
    "find_data",
    "initialise",
    "run_demo",
    "scaled",
    "status",
]
