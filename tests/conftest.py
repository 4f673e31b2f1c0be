"""Every test starts from the same random state, and with the checks of torch.distributions on."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from hardconcrete.compaction import planning
from hardconcrete.cost import operations, strands
from hardconcrete.structure import groups
from hardconcrete.structure.trace import trace
from hardconcrete.structure.walk import named_tensors


@pytest.fixture(autouse=True)
def same_start() -> None:
    seeds = torch if torch.accelerator.is_available() else torch.default_generator
    seeds.manual_seed(0)  # without a device many times quicker
    Distribution.set_default_validate_args(True)  # torch.compile turns it off for good


@pytest.fixture
def traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that ask again and again, with other gates, what the graph of a network is.

    A network of the zoo is the same in all tests; others are known by the test itself.
    """
    entry = getattr(request.node, "callspec", None) and request.node.callspec.params.get("entry")
    graphs = _GRAPHS if entry else {}

    def traced(model: nn.Module, args: Any, kwargs: Any = None) -> fx.GraphModule:
        tensors = *named_tensors(model).items(), *enumerate(tree_leaves((args, kwargs)))
        shapes = ((name, getattr(tensor, "shape", None)) for name, tensor in tensors)
        key = entry and entry.name, type(model), *shapes
        if key not in graphs:
            graphs[key] = trace(model, args, kwargs)
        return graphs[key]

    for module in (groups, operations, planning, strands):
        monkeypatch.setattr(module, "trace", traced)


_GRAPHS: dict[Any, fx.GraphModule] = {}
