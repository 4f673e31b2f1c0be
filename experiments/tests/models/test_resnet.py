import math

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.models import PreActResNet, ResNet, WideResNet
from hardconcrete_paper.models.resnet import PlainBlock, PreActBlock


def on_meta(build, *args, **kwargs) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return build(*args, **kwargs), torch.zeros(2, 3, 32, 32)


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("build", "arguments", "parameters"),
    [
        (WideResNet, (28, 10), 36_479_194),  # 36.5M
        (WideResNet, (28, 10, 100), 36_536_884),
        (WideResNet, (16, 4), 2_748_890),  # 2.7M
        (WideResNet, (40, 4), 8_949_210),  # 8.9M
        (ResNet, (20,), 269_722),  # 0.27M
        (ResNet, (56,), 853_018),  # 0.85M
        (ResNet, (110,), 1_727_962),  # 1.7M
        (PreActResNet, (110,), 1_730_522),  # 1.7M
    ],
)
def test_published_sizes(build, arguments: tuple[int, ...], parameters: int) -> None:
    model, images = on_meta(build, *arguments)
    assert sum(p.numel() for p in model.parameters()) == parameters
    classes = arguments[2] if len(arguments) > 2 else 10
    assert model(images).shape == (2, classes)


def test_multiply_adds_of_the_wide_network() -> None:
    model, images = on_meta(WideResNet)
    assert hc.count(model, images[:1]).macs == pytest.approx(5.2e9, rel=0.01)


@pytest.mark.parametrize(
    ("build", "depth", "words"),
    [
        (WideResNet, 26, r"depth 26 is not 6n \+ 4; use 10, 16, 22"),
        (ResNet, 28, r"depth 28 is not 6n \+ 2; use 8, 14, 20"),
        (PreActResNet, 2, r"depth 2 is not 6n \+ 2"),
    ],
)
def test_depths_that_do_not_exist(build, depth: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        build(depth)


def test_hidden_maps_of_the_wide_network_are_twelve_groups() -> None:
    model, images = on_meta(WideResNet)
    found = hc.find_groups(model, images)
    hidden = {g.name: g.units for g in found if g.name.endswith("conv1")}
    assert hidden == {
        f"stages.{stage}.{block}.conv1": width
        for stage, width in enumerate((160, 320, 640))
        for block in range(4)
    }
    assert sum(hidden.values()) == 4480
    assert sum(found[name].parameters * units for name, units in hidden.items()) == 36_204_800
    assert sum(model.get_submodule(name).weight.numel() for name in hidden) == 16_842_240  # paper's
    for name in hidden:
        consumer = name.replace("conv1", "conv2")
        assert [str(axis) for axis in found[name].gated] == [f"{consumer}.weight[1]"]
    streams = {g.name: g.units for g in found if g.name not in hidden}
    assert streams == {
        "stem": 16, "stages.0.0.conv2": 160, "stages.1.0.conv2": 320, "stages.2.0.conv2": 640
    }  # fmt: skip
    assert [fixed.name for fixed in found.fixed] == ["fc"]


@pytest.mark.parametrize(
    "model",
    [WideResNet(10, 2, dropout=0.3), ResNet(8), PreActResNet(8)],
    ids=lambda m: type(m).__name__,
)
def test_hidden_maps_are_chosen_by_a_pattern(model: nn.Module) -> None:
    gated = hc.attach_gates(model, torch.zeros(2, 3, 32, 32), include="stages.*.conv1")
    assert [group.name for group in gated.groups] == [f"stages.{k}.0.conv1" for k in range(3)]


def test_groups_of_a_residual_network() -> None:
    """Maps of a stage that meet zeros in the shortcut are units of their own."""
    model, images = on_meta(ResNet, 20)
    found = {group.name: group.units for group in hc.find_groups(model, images)}
    hidden = {f"stages.{s}.{b}.conv1": 16 * 2**s for s in range(3) for b in range(3)}
    streams = {"stem": 16, "stages.1.0.conv2[16:32]": 16, "stages.2.0.conv2[32:64]": 32}
    assert found == hidden | streams


def test_shortcut_of_a_plain_block() -> None:
    """With a silent branch, what comes out is every other pixel and maps of zeros behind."""
    block = PlainBlock(4, 6, stride=2).eval()
    nn.init.zeros_(block.bn2.weight)
    images = torch.rand(2, 4, 8, 8)
    out = block(images)
    assert torch.equal(out[:, :4], images[:, :, ::2, ::2])
    assert torch.equal(out[:, 4:], torch.zeros(2, 2, 4, 4))


def test_shortcuts_of_a_pre_activation_block() -> None:
    images = torch.randn(2, 4, 8, 8)
    same, wider = PreActBlock(4, 4, stride=1).eval(), PreActBlock(4, 6, stride=2).eval()
    for block in (same, wider):
        nn.init.zeros_(block.conv2.weight)
    assert torch.equal(same(images), images)
    assert wider.shortcut is not None
    torch.testing.assert_close(wider(images), wider.shortcut(wider.bn1(images).relu()))


def test_dropout_lies_between_the_convolutions() -> None:
    block = PreActBlock(4, 4, stride=1, dropout=1.0)
    images = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(images), images)
    assert not torch.equal(block.eval()(images), images)
    assert WideResNet(10, 1, dropout=0.3).stages[0][0].dropout.p == 0.3


def test_he_normal_weights() -> None:
    block = WideResNet(10, 4).stages[2][0]
    assert block.conv2.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.02)
