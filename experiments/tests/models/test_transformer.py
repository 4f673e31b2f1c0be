import pytest
import torch

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.models import CharTransformer


def text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(65, (batch, length))


def test_heads_and_feed_forward_widths_are_found() -> None:
    found = hc.find_groups(CharTransformer(65), text(2, 128))
    names = {"attention": 4, "widen": 512}
    expected = {f"blocks.{k}.{name}": units for k in range(4) for name, units in names.items()}
    assert {g.name: g.units for g in found} == expected
    assert [str(axis) for axis in found["blocks.2.widen"].gated] == ["blocks.2.narrow.weight[1]"]


def test_no_place_sees_what_comes_after_it() -> None:
    model = CharTransformer(65, width=32, layers=2, hidden=64).eval()
    first = text(1, 20)
    second = first.clone()
    second[0, 12:] = (second[0, 12:] + 1) % 65
    one, other = model(first), model(second)
    torch.testing.assert_close(one[:, :12], other[:, :12])
    assert (one[:, 12:] - other[:, 12:]).abs().amax(2).min() > 1e-4


def test_places_matter() -> None:
    scores = CharTransformer(65, width=32, layers=1)(torch.full((1, 8), 7))
    assert (scores[0, 0] - scores[0, 5]).abs().max() > 1e-4


def test_untrained_scores_are_as_good_as_guessing() -> None:
    scores = CharTransformer(65)(text(4, 64))
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), text(4, 64).flatten())
    assert loss.item() == pytest.approx(4.174, abs=0.1)  # log 65


def test_size() -> None:
    """Embeddings and scores, then per block 4 attention layers, 2 feed-forward ones, 2 norms."""
    block = 4 * (128 * 128 + 128) + (128 * 512 + 512) + (512 * 128 + 128) + 4 * 128
    expected = 65 * 128 + 128 * 128 + 4 * block + 2 * 128 + 128 * 65 + 65
    assert sum(p.numel() for p in CharTransformer(65).parameters()) == expected


def test_heads_share_the_width() -> None:
    with pytest.raises(ArgumentError, match="5 heads cannot share a width of 128"):
        CharTransformer(65, heads=5)
