"""A character-level GPT with half of its multiply-adds: a budget from scratch, narrow, pruned.

Every method trains for as many steps, on the same batches of Tiny Shakespeare. The loss is that of
the last tenth of the text, in nats for a character. ``prune`` and ``prune-trained`` start
from the dense model; the latter trains for a tenth of the steps more. The gated and the small model
of the budget write a text from the same random numbers.

    python experiments/benchmarks/gpt.py --data FOLDER                      # a CPU, minutes
    python experiments/benchmarks/gpt.py --data FOLDER --size gpt2 --steps 300 --seeds 0  # a GPU

It needs no install: PYTHONPATH=src:experiments/src:experiments is enough. Jobs that have a line in
--out are skipped.
"""

import argparse
import json
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.report import environment
from hardconcrete_paper.data.shakespeare import load_shakespeare
from hardconcrete_paper.models import CharTransformer

METHODS = ("dense", "budget", "narrow", "prune", "prune-trained")
BATCH, BATCHES_TO_PRUNE, BATCHES_TO_TEST, CHARACTERS_TO_WRITE = 32, 32, 100, 200


@dataclass(frozen=True)
class Size:
    """The dense model, and the rate at which all models are trained."""

    layers: int
    width: int
    heads: int
    context: int
    lr: float

    def build(self, vocabulary: int, width: int = 0, hidden: int = 0) -> CharTransformer:
        """The model, or one with other widths."""
        width = width or self.width
        hidden = hidden or 4 * width
        return CharTransformer(vocabulary, width, self.layers, self.heads, self.context, hidden)


SIZES = {"small": Size(3, 96, 6, 64, lr=3e-3), "gpt2": Size(12, 768, 12, 256, lr=3e-4)}


class Run:
    """All methods of one seed: of the weights and the batches."""

    def __init__(self, a: argparse.Namespace, seed: int) -> None:
        self.a, self.seed, self.size = a, seed, SIZES[a.size]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text, self.test = (load_shakespeare(split, a.data) for split in ("train", "test"))
        self.vocabulary = len(self.text.alphabet)
        self.example = self.text.numbers[None, : self.size.context].to(self.device)
        self.trained: dict[str, nn.Module] = {}

    def batches(self, split: str, number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Pieces of the text, the same for every method."""
        text = self.text if split == "train" else self.test
        generator, last = torch.Generator().manual_seed(seed), len(text) - self.size.context
        starts = torch.randint(last, (number, BATCH), generator=generator)
        pairs = (text.windows(each, self.size.context) for each in starts)
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Nats for a character."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            scores = model(batch[0])
        return F.cross_entropy(scores.float().flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def test_loss(self, model: nn.Module) -> float:
        """On the last tenth of the text."""
        losses = [self.loss(model.eval(), b) for b in self.batches("test", BATCHES_TO_TEST, 10**6)]
        return torch.stack(losses).mean().item()

    @torch.no_grad()
    def write(self, model: nn.Module) -> str:
        """A text by the model."""
        model.eval()
        generator, written = torch.Generator().manual_seed(0), self.example[:, :1]
        for _ in range(CHARACTERS_TO_WRITE):
            scores = model(written[:, -self.size.context :])[0, -1].double().cpu()
            drawn = torch.multinomial(scores.softmax(0), 1, generator=generator)
            written = torch.cat([written, drawn[None].to(self.device)], 1)
        return self.text.decode(written[0])

    def train(
        self, model: nn.Module, steps: int, seed: int, budget: hc.Budget | None = None
    ) -> nn.Module:
        """AdamW with a warm-up and a cosine. A budget shrinks the model when it has settled."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.size.lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.size.lr, steps, pct_start=0.1
        )
        model.train()
        for batch in self.batches("train", steps, seed):
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            weights = model.model if isinstance(model, hc.GatedModel) else model
            nn.utils.clip_grad_norm_(weights.parameters(), 1.0)  # not the gates': a budget reads it
            optimizer.step()
            scheduler.step()
            if budget is not None and isinstance(model, hc.GatedModel):
                settled = budget.settled
                budget.step()
                if budget.settled and not settled:
                    hc.shrink(model, optimizer)
        return model

    def model(self, method: str, more: dict[str, Any]) -> nn.Module:
        """The model of a method, trained."""
        torch.manual_seed(self.seed)
        model: nn.Module = self.size.build(self.vocabulary).to(self.device)
        if method == "dense":
            if method not in self.trained:
                self.trained[method] = self.train(model, self.a.steps, self.seed)
            return self.trained[method]
        if method == "narrow":
            return self.train(self.narrow().to(self.device), self.a.steps, self.seed)
        if method == "budget":
            gated = hc.attach_gates(model, self.example)
            budget = hc.Budget(gated, macs=self.a.macs, steps=self.a.steps)
            self.train(gated, self.a.steps, self.seed, budget)
            small = hc.compact(gated, budget=budget)
            more["text"], by_gated = self.write(small), self.write(gated)
            more["same_text"] = more["text"] == by_gated
            return small
        batches = self.batches("train", BATCHES_TO_PRUNE, 10**5)
        dense = self.model("dense", more)
        small = hc.prune(dense, self.example, batches, self.loss, macs=self.a.macs, stages=1)
        steps = self.a.steps // 10 if method == "prune-trained" else 0
        return self.train(small, steps, self.seed + 1) if steps else small

    def narrow(self) -> nn.Module:
        """As wide as fits, with as many layers and heads; the feed-forward width takes the rest."""

        def macs(width: int, hidden: int) -> int:
            with torch.device("meta"):
                model = self.size.build(self.vocabulary, width, hidden)
            return hc.count(model, self.example.to("meta")).macs

        limit, heads = self.a.macs * macs(self.size.width, 4 * self.size.width), self.size.heads
        fit = [w for w in range(heads, self.size.width + 1, heads) if macs(w, 4 * w) <= limit]
        width = fit[-1]
        hidden = next(h for h in count(4 * width) if macs(width, h + 1) > limit)
        torch.manual_seed(self.seed)
        return self.size.build(self.vocabulary, width, hidden)

    def run(self, method: str) -> None:
        """One job and its line."""
        start, more = time.perf_counter(), dict[str, Any]()
        model = self.model(method, more)
        seconds = round(time.perf_counter() - start, 1)
        sizes = [self.size.build(self.vocabulary).to(self.device), model]
        dense, small = (hc.count(each, self.example) for each in sizes)
        line = {
            "size": self.a.size, "steps": self.a.steps, "macs": self.a.macs, "seed": self.seed,
            "method": method, "loss": round(self.test_loss(model), 4),
            "macs_fraction": round(small.macs / dense.macs, 4), "params": small.params,
            "dense_params": dense.params, "seconds": seconds, **more, **environment(self.device),
        }  # fmt: skip
        with self.a.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(method, self.seed, line["loss"], line["macs_fraction"], flush=True)


def main() -> None:
    """Run the jobs that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of input.txt or input.txt.gz")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--macs", type=float, default=0.5)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("results/gpt.jsonl"))
    a = parser.parse_args()
    keys = ("size", "steps", "macs", "seed", "method")
    lines = a.out.read_text().splitlines() if a.out.exists() else []
    done = {tuple(line[key] for key in keys) for line in map(json.loads, lines)}
    for seed in a.seeds:
        run = Run(a, seed)
        for method in a.methods:
            if (a.size, a.steps, a.macs, seed, method) not in done:
                run.run(method)


if __name__ == "__main__":
    main()
