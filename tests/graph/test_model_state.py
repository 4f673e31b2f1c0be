import warnings

import pytest
import torch
from torch import Tensor, nn

from hardconcrete.graph.model_state import (
    buffers_kept,
    detached_copy,
    in_mode,
    no_fast_path,
    random_state_kept,
)


@pytest.mark.parametrize("training", [True, False])
def test_each_module_gets_its_mode_back(training: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout()).train()
    model[1].eval()
    with in_mode(model, training):
        assert all(module.training == training for module in model.modules())
    with pytest.raises(ZeroDivisionError), in_mode(model, training):
        raise ZeroDivisionError
    assert [layer.training for layer in model] == [True, False, True]


class Counter(nn.Module):
    """Writes into one buffer and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.full((), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = torch.ones(())
        return self.layer(x)


def test_buffers_are_restored() -> None:
    model = Counter()
    before = [model.written, model.replaced]
    with buffers_kept(model):
        model(torch.zeros(2, 4))
        assert model.written == model.replaced == 1
    assert model.written is before[0]
    assert model.replaced is before[1]
    assert model.written == 0
    assert model.replaced.isnan()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_are_restored(layout: torch.layout) -> None:
    model = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of them a beta
        model.register_buffer("edges", torch.eye(3).to_sparse(layout=layout))
    with buffers_kept(model):
        model.edges.mul_(2)
        assert model.edges.to_dense()[0, 0] == 2
    assert torch.equal(model.edges.to_dense(), torch.eye(3))


def test_the_fast_path_is_restored() -> None:
    with no_fast_path():
        assert not torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError), no_fast_path():
        raise ZeroDivisionError
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_random_state_is_restored() -> None:
    before = torch.get_rng_state()
    with random_state_kept():
        torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_a_model_that_stores_its_last_output() -> None:
    layer = nn.Linear(2, 2)
    layer.last = layer(torch.ones(1, 2))  # type: ignore[assignment]
    copy = detached_copy(layer)
    assert torch.equal(copy.last, layer.last)  # type: ignore[arg-type]
    assert not copy.last.requires_grad  # type: ignore[union-attr]
    assert copy.weight is not layer.weight


def test_copies_share_the_parameters_that_they_are_told_to() -> None:
    layer = nn.BatchNorm1d(2)
    copied = detached_copy(layer, [layer.weight])
    assert copied.weight is layer.weight
    assert copied.bias is not layer.bias
    assert copied.running_mean is not layer.running_mean
