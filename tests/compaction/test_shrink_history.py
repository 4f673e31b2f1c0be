"""The dense self of a shrunk model."""

import copy
import io

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.shrink_history import KEY, SHUT, among_all, cut_so_far, expanded
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
    dense, kept = expanded(gated), [0, 2, 3, 5]
    raw = dict(dense.model.named_parameters())["words.weight"]
    old = dict(whole.model.named_parameters())["words.weight"]
    assert raw.shape == old.shape == (9, 6)
    assert torch.equal(raw[:, kept], old[:, kept])
    assert not raw[:, [1, 4]].any()
    assert dense.gates.log_alpha[[1, 4]].tolist() == [SHUT, SHUT]
    assert torch.equal(dense.gates.log_alpha[kept], whole.gates.log_alpha[kept])


def test_what_is_tied_stays_tied() -> None:
    model = expanded(shrunk_words()[0]).model
    assert model.words._parameters["weight"] is model.decoder._parameters["weight"]  # type: ignore[union-attr]


def test_modes_and_frozen_parameters_are_those_of_now() -> None:
    gated, _ = shrunk_words()
    gated.eval()
    gated.model.mix.requires_grad_(False)  # type: ignore[union-attr]
    gated.freeze_gates()
    dense = expanded(gated)
    assert not dense.model.mix.training  # type: ignore[union-attr]
    assert not dict(dense.model.named_parameters())["mix.bias"].requires_grad
    assert dense.gates.frozen


def test_a_model_that_was_never_shrunk_is_dense_itself() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"])
    assert cut_so_far(gated).cuts == ()
    assert among_all(gated, torch.ones(4)).tolist() == [1, 1, 1, 1]
    assert expanded(gated) is gated


def test_values_are_put_where_the_gates_were() -> None:
    gated, _ = shrunk_words()
    assert among_all(gated, torch.arange(1.0, 5.0)).tolist() == [1, 0, 2, 3, 0, 4]


def test_it_takes_no_memory_and_no_keys_and_travels() -> None:
    gated, _ = shrunk_words()
    record = gated.__dict__[KEY]
    assert all(parameter.is_meta for parameter in record.dense.parameters())
    assert copy.deepcopy(gated).__dict__[KEY] is record
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
