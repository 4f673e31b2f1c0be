"""Convolutions: full, grouped, depthwise, transposed, and kernels that are computed."""

import pytest
from torch import nn
from torch.nn import functional as F

from tests.graph.operators.contract import (
    IMAGE,
    Network,
    assert_contract,
    case,
    conv,
    parameter,
)


def then(layer: nn.Module, read: int = 6) -> Network:
    """8 maps, a layer, and what reads its outputs."""
    return conv(lambda net, h: net.layer(h), 8, read, layer=layer)


def raw(read: int, kernel: nn.Parameter) -> Network:
    return conv(lambda net, h: F.conv2d(h, net.w.view(6, 8, 3, 3)), 8, read, w=kernel)


def unbatched() -> Network:
    layers = {"inp": nn.Conv2d(3, 8, 3), "out": nn.Conv2d(8, 4, 3)}
    return Network(lambda net, x: net.out(net.inp(x.mean(0)).relu()), **layers)


def dynamic() -> Network:
    """A kernel that is an activation: no gate can sit on it."""
    layers = {"inp": nn.Conv2d(3, 8, 3), "kernel": nn.Linear(3, 6 * 72), "fc": nn.Linear(6, 4)}

    def forward(net, x):
        kernel = net.kernel(x.mean((0, 2, 3))).view(6, 8, 3, 3)
        return net.fc(F.conv2d(net.inp(x), kernel).mean((2, 3)))

    return Network(forward, **layers)


T, O = nn.ConvTranspose2d, "out: 4 fixed"  # noqa: E741
FULL = {"inp": 8, "layer": 6}
CASES = [
    case("circular", lambda: then(nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular")), IMAGE,
         FULL, O),
    case("same", lambda: then(nn.Conv2d(8, 6, 3, padding="same", bias=False)), IMAGE, FULL, O),
    case("transposed", lambda: then(T(8, 6, 2, 2)), IMAGE, FULL, O),
    # 4 groups of 2 maps in and 3 out: the k-th of every group is one unit
    case("grouped", lambda: then(nn.Conv2d(8, 12, 3, groups=4), 12), IMAGE, {"inp": 2, "layer": 3},
         O),
    case("transposed_groups", lambda: then(T(8, 6, 2, groups=2)), IMAGE, {"inp": 4, "layer": 3}, O),
    # a map has two kernels of its own, which go with it
    case("depthwise", lambda: then(nn.Conv2d(8, 16, 3, groups=8), 16), IMAGE, {"inp": 8}, O),
    case("transposed_depthwise", lambda: then(T(8, 16, 2, groups=8), 16), IMAGE, {"inp": 8}, O),
    case("unbatched", unbatched, IMAGE, {"inp": 8}, O),
    case("flat_kernel", lambda: raw(6, parameter(6, 72)), IMAGE, {"inp": 8, "w": 6}, O),
    # a row of the parameter is a pair of maps: rows of one input map go together
    case("kernel_of_pairs", lambda: raw(6, parameter(48, 9)), IMAGE, {"inp": 8}, O),
    case("dynamic", dynamic, IMAGE, {}, "8 fixed: the kernel is not a parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
