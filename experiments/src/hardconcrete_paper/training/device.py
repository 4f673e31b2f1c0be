"""The device on which experiments run."""

import torch

from hardconcrete.errors import ArgumentError


def choose_device(device: str) -> torch.device:
    """The device of a name, ``"auto"`` being a GPU where there is one.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.zeros((), device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"--device {device}: {str(error).splitlines()[0][:200]}") from error
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device {device}: the experiments run on cpu and cuda")
    return place
