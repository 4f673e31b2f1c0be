r"""The race: error against multiply-adds of networks that were pruned, or narrow from the start.

Every method gets the same data, the same number of epochs in all, those of the dense training
included, and the same multiply-adds at the end, counted by ``hardconcrete.count``. The network
after the last step is tested. Rates are chosen on held-out training images only.

    python experiments/benchmarks/race.py run --validate --rates 0.02 0.05 0.1 0.2  # tuning
    python experiments/benchmarks/race.py choose                          # writes rates.json
    python experiments/benchmarks/race.py run --seeds 0 1 2 --processes 15
    python experiments/benchmarks/race.py latency
    python experiments/benchmarks/race.py table
    python experiments/benchmarks/race.py plot

It needs no install: ``PYTHONPATH=src:experiments/src:experiments`` in a checkout is enough.
``plan`` takes the arguments of ``run`` and prints what the jobs cost. Several lists of jobs stand
in one command with ``--and`` between them; options that are no part of a job come from the first.
A command with ``--max-minutes`` stops in time, half a minute later at the latest. The same command
again continues the trainings that can be continued, and starts the others anew. With ``--keep``
checkpoints of up to 62 MB in all outlive the machine.

The commands of the published results, each given until no job is left, with

    RUN="python experiments/benchmarks/race.py run --data DATA --keep kept --max-minutes 8.5"

(a) ResNet-20, all cells and methods, three seeds:

    $RUN --seeds 0 1 2 --processes 15

(b) a ResNet-20 with four times the widths:

    $RUN --processes 15 \
        --network resnet20x4 --cells none 300 --methods ours tp-magnitude tp-taylor narrow \
        --and --network resnet20x4 --cells half \
        --methods ours ours-budget tp-magnitude tp-taylor \
        --and --network resnet20x4 --cells scratch --methods ours-scratch narrow dense

(c) ResNet-56, 200 epochs in all, two seeds:

    $RUN --processes 8 --network resnet56 --cells scratch --methods ours-scratch narrow \
        --targets 0.47 0.25 --seeds 0 1 --epochs 200

(d) WRN-28-10, 200 epochs, one seed. A checkpoint at a half is too large to keep: its command is
given again at once, on the same machine.

    $RUN --processes 1 --network wrn-28-10 --cells scratch --methods ours-scratch narrow \
        --targets 0.5 --epochs 200 --rates 0.1 --schedule step --round-to 8 --compile
    $RUN --processes 1 --network wrn-28-10 --cells scratch --methods ours-scratch narrow \
        --targets 0.16 --epochs 200 --rates 0.1 --schedule step --round-to 8 --compile

(e) a vision transformer with the sizes of DeiT-tiny, from scratch with AdamW, one seed:

    $RUN --processes 2 --network vit-tiny --cells scratch --methods ours-scratch narrow \
        --targets 0.5 --rates 0.001
"""

import argparse
import json
import math
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.racing.data import cache_split
from benchmarks.racing.jobs import DENSE, Job, takes_part
from benchmarks.racing.latency import add_latencies
from benchmarks.racing.methods import CELLS, FROM_SCRATCH, METHODS
from benchmarks.racing.networks import NETWORKS
from benchmarks.racing.plan import show_plan
from benchmarks.racing.run import Limits, Line, read_lines, run_all
from benchmarks.racing.schedules import SCHEDULES
from benchmarks.racing.settings import REGULARIZATION
from benchmarks.racing.tables import choose, details, plot, tables

RATES = {"none": 0.0, "300": 0.05, "half": 0.1, "scratch": 0.2}
"""Peak rates that are not in ``rates.json``."""

ONLY_WITHOUT_TRAINING = 0.7
"""A target of the cell ``none`` alone."""

DATASETS = dict.fromkeys(NETWORKS, "cifar10") | {"vgg16bn": "cifar100", "lenet5": "mnist"}
"""The data set of each network, if no other is named."""

AND = "--and"
"""Stands between lists of jobs."""


def make_jobs(a: argparse.Namespace) -> list[Job]:
    """All jobs that the arguments ask for, the dense trainings among them."""
    file = a.out / "rates.json"
    chosen = json.loads(file.read_text()) if file.exists() else {}
    dataset = a.dataset or DATASETS[a.network]

    def job(
        cell: str, method: str, target: float, seed: int, rate: float, regularization: float
    ) -> Job:
        return Job(
            a.network, dataset, cell, method, target, seed, rate, a.dense_rate, a.epochs,
            a.dense_epochs, a.steps, a.validate, a.smoke, a.round_to, regularization,
            a.schedule, a.compile,
        )  # fmt: skip

    jobs = []
    for cell, method, seed in product(a.cells, a.methods, a.seeds):
        if not takes_part(cell, method):
            continue
        best = chosen.get(a.network, {}).get(cell, {}).get(method, {})
        usual = RATES["scratch" if method in FROM_SCRATCH else cell]
        rates = a.rates or [best.get("peak_lr", usual)]
        rates = [0.0] if cell == "none" else rates
        strength = a.regularization or best.get("regularization", REGULARIZATION)
        targets = [t for t in a.targets if cell == "none" or t != ONLY_WITHOUT_TRAINING]
        for target, rate in product([1.0] if method == "dense" else targets, rates):
            strength = strength if method == "tp-reg" else REGULARIZATION
            jobs.append(job(cell, method, target, seed, rate, strength))
    seeds = sorted({j.seed for j in jobs if j.needs_dense})
    dense = [job(DENSE, "dense", 1.0, seed, a.dense_rate, REGULARIZATION) for seed in seeds]
    return list(dict.fromkeys(dense + jobs))


