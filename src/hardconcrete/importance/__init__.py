"""Which units matter: measuring their importance, choosing what to keep, re-fitting the rest."""

from hardconcrete.importance.score import Importance, importance

__all__ = ["Importance", "importance"]
