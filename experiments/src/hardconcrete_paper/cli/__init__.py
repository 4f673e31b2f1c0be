"""``hardconcrete-paper``: every table and figure of the paper. Torch is imported on demand."""

import typer

from hardconcrete_paper.cli import cifar, figures, mnist

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Reproduce the paper's tables and figures.",
    epilog="Begin with `hardconcrete-paper mlp --epochs 5 --validate`.",
)
mnist.add_to(app)
cifar.add_to(app)
figures.add_to(app)

__all__ = ["app"]
