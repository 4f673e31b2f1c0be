"""Arguments that many functions take, checked in one way."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from hardconcrete.errors import ArgumentError


def refuse_no_count(at_least: int = 1, **values: object) -> None:
    """Refuse values that are no whole numbers, or too small. Names are those of the arguments.

    Example:
        >>> try:
        ...     refuse_no_count(round_to=0)
        ... except ArgumentError as error:
        ...     print(error)
        round_to=0 must be a whole number, at least 1
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
            raise ArgumentError(f"{name}={value!r} must be a whole number, at least {at_least}")


def refuse_no_number(**values: object) -> None:
    """Refuse values that are no real numbers."""
    for name, value in values.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ArgumentError(f"{name}={value!r} must be a number")


def as_kwargs(kwargs: object) -> dict[str, Any]:
    """Keyword inputs of a model as a dict; none for None."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ArgumentError(
            f"kwargs is a {type(kwargs).__name__}; it takes keyword inputs by name, "
            'such as {"mask": mask}'
        )
    return dict(kwargs)
