"""``python -m hardconcrete`` is the command line."""

from hardconcrete.cli import app

app()
