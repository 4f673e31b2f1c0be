"""The sentences of SST-2, the classifier and its training."""

import csv
import gzip
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import hardconcrete as hc

Batch = dict[str, Tensor]
Row = tuple[list[int], int]
"""Word pieces and the label."""

TRAIN_ROWS, HELD_OUT_ROWS = 2000, 1000
TRAIN_ROWS, HELD_OUT_ROWS = 2000, 1000
BATCH, MAX_WORD_PIECES = 32, 64


class Classifier(nn.Module):
    """The encoder, the mean over its words, and a linear layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        """Logits, and the hidden states for distillation."""
        out = self.encoder(input_ids, attention_mask, output_hidden_states=True)
        mask = attention_mask[..., None]
        mean = (out.last_hidden_state * mask).sum(1) / mask.sum(1)
        return {"logits": self.head(mean), "hidden_states": out.hidden_states}


def outputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The outputs, in bfloat16 where that is faster."""
    with torch.autocast("cpu", torch.bfloat16):
        return cast(dict[str, Any], model(batch["input_ids"], batch["attention_mask"]))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(outputs(model, batch)["logits"].float(), batch["labels"])


def read(file: Path, tokenizer: Any) -> list[Row]:
    """Word pieces and label of every row."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [*csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]
    text = [row[0].strip() for row in rows]
    pieces = tokenizer(text, truncation=True, max_length=MAX_WORD_PIECES)["input_ids"]
    return [*zip(pieces, (int(row[1]) for row in rows), strict=True)]


def load(encoder: Path, data: Path, seed: int, held_out: bool) -> tuple[list[Row], list[Row]]:
    """The rows to train on, drawn by the seed; and to test on, dev or other training rows."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    rows = read(data / "train.tsv.gz", tokenizer)
    random.Random(0).shuffle(rows)
    test = rows[:HELD_OUT_ROWS] if held_out else read(data / "dev.tsv.gz", tokenizer)
    return random.Random(seed).sample(rows[HELD_OUT_ROWS:], TRAIN_ROWS), test


def collate(rows: list[Row]) -> Batch:
    """A padded batch."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row[0]) for row in rows], batch_first=True)
    return {  # word piece 0 is padding
        "input_ids": ids, "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row[1] for row in rows]),
    }  # fmt: skip


def batches(rows: list[Row], seed: int) -> Iterator[Batch]:
    """Endless shuffled batches; sentences of similar lengths are together."""
    order, generator = list(rows), random.Random(seed)
    while True:
        generator.shuffle(order)
        parts = [sorted(order[i : i + 8 * BATCH], key=lambda row: len(row[0]))
                 for i in range(0, len(order), 8 * BATCH)]  # fmt: skip
        groups = [part[i : i + BATCH] for part in parts for i in range(0, len(part), BATCH)]
        generator.shuffle(groups)
        yield from map(collate, groups)


def train(
    model: nn.Module,
    rows: list[Row],
    seed: int,
    steps: int,
    lr: float,
    teacher: nn.Module | None = None,
    budget: hc.Budget | None = None,
) -> None:
    """AdamW with a warm-up and a linear decay. A budget shrinks the model when it has settled."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    model.train()
    for _, batch in zip(range(steps), batches(rows, seed), strict=False):
        out = outputs(model, batch)
        value = F.cross_entropy(out["logits"].float(), batch["labels"])
        if teacher is not None:
            with torch.no_grad():
                goal = outputs(teacher.eval(), batch)
            value = value + hc.distillation_loss(out, goal, mask=batch["attention_mask"])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        scheduler.step()
        if budget is not None and isinstance(model, hc.GatedModel):
            settled = budget.settled
            budget.step()
            if budget.settled and not settled:
                hc.shrink(model, optimizer)


@torch.no_grad()
def accuracy(model: nn.Module, rows: list[Row]) -> float:
    """In evaluation mode."""
    model.eval()
    ordered, right = sorted(rows, key=lambda row: len(row[0])), 0
    for start in range(0, len(ordered), 64):
        batch = collate(ordered[start : start + 64])
        right += int((outputs(model, batch)["logits"].argmax(1) == batch["labels"]).sum())
    return right / len(ordered)
