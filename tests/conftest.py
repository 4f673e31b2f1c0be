"""Every test starts from the same random state, and with the checks of torch.distributions on."""

import pytest

collect_ignore = ["zoo/huggingface.py"]  # it has no tests, and imports transformers


@pytest.fixture(autouse=True)
def same_start() -> None:
    import torch  # not above: the process that hands out the tests does without
    from torch.distributions import Distribution

    seeds = torch if torch.accelerator.is_available() else torch.default_generator
    seeds.manual_seed(0)  # without a device many times quicker
    Distribution.set_default_validate_args(True)  # torch.compile turns it off for good
