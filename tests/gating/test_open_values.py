"""The value of each gate where its unit stays."""

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.gating.open_values import open_values


@pytest.mark.parametrize("readout", ["paper", "median", "mean", "binary"])
def test_the_readout_or_the_mean_where_that_is_zero(readout: str) -> None:
    gated = hc.attach_gates(nn.Linear(5, 2), torch.zeros(1, 5), sites=[":in"], readout=readout)
    gated.gates.log_alpha.data.copy_(torch.tensor([9.0, 0.3, -3.0, -40.0, -300.0]))
    values, read = open_values(gated), gated.gates.readout().detach()
    mean = gated.gates.distribution().mean.detach()
    assert (values > 0).all()
    assert not values.requires_grad
    assert torch.equal(values[read > 0], read[read > 0])
    back = (read == 0) & (mean > 0)
    assert torch.equal(values[back], mean[back])
    assert (values[mean == 0] == torch.finfo(torch.float32).tiny).all()
