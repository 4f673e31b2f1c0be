import pytest
import torch

from hardconcrete.distributions.quadrature import NODES, integrate


def cut(lower: torch.Tensor, upper: torch.Tensor, panels: int) -> torch.Tensor:
    return torch.stack([lower + (upper - lower) * k / panels for k in range(panels + 1)])


@pytest.mark.parametrize("panels", [1, 8])
def test_polynomials_below_the_number_of_nodes_are_exact(panels: int) -> None:
    lower, upper = torch.tensor([0.0, -1.0]).double(), torch.tensor([1.0, 2.0]).double()
    for degree in (0, 1, 7, NODES - 1):
        exact = (upper ** (degree + 1) - lower ** (degree + 1)) / (degree + 1)
        value = integrate(lambda s, d=degree: s**d, cut(lower, upper, panels))
        torch.testing.assert_close(value, exact, rtol=1e-13, atol=1e-13)


def test_the_function_may_be_wider_than_the_bounds() -> None:
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    slopes = torch.arange(6.0).double().view(2, 3)
    value = integrate(lambda s: slopes * s[..., None, None], cut(zero, one, 1))
    torch.testing.assert_close(value, slopes / 2)


def test_panels_resolve_a_narrow_peak() -> None:
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    peak = torch.distributions.Normal(torch.tensor(0.37).double(), torch.tensor(0.01).double())
    value = integrate(lambda s: peak.log_prob(s).exp(), cut(zero, one, 8))
    torch.testing.assert_close(value, one, rtol=0, atol=1e-6)


def test_autocast_does_not_lower_the_precision() -> None:
    zero, one = torch.zeros(()), torch.ones(())
    plain = integrate(torch.exp, cut(zero, one, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(integrate(torch.exp, cut(zero, one, 1)), plain)
