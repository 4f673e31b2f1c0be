"""Every network of the zoo: groups as derived by hand, and a small model that is the same."""

from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import TraceError
from tests.exactness import apart, assert_compacts, at_random, outputs
from tests.zoo import GATED, REFUSED, ZOO, Entry, gated_network

NAMES = [entry.name for entry in ZOO]
MOST_GRAPHS = 0.2
"""At least four of five networks come back as their own class."""


def built(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    return entry.build()


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", ZOO, ids=NAMES)
def test_exact(entry: Entry, tmp_path: Path) -> None:
    """Groups by hand, perturbation oracle, gated against compact, form, file."""
    if not entry.groups:
        found = hc.find_groups(built(entry), *entry.inputs(2))
        assert not found.groups
    else:
        gated = gated_network(entry)
        small = assert_compacts(at_random(gated), entry.inputs)
        assert gated.analysis is not None
        found = gated.analysis
        assert {group.name: group.units for group in found} == dict(entry.groups)
        same_class = type(small) is type(built(entry))
        assert same_class == (hc.CompactionPlan.of(small).form == "module")
        if entry.form == "module":
            assert hc.CompactionPlan.of(small).form == "module"
        hc.save(tmp_path / "small.safetensors", small)
        loaded = hc.load(tmp_path / "small.safetensors", built(entry)).eval()
        three = entry.inputs(3)
        assert apart(outputs(small.eval(), three), outputs(loaded, three)) == 0
    for words in entry.fixed:
        assert any(words in str(fixed) for fixed in found.fixed), words


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_one_unit_costs_what_is_said(entry: Entry) -> None:
    """Without its first unit a network has as many parameters and MACs less as the group tells."""
    gated = gated_network(entry)
    with torch.no_grad():
        gated.gates.log_alpha.fill_(9.0)
        gated.gates.log_alpha[0] = -9.0
    small = hc.compact(gated)
    args, kwargs = entry.inputs(2)
    before = hc.count(built(entry), args, kwargs)
    after = hc.count(small, args, kwargs)
    group = gated.analysis[0]  # type: ignore[index]
    assert before.params - after.params == group.parameters
    assert before.macs - after.macs == 2 * group.macs


def test_most_networks_keep_their_class() -> None:
    assert sum(entry.form == "graph" for entry in ZOO) <= MOST_GRAPHS * len(ZOO)
    assert len(ZOO) >= 40


@pytest.mark.parametrize(
    ("build", "inputs", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(build: object, inputs: object, words: str) -> None:
    args, kwargs = inputs(2)  # type: ignore[operator]
    with pytest.raises(TraceError, match=words):
        hc.find_groups(build(), args, kwargs)  # type: ignore[operator]
