"""The inputs that a model is traced, verified and measured with."""

from typing import Any

ExampleInputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional inputs, and inputs by keyword."""
