"""A smaller model at once: stages of importance, cut and re-fit, without training."""

from hardconcrete.pruning.prune import prune

__all__ = ["prune"]
