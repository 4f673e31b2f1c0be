"""The dense model of a shrunk one, and its remaining groups and gates."""

import copy
import io

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.plan import CompactionPlan, Cut
from hardconcrete.compaction.shrink_history import (
    ShrinkHistory,
    dense_model,
    dense_values,
    plan_so_far,
    positions_in,
)
from hardconcrete.errors import CompactionError
from hardconcrete.sparsifiers.hard_concrete import REMOVED
from tests.compaction.networks import TiedWords


def shrunk_words() -> tuple[hc.GatedModel, hc.GatedModel]:
    gated = hc.attach_gates(TiedWords(), torch.tensor([[1, 2, 3]]))
    with torch.no_grad():
        gated.gates.log_alpha[[1, 4]] = -50.0
    whole = copy.deepcopy(gated)
    assert hc.shrink(gated, None, pays=0)
    return gated, whole


def test_it_has_the_old_shapes_with_zeros_for_what_is_gone() -> None:
    gated, whole = shrunk_words()
    dense, kept = dense_model(gated), [0, 2, 3, 5]
    raw = dict(dense.model.named_parameters())["words.weight"]
    old = dict(whole.model.named_parameters())["words.weight"]
    assert raw.shape == old.shape == (9, 6)
    assert torch.equal(raw[:, kept], old[:, kept])
    assert not raw[:, [1, 4]].any()
    assert dense.gates.log_alpha[[1, 4]].tolist() == [REMOVED, REMOVED]
    assert torch.equal(dense.gates.log_alpha[kept], whole.gates.log_alpha[kept])


def test_what_is_tied_stays_tied() -> None:
    model = dense_model(shrunk_words()[0]).model
    assert model.words._parameters["weight"] is model.decoder._parameters["weight"]  # type: ignore[union-attr]


def test_modes_and_frozen_parameters_are_those_of_now() -> None:
    gated, _ = shrunk_words()
    gated.eval()
    gated.model.mix.requires_grad_(False)  # type: ignore[union-attr]
    gated.freeze_gates()
    dense = dense_model(gated)
    assert not dense.model.mix.training  # type: ignore[union-attr]
    assert not dict(dense.model.named_parameters())["mix.bias"].requires_grad
    assert dense.gates.frozen


def test_a_model_that_was_never_shrunk_is_dense_itself() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"])
    assert plan_so_far(gated).cuts == ()
    assert dense_values(gated, torch.ones(4)).tolist() == [1, 1, 1, 1]
    assert dense_model(gated) is gated


def test_values_are_put_where_the_gates_were() -> None:
    gated, _ = shrunk_words()
    assert dense_values(gated, torch.arange(1.0, 5.0)).tolist() == [1, 0, 2, 3, 0, 4]


def test_it_takes_no_memory_and_no_keys_and_travels() -> None:
    gated, _ = shrunk_words()
    record = gated.shrink_history
    assert isinstance(record, ShrinkHistory)
    assert all(parameter.is_meta for parameter in record.dense.parameters())
    assert copy.deepcopy(gated).shrink_history is record
    assert set(gated.state_dict()) == {
        "gates.log_alpha", "gates.original", "gates.checks",
        *(f"model.{name}" for name in TiedWords().state_dict()),
    }  # fmt: skip
    file = io.BytesIO()
    torch.save(gated, file)
    file.seek(0)
    again = torch.load(file, weights_only=False).eval()
    x = torch.tensor([[4, 0, 2]])
    torch.testing.assert_close(hc.compact(again)(x), gated.eval()(x))


def test_a_gate_is_gone_when_all_that_it_multiplied_is_gone() -> None:
    """The gates of one site multiply two layers, one of which was cut."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    site = hc.Site(("0.weight", "1.weight"), dim=1)
    dense = hc.attach_gates(model, torch.zeros(1, 4), sites=[site, "1:out"])
    cuts = [Cut("1.weight", 1, 4, (0, 2, 3)), Cut("1.weight", 0, 4, (1,))]
    cuts += [Cut("1.bias", 0, 4, (1,))]
    plan = CompactionPlan("Sequential", {}, tuple(cuts))
    (first, second), original = ShrinkHistory(dense, plan).remaining_groups()
    assert (first.units, first.removed, first.dense_units) == (4, 0, 4)
    assert first.axes[0].is_one_to_one
    assert first.axes[1].units.tolist() == [0, 2, 3]
    assert (second.units, second.removed, second.start) == (1, 3, 4)
    assert original.tolist() == [0, 1, 2, 3, 5]


def test_single_weights_go_with_rows_and_columns() -> None:
    dense = hc.attach_gates(nn.Linear(3, 4), torch.zeros(1, 3), sites=[":each"])
    plan = CompactionPlan("Linear", {}, (Cut("weight", 0, 4, (1, 3)), Cut("weight", 1, 3, (0, 2))))
    (group,), original = ShrinkHistory(dense, plan).remaining_groups()
    assert original.tolist() == [3, 5, 9, 11]
    assert group.axes[0].units.tolist() == [[0, 1], [2, 3]]


def test_positions() -> None:
    assert positions_in(torch.tensor([2, 5, 7]), torch.tensor([5, 7])).tolist() == [1, 2]
    for wanted in ([4], [8]):
        with pytest.raises(CompactionError, match="cannot come back"):
            positions_in(torch.tensor([2, 5, 7]), torch.tensor(wanted))
