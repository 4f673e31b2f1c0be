"""A small model and its file, for all tests of files."""

from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from tests.compaction.networks import Joined, at_random


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return hc.compact(at_random(hc.attach_gates(Joined(), torch.randn(3, 4)), seed=1))


@pytest.fixture
def file(tmp_path: Path, small: nn.Module) -> Path:
    hc.save(tmp_path / "small.safetensors", small)
    return tmp_path / "small.safetensors"
