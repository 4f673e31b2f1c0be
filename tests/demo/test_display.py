import io
import re

import pytest
import torch
from rich.console import Console

import hardconcrete as hc
from hardconcrete.demo import MLP, Display, Status, status

SIZES = {"fc1:in": 64, "fc2:in": 20, "fc3:in": 10}
DENSE = 64 * 20 + 200 + 100


def test_a_dense_network_counts_whole() -> None:
    now = status(MLP(64, (20, 10)), 0.5, SIZES, DENSE)
    assert now.units == (64, 20, 10)
    assert now.expected == now.delivered == DENSE


def test_expected_and_delivered_differ_while_gates_are_undecided() -> None:
    gated = hc.attach_gates(MLP(64, (20, 10)), torch.zeros(1, 64), sites=[*SIZES])
    now = status(gated, 0.5, SIZES, DENSE)
    assert now.delivered == DENSE
    assert now.expected < 0.8 * now.delivered
    with torch.no_grad():
        gated.gates.log_alpha[:60] = -9
    assert status(gated, 0.5, SIZES, DENSE).units == (4, 20, 10)


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(["a", "b"], epochs=40, dense=100.0) as display:
        for epoch in range(1, 41):
            display.show(epoch, [Status(0.25, (3, 2), 50.0, 60.0)] * 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert "40/40" in lines[-1]
    assert "units 3-2 MACs 60% (expected 50%)" in lines[0]


def test_a_terminal_of_80_columns_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, *_, last = screen(monkeypatch, ["seed 0", "seed 10"], (20, 25, 45, 462))
    assert heading.split() == ["epoch", "loss", "units", "MACs", "expected", "left"]
    name, bar, *fields, left = last.removeprefix("seed ").split()
    assert name == "10"
    assert set(bar) == {"━"}
    assert fields == ["100/200", "0.481", "20-25-45-462", "13%", "12%"]
    assert left.count(":") == 1


def test_many_groups_of_units_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    last = screen(monkeypatch, ["seed 0"], (640,) * 12)[-1]
    assert len(last) == 80
    assert "100/200 0.481 640-640-" in last
    assert "…  13%" in last


def screen(monkeypatch: pytest.MonkeyPatch, names: list[str], units: tuple[int, ...]) -> list[str]:
    """The last picture of a run that is half done."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("hardconcrete.demo.display.Console", lambda: console)
    with Display(names, epochs=200, dense=100.0) as display:
        display.show(100, [Status(0.4806, units, 12.0, 13.0)] * len(names))
        display.refresh()
    lines = re.sub(r"\x1b\[\S*?[A-Zhl]", "", file.getvalue()).strip("\n").splitlines()
    return lines[-1 - len(names) :]
