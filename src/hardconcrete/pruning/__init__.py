"""Make a trained model smaller without training."""

from hardconcrete.pruning.prune import prune

__all__ = ["prune"]
