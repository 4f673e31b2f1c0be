"""The divergence of Gaussian noise from a log-uniform prior, which three papers share."""

from torch import Tensor
from torch.nn.functional import softplus

K1, K2, K3 = 0.63576, 1.87320, 1.48695
"""Fitted by Molchanov et al."""

TINY = 1e-8
"""Added to squares below a logarithm, as in the code of Louizos et al."""


def log_alpha(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log of the variance relative to the squared mean.

    Example:
        >>> import torch
        >>> log_alpha(torch.tensor([1.0]), torch.tensor([-9.0]))
        tensor([-9.])
    """
    return log_variance - (mean.square() + TINY).log()


def log_uniform_divergence(log_alpha: Tensor) -> Tensor:
    """KL(N(m, alpha m^2) || log-uniform), up to 0.01 (Molchanov et al. 2017, eq. 14).

    The exact divergence has an infinite constant. It is chosen so that the limit for large alpha,
    where the noise drowns the mean, is 0.

    Example:
        >>> import torch
        >>> log_uniform_divergence(torch.tensor([-9.0, 0.0, 9.0]))
        tensor([5.1358e+00, 4.3124e-01, 6.1870e-05])
    """
    return K1 + 0.5 * softplus(-log_alpha) - K1 * (K2 + K3 * log_alpha).sigmoid()
