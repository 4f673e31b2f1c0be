"""The commands for figures that need no training."""

from pathlib import Path
from typing import Annotated

import typer

from hardconcrete.cli import Out, refusals_in_words, show

Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the samples in part (b).")]
Samples = Annotated[int, typer.Option(min=1, help="Samples averaged in part (b).")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("figure1")(figure1)
    app.command("figure2")(figure2)


def figure1(out: Out = Path("report")) -> None:
    """Draw the L_p penalties: why only p = 0 prunes without shrinking what stays."""
    with refusals_in_words():
        from hardconcrete_paper.figure1 import figure1

        show(figure1(out), "Figure 1")


def figure2(out: Out = Path("report"), samples: Samples = 10_000, seed: Seed = 0) -> None:
    """Draw the binary and the hard concrete, and their means over log alpha."""
    with refusals_in_words():
        from hardconcrete.demo import figure2

        show(figure2(out, samples=samples, seed=seed), "Figure 2")
