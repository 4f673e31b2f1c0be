"""The comparison on SST-2 is fair only if every method reaches the size that it is asked for."""

import copy
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

import hardconcrete as hc

transformers = pytest.importorskip("transformers")

from benchmarks.sentences.peers import at_random, inputs_of, magnitude, torch_pruning  # noqa: E402
from benchmarks.sentences.tables import table  # noqa: E402
from benchmarks.sentences.task import (  # noqa: E402
    Classifier,
    Row,
    accuracy,
    batches,
    collate,
    train,
)

PEERS = {
    "taylor": lambda *a: torch_pruning("GroupTaylorImportance", "layer", *a),
    "taylor of all layers": lambda *a: torch_pruning("GroupTaylorImportance", "all", *a),
    "magnitude of torch-pruning": lambda *a: torch_pruning("GroupMagnitudeImportance", "layer", *a),
    "magnitude": magnitude,
    "random": at_random,
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    draw = random.Random(0)
    return [([draw.randrange(1, 40) for _ in range(2 + k % 7)], k % 2) for k in range(64)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    folder: Path = tmp_path_factory.mktemp("encoder")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return Classifier(folder).eval()


def macs(model: torch.nn.Module, rows: list[Row]) -> int:
    return hc.count(model, (), inputs_of(collate(rows[:1]))).macs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_removes_half(peer: str, dense: Classifier, rows: list[Row]) -> None:
    if "random" not in peer and peer != "magnitude":
        pytest.importorskip("torch_pruning")
    small = PEERS[peer](dense, rows, 0.5, 0)
    assert macs(small, rows) == pytest.approx(0.5 * macs(dense, rows), rel=0.08)
    assert small(**inputs_of(collate(rows[:4])))["logits"].shape == (4, 2)


def test_padding_does_not_change_an_answer(dense: Classifier, rows: list[Row]) -> None:
    alone = dense(**inputs_of(collate(rows[:1])))["logits"]
    padded = dense(**inputs_of(collate(rows[:7])))["logits"][:1]
    torch.testing.assert_close(alone, padded)


def test_a_budget_trains_with_distillation(dense: Classifier, rows: list[Row]) -> None:
    gated = hc.attach_gates(copy.deepcopy(dense), (), inputs_of(collate(rows[:2])))
    budget = hc.Budget(gated, macs=0.5, steps=20)
    train(gated, rows, 0, 20, 1e-3, dense, budget)
    small = hc.compact(gated, budget=budget)
    assert macs(small, rows) <= 0.5 * macs(dense, rows)
    assert 0 <= accuracy(small, rows) <= 1


def test_batches_are_shuffled_passes(rows: list[Row]) -> None:
    first, second = (list(islice(batches(rows, seed), 4)) for seed in (0, 1))
    assert sum(len(batch["labels"]) for batch in first[:2]) == len(rows)
    assert any(
        not torch.equal(a["labels"], b["labels"]) for a, b in zip(first, second, strict=True)
    )


def test_the_table_has_means_and_standard_errors() -> None:
    line = {"method": "prune", "size": 0.5, "steps": 100, "distill": True}
    lines = [line | {"seed": seed, "accuracy": 80.0 + seed} for seed in (0, 1, 2)]
    assert "| prune | 50% | 100, distilled | 81.0 ± 0.6 | 80.0, 81.0, 82.0 |" in table(lines)
