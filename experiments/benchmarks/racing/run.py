"""Running all jobs: processes that share one GPU, and files of results that only grow."""

import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.racing.checkpoint import Checkpoint, Paused
from benchmarks.racing.checkpoint_archive import keep, restore
from benchmarks.racing.data import Data, cache_split
from benchmarks.racing.jobs import DENSE, Job, run_job
from benchmarks.racing.plan import seconds

SECONDS_TO_PAUSE = 30
"""How long after its time is over a job may take to write its checkpoint and stop."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long jobs run, and what outlives them.

    Args:
        deadline: when every training stops, as ``time.time()`` counts.
        every: seconds from one checkpoint to the next.
        keep: the folder of checkpoints that outlive the machine.
    """

    deadline: float = math.inf
    every: float = 60.0
    keep: Path | None = None

    def over(self) -> bool:
        """Whether no job starts any more."""
        return time.time() >= self.deadline

    def checkpoint(self, job: Job, work: Path) -> Checkpoint:
        """That of a job which starts now."""
        file = job.checkpoint_file(work) if job.resumable else None
        return Checkpoint(file, self.every, self.deadline)


def read_lines(out: Path, ending: str = "") -> list[Line]:
    """All results in a folder; those of files whose name ends so."""
    files = sorted(out.glob(f"*{ending}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]


def write_line(out: Path, name: str, line: Line) -> None:
    """Add a result to its file, at once."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def without_done(jobs: Iterable[Job], out: Path, work: Path) -> list[Job]:
    """Jobs without a line; a dense training also runs again if its model is lost and needed."""
    done = {Job.key_of(line) for line in read_lines(out)}
    left = [job for job in jobs if Job.key_of(asdict(job)) not in done]
    needed = {job.dense_file(work) for job in left if job.needs_dense}
    lost = [
        job
        for job in jobs
        if job.cell == DENSE
        and job not in left
        and job.dense_file(work) in needed
        and not job.dense_file(work).exists()
    ]
    return lost + left


def run_all(
    jobs: list[Job],
    data: Path | None,
    work: Path,
    out: Path,
    device: str,
    processes: int,
    limits: Limits,
) -> int:
    """Run what is not done; returns how many failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that all below is undone
    work.mkdir(parents=True, exist_ok=True)
    if limits.keep:
        restore(limits.keep, work)
    waiting = without_done(jobs, out, work)
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are done already", flush=True)
    if not waiting:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cached = Path(folder)
        for dataset, validate in {(job.dataset, job.validate) for job in waiting}:
            for split in ("train",) if validate else ("train", "test"):
                cache_split(dataset, split, data, cached)
        with _shared_gpu(device, processes):
            workers = Workers(min(processes, len(waiting)), cached, work, device, limits)
            try:
                return _schedule(waiting, workers, work, out, limits)
            finally:
                workers.stop()
                if limits.keep:
                    _keep(without_done(jobs, out, work), work, limits.keep)


def _keep(jobs: list[Job], work: Path, folder: Path) -> None:
    """What jobs that are not done have written, and the dense models that they wait for."""
    dense = [job.dense_file(work) for job in jobs if job.needs_dense]
    files = dict.fromkeys([job.checkpoint_file(work) for job in jobs] + dense)
    for file in keep([file for file in files if file.exists()], folder):
        print(f"no room to keep {file.name}, {file.stat().st_size / 1e6:.1f} MB", flush=True)


def _schedule(waiting: list[Job], workers: "Workers", work: Path, out: Path, limits: Limits) -> int:
    """Dense trainings first, then the longest job whose dense model is there."""
    waiting = sorted(waiting, key=lambda job: (job.cell != DENSE, -seconds(job)))
    total, done, failed, start = sum(map(seconds, waiting)), 0.0, 0, time.time()
    count, finished, paused, running = len(waiting), 0, 0, dict[int, tuple[Job, float]]()
    pace = 0.0  # the most seconds that a job took for each that was estimated
    while waiting or running:
        coming = [job for job, _ in running.values()] + waiting
        dense = {job.dense_file(work) for job in coming if job.cell == DENSE}
        for worker in [] if limits.over() else workers.idle(running):
            time_left = limits.deadline - time.time()
            ready = (
                job
                for job in waiting
                if _ready(job, dense, work) and (job.resumable or seconds(job) * pace < time_left)
            )
            if (job := next(ready, None)) is None:
                break
            waiting.remove(job)
            running[worker] = job, time.time()
            workers.give(worker, job)
        if not running:
            break
        result = workers.next_result(running, limits.deadline + SECONDS_TO_PAUSE)
        if result is None:
            print(f"{len(running)} jobs did not stop in time", flush=True)
            paused += len(running)
            break
        worker, line, trouble = result
        job, began = running.pop(worker)
        if line is None and not trouble:
            paused += 1
            print(f"paused {_words(job)}", flush=True)
            continue
        finished, done = finished + 1, done + seconds(job)
        if line is None:
            failed += 1
            print(f"FAILED {_words(job)}\n{trouble}", flush=True)
            continue
        write_line(out, job.name(), line)
        job.checkpoint_file(work).unlink(missing_ok=True)
        pace = max(pace, (time.time() - began) / seconds(job))
        rest = (time.time() - start) * (total - done) / done
        print(
            f"[{finished}/{count}, {rest / 60:.1f} min left] {_words(job)}: error "
            f"{line['error']:.2f}% at {line['macs_fraction']:.4f} in {line['seconds']:.0f} s",
            flush=True,
        )
    left = len(waiting) + paused
    if left and limits.deadline < math.inf:
        print(f"{left} jobs are left: give the same command again", flush=True)
    elif left:
        print(f"{left} jobs have no dense model", flush=True)
        failed += left
    return failed


def _ready(job: Job, coming: set[Path], work: Path) -> bool:
    file = job.dense_file(work)
    return not job.needs_dense or (file not in coming and file.exists())


def _words(job: Job) -> str:
    return (
        f"{job.network} {job.cell} {job.method} {job.target:g} seed {job.seed} lr {job.peak_lr:g}"
    )


class Workers:
    """Processes that each hold the data and run one job at a time."""

    def __init__(self, number: int, data: Path, work: Path, device: str, limits: Limits) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.arguments = data, work, device, limits
        self.results = self.context.Queue()
        self.tasks = [self.context.Queue() for _ in range(number)]
        self.processes = [self._start(worker) for worker in range(number)]

    def _start(self, worker: int) -> Any:
        arguments = (worker, self.tasks[worker], self.results, *self.arguments)
        process = self.context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        return process

    def idle(self, running: Iterable[int]) -> list[int]:
        """Those without a job."""
        return [worker for worker in range(len(self.tasks)) if worker not in running]

    def give(self, worker: int, job: Job) -> None:
        """Start a job."""
        self.tasks[worker].put(job)

    def next_result(
        self, running: Iterable[int], deadline: float
    ) -> tuple[int, Line | None, str] | None:
        """The worker, its line, or what went wrong; a process that died is started again.

        Without a line and trouble the job was paused. None if nothing comes until the deadline.
        """
        while True:
            try:
                return self.results.get(timeout=min(5.0, max(0.1, deadline - time.time())))
            except queue.Empty:
                if time.time() >= deadline:
                    return None
                for worker in running:
                    if not self.processes[worker].is_alive():
                        code = self.processes[worker].exitcode
                        self.tasks[worker] = self.context.Queue()
                        self.processes[worker] = self._start(worker)
                        return worker, None, f"its process ended with {code}"

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _work(
    worker: int,
    tasks: Any,
    results: Any,
    folder: Path,
    work: Path,
    device: str,
    limits: Limits,
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":  # everything on one stream, which can be captured
        torch.cuda.set_stream(torch.cuda.Stream())
    images: dict[tuple[Any, ...], Data] = {}
    while True:
        try:
            job: Job = tasks.get(timeout=5)
        except queue.Empty:
            if not multiprocessing.parent_process().is_alive():
                return
            continue
        try:
            which = job.dataset, job.validate, folder, torch.device(device), job.smoke
            if which not in images:
                images.clear()
                images[which] = Data(*which)
            checkpoint = limits.checkpoint(job, work)
            results.put((worker, run_job(job, images[which], work, checkpoint), ""))
        except Paused:
            results.put((worker, None, ""))
        except (Exception, SystemExit):
            results.put((worker, None, traceback.format_exc()))


@contextmanager
def _shared_gpu(device: str, processes: int) -> Iterator[None]:
    """A server through which processes use one GPU at the same time, where there is one."""
    command = shutil.which("nvidia-cuda-mps-control")
    if device != "cuda" or processes == 1 or command is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        names = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
        os.environ |= dict.fromkeys(names, folder)
        started = subprocess.run([command, "-d"], check=False).returncode == 0
        print("MPS is on" if started else "MPS did not start", flush=True)
        if not started:
            for name in names:
                os.environ.pop(name)
        try:
            yield
        finally:
            if started:
                subprocess.run([command], input="quit\n", text=True, check=False)
