import pytest
import torch

from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.data.hold_out import hold_out


def numbered(count: int) -> Images:
    labels = torch.arange(count)
    return Images(labels.to(torch.uint8).view(-1, 1, 1, 1), labels, "numbered")


def test_hold_out_parts_the_whole() -> None:
    training, validation = hold_out(numbered(100), count=30, seed=1)
    assert (len(training), len(validation)) == (70, 30)
    both = torch.cat([training.labels, validation.labels])
    assert torch.equal(both.sort().values, torch.arange(100))
    assert torch.equal(validation.images.flatten().long(), validation.labels)
    assert validation.name == "numbered"


def test_hold_out_is_decided_by_its_seed_alone() -> None:
    first = hold_out(numbered(100), count=30, seed=1)[1].labels
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert torch.equal(hold_out(numbered(100), count=30, seed=1)[1].labels, first)
    assert not torch.equal(hold_out(numbered(100), count=30, seed=2)[1].labels, first)
    assert torch.equal(torch.get_rng_state(), state)


def test_hold_out_by_default() -> None:
    assert [len(part) for part in hold_out(numbered(6000))] == [1000, 5000]


@pytest.mark.parametrize("count", [0, -1, 10, 11])
def test_hold_out_of_too_many(count: int) -> None:
    with pytest.raises(ArgumentError, match=f"count = {count} of 10 images cannot be held out"):
        hold_out(numbered(10), count)
