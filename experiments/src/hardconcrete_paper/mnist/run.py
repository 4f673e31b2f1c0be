"""Training an experiment on MNIST."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.demo import Prepare, scaled
from hardconcrete.demo.data import Images, Split, find_mnist, load_mnist
from hardconcrete_paper.mnist.examination import MnistResult, examine
from hardconcrete_paper.mnist.experiment import EPOCHS, NETWORKS, MnistExperiment, learner
from hardconcrete_paper.training.driver import RunOptions, Trained, drive
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.run_folder import RunFolder


def run(experiment: MnistExperiment, **options: Any) -> list[MnistResult]:
    """Train all seeds of an experiment; the options are those of ``RunOptions``.

    Example:
        ``run(MnistExperiment("mlp", (0.1,), seeds=(0, 1, 2)), out=Path("runs"))`` trains the first
        L0 row of table 1. An impossible setting is refused first:

        >>> try:
        ...     MnistExperiment("mlp", lam=(0.1, 0.5))
        ... except hc.HardConcreteError as error:
        ...     print(error)
        --lam takes one number or one for each of fc1:in, fc2:in, fc3:in, not 2
    """
    return drive(MnistTask(experiment), RunOptions(**options)) or []


@dataclass(frozen=True)
class MnistTask:
    """What the driver does for an experiment on MNIST."""

    experiment: MnistExperiment

    def result(self, folder: RunFolder) -> list[MnistResult] | None:
        """A result for each seed; None if the run is not finished."""
        record = folder.read()
        return [MnistResult.of(row) for row in record["results"]] if "results" in record else None

    def find(self, split: Split, data: Path | None) -> None:
        """Refuse missing files, without opening them."""
        find_mnist(split, data)

    def load(self, split: Split, data: Path | None) -> Images:
        """The images."""
        return load_mnist(split, data)

    def learners(self, examples: int, device: torch.device) -> list[Learner]:
        """A network for each seed, before its first step."""
        return [learner(self.experiment, seed, examples, device) for seed in self.experiment.seeds]

    def stacks(self, device: torch.device) -> bool:
        """Whether the networks of all seeds are stacked into one."""
        alone = self.experiment.method == "budget" or self.experiment.shrink
        return device.type == "cuda" and not alone

    def prepare(self, device: torch.device) -> Prepare:  # noqa: ARG002
        """Pixels between 0 and 1."""
        return scaled

    def sizes(self, learners: Sequence[Learner]) -> Mapping[str, int]:  # noqa: ARG002
        """Units of the dense network, by group."""
        return NETWORKS[self.experiment.network].sizes

    def dense_macs(self) -> int:
        """Multiply-adds of the dense network, for one image."""
        return NETWORKS[self.experiment.network].dense_macs

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """Multiply-adds as the paper counts them."""
        if not isinstance(model, hc.GatedModel):
            return {}
        uncoupled = NETWORKS[self.experiment.network].uncoupled
        return {"uncoupled": uncoupled(model.open_probability())}

    def advice(self, out: Path) -> str:
        """How to choose between settings, before the test set is opened."""
        if self.experiment.validate or self._is_published():
            return ""
        folders = map(RunFolder, sorted(out.glob(f"{self.experiment.network}-*")))
        before = [folder.path.name for folder in folders if folder.has_been_tested()]
        seen = f" It has been opened for {', '.join(before)}." if before else ""
        return (
            "this setting is not the paper's, and its error will be that on the test set."
            f"{seen} To choose between settings, call each with --validate, then the chosen one "
            "once"
        )

    def _is_published(self) -> bool:
        one = self.experiment
        published = {(), *NETWORKS[one.network].rows}  # dense networks have no lambdas
        changed = one.weight_decay or one.shrink or one.per_example or one.method == "budget"
        return one.lam in published and not changed and one.epochs == EPOCHS

    def examine(self, trained: Trained) -> Iterator[dict[str, Any]]:
        """Compact, tune, time and test every network."""
        results = examine(self.experiment, trained)
        yield {
            "seconds_in_all": round(time.perf_counter() - trained.began, 1),
            "results": [asdict(result) for result in results],
        }
