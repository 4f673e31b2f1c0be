"""Two processes train one network as one process would."""

import os
import socket
from pathlib import Path

import pytest
import torch

import hardconcrete as hc
from experiments.tests.conftest import stand_in_for_cifar
from hardconcrete.demo import MLP
from hardconcrete.demo.data import Images
from hardconcrete_paper.cifar import examination
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.cifar.run import run
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.processes import agreed, processes
from hardconcrete_paper.training.run_folder import RunFolder
from tests.processes import in_processes

WIDE = CifarExperiment(
    network="wrn-10-1", variant="budget", seed=1, shrink=1, gate_lr=8.0, epochs=3
)


def data() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return Images(images, torch.arange(60) % 10, "noise")


def trained(gated: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = MLP(16, (8, 6))
    recipe = Recipe(epochs=2, batch_size=20)
    if not gated:
        one = Learner("", 0, model, recipe)
    else:
        wrapped = hc.attach_gates(model, torch.zeros(1, 16), sites=["fc1:in"])
        one = Learner("", 0, wrapped, recipe, hc.L0Penalty(wrapped, 1e-3))
    list(Engine([one], data()))
    return one.state()


def work(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with processes("cpu"):
        assert agreed(7.0 + rank) == 7.0  # what the first one says
        folder = RunFolder(out / "run")
        if rank == 0:
            folder.begin({}, resume=False)
            folder.log({"epoch": 1})  # of an epoch that no checkpoint has
        agreed(0.0)
        assert folder.load() is None
        agreed(0.0)
        assert folder.lines() == []
        for gated in (False, True):
            torch.save(trained(gated), out / f"{rank}-{gated}.pt")
        with pytest.MonkeyPatch.context() as patch:
            stand_in_for_cifar(patch)
            patch.setattr(examination, "latencies", lambda *_: {})
            for minutes in (0.0, 60.0):  # in two pieces
                result = run(WIDE, out=out, device="cpu", resume=minutes > 0, minutes=minutes)
        assert (result is None) == (rank > 0)  # one of them tests


def test_two_processes_share_every_batch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_processes(2, work, port, tmp_path)
    for gated in (False, True):
        first, second = (torch.load(tmp_path / f"{rank}-{gated}.pt") for rank in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name
        alone = trained(gated)
        close = [torch.allclose(first[name], alone[name], atol=1e-5) for name in alone]
        assert all(close) is not gated  # each process draws gates of its own
    wide = RunFolder(tmp_path / WIDE.name)
    assert [line["epoch"] for line in wide.lines()] == [1, 2, 3]  # one of them writes
    assert wide.lines()[-1]["widths"] < [16, 32, 64]  # both have shrunk
    assert wide.read()["result"]["macs"][0] <= 0.5 * wide.read()["result"]["macs"][1]
