"""Other ways to remove heads and feed-forward units: torch-pruning, magnitude, random."""

import copy
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.sentences.task import Batch, Row, collate, loss

Peer = Callable[[nn.Module, list[Row], float, int], nn.Module]
"""From the dense model, training rows, a fraction of its multiply-adds and a seed."""


def inputs_of(batch: Batch) -> Batch:
    """What the model is called with."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def torch_pruning(
    importance: str,
    scope: str,
    dense: nn.Module,
    rows: list[Row],
    fraction: float,
    seed: int,
) -> nn.Module:
    """Torch-pruning's way for BERT: the same fraction of heads and of feed-forward units.

    As in its example, heads are removed whole and the encoder is told its new sizes. The residual
    width stays, as for all methods.

    ``importance`` is a class of ``tp.importance``. The scope ``"layer"`` compares the units of one
    layer, and ``"all"`` those of all layers.
    """
    import torch_pruning as tp

    torch.manual_seed(seed)
    model: Any = copy.deepcopy(dense).eval()
    layers = model.encoder.encoder.layer
    attentions = [layer.attention.self for layer in layers]
    heads = {
        projection: attention.num_attention_heads
        for attention in attentions
        for projection in (attention.query, attention.key, attention.value)
    }
    residual = [layer.attention.output.dense for layer in layers]
    residual += [layer.output.dense for layer in layers]
    pruner = tp.pruner.BasePruner(
        model,
        inputs_of(collate(rows[:4])),
        importance=getattr(tp.importance, importance)(),
        global_pruning=scope == "all",
        pruning_ratio=1 - fraction,
        head_pruning_ratio=1 - fraction,
        num_heads=heads,
        prune_num_heads=True,
        prune_head_dims=False,
        ignored_layers=[model.encoder.embeddings, model.head, *residual],
        output_transform=lambda out: out["logits"].sum(),
    )
    if importance == "GroupTaylorImportance":
        for start in range(0, len(rows), 32):
            loss(model, collate(rows[start : start + 32])).backward()
    pruner.step()
    model.zero_grad()
    for attention in attentions:
        attention.num_attention_heads = pruner.num_heads[attention.query]
        attention.all_head_size = attention.query.out_features
    return model  # type: ignore[no-any-return]


def magnitude(dense: nn.Module, rows: list[Row], fraction: float, seed: int) -> nn.Module:  # noqa: ARG001
    """Global magnitude: the mean square of the weights that read a unit, all units compared."""
    found = hc.find_groups(dense, (), inputs_of(collate(rows[:4])))
    parameters = dict(dense.named_parameters())
    scores = {}
    for group in found:
        weights = sum(parameters[axis.tensor].numel() / group.units for axis in group.gated)
        scores[group.name] = (group.squared_norms(dense) / weights).tolist()
    return _cut(dense, rows, fraction, scores)


def at_random(dense: nn.Module, rows: list[Row], fraction: float, seed: int) -> nn.Module:
    """Units at random."""
    draw = random.Random(seed)
    found = hc.find_groups(dense, (), inputs_of(collate(rows[:4])))
    scores = {group.name: [draw.random() for _ in range(group.units)] for group in found}
    return _cut(dense, rows, fraction, scores)


def _cut(
    dense: nn.Module, rows: list[Row], fraction: float, scores: Mapping[str, list[float]]
) -> nn.Module:
    """The model without the units of the smallest scores; every group keeps its best one."""
    example = inputs_of(collate(rows[:1]))
    cost = {group.name: group.macs for group in hc.find_groups(dense, (), example)}
    left = hc.count(dense, (), example).macs
    limit = fraction * left
    best = {name: max(range(len(own)), key=own.__getitem__) for name, own in scores.items()}
    keep = {name: set(range(len(own))) for name, own in scores.items()}
    for _, name, unit in sorted(
        (score, name, unit) for name, own in scores.items() for unit, score in enumerate(own)
    ):
        if left > limit and unit != best[name]:
            keep[name].remove(unit)
            left -= cost[name]
    return hc.compact(
        dense, (), example, keep={name: sorted(units) for name, units in keep.items()}
    )


PEERS: Mapping[str, Peer] = {
    "tp-taylor": partial(torch_pruning, "GroupTaylorImportance", "layer"),
    "tp-taylor-all": partial(torch_pruning, "GroupTaylorImportance", "all"),
    "tp-magnitude": partial(torch_pruning, "GroupMagnitudeImportance", "layer"),
    "magnitude": magnitude,
    "random": at_random,
}
