"""A table of bad calls of every public name: each is refused in words of ours, by name.

``bad_calls.tsv`` has a row for each call: the valid call in ``bad_calls.py``, the argument that is
replaced, an expression for its value, and a part of the message.
"""

import csv
from pathlib import Path

import pytest

import hardconcrete as hc
from tests import bad_calls

with (Path(__file__).parent / "bad_calls.tsv").open(newline="") as file:
    ROWS = [tuple(row) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]

RECORDS = {"Count", "Group", "HardConcreteError", "HardConcreteWarning", "LatencyTable", "Report"}
"""Public names that only the library makes objects of, without arguments of yours."""


@pytest.mark.parametrize(
    ("name", "argument", "value", "words"), ROWS, ids=[" ".join(row[:3])[:60] for row in ROWS]
)
@pytest.mark.filterwarnings("ignore::hardconcrete.HardConcreteWarning")
def test_a_bad_call_is_refused_in_words(name: str, argument: str, value: str, words: str) -> None:
    with pytest.raises(hc.HardConcreteError) as caught:
        bad_calls.call(name, argument, eval(value, vars(bad_calls)))
    assert words in str(caught.value)


def test_the_table_is_about_all_public_names() -> None:
    assert len(ROWS) >= 200
    names = {name.partition("(")[0].partition(".")[0].replace("Learned", "") for name, *_ in ROWS}
    assert names | RECORDS >= {*hc.__all__}
