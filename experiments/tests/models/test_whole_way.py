"""Gates, a few steps of training and compaction, on each network at a small size."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete_paper.models import CharTransformer, PreActResNet, ResNet, WideResNet
from tests.exactness import apart, assert_exact, outputs


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int

    def targets(self, batch: int) -> Tensor:
        shape = self.build()(self.inputs(batch)).shape[:-1]
        return torch.randint(self.classes, shape)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def text(batch: int) -> Tensor:
    return torch.randint(65, (batch, 24))


CASES = {
    "WRN-10-1": Case(lambda: WideResNet(10, 1, dropout=0.3), images, 10),
    "ResNet-20": Case(lambda: ResNet(20), images, 10),
    "PreActResNet-8": Case(lambda: PreActResNet(8), images, 10),
    "CharTransformer": Case(
        lambda: CharTransformer(65, width=32, layers=2, context=24, hidden=48), text, 65
    ),
}


def trained(case: Case, steps: int = 3) -> hc.GatedModel:
    gated = hc.attach_gates(case.build(), case.inputs(2), droprate=0.5)
    penalty = hc.L0Penalty(gated, 1e-3)
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3, gate_lr=1e-1))
    x, y = case.inputs(8), case.targets(8)
    for _ in range(steps):
        loss = F.cross_entropy(gated(x).flatten(0, -2), y.flatten()) + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)
    return gated


@pytest.mark.unwatched
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_whole_way(case: Case) -> None:
    gated = trained(case)
    assert gated.gates.log_alpha.abs().max() > 0.1  # about 0.01 before the steps
    with torch.no_grad():
        gated.gates.log_alpha[::2] = -9.0
    small = hc.compact(gated)
    assert type(small) is type(case.build())
    assert hc.count(small, case.inputs(1)).params < hc.count(case.build(), case.inputs(1)).params
    for batch in (1, 4):
        x = (case.inputs(batch),), {}
        assert apart(outputs(gated.eval(), x), outputs(small.eval(), x)) < 1e-5
    assert_exact(hc.remove_gates(gated), lambda batch: ((case.inputs(batch),), {}))
