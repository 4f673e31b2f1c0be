"""How many batches are kept, how many examples one has, and what no loss may return."""

import pytest
import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.importance.batches import batch_size, check_loss, keep_batches


def test_batches_are_kept_up_to_a_number_of_examples_or_of_batches() -> None:
    batches = [torch.zeros(8, 3) for _ in range(5)]
    assert len(keep_batches(batches, 20)) == 3
    assert len(keep_batches(iter(batches), 1000)) == 5
    assert len(keep_batches(batches, max_batches=2)) == 2
    assert keep_batches(batches, 8)[0] is batches[0]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty"),
        (torch.zeros(4, 3), "batches is one tensor"),
        ("text", "batches is a str"),
        (3, "batches is a int"),
    ],
)
def test_what_are_no_batches_is_refused(batches: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        keep_batches(batches, 10)


class Encoding:
    """A mapping that is no dict, as tokenizers return."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def keys(self):
        return self.tensors.keys()

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


def test_the_size_of_a_batch() -> None:
    assert batch_size((torch.zeros(()), torch.zeros(4, 2))) == 4
    assert batch_size({"a": [torch.zeros(7)]}) == 7
    assert batch_size(Encoding(input_ids=torch.zeros(5, 2))) == 5
    assert batch_size("no tensor") == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3.0, "returned float"),
        (torch.ones(3, requires_grad=True), r"returned \[3\]"),
        (torch.ones(()), "without a gradient"),
        (torch.full((1,), torch.nan, requires_grad=True), "returned nan"),
    ],
)
def test_what_is_no_loss_is_refused(value: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_loss(value)


def test_a_loss_of_one_entry_is_a_scalar() -> None:
    assert check_loss(torch.ones(1, 1, requires_grad=True)).shape == ()
