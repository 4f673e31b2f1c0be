"""Every test starts from the same random state, and with the checks of torch.distributions on."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributions import Distribution

from hardconcrete.compaction import planning
from hardconcrete.structure.trace import trace
from hardconcrete.structure.walk import named_tensors


@pytest.fixture(autouse=True)
def same_start() -> None:
    seeds = torch if torch.accelerator.is_available() else torch.default_generator
    seeds.manual_seed(0)  # without a device many times quicker
    Distribution.set_default_validate_args(True)  # torch.compile turns it off for good


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that compact a network again and again with other gates: its graph is the same."""
    graphs: dict[Any, fx.GraphModule] = {}

    def traced(model: nn.Module, *example: Any) -> fx.GraphModule:
        key = type(model), *((name, t.shape) for name, t in named_tensors(model).items())
        if key not in graphs:
            graphs[key] = trace(model, *example)
        return graphs[key]

    monkeypatch.setattr(planning, "trace", traced)
