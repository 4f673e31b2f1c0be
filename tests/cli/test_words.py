"""Words of the command line: options that exclude each other."""

import pytest

from hardconcrete.cli import refuse_targets
from hardconcrete.errors import ArgumentError


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ((True, 0.3, None), "exclude each other"),
        ((True, None, 0.1), "exclude each other"),
        ((False, 0.0, None), "must be above 0"),
        ((False, 0.5, 0.0), "must be above 0"),
    ],
)
def test_targets_that_are_refused(
    targets: tuple[bool, float | None, float | None], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        refuse_targets(*targets)


@pytest.mark.parametrize("targets", [(True, None, None), (False, 0.3, 0.1), (False, None, None)])
def test_targets_that_are_none_or_one_of_both(
    targets: tuple[bool, float | None, float | None],
) -> None:
    assert refuse_targets(*targets) is None
