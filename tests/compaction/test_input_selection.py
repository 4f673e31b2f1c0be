import copy
import pickle

import pytest
import torch
from torch import nn

from hardconcrete.compaction.input_selection import select_inputs

LAYERS = {
    "Linear": (lambda n: nn.Linear(n, 3), (5, 6)),
    "Linear on one example": (lambda n: nn.Linear(n, 3), (6,)),
    "Linear on sequences": (lambda n: nn.Linear(n, 3), (2, 4, 6)),
    "Conv1d": (lambda n: nn.Conv1d(n, 3, 2), (5, 6, 4)),
    "Conv2d": (lambda n: nn.Conv2d(n, 3, 2), (5, 6, 4, 4)),
    "Conv2d on one example": (lambda n: nn.Conv2d(n, 3, 2), (6, 4, 4)),
}
KEPT = (0, 2, 5)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A layer with columns of zeros, and one that selects the others."""
    make = LAYERS[name][0]
    wide, narrow = make(6), make(3)
    wide.weight.data[:, [1, 3, 4]] = 0
    narrow.load_state_dict({"weight": wide.weight[:, list(KEPT)], "bias": wide.bias})
    select_inputs(narrow, KEPT)
    return wide, narrow


@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_the_same(name: str) -> None:
    wide, narrow = pair(name)
    x = torch.randn(LAYERS[name][1])
    torch.testing.assert_close(narrow(x), wide(x))
    assert isinstance(narrow, type(wide))
    assert type(narrow).__name__ == f"Selecting{type(wide).__name__}"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_select_too(again: object) -> None:
    _, narrow = pair("Linear")
    other = again(narrow)  # type: ignore[operator]
    x = torch.randn(5, 6)
    assert type(other) is type(narrow)
    assert torch.equal(other(x), narrow(x))
    other.weight.data.zero_()
    assert not torch.equal(other(x), narrow(x))


def test_what_is_kept_is_part_of_the_state_and_moves_along() -> None:
    _, narrow = pair("Linear")
    assert narrow.state_dict()["kept_inputs"].tolist() == list(KEPT)
    assert narrow.double().kept_inputs.dtype == torch.int64
    assert narrow.to("meta").kept_inputs.is_meta


def test_hooks_are_called() -> None:
    _, narrow = pair("Linear")
    seen: list[torch.Size] = []
    narrow.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    narrow(torch.randn(5, 6))
    assert seen == [(5, 6)]
