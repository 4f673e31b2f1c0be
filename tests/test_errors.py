import inspect

import pytest

from hardconcrete import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_documented_and_derives_from_ours(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.HardConcreteError | errors.HardConcreteWarning)
    assert ">>> " in kind.__doc__
