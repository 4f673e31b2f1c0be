"""Agreement with torch-pruning on plain CNNs, where it is right; needs the extra `bench`."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hardconcrete as hc
from tests.zoo import ZOO

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tp = pytest.importorskip("torch_pruning", reason="needs the extra bench: torch-pruning")

PLAIN = ("lenet", "vgg", "adaptive_pooling", "depthwise_separable", "resnet", "bottleneck",
         "wide_resnet", "mobilenet", "densenet", "unet", "inception")  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_axes_go_with_a_unit(name: str) -> None:
    """For every group, cutting its first unit takes the same number of parameters along."""
    entry = next(entry for entry in ZOO if entry.name == name)
    torch.manual_seed(0)
    model = entry.build().eval()
    args, kwargs = entry.inputs(2)
    found = hc.find_groups(model, args, kwargs)
    assert not kwargs
    compared = 0
    for group in found:
        other = copy.deepcopy(model)
        graph = tp.DependencyGraph().build_dependency(other, args)
        layer: nn.Module = other.get_submodule(group.name.partition("[")[0])
        before = sum(p.numel() for p in other.parameters())
        prune = tp.prune_conv_out_channels if hasattr(layer, "kernel_size") else (
            tp.prune_linear_out_channels
        )  # fmt: skip
        graph.get_pruning_group(layer, prune, idxs=[0]).prune()
        after = sum(p.numel() for p in other.parameters())
        assert before - after == group.parameters, group.name
        compared += 1
    assert compared == len(found) > 0
