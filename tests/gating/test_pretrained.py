"""A pretrained network starts from its own function."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.demo.data import load_digits


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 4, 40)
        self.fc2 = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.conv1(x)).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


@pytest.fixture(scope="module")
def trained() -> tuple[dict, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    train = load_digits("train")
    images, labels = train.images.float() / 255, train.labels
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(12):
        for rows in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    test = load_digits("test")
    return model.state_dict(), test.images.float() / 255, test.labels


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).float().mean())


@pytest.mark.unwatched
def test_a_low_drop_rate_leaves_the_accuracy(trained: tuple) -> None:
    """In train mode with sampled gates, 20 draws on average; batch norm in train mode in both."""
    state, images, labels = trained
    model = Digits()
    model.load_state_dict(state)
    dense = accuracy(model.train(), images, labels)
    assert dense > 93
    model.load_state_dict(state)
    gated = hc.attach_gates(model, images[:2], droprate=0.01).train()
    assert [group.name for group in gated.groups] == ["conv1", "conv2", "fc1"]
    torch.manual_seed(1)
    sampled = [accuracy(gated, images, labels) for _ in range(20)]
    assert abs(sum(sampled) / 20 - dense) <= 1


def test_dividing_by_the_mean_gate_keeps_mean_outputs(trained: tuple) -> None:
    """At a drop rate of 0.3 the outputs of one gated layer have the mean of the dense ones."""
    state, images, _ = trained
    outputs = {}
    for keep_mean in (False, True):
        model = Digits().eval()
        model.load_state_dict(state)
        dense = model(images[:8]).detach()
        gated = hc.attach_gates(model, images[:2], include="fc1", droprate=0.3, keep_mean=keep_mean)
        gated.training = True  # gates are drawn, batch norm stays in evaluation
        for module in model.modules():
            module.training = not isinstance(module, nn.BatchNorm2d)
        torch.manual_seed(2)
        with torch.no_grad():
            mean = gated(images[:8], samples=500).mean(0)
        outputs[keep_mean] = float((mean - dense).abs().max() / dense.abs().max())
    assert outputs[True] < 0.06
    assert outputs[False] > 0.1
