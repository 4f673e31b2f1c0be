import math

import pytest
import torch
from torch.distributions import Exponential, Normal, TransformedDistribution, Uniform
from torch.distributions.transforms import AffineTransform, ExpTransform, SigmoidTransform

from hardconcrete.distributions.base import interior, support_ends

LOGISTIC = [SigmoidTransform().inv, AffineTransform(-40.0, 2.0)]


@pytest.mark.parametrize(
    ("distribution", "lower", "upper"),
    [
        (Normal(0.0, 1.0), -math.inf, math.inf),
        (Uniform(0.2, 0.7), 0.2, 0.7),
        (Exponential(1.0), 0.0, math.inf),
        (TransformedDistribution(Uniform(0.0, 1.0), [AffineTransform(1.0, -3.0)]), -2.0, 1.0),
        (TransformedDistribution(Uniform(0.0, 1.0), LOGISTIC), -math.inf, math.inf),
        (TransformedDistribution(Normal(0.0, 1.0), [ExpTransform()]), 0.0, math.inf),
        (
            TransformedDistribution(
                Normal(0.0, 1.0), [SigmoidTransform(), AffineTransform(-0.1, 1.2)]
            ),
            -0.1,
            1.1,
        ),
        (
            TransformedDistribution(Exponential(1.0), [AffineTransform(0.5, -1.0)]),
            -math.inf,
            0.5,
        ),
    ],
)
def test_ends_are_carried_through_transforms(distribution, lower, upper) -> None:
    ends = torch.stack([end.float() for end in support_ends(distribution)])
    torch.testing.assert_close(ends, torch.tensor([lower, upper]))


def test_ends_are_differentiable() -> None:
    loc, scale = torch.tensor([0.2, 0.3]).requires_grad_(), torch.tensor(0.5).requires_grad_()
    uniform = Uniform(torch.zeros(2), torch.ones(2))
    lower, upper = support_ends(TransformedDistribution(uniform, [AffineTransform(loc, scale)]))
    (lower.sum() + 2 * upper.sum()).backward()
    torch.testing.assert_close(loc.grad, torch.full((2,), 3.0))
    torch.testing.assert_close(scale.grad, torch.tensor(4.0))


def test_interior_lies_between() -> None:
    lower = torch.tensor([-math.inf, -math.inf, 3.0, 3.0])
    upper = torch.tensor([math.inf, -5.0, math.inf, 4.0])
    inside = interior(lower, upper)
    assert ((lower < inside) & (inside < upper)).all()
