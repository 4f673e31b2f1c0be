"""The race: error against multiply-adds of networks that were pruned, or narrow from the start.

Every method gets the same data, the same number of epochs in all, those of the dense training
included, and the same multiply-adds at the end, counted by ``hardconcrete.count``. The network
after the last step is tested. Rates are chosen on held-out training images only.

    python benchmarks/race.py run --validate --rates 0.02 0.05 0.1 0.2    # tuning
    python benchmarks/race.py choose                                      # writes rates.json
    python benchmarks/race.py run --seeds 0 1 2 --processes 15
    python benchmarks/race.py latency
    python benchmarks/race.py table
    python benchmarks/race.py plot
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.racing.data import cache_split
from benchmarks.racing.jobs import DENSE, Job, takes_part
from benchmarks.racing.latency import add_latencies
from benchmarks.racing.methods import CELLS, FROM_SCRATCH, METHODS
from benchmarks.racing.networks import NETWORKS
from benchmarks.racing.run import Line, read_lines, run_all
from benchmarks.racing.settings import REGULARIZATION
from benchmarks.racing.tables import choose, details, plot, tables

RATES = {"none": 0.0, "300": 0.05, "half": 0.1, "scratch": 0.2}
"""Peak rates that are not in ``rates.json``."""

ONLY_WITHOUT_TRAINING = 0.7
"""A target of the cell ``none`` alone."""

DATASETS = {"resnet20": "cifar10", "resnet56": "cifar10", "vgg16bn": "cifar100", "lenet5": "mnist"}


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


def run(a: argparse.Namespace) -> None:
    """Run all jobs; those that have a line already are skipped."""
    device = a.device or best_device()
    if failed := run_all(make_jobs(a), a.data, a.work, a.out, device, a.processes):
        raise SystemExit(f"{failed} jobs failed")


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


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/race"))
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("run", help="train and prune")
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
    sub.add_argument("--validate", action="store_true", help="test on held-out training images")
    sub.add_argument("--smoke", action="store_true", help="a few steps on a few images")
    sub.add_argument("--data", type=Path)
    sub.add_argument("--work", type=Path, default=Path("/tmp/race"))
    sub.add_argument("--out", type=Path, default=argparse.SUPPRESS)
    sub.add_argument("--device", choices=["cpu", "cuda"])
    sub.add_argument("--processes", type=int, default=1)
    sub.set_defaults(do=run)
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


if __name__ == "__main__":
    chosen = arguments().parse_args()
    chosen.do(chosen)
