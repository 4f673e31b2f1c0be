"""Groups that keep equally many units: by the places of layers, and by numbers that size them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.units.configuration import build, configurations_in, shapes_of
from hardconcrete.units.uniform import by_classes, uniform_classes
from tests.compaction.configured import HEADS, WIDTHS, network, x


@dataclass
class Sizes:
    width: int = 6
    inner: int = 8


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(sizes.width, sizes.inner),
            nn.Linear(sizes.inner, sizes.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Pair(nn.Module):
    """Encoder and decoder have their width from one number."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder, self.decoder = Layer(sizes), Layer(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def test_the_same_places_of_all_layers() -> None:
    model = network()
    assert uniform_classes(hc.find_groups(model, x()), model) == [HEADS, WIDTHS]


def test_places_that_one_number_sizes() -> None:
    model = Pair(Sizes())
    found = hc.find_groups(model, torch.randn(2, 6))
    assert uniform_classes(found, model) == [("encoder.up", "decoder.up")]
    apart = nn.Sequential(Layer(Sizes()), nn.Sequential(Layer(Sizes())))
    found = hc.find_groups(apart, torch.randn(2, 6))
    assert uniform_classes(found, apart) == [("0.up",), ("1.0.up",)]


def test_groups_without_a_class_are_alone() -> None:
    found = hc.find_groups(network(), x())
    together = by_classes(found.groups, [WIDTHS, ("gone",)])
    names = [tuple(group.name for group in groups) for groups in together]
    assert names == [WIDTHS, (HEADS[0],), (HEADS[1],)]


def test_building_again_costs_no_parameters() -> None:
    """Parameters are on the meta device, and the random state stays."""
    model, state = network(), torch.get_rng_state()
    ((path, name, config),) = configurations_in(model)
    assert (path, name) == ("", "settings")
    built = build(model, config, {"part.inner": 7})
    assert all(parameter.is_meta for parameter in built.parameters())
    assert shapes_of(built)["blocks.1.up.weight"] == (7, 16)
    assert torch.equal(torch.get_rng_state(), state)
    assert config.part.inner == 24
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())
