"""A run that is killed at any of its writes, and resumed, ends bit-identically."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.demo.data import Images
from hardconcrete_paper.training import checkpoints
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.run_folder import RunFolder
from tests.processes import in_processes

EPOCHS = 4
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


def make_learner() -> Learner:
    torch.manual_seed(0)
    gated = hc.attach_gates(MLP(16, (12, 8)), torch.zeros(1, 16), sites=["fc1:in", "fc2:in"])
    budget = hc.Budget(gated, macs=0.4, steps=3 * EPOCHS, by="gates")
    recipe = Recipe(epochs=EPOCHS, batch_size=20, gate_lr=1.0, shrink=1, averaging=0.5)
    return Learner("budget", 0, gated, recipe, budget)


def run(out: Path) -> None:
    """Train from the last checkpoint, shrink on the way, then compact and record the result."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    checkpoints.CHECKPOINT_SECONDS = 0.0
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator)
    folder = RunFolder(out)
    folder.begin({"seed": 0}, resume=True)
    learner = make_learner()
    checkpoints.fit([learner], folder)
    engine = Engine([learner], Images(pixels, torch.arange(60) % 10, "noise"))
    sizes = {"fc1:in": 16, "fc2:in": 12}
    checkpoints.train(engine, folder, sizes, 1000)
    small = hc.compact(learner.averaged)
    hc.save(folder.small(0), small)
    units = [len(kept.kept) for kept in hc.CompactionPlan.of(small).groups.values()]
    folder.write({**folder.read(), "result": units})


def result(out: Path) -> tuple[Any, ...]:
    """Everything that a run leaves, without its times."""
    folder = RunFolder(out)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in folder.lines()]
    snapshots = {path.name: load_file(path) for path in sorted(out.glob("snapshots/*.safetensors"))}
    ends = load_file(folder.checkpoint), load_file(folder.small(0))
    return lines, folder.read(), snapshots, ends, sorted(path.name for path in out.iterdir())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def at_write(number: int, out: Path, count: list[int]) -> None:
    """Kill this process before its n-th change of a file in a folder."""

    def watch(event: str, args: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir") or (
            event == "open" and isinstance(args[2], int) and args[2] & WRITES
        )
        if changes and str(args[0]).startswith(str(out)):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def after(seconds: float) -> None:
    """Kill this process after some time."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def forked(work: Callable[[], None]) -> int:
    """Run a function in a copy of this process; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.waitstatus_to_exitcode(status) == 0
    return 0


def count_writes(out: Path) -> None:
    count = [0]
    at_write(0, out, count)
    run(out)
    (out.parent / "writes").write_text(str(count[0]))


def kill_at_writes(_: int, folder: Path, every: int) -> None:
    """Kill a run at one write after the other, in a new folder each time, and resume it."""
    assert forked(lambda: count_writes(folder / "whole")) == 0
    writes = int((folder / "writes").read_text())
    assert writes > 30, writes
    whole = result(folder / "whole")
    for number in range(1, writes + 1, every):
        out = folder / f"killed-{number}"
        killed = forked(lambda: (at_write(number, out, [0]), run(out)))  # noqa: B023
        assert killed == signal.SIGKILL or number > writes - 6  # writes depend on the clock
        assert forked(lambda: run(out)) == 0  # noqa: B023
        assert same(result(out), whole), f"killed at write {number}"


def kill_at_random(_: int, folder: Path, kills: int) -> None:
    """Kill runs after random times and at random writes, several times each."""
    draw, done = random.Random(0), 0
    start = time.perf_counter()
    assert forked(lambda: run(folder / "whole")) == 0
    seconds = time.perf_counter() - start
    whole, number = result(folder / "whole"), 0
    while done < kills:
        number += 1
        out = folder / f"killed-{number}"
        for _ in range(3):
            if draw.random() < 0.5:
                when = draw.uniform(0, seconds)
                killed = forked(lambda: (after(when), run(out)))  # noqa: B023
            else:
                write = draw.randint(1, 30)
                killed = forked(lambda: (at_write(write, out, [0]), run(out)))  # noqa: B023
            done += killed == signal.SIGKILL
        assert forked(lambda: run(out)) == 0  # noqa: B023
        assert same(result(out), whole), f"run {number}"
    (folder / "kills").write_text(json.dumps(done))


def test_a_run_killed_at_a_write_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    in_processes(1, kill_at_writes, tmp_path, 14)


@pytest.mark.slow
def test_a_run_killed_at_every_write(tmp_path: Path) -> None:
    in_processes(1, kill_at_writes, tmp_path, 1)


@pytest.mark.slow
def test_runs_killed_fifty_times(tmp_path: Path) -> None:
    in_processes(1, kill_at_random, tmp_path, 50)
    assert json.loads((tmp_path / "kills").read_text()) >= 50
