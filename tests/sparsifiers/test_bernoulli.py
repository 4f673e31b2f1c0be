import pytest
import torch
from torch.distributions import Beta

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import (
    Concrete,
    GeneralizedDropout,
    RectifiedGates,
    StraightThrough,
    UnitWeights,
)

LOGITS = torch.tensor([-6.0, -1.0, 0.0, 0.7, 4.0])
DRAWS = 1_000_000
NO_WEIGHTS = UnitWeights(())


@pytest.mark.parametrize("family", [StraightThrough(), Concrete(), Concrete(0.3)])
def test_the_mean_is_that_of_draws(family: StraightThrough) -> None:
    """Five means of 10^6 draws within 5 standard errors, and 1e-3: one seed in 300,000 fails."""
    torch.manual_seed(0)
    z = family.sample({"logits": LOGITS}, (DRAWS,))
    error = (z.mean(0) - family.mean({"logits": LOGITS})).abs()
    assert (error < 5 * z.std(0) / DRAWS**0.5 + 1e-3).all()


def test_a_straight_through_draw_is_0_or_1_with_the_slope_of_its_probability() -> None:
    logits = LOGITS.clone().requires_grad_()
    z = StraightThrough().sample({"logits": logits}, (100,))
    assert set(z.unique().tolist()) == {0.0, 1.0}
    (slope,) = torch.autograd.grad(z.sum(), logits)
    p = LOGITS.sigmoid()
    torch.testing.assert_close(slope, 100 * p * (1 - p))


def test_concrete_is_never_0_and_hard_concrete_often_is() -> None:
    """Of 10^6 draws at log alpha = -3, where hard concrete is 0 in 77%."""
    torch.manual_seed(0)
    location = torch.full((DRAWS,), -3.0)
    concrete = Concrete().sample({"logits": location})
    assert (concrete > 0).all()
    hard = RectifiedGates().sample({"log_alpha": location})
    assert (hard == 0).float().mean() == pytest.approx(0.77, abs=0.05)
    assert concrete.median() < 0.02


def test_the_count_of_concrete_is_that_of_the_bernoulli_it_relaxes() -> None:
    """Five shares of 10^6 draws within 5 standard errors: one seed in 300,000 fails."""
    torch.manual_seed(0)
    above = (Concrete().sample({"logits": LOGITS}, (DRAWS,)) > 0.5).float()
    p = Concrete().open_probability({"logits": LOGITS})
    assert ((above.mean(0) - p).abs() < 5 * (p * (1 - p) / DRAWS).sqrt()).all()


@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.5), (1.0, 1.0), (0.1, 0.1), (2.0, 5.0)])
def test_generalized_dropout_has_the_log_density_of_its_prior(a: float, b: float) -> None:
    logits = LOGITS.double()
    expected = -Beta(a, b).log_prob(logits.sigmoid())
    found = GeneralizedDropout(a, b).complexity({"logits": logits}, NO_WEIGHTS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_generalized_dropout_is_finite_far_out() -> None:
    logits = torch.tensor([-100.0, 100.0], requires_grad=True)
    penalty = GeneralizedDropout().complexity({"logits": logits}, NO_WEIGHTS)
    (slope,) = torch.autograd.grad(penalty.sum(), logits)
    assert penalty.isfinite().all()
    assert slope.isfinite().all()


def test_readouts() -> None:
    logits = {"logits": torch.tensor([-9.0, -1.0, 2.0])}
    family = GeneralizedDropout()
    assert family.readout(logits, "threshold").tolist() == [
        0.0,
        *torch.tensor([-1.0, 2.0]).sigmoid().tolist(),
    ]
    assert family.readout(logits, "binary").tolist() == [0, 0, 1]
    assert Concrete().readout(logits, "binary").tolist() == [0, 0, 1]
    assert (Concrete().readout(logits, "median") > 0).all()
    for family in (StraightThrough(), GeneralizedDropout(), Concrete()):
        removed = family.removed(torch.zeros(1, dtype=torch.bool))
        assert not family.is_open(removed, family.readouts[0]).any()


def test_settings_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"a=0 and b=0.5 must be above 0"):
        GeneralizedDropout(a=0)
    with pytest.raises(ArgumentError, match="temperature=0 must be a number above 0"):
        Concrete(0)
