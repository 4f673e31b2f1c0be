"""Training an experiment on CIFAR."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.demo import Prepare
from hardconcrete.demo.data import Images, Split
from hardconcrete_paper.cifar.examination import CifarResult, examine, read_run
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.data.cifar import find_cifar, load_cifar
from hardconcrete_paper.training.driver import RunOptions, Trained, drive
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.run_folder import RunFolder


def run(experiment: CifarExperiment, **options: Any) -> CifarResult | None:
    """Train one network; None if the minutes, from now on, were over before its end.

    The options are those of ``RunOptions``. The test set is opened once, when the network is
    trained; again if what follows was interrupted.
    """
    return drive(CifarTask(experiment), RunOptions(**options))


@dataclass(frozen=True)
class CifarTask:
    """What the driver does for an experiment on CIFAR."""

    experiment: CifarExperiment

    def result(self, folder: RunFolder) -> CifarResult | None:
        """The result; None if the run is not finished and has a checkpoint."""
        _, result = read_run(folder)
        return result if result and (result.curve or not folder.checkpoint.exists()) else None

    def find(self, split: Split, data: Path | None) -> None:
        """Refuse missing files, without opening them."""
        find_cifar(self.experiment.classes, split, data)

    def load(self, split: Split, data: Path | None) -> Images:
        """The images."""
        return load_cifar(self.experiment.classes, split, data)

    def learners(self, examples: int, device: torch.device) -> list[Learner]:
        """The network, before its first step."""
        return [cifar_learner(self.experiment, examples, device)]

    def stacks(self, device: torch.device) -> bool:  # noqa: ARG002
        """There is one network."""
        return False

    def prepare(self, device: torch.device) -> Prepare:
        """Images normalised; in training cropped and mirrored."""
        return Preparation(CIFAR_STATISTICS[self.experiment.classes]).to(device)

    def sizes(self, learners: Sequence[Learner]) -> Mapping[str, int]:
        """Units of the dense network, by group."""
        return {group.name: group.dense_units for group in _groups(learners[0].model)}

    def dense_macs(self) -> int:
        """Multiply-adds of the dense network, for one image."""
        return hc.count(self.experiment.build(), torch.zeros(1, 3, 32, 32)).macs

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """The present units of each group, closed ones included; fewer after a shrink."""
        return {"widths": [group.units for group in _groups(model)]}

    def advice(self, out: Path) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def examine(self, trained: Trained) -> Iterator[dict[str, Any]]:
        """Compact, test and time. Each result is more complete than the last."""
        for result in examine(self.experiment, trained):
            yield {"result": asdict(result)}


def _groups(model: nn.Module) -> tuple[hc.Group, ...]:
    """The groups of a network with gates."""
    return model.groups if isinstance(model, hc.GatedModel) else ()
