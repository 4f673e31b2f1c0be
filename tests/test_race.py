"""The race compares fairly only if its own trainer and networks are right."""

import pytest
import torch
from torch import nn

from benchmarks.racing.data import Crops, Data
from benchmarks.racing.networks import NETWORKS, build, macs, narrow, same_widths, sizes, with_sizes
from benchmarks.racing.train import NesterovSGD, one_cycle

EXAMPLES = {"lenet5": torch.zeros(1, 1, 28, 28)}


def test_the_optimiser_is_that_of_torch():
    torch.manual_seed(0)
    settings = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    first = nn.Linear(3, 2)
    second = nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    ours, theirs = (
        kind(model.parameters(), lr=0.1, **settings)
        for kind, model in ((NesterovSGD, first), (torch.optim.SGD, second))
    )
    rate = torch.zeros(())
    ours.param_groups[0]["lr"] = rate
    for value in (0.1, 0.3, 0.2):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = value
        x = torch.randn(4, 3)
        for model, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(first.weight, second.weight)


@pytest.mark.parametrize("steps", [1, 2, 20, 300])
def test_the_rate_rises_once_and_falls_to_nearly_zero(steps):
    rates = one_cycle(steps, 0.4)
    top = int(rates.argmax())
    assert len(rates) == steps
    assert rates[top] == pytest.approx(0.4)
    assert (rates[: top + 1].diff() > 0).all()
    assert (rates[top:].diff() < 0).all()


@pytest.mark.parametrize("network", ["resnet20", "lenet5"])
@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_narrow_networks_keep_to_the_target(network, fraction):
    example = EXAMPLES.get(network, torch.zeros(1, 3, 32, 32))
    dense = macs(build(network, 10), example)
    part = macs(narrow(network, 10, fraction, example), example) / dense
    assert 0.85 * fraction < part <= fraction


def test_a_network_is_rebuilt_from_its_sizes_and_starts_anew():
    builder, _ = NETWORKS["resnet20"]
    small = builder(10, [5, 6, 7, 3, 2, 4, 8, 9, 1, 2, 3, 4])
    again, fresh = with_sizes("resnet20", 10, sizes(small)), same_widths(small)
    example = torch.zeros(1, 3, 32, 32)
    assert sizes(again) == sizes(small) == sizes(fresh)
    assert macs(again, example) == macs(small, example)
    assert not torch.equal(fresh.conv.weight, small.conv.weight)


def test_batches_are_crops_of_the_images_some_mirrored(tmp_path):
    train = torch.randint(1, 256, (5004, 3, 32, 32), dtype=torch.uint8)
    file = {"images": train, "labels": torch.arange(5004) % 10}
    torch.save(file, tmp_path / "cifar10-train.pt")
    data = Data("cifar10", True, tmp_path, torch.device("cpu"), smoke=False)
    assert (len(data), len(data.test_labels)) == (4, 5000)
    places = [torch.tensor([column]) for column in ([2, 3], [4, 0], [4, 8], [0, 1])]
    images, labels = data.batch(Crops(*places), torch.tensor([0]))
    assert labels.tolist() == [2, 3]
    torch.testing.assert_close(images[0], data.normalise(train[2]))
    # Four rows of black above; four columns further right; mirrored.
    torch.testing.assert_close(images[1, :, 4:, 4:], data.normalise(train[3])[:, :28, 4:].flip(2))
