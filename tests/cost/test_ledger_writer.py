import pytest
import torch

import hardconcrete as hc
from hardconcrete.cost.ledger_writer import write_ledger
from tests.compaction.networks import dense

EXAMPLE = (torch.zeros(2, 4),), {}


def test_without_gates_everything_stays() -> None:
    ledger = write_ledger(dense(), EXAMPLE, {})
    found = hc.count(dense(), torch.zeros(2, 4))
    assert ledger.dense.tolist() == [found.params, found.macs, found.weight_bytes, 0]
    nothing = torch.zeros(0)
    assert ledger.cost(nothing).tolist() == ledger.dense.tolist()


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_multiply_adds_are_for_the_examples_given(batch: int) -> None:
    """One example is traced as two."""
    gates = {("2.weight", 1): torch.arange(6)}
    ledger = write_ledger(dense(), ((torch.zeros(batch, 4),), {}), gates)
    one = write_ledger(dense(), EXAMPLE, gates)
    half = torch.full((6,), 0.5)
    assert ledger.cost(half)[1] == one.cost(half)[1] / 2 * batch


def test_a_dimension_of_one_index_has_no_units() -> None:
    """Its gate removes nothing."""
    model = torch.nn.Conv2d(1, 2, 3)
    example = (torch.zeros(2, 1, 5, 5),), {}
    ledger = write_ledger(model, example, {("weight", 1): torch.zeros(1, dtype=torch.int64)})
    assert ledger.cost(torch.zeros(1)).tolist() == ledger.dense.tolist()


def test_single_weights_without_units_remove_nothing() -> None:
    sites = [hc.Site("0.bias", dim=None), "1:each"]
    layers = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)
    gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 8), sites=sites)
    gated.gates.log_alpha.data.fill_(-9.0)[0] = 9.0
    assert gated.delivered("params").item() == hc.count(hc.compact(gated), torch.zeros(2, 8)).params
