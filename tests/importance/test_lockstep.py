"""The thread in which paused calls compute. What they compute is tested with the re-fit."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from hardconcrete.importance import lockstep
from hardconcrete.importance.refit import refit
from tests.importance.networks import KINDS, Kind, call

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Computes as on an accelerator; returns the ids of the threads that compute."""
    seen: set[int] = set()
    run = lockstep._FunctionCall.run

    def noted(call: lockstep._FunctionCall) -> object:
        seen.add(threading.get_ident())
        return run(call)

    monkeypatch.setattr(lockstep, "_is_on_accelerator", lambda _: True)
    monkeypatch.setattr(lockstep._FunctionCall, "run", noted)
    return seen


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_calling_thread_computes_the_same(kind: Kind, threads: set[int]) -> None:
    dense = kind.build().double()
    small = copy.deepcopy(dense)
    kind.prune(small)
    batches = kind.batches()
    expected = dense(batches[0])
    refit(small, dense, batches, call, ridge=1e-9)
    assert (small(batches[0]) - expected).abs().max() < 1e-4 * expected.std()
    assert threads == {threading.get_ident()}


def test_what_a_function_raises_is_raised_where_it_was_called(threads: set[int]) -> None:
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    caught = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        try:
            torch.ones(2, 3) @ x
        except RuntimeError as error:
            caught.append(error)
        return model(x)

    refit(copy.deepcopy(dense), dense, [torch.randn(8, 4)], loss)
    assert len(caught) == 3  # recorded once, then in both models
    assert threads


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_that_of_the_call(threads: set[int], outside: bool, inside: bool) -> None:
    dense, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), set()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            result = x @ x.T
        seen.add(result.dtype)
        return model(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        refit(copy.deepcopy(dense), dense, [torch.randn(8, 4)], loss)
    assert seen == {torch.bfloat16 if inside else torch.float32}
    assert threads
