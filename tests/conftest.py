"""Every test starts from the same random state, and with the checks of torch.distributions on."""

import pytest
import torch
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def same_start() -> None:
    seeds = torch if torch.accelerator.is_available() else torch.default_generator
    seeds.manual_seed(0)  # without a device many times quicker
    Distribution.set_default_validate_args(True)  # torch.compile turns it off for good
