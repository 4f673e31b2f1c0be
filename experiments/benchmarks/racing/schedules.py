"""Learning rates of a training, one for every step."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

RISE = 0.15
"""Part of the training in which a one-cycle rate goes up."""
MILESTONES = (0.3, 0.6, 0.8)
"""Parts of the training after which a rate in steps falls."""
FALL = 0.2
"""Factor on the rate at each milestone."""


def one_cycle(steps: int, peak: float) -> Tensor:
    """The rate of every step: linear up to the peak, then linear down to nearly zero."""
    top = max(1, round(RISE * steps))
    up = torch.arange(1, top + 1) / top
    down = torch.arange(steps - top, 0, -1) / (steps - top + 1)
    return peak * torch.cat([up, down])[:steps].float()


def in_steps(steps: int, peak: float) -> Tensor:
    """The rate of every step: the peak from the start, a fifth of it after each milestone."""
    place = torch.arange(steps)
    passed = sum((place >= round(part * steps)).int() for part in MILESTONES)
    return peak * FALL**passed


SCHEDULES: Mapping[str, Callable[[int, float], Tensor]] = {"one-cycle": one_cycle, "step": in_steps}
"""By name: from the number of steps and the highest rate to all rates."""
