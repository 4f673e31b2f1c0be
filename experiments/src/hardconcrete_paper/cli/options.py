"""What the commands share: options, lists of values, and interrupts in words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hardconcrete.cli import refusals_in_words

Runs = Annotated[Path, typer.Option(help="Folder for the files of the runs.")]
Results = Annotated[Path, typer.Option(help="Folder for the table and its picture.")]
Sweeps = Annotated[Path, typer.Option(help="Folder for the runs; a second call continues there.")]
Seeds = Annotated[list[int], typer.Option(help="Seeds of the networks: --seeds 0 1 2.")]
Shrink = Annotated[
    int, typer.Option(min=0, help="Remove units shut for so many epochs while training; 0: never.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training images.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Mnist = Annotated[
    Path | None,
    typer.Option(help="Folder with MNIST; else HARDCONCRETE_DATA, the cache, or a download."),
]
Cifar = Annotated[
    Path | None,
    typer.Option(help="Folder with CIFAR; else HARDCONCRETE_DATA, the cache, or a download."),
]
Validate = Annotated[
    bool,
    typer.Option("--validate", help="Test on 5,000 held-out training images, not on the test set."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]


class ManyValues(TyperCommand):
    """A command whose list options take several values at once: ``--seeds 0 1 2``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further value, as the parser wants it."""
        many = {
            name
            for option in self.params
            if getattr(option, "multiple", False)
            for name in option.opts
        }
        expanded: list[str] = []
        current = None
        for arg in args:
            if arg.startswith("--"):
                current = arg if arg in many else None
            elif current and expanded[-1] != current:
                expanded.append(current)
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


@contextmanager
def interrupts_in_words(how: str) -> Iterator[None]:
    """Print errors as messages. After an interrupt, print how to continue."""
    with refusals_in_words():
        try:
            yield
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command {how}continues from the last checkpoint")
            raise typer.Exit(130) from None
