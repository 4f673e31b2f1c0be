"""The largest possible saving, against what compaction delivers."""

import pickle

import pytest
import torch
from torch import nn

import hardconcrete as hc
from tests.zoo import GATED, Entry, gated_network

NOT_TRACED = 0.005
"""Products among parameters, as in a spectral norm, are counted in a call and not by the trace."""


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_the_largest_saving_is_delivered(entry: Entry) -> None:
    """With one unit in every group, the model costs what was said."""
    gated = gated_network(entry)
    assert gated.analysis is not None
    one_each = torch.zeros(gated.gates.count)
    for group in gated.groups:
        one_each[group.start] = 1.0
    rest = gated.ledger.cost(one_each) / gated.ledger.dense
    largest = gated.analysis.savings.largest
    assert largest.params == pytest.approx(1 - rest[0].item(), abs=1e-9)
    assert largest.macs == pytest.approx(1 - rest[1].item(), abs=NOT_TRACED)


def test_reasons_keep_the_rest() -> None:
    """Of 8-16-4 with a norm, the norm keeps the middle, and the output the rest of the end."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 4))
    savings = hc.find_groups(model, torch.zeros(2, 8)).savings
    assert savings.largest.params == savings.largest.macs == 0
    kept_by = savings.kept_by
    assert kept_by["layer_norm normalises over all of them (layer_norm)"].macs == pytest.approx(1)
    output = kept_by["the model's output (output)"]
    assert output.params == pytest.approx((16 * 4 + 4) / (8 * 16 + 2 * 16 + 16 * 4 + 4))
    assert "normalises" in next(iter(kept_by))
    assert str(savings).startswith("at most 0% of the MACs and 0% of the parameters can go\n")


def test_recurrent_layers_have_multiply_adds() -> None:
    """The units of a recurrent layer stay, so its share of the MACs cannot go."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 10)
            self.between = nn.Linear(10, 4)
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.between(self.before(x).relu()))[0]

    example = torch.zeros(2, 3, 6)
    model = Net()
    found = hc.find_groups(model, example)
    small = hc.compact(model, example, keep={name: [0] for name in found.names})
    macs = hc.count(small, example).macs / hc.count(model, example).macs
    assert found.savings.largest.macs == pytest.approx(1 - macs)


def test_savings_stay_in_a_pickle() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = hc.find_groups(model, torch.zeros(2, 8))
    assert pickle.loads(pickle.dumps(found)).savings == found.savings
