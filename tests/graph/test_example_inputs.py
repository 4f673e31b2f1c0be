from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.graph.example_inputs import as_inputs


def test_a_single_input_or_a_tuple_or_list() -> None:
    x = torch.zeros(2)
    assert as_inputs(x)[0][0] is as_inputs((x,))[0][0] is as_inputs([x])[0][0] is x


@pytest.mark.parametrize(
    ("example_inputs", "kwargs", "words"),
    [
        (None, None, "example inputs are missing"),
        ({"x": 1, "y": 2}, {"y": 3}, "example_inputs and kwargs both have y"),
    ],
)
def test_what_is_refused(example_inputs: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        as_inputs(example_inputs, kwargs)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(self.up(x) * scale)


BATCH = {"x": torch.ones(2, 4), "scale": torch.ones(2, 1)}
FORMS = {
    "tuple": (tuple(BATCH.values()), None),
    "dict": (BATCH, None),
    "mapping": (UserDict(BATCH), None),
    "keywords": (None, BATCH),
    "both": ({"x": BATCH["x"]}, {"scale": BATCH["scale"]}),
}


@pytest.mark.parametrize(("inputs", "kwargs"), FORMS.values(), ids=FORMS.keys())
def test_every_function_takes_every_form(inputs: Any, kwargs: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).square().mean()

    model = Scaled().eval()
    assert hc.find_groups(model, inputs, kwargs).names == ("up",)
    assert hc.count(model, inputs, kwargs).macs == 96
    smaller = [
        hc.compact(model, inputs, kwargs, keep={"up": [0, 1]}),
        hc.compact(model, inputs, kwargs, keep={"up": [0, 1]}, form="graph"),
        hc.prune(model, inputs, [UserDict(BATCH)], loss, kwargs, macs=0.25),
        hc.compact(hc.attach_gates(Scaled(), inputs, kwargs), form="graph"),
    ]
    for small in smaller:
        report = hc.measure(model, small, inputs, kwargs, batches=[1], repeats=2)
        assert report.after.macs == hc.count(small, BATCH).macs / 2
    assert hc.CompactionPlan.of(smaller[1]).apply(model, inputs, kwargs)(**BATCH).shape == (2, 2)
