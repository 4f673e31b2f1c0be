import pytest
import torch
from torch import Tensor

from hardconcrete_paper.data.augmentation import (
    CIFAR_STATISTICS,
    Preparation,
    Statistics,
    crop_and_flip,
)


def numbered(count: int, height: int = 5, width: int = 6) -> Tensor:
    """No two pixels of an image are the same, and none is zero."""
    pixels = torch.arange(1, 3 * height * width + 1).view(3, height, width)
    return (pixels + torch.arange(count).view(-1, 1, 1, 1)).to(torch.uint8)


def every_outcome(image: Tensor, padding: int) -> dict[tuple[int, int, bool], Tensor]:
    """All crops of one image, by slicing; the plain reference."""
    channels, height, width = image.shape
    padded = image.new_zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    outcomes = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            outcomes[top, left, False] = crop
            outcomes[top, left, True] = torch.stack(crop.unbind(2)[::-1], 2)
    return outcomes


def which(cropped: Tensor, image: Tensor, padding: int) -> tuple[int, int, bool]:
    fits = [key for key, outcome in every_outcome(image, padding).items() if cropped.equal(outcome)]
    assert len(fits) == 1
    return fits[0]


def test_every_image_is_a_crop_of_itself_and_all_crops_are_as_likely() -> None:
    """18 outcomes, 3600 images: chi square with 17 degrees, beyond 45 in 1 of 4000 seeds."""
    images = numbered(1).expand(3600, -1, -1, -1)
    cropped = crop_and_flip(images, 1, torch.Generator().manual_seed(0))
    found = torch.zeros(3, 3, 2)
    for crop in cropped:
        top, left, flipped = which(crop, images[0], 1)
        found[top, left, int(flipped)] += 1
    assert ((found - 200) ** 2 / 200).sum() < 45


def test_images_are_not_mixed() -> None:
    images = numbered(40)
    cropped = crop_and_flip(images, 2, torch.Generator().manual_seed(0))
    outcomes = {which(crop, image, 2) for crop, image in zip(cropped, images, strict=True)}
    assert len(outcomes) > 20


def test_generator_decides() -> None:
    images = numbered(9)
    first = crop_and_flip(images, 2, torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    assert first.equal(crop_and_flip(images, 2, torch.Generator().manual_seed(3)))
    assert not first.equal(crop_and_flip(images, 2, torch.Generator().manual_seed(4)))
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_kind_and_shape_stay(dtype: torch.dtype) -> None:
    cropped = crop_and_flip(numbered(2).to(dtype))
    assert cropped.dtype == dtype
    assert cropped.shape == (2, 3, 5, 6)
    assert cropped.is_contiguous(memory_format=torch.channels_last)


def test_preparation_for_training() -> None:
    statistics = Statistics((0.1, 0.2, 0.3), (0.5, 0.25, 0.125))
    images = numbered(7)
    prepare = Preparation(statistics, 2, torch.Generator().manual_seed(5))
    cropped = crop_and_flip(images, 2, torch.Generator().manual_seed(5))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (statistics.mean, statistics.std))
    torch.testing.assert_close(prepare(images), (cropped / 255 - mean) / std)
    assert not list(prepare.parameters())
    assert not prepare.state_dict()


@pytest.mark.parametrize("classes", [10, 100])
def test_preparation_for_testing(classes: int) -> None:
    """Pixels with the statistics of the data set come out with mean 0 and deviation 1."""
    statistics = CIFAR_STATISTICS[classes]
    pixels = torch.randn(2000, 3, 2, 2) * torch.tensor(statistics.std).view(3, 1, 1)
    pixels = 255 * (pixels + torch.tensor(statistics.mean).view(3, 1, 1))
    prepared = Preparation(statistics).eval()(pixels)
    assert prepared.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=0.05)
    assert prepared.std((0, 2, 3)).tolist() == pytest.approx([1] * 3, abs=0.05)


def test_each_call_crops_anew() -> None:
    images = numbered(9)
    prepare = Preparation(CIFAR_STATISTICS[10], generator=torch.Generator().manual_seed(0))
    assert not prepare(images).equal(prepare(images))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_in_a_graph() -> None:
    images = numbered(64).cuda()
    generator = torch.Generator("cuda")
    prepare = Preparation(CIFAR_STATISTICS[10], 2, generator).cuda()
    generator.manual_seed(1)
    expected = [prepare(images) for _ in range(2)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.stream(stream):
        prepare(images)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        replayed = prepare(images)
    generator.manual_seed(1)
    for eager in expected:
        graph.replay()
        assert replayed.equal(eager)


def test_no_value_is_read_back_from_the_device() -> None:
    """Meta tensors have no values: whoever asks for one fails."""
    prepare = Preparation(CIFAR_STATISTICS[10]).to("meta")
    assert prepare(numbered(4).to("meta")).shape == (4, 3, 5, 6)
