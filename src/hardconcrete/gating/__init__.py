"""Gates on a model: where they sit, what they multiply, and the calls that put them on and off."""

from hardconcrete.gating.attach import attach_gates, remove_gates
from hardconcrete.gating.class_swap import plain_copy
from hardconcrete.gating.compilation import cacheable
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.gating.optimizer import parameter_groups
from hardconcrete.gating.sites import Site

__all__ = [
    "GatedModel",
    "Site",
    "attach_gates",
    "cacheable",
    "parameter_groups",
    "plain_copy",
    "remove_gates",
]
