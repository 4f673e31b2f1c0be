"""Lists of values."""

import typer
from typer.testing import CliRunner

from hardconcrete_paper.cli.options import ManyValues


def test_a_list_takes_its_values_until_the_next_option() -> None:
    app, seen = typer.Typer(), []

    @app.command(cls=ManyValues)
    def command(seeds: list[int] = typer.Option(...), name: str = "a") -> None:  # noqa: B008
        seen.append((seeds, name))

    result = CliRunner().invoke(app, ["--seeds", "1", "2", "--seeds", "3", "--name", "b"])
    assert result.exit_code == 0, result.output
    assert seen == [([1, 2, 3], "b")]
