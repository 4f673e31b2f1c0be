"""``python -m hardconcrete_paper`` is the command line."""

from hardconcrete_paper.cli import app

app()
