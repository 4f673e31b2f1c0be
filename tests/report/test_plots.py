from pathlib import Path

import pytest
import torch

from hardconcrete.report.plots import gate_histograms, kept_inputs, save_figure, units_over_time


@pytest.mark.parametrize(
    ("draw", "name", "words"),
    [
        (
            lambda out: kept_inputs(torch.tensor([0.0, 0.5, 1.0, 0.0]), (2, 2), out),
            "pixels",
            "2 of 4 input pixels are kept",
        ),
        (
            lambda out: gate_histograms({f"g{i}": torch.rand(9) for i in range(7)}, out),
            "gates",
            "g6 (9 gates)",
        ),
        (
            lambda out: units_over_time({"fc1:in": [10, 7, 4], "fc2:in": [5, 5, 2]}, out),
            "units",
            "fc2:in: 2 of 5",
        ),
    ],
)
def test_pictures_carry_their_labels(draw, name: str, words: str, tmp_path: Path) -> None:
    svg, png = draw(tmp_path / "new")
    assert (svg.name, png.name) == (f"{name}.svg", f"{name}.png")
    assert words in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_pictures_repeat_byte_for_byte(tmp_path: Path) -> None:
    def draw(figure) -> None:
        figure.subplots().plot([1, 2, 3])

    first, second = (save_figure(draw, tmp_path / name, "line", (2, 2)) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