def best_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def all_jobs(a: argparse.Namespace) -> list[Job]:
    """Those of every list of jobs in the command."""
    return list(dict.fromkeys(job for each in (a, *a.others) for job in make_jobs(each)))


def run(a: argparse.Namespace) -> None:
    """Run all jobs; those that have a line already are skipped."""
    device = a.device or best_device()
    limits = Limits(time.time() + 60 * a.max_minutes, a.checkpoint_seconds, a.keep)
    if failed := run_all(all_jobs(a), a.data, a.work, a.out, device, a.processes, limits):
        raise SystemExit(f"{failed} jobs failed")


def plan(a: argparse.Namespace) -> None:
    """Print what the jobs of a command cost."""
    show_plan(all_jobs(a))


def cache(a: argparse.Namespace) -> None:
    """Write the images of a data set as files that --data takes on a machine without the rest."""
    for split in ("train", "test"):
        cache_split(a.dataset, split, a.data, a.to)


def lines_of(a: argparse.Namespace) -> list[Line]:
    """The results of one network and data set, on the test set or on held-out images."""
    dataset = a.dataset or DATASETS[a.network]
    wanted = {"network": a.network, "dataset": dataset, "validate": a.held_out, "smoke": a.smoke}
    lines = read_lines(a.out)
    return [line for line in lines if all(line[name] == wanted[name] for name in wanted)]


def _add_job_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--network", choices=NETWORKS, default="resnet20")
    sub.add_argument("--dataset", help="by default the one of the network")
    sub.add_argument("--cells", nargs="+", choices=CELLS, default=[*CELLS])
    sub.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    sub.add_argument("--targets", nargs="+", type=float, default=[0.7, 0.5, 0.25, 0.1])
    sub.add_argument("--seeds", nargs="+", type=int, default=[0])
    sub.add_argument("--rates", nargs="+", type=float, help="peak rates to try")
    sub.add_argument("--dense-rate", type=float, default=0.2)
    sub.add_argument("--epochs", type=int, default=24)
    sub.add_argument("--dense-epochs", type=int, default=12)
    sub.add_argument("--steps", type=int, default=300, help="after the dense training, in cell 300")
    sub.add_argument("--regularization", type=float, help="of tp-reg")
    sub.add_argument("--round-to", type=int, default=1)
    sub.add_argument("--schedule", choices=SCHEDULES, default="one-cycle")
    sub.add_argument("--compile", action="store_true", help="for networks whose kernels are large")
    sub.add_argument("--validate", action="store_true", help="test on held-out training images")
    sub.add_argument("--smoke", action="store_true", help="a few steps on a few images")
    sub.add_argument("--data", type=Path)
    sub.add_argument("--work", type=Path, default=Path("/tmp/race"))
    sub.add_argument("--out", type=Path, default=argparse.SUPPRESS)
    sub.add_argument("--device", choices=["cpu", "cuda"])
    sub.add_argument("--processes", type=int, default=1)
    sub.add_argument("--max-minutes", type=float, default=math.inf, help="then everything stops")
    sub.add_argument("--checkpoint-seconds", type=float, default=60.0, help="between two of them")
    sub.add_argument("--keep", type=Path, help="folder of checkpoints that outlive the machine")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/race"))
    commands = parser.add_subparsers(required=True)
    for name, do in (("run", run), ("plan", plan)):
        sub = commands.add_parser(name, help=do.__doc__)
        _add_job_arguments(sub)
        sub.set_defaults(do=do, others=[])
    sub = commands.add_parser("cache", help=cache.__doc__)
    sub.add_argument("dataset")
    sub.add_argument("to", type=Path)
    sub.add_argument("--data", type=Path)
    sub.set_defaults(do=cache)
    sub = commands.add_parser("choose", help=choose.__doc__)
    sub.add_argument("--out", type=Path, default=argparse.SUPPRESS)
    sub.set_defaults(do=lambda a: choose(read_lines(a.out), a.out))
    sub = commands.add_parser("latency", help=add_latencies.__doc__)
    sub.add_argument("--device", choices=["cpu", "cuda"])
    sub.add_argument("--threads", type=int, default=1)
    sub.add_argument("--out", type=Path, default=argparse.SUPPRESS)
    sub.set_defaults(do=lambda a: add_latencies(a.out, a.device or best_device(), a.threads))
    for name, show in (("table", tables), ("details", details), ("plot", plot)):
        sub = commands.add_parser(name, help=show.__doc__)
        sub.add_argument("--network", choices=NETWORKS, default="resnet20")
        sub.add_argument("--dataset")
        sub.add_argument("--held-out", action="store_true")
        sub.add_argument("--smoke", action="store_true")
        sub.add_argument("--out", type=Path, default=argparse.SUPPRESS)
        more = ["out"] if show is plot else []
        sub.set_defaults(
            do=lambda a, show=show, more=more: show(lines_of(a), *(getattr(a, m) for m in more))
        )
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments of a command, and those of further lists of jobs as ``others``."""
    lists: list[list[str]] = [[]]
    for word in words:
        if word == AND:
            lists.append([])
        else:
            lists[-1].append(word)
    parser = arguments()
    first = parser.parse_args(lists[0])
    if len(lists) > 1:
        command = next(word for word in lists[0] if word in ("run", "plan"))
        first.others = [parser.parse_args([command, *more]) for more in lists[1:]]
        for other in first.others:
            other.out = first.out
    return first


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    chosen.do(chosen)
