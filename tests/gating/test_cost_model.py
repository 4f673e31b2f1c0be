import copy

import torch

import hardconcrete as hc
from hardconcrete.cost.liveness_formulas import EACH
from hardconcrete.gating.cost_model import gate_places, ledger_of
from tests.compaction.networks import Joined, TiedWords, dense


def places(gated: hc.GatedModel) -> dict[tuple[str, int], list[int]]:
    return {place: index.tolist() for place, index in gate_places(gated).items()}


def test_gates_are_numbered_as_in_the_bank() -> None:
    gated = hc.attach_gates(dense(), torch.zeros(2, 4), sites=["2:in", "0:out"])
    assert places(gated) == {
        ("2.weight", 1): [0, 1, 2, 3, 4, 5],
        ("0.weight", 0): [6, 7, 8, 9, 10, 11],
        ("0.bias", 0): [6, 7, 8, 9, 10, 11],
    }


def test_two_groups_on_one_axis() -> None:
    gated = hc.attach_gates(Joined(), torch.zeros(2, 4))
    assert places(gated)["head.weight", 1] == list(range(11))


def test_single_weights_have_no_axis() -> None:
    gated = hc.attach_gates(dense(), torch.zeros(2, 4), sites=["0:in", "2:each"])
    numbers = torch.arange(4, len(gated.gates.log_alpha)).view(-1, 6)
    assert places(gated) == {("0.weight", 1): [0, 1, 2, 3], ("2.weight", EACH): numbers.tolist()}


def test_tied_parameters_go_by_their_first_name() -> None:
    gated = hc.attach_gates(TiedWords(), torch.randint(9, (2, 4)))
    assert {name for name, _ in places(gated)} == {"words.weight", "mix.weight"}


def test_the_model_keeps_its_gates() -> None:
    gated = hc.attach_gates(dense(), torch.randn(2, 4))
    before = copy.deepcopy(gated.state_dict())
    ledger_of(gated)
    assert all(torch.equal(before[key], value) for key, value in gated.state_dict().items())
    assert type(gated.model[2]) is not torch.nn.Linear
