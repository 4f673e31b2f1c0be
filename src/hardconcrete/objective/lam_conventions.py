"""Convert the lambda of papers and other code to the lambda of ``L0Penalty``."""

import math
from typing import Literal

from hardconcrete.arguments import refuse_no_number
from hardconcrete.errors import ArgumentError
from hardconcrete.gating.gated_model import GatedModel

Per = Literal["weight", "gate", "mean", "share"]


def lam_per_weight(
    value: float, *, per: Per = "weight", examples: int = 1, gated: GatedModel | None = None
) -> float | dict[str, float]:
    """The ``lam`` of an ``L0Penalty`` that equals a coefficient of another convention.

    ``L0Penalty`` adds lam times the sum over gates of P(open) |g| to a loss that is a mean over
    examples. So its lambda is per weight and per example.

    Args:
        value: the coefficient in the other convention.
        per: what the coefficient multiplies there. ``"weight"``: the sum over gates of P(open) |g|,
            as in the paper. ``"gate"``: the sum of P(open), whatever the size of a group.
            ``"mean"``: the mean of P(open) over the gates. ``"share"``: the expected fraction of
            the gated weights, between 0 and 1.
        examples: the number of examples that the loss there sums over, 1 for a mean. It is the
            batch size for a sum over a batch. It is N for a sum over the data, and for the paper's
            tables, which list lambda * N.
        gated: the model, for all conventions but ``"weight"``.

    Returns:
        A number, or one for each group if it depends on the size of the group.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 5), torch.zeros(2, 4), sites=[":in"])
        >>> hc.lam_per_weight(0.1, examples=50_000)               # table 1's "0.1/N"
        2e-06
        >>> hc.lam_per_weight(0.5, per="gate", gated=gated)       # a gate multiplies 5 weights
        {':in': 0.1}
        >>> hc.lam_per_weight(0.5, per="share", gated=gated)      # of 20 weights
        0.025
    """
    if per not in ("weight", "gate", "mean", "share"):
        raise ArgumentError(f"per={per!r} is not known; use 'weight', 'gate', 'mean' or 'share'")
    refuse_no_number(value=value)
    if not 0 <= value < math.inf:
        raise ArgumentError(f"value={value} must not be negative or infinite")
    refuse_no_number(examples=examples)
    if examples < 1:
        raise ArgumentError(f"examples={examples} must be at least 1; pass 1 for a mean")
    lam = value / examples
    if per == "weight":
        return lam
    if not isinstance(gated, GatedModel):
        raise ArgumentError(f"per={per!r} needs gated=, whose gates and weights are counted")
    if per == "share":
        return lam / sum(group.dense_units * group.size for group in gated.groups)
    gates = sum(group.dense_units for group in gated.groups) if per == "mean" else 1
    return {group.name: lam / (gates * group.size) for group in gated.groups}
