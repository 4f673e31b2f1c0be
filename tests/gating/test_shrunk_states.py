"""Who removes units before the state of a shrunk model is loaded."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import GateError
from hardconcrete.gating import attach_gates, shrunk_states

SCRIPT = """
import sys, torch
from torch import nn
{how}
make = lambda: attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.zeros(2, 4))
gated = make()
assert ("hardconcrete.compaction" in sys.modules) == {loaded}
"""


def shrunk_state() -> dict[str, torch.Tensor]:
    gated = made()
    gated.gates.log_alpha.data[:6] = -20.0
    assert hc.shrink(gated, None)
    return gated.state_dict()


def made() -> hc.GatedModel:
    return attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.zeros(2, 4))


def test_the_same_units_are_removed() -> None:
    gated = made()
    gated.load_state_dict(shrunk_state())
    assert gated.groups[0].units == 2
    assert gated.gates.original is not None


def test_without_compaction_the_error_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    state, gated = shrunk_state(), made()
    monkeypatch.setattr(shrunk_states, "_removers", [])
    with pytest.raises(GateError, match=r"hc.shrink made smaller: import hardconcrete.compaction"):
        gated.load_state_dict(state)
    assert gated.groups[0].units == 8


@pytest.mark.parametrize(
    ("how", "loaded"),
    [
        ("import hardconcrete as hc; attach_gates = hc.attach_gates", True),
        ("from hardconcrete import attach_gates", True),
        ("from hardconcrete.gating import attach_gates", False),
    ],
)
def test_public_names_bring_compaction_along(how: str, loaded: bool) -> None:
    script = SCRIPT.format(how=how, loaded=loaded)
    subprocess.run([sys.executable, "-c", script], check=True)
