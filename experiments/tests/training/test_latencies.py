import copy

import pytest
import torch
from torch import nn

from hardconcrete_paper.training.latencies import Replayed, latencies


def test_both_networks_are_timed() -> None:
    dense, small = nn.Conv2d(3, 64, 5), nn.Conv2d(3, 4, 5)
    ((words, (before, after)),) = latencies(dense, small, torch.device("cpu"), repeats=3).items()
    assert words == "cpu, float32, batch 1"
    assert before > after > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_replayed_is_what_is_computed() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).cuda().eval()
    replayed = Replayed(copy.deepcopy(net))
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(4, 3, 9, 9, device="cuda")
            torch.testing.assert_close(replayed(x), net(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_adds_its_own_times() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    found = latencies(net, net.cuda(), torch.device("cuda"), repeats=3)
    assert [*found][1:] == ["cuda, bfloat16, batch 1", "cuda, bfloat16, batch 128"]
