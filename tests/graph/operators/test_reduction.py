"""Operators that read a whole dimension fix it and keep the labels of the others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graph.operators.contract import (
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    dense,
)

OUT = "out: 4 fixed"


def over_time(reduce) -> Network:
    """[batch, time, 12] with time reduced or read."""
    layers = {"inp": nn.Linear(6, 12), "out": nn.Linear(12, 4)}
    return Network(lambda net, x: net.out(reduce(net.inp(x).relu())), **layers)


def down(h):
    """Time is reduced."""
    mean = torch.add(*torch.var_mean(h, 1)) + h.logsumexp(1) + (h * h.softmax(-2)).sum(-2)
    return mean + h.max(1)[0] + h.median(1).values + F.cosine_similarity(h, h.exp(), dim=1)


def along(h):
    """Time stays, or some of it."""
    h = h.cumsum(1) + h.sort(1, descending=True)[0] + F.normalize(h, dim=1)
    return h.topk(3, 1)[0] + h.amax(1, keepdim=True)


OVER_UNITS = {
    "mean": lambda _, h: h - h.mean(),
    "max": lambda _, h: h * h.max(-1, keepdim=True)[0],
    "argmax": lambda _, h: h * h.argmax(-1, keepdim=True),
    "cumsum": lambda _, h: h.cumsum(-1),
    "linalg_vector_norm": lambda _, h: F.normalize(h),
    "var_mean": lambda _, h: h / torch.var_mean(h, -1, keepdim=True)[0],
    "log_softmax": lambda _, h: F.log_softmax(h, -1),
    "cosine_similarity": lambda _, h: F.cosine_similarity(h, h.exp(), dim=-1)[:, None] * h,
    "renorm": lambda _, h: h.renorm(2, 0, 1.0),
}
CASES = [
    case("down_time", lambda: over_time(down), SEQUENCE, {"inp": 12}, OUT),
    case("along_time", lambda: over_time(along), SEQUENCE, {"inp": 12}, OUT),
    *(case(f"{name}_over_units", lambda f=f: dense(f), ROW, {}, f"({name} in the model itself)")
      for name, f in OVER_UNITS.items()),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
