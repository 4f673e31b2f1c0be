"""What becomes of a random network: shared by the tests and the recorded run."""

import hardconcrete as hc
from tests.exactness import assert_exact
from tests.units.random_networks import random_network

TOLERANCE = 1e-9
"""In float64, as a part of the output's scale."""

NO_UNITS = "no units"


def verdict(seed: int) -> str:
    """The form of the small model, ``"no units"``, or the failure with a script that shows it."""
    network, inputs, script = random_network(seed)
    try:
        small = assert_exact(network, lambda batch: (inputs(batch), {}), seed, TOLERANCE)
    except Exception as error:
        if "no units that could be removed" in str(error):
            return NO_UNITS
        kind = "refused" if isinstance(error, hc.HardConcreteError) else "wrong"
        return f"{kind}: seed {seed}: {type(error).__name__}: {error}\n\n{script}"
    return hc.CompactionPlan.of(small).form
