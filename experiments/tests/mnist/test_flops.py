import pytest
import torch

import hardconcrete as hc
from hardconcrete_paper.mnist.experiment import NETWORKS, with_gates


@pytest.mark.parametrize("name", NETWORKS)
def test_a_dense_network_has_the_macs_that_are_counted(name: str) -> None:
    network = NETWORKS[name]
    assert hc.count(network.build(), torch.zeros(1, 1, 28, 28)).macs == network.dense_macs
    whole = {site: torch.ones(size) for site, size in network.sizes.items()}
    assert network.uncoupled(whole) == network.dense_macs


def test_one_gate_saves_its_own_layer_only() -> None:
    network = NETWORKS["lenet5"]
    alive = {site: torch.ones(size) for site, size in network.sizes.items()}
    alive["conv1:out"][0] = 0
    assert network.dense_macs - network.uncoupled(alive) == 24 * 24 * 25
    gated = with_gates(network, torch.device("cpu"))
    coupled = gated.ledger.cost(torch.cat([*alive.values()]))[1].item()
    assert network.dense_macs - coupled == 24 * 24 * 25 + 8 * 8 * 25 * 50
