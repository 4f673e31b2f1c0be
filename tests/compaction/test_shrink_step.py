"""What is left of groups and gates."""

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.plan import CompactionPlan, Cut
from hardconcrete.compaction.shrink_history import ShrinkHistory
from hardconcrete.compaction.shrink_step import positions, remaining_groups
from hardconcrete.errors import CompactionError


def test_a_gate_is_gone_when_all_that_it_multiplied_is_gone() -> None:
    """The gates of one site multiply two layers, one of which was cut."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    site = hc.Site(("0.weight", "1.weight"), dim=1)
    dense = hc.attach_gates(model, torch.zeros(1, 4), sites=[site, "1:out"])
    cuts = [Cut("1.weight", 1, 4, (0, 2, 3)), Cut("1.weight", 0, 4, (1,))]
    cuts += [Cut("1.bias", 0, 4, (1,))]
    plan = CompactionPlan("Sequential", {}, tuple(cuts))
    (first, second), original = remaining_groups(ShrinkHistory(dense, plan))
    assert (first.units, first.removed, first.dense_units) == (4, 0, 4)
    assert first.axes[0].is_one_to_one
    assert first.axes[1].units.tolist() == [0, 2, 3]
    assert (second.units, second.removed, second.start) == (1, 3, 4)
    assert original.tolist() == [0, 1, 2, 3, 5]


def test_single_weights_go_with_rows_and_columns() -> None:
    dense = hc.attach_gates(nn.Linear(3, 4), torch.zeros(1, 3), sites=[":each"])
    plan = CompactionPlan("Linear", {}, (Cut("weight", 0, 4, (1, 3)), Cut("weight", 1, 3, (0, 2))))
    (group,), original = remaining_groups(ShrinkHistory(dense, plan))
    assert original.tolist() == [3, 5, 9, 11]
    assert group.axes[0].units.tolist() == [[0, 1], [2, 3]]


def test_positions() -> None:
    assert positions(torch.tensor([2, 5, 7]), torch.tensor([5, 7])).tolist() == [1, 2]
    for wanted in ([4], [8]):
        with pytest.raises(CompactionError, match="cannot come back"):
            positions(torch.tensor([2, 5, 7]), torch.tensor(wanted))
