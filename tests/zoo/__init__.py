"""Small networks, and what must be found in each: derived by hand, from what the networks compute.

A unit is what lives or dies as one. It can go when everything that reads it is a contraction with
a parameter, perhaps after operators that carry it. Inputs and outputs of the model are fixed, and
so is what a softmax, a reduction, a layer or group norm, or the sum in a product of two activations
reads as a whole. Of heads and their features this leaves the heads. Sums and products of two
branches make unit k of one and of the other the same unit.

A group is the units that own the same axes, equally many indices on each. Its name is the path of
the module (or of the bare parameter) that first produces them; where the units of one module are
in several groups, the range from the first to the last of the group's units follows. A unit alone
is no group.
"""

import copy
from functools import cache

import torch

import hardconcrete as hc
from tests.zoo import (
    attention,
    convolutional,
    dense,
    experts,
    joined,
    odd,
    raw,
    residual,
    sequence,
    statistics,
)
from tests.zoo.entry import Entry, varied
from tests.zoo.odd import REFUSED

__all__ = ["GATED", "REFUSED", "ZOO", "Entry", "gated_network"]

FAMILIES = (
    dense,
    statistics,
    convolutional,
    residual,
    joined,
    sequence,
    attention,
    experts,
    raw,
    odd,
)
ZOO: tuple[Entry, ...] = tuple(varied(entry) for family in FAMILIES for entry in family.ENTRIES)

GATED = tuple(entry for entry in ZOO if entry.groups)
"""Those that have units to remove."""


def gated_network(entry: Entry) -> hc.GatedModel:
    """A network with gates, and its costs: the caller's own copy of what is traced once.

    The random state is the same after every call.
    """
    gated = copy.deepcopy(_gated(entry.name))
    torch.manual_seed(0)
    return gated


@cache
def _gated(name: str) -> hc.GatedModel:
    (entry,) = (entry for entry in ZOO if entry.name == name)
    torch.manual_seed(0)
    gated = hc.attach_gates(entry.build(), *entry.inputs(2), droprate=0.5)
    assert gated.ledger is not None
    return gated
