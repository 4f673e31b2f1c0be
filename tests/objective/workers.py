"""What child processes run; they import this module by its name."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hardconcrete as hc
from tests.processes import join_group, leave_group

STEPS = 30


def make_budget() -> hc.Budget:
    """The same network with the same budget in every process."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 8))
    return hc.Budget(gated, macs=0.5, steps=STEPS)


def distributed_budget(rank: int, folder: Path) -> None:
    """Data parallel training on one of two processes; answers with the open gates."""
    join_group(rank, folder)
    budget = make_budget()
    gated = budget.gated
    parallel = DistributedDataParallel(gated)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        ((parallel(x) - x[:, :2].abs()).square().mean() + budget()).backward()
        optimizer.step()
        budget.step()
    leave_group((gated.gates.readout().detach(), budget.delivered()), rank, folder)
