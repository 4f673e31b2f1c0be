"""Run the command line with ``python -m hardconcrete``."""

from hardconcrete.cli import app

app()
