"""Claim: by which side of a layer He-normal weights are scaled does not decide LeNet-5's row.

Trains both LeNet-5 rows of table 1 from three initialisations, four seeds each, and tests them on
5,000 held-out training images; the test set stays closed. About 9 minutes on an H200.

    python experiments/benchmarks/initialisation.py [--data DIR] [--out FILE]
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hardconcrete.report import environment
from hardconcrete_paper.mnist.experiment import MnistExperiment
from hardconcrete_paper.mnist.run import run
from hardconcrete_paper.models import lenet5 as models

MODES = (("fan_in", "fan_in"), ("fan_out", "fan_in"), ("fan_out", "fan_out"))


def initialiser(conv: str, dense: str) -> Callable[[nn.Module], None]:
    """He-normal weights, scaled by the named sides, and zero biases."""

    def initialise(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                mode = conv if isinstance(module, nn.Conv2d) else dense
                nn.init.kaiming_normal_(module.weight, mode=mode)
                nn.init.zeros_(module.bias)

    return initialise


def main() -> None:
    """Train every setting and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = []
    for lam in ((10.0, 0.5, 0.1, 10.0), (0.1,)):
        for conv, dense in MODES:
            models.initialise = initialiser(conv, dense)
            experiment = MnistExperiment("lenet5", lam, (0, 1, 2, 3), validate=True)
            with tempfile.TemporaryDirectory() as folder:
                results = run(experiment, out=Path(folder), data=arguments.data)
            for result in results:
                line = {"lam": lam, "conv": conv, "dense": dense, "seed": result.seed}
                runs.append({**line, "units": result.units, "error": result.error})
                print(json.dumps(runs[-1]), flush=True)
    if arguments.out:
        record = {"environment": environment(device), "runs": runs}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
