"""Networks of the race, narrow ones, and networks with the widths of another."""

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc

Widths = Sequence[int]
Builder = Callable[[int, Widths], nn.Module]
"""From the number of classes and the widths to a network."""


def initialise(model: nn.Module) -> nn.Module:
    """The same initialisation for every network and method; returns the model."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.Linear):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise TypeError(f"no initialisation is known for {type(module).__name__}")
    return model


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if project:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The next maps."""
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A residual network of 6n + 2 layers for images of 32 x 32 pixels (He et al., 2015, B)."""

    def __init__(self, classes: int, widths: Widths) -> None:
        super().__init__()
        streams, inner = widths[:3], widths[3:]
        blocks = len(inner) // 3
        self.conv = nn.Conv2d(3, streams[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(streams[0])
        self.stages = nn.Sequential()
        inputs = streams[0]
        for stage, outputs in enumerate(streams):
            parts = nn.Sequential()
            for block, width in enumerate(inner[stage * blocks : (stage + 1) * blocks]):
                changes = stage > 0 and block == 0
                parts.append(Block(inputs, width, outputs, 2 if changes else 1, changes))
                inputs = outputs
            self.stages.append(parts)
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.fc(self.stages(self.bn(self.conv(x)).relu()).mean((2, 3)))


class PreActivatedBlock(nn.Module):
    """A norm and an activation before each of two convolutions.

    Where the shape changes, the shortcut is a 1x1 convolution of the activated maps.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """The next maps."""
        active = self.bn1(x).relu()
        out = self.conv2(self.bn2(self.conv1(active)).relu())
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A wide residual network of 6n + 4 layers, as ``hardconcrete_paper.models`` builds it.

    Its widths are those of the stem, of the three streams, and inside each block.
    """

    def __init__(self, classes: int, widths: Widths) -> None:
        super().__init__()
        inputs, streams, inner = widths[0], widths[1:4], widths[4:]
        blocks = len(inner) // 3
        self.stem = nn.Conv2d(3, inputs, 3, padding=1, bias=False)
        self.stages = nn.Sequential()
        for stage, outputs in enumerate(streams):
            parts = nn.Sequential()
            for block, width in enumerate(inner[stage * blocks : (stage + 1) * blocks]):
                stride = 2 if stage and not block else 1
                parts.append(PreActivatedBlock(inputs, width, outputs, stride, block == 0))
                inputs = outputs
            self.stages.append(parts)
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.fc(self.bn(self.stages(self.stem(x))).relu().mean((2, 3)))


VGG_POOLS = (1, 3, 6, 9, 12)
"""Convolutions of VGG-16 that are followed by pooling."""


class VGG(nn.Module):
    """VGG-16 with batch norms and one linear layer, for images of 32 x 32 pixels."""

    def __init__(self, classes: int, widths: Widths) -> None:
        super().__init__()
        self.features = nn.Sequential()
        inputs = 3
        for layer, width in enumerate(widths):
            convolution = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
            self.features.extend([convolution, nn.BatchNorm2d(width), nn.ReLU()])
            if layer in VGG_POOLS:
                pool = nn.AvgPool2d(2) if layer == VGG_POOLS[-1] else nn.MaxPool2d(2)
                self.features.append(pool)
            inputs = width
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.fc(self.features(x).flatten(1))


class LeNet5(nn.Module):
    """LeNet-5 as in Caffe's examples, for images of 28 x 28 pixels."""

    def __init__(self, classes: int, widths: Widths) -> None:
        super().__init__()
        first, second, hidden = widths
        self.conv1 = nn.Conv2d(1, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * second, hidden)
        self.fc2 = nn.Linear(hidden, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        return self.fc2(self.fc1(x.flatten(1)).relu())


HEAD_WIDTH = 64
"""Features of an attention head."""

PATCH = 4
"""Pixels of a patch's side: an image of 32 x 32 pixels has 64 of them."""


class Encoder(nn.Module):
    """One layer of a transformer: attention, then a feed-forward network, each after a norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * HEAD_WIDTH)
        self.out = nn.Linear(heads * HEAD_WIDTH, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The next tokens."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, HEAD_WIDTH))
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer for images of 32 x 32 pixels, with the sizes of DeiT-tiny.

    Its widths are those of the tokens, the numbers of heads, and the feed-forward widths. The mean
    of the tokens is classified.
    """

    def __init__(self, classes: int, widths: Widths) -> None:
        super().__init__()
        width, layers = widths[0], len(widths) // 2
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.positions = nn.Embedding((32 // PATCH) ** 2, width)
        pairs = zip(widths[1 : 1 + layers], widths[1 + layers :], strict=True)
        self.layers = nn.Sequential(*(Encoder(width, *pair) for pair in pairs))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        return self.fc(self.norm(self.layers(tokens)).mean(1))


def _resnet_widths(blocks: int, factor: int = 1) -> Widths:
    streams = 16 * factor, 32 * factor, 64 * factor
    return *streams, *(width for width in streams for _ in range(blocks))


NETWORKS: Mapping[str, tuple[Builder, Widths]] = {
    "resnet20": (ResNet, _resnet_widths(3)),
    "resnet20x4": (ResNet, _resnet_widths(3, factor=4)),
    "resnet56": (ResNet, _resnet_widths(9)),
    "wrn-28-10": (WideResNet, (16, *_resnet_widths(4, factor=10))),
    "vgg16bn": (VGG, (64, 64, 128, 128, *[256] * 3, *[512] * 6)),
    "lenet5": (LeNet5, (20, 50, 500)),
    "vit-tiny": (ViT, (192, *[3] * 12, *[768] * 12)),
}


def build(network: str, classes: int) -> nn.Module:
    """The dense network, initialised."""
    builder, widths = NETWORKS[network]
    return builder(classes, widths)


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-adds for one image."""
    return hc.count(model, example).macs


def macs_by_weights(model: nn.Module, example: Tensor) -> Callable[[], int]:
    """A quick way to count a model's multiply-adds again after its layers lost units.

    Each weight is used once for every position of its output, and their number stays.
    """
    positions: dict[nn.Conv2d | nn.Linear, int] = {}

    def record(layer: nn.Module, _: object, output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        positions[layer] = math.prod(output.shape[2:])

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(record) for layer in layers]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    in_all = macs(model, example)

    def count() -> int:
        return sum(layer.weight.numel() * number for layer, number in positions.items())

    if count() != in_all:
        raise ValueError(f"{count():,} multiply-adds by the weights, {in_all:,} counted")
    return count


def narrow(
    network: str, classes: int, fraction: float, example: Tensor, round_to: int = 1
) -> nn.Module:
    """All widths times one factor: the most multiply-adds not above a fraction of the dense.

    Widths are multiples of ``round_to``, as in a network that was pruned so.
    """
    builder, widths = NETWORKS[network]
    make, example = partial(builder, classes), example.cpu()
    limit = fraction * macs(make(widths), example)
    # The factors at which a rounded width changes.
    parts = [width / round_to for width in widths]
    changes = {(k + 0.5) / part for part in parts for k in range(1, math.ceil(part))}
    factors = sorted({factor for factor in changes if factor < 1} | {0.0, 1.0})

    def scaled(factor: float) -> list[int]:
        rounded = (round_to * max(1, int(factor * part + 0.5 + 1e-9)) for part in parts)
        return [min(new, width) for new, width in zip(rounded, widths, strict=True)]

    above = bisect_right(factors, limit, key=lambda factor: macs(make(scaled(factor)), example))
    return make(scaled(factors[max(0, above - 1)]))


def same_widths(small: nn.Module) -> nn.Module:
    """A copy of a network with fresh parameters."""
    return initialise(copy.deepcopy(small))


Sizes = dict[str, list[int]]
"""By module, its outputs and inputs; of a batch norm only its channels."""


def sizes(model: nn.Module) -> Sizes:
    """The widths of every layer."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d)
    }
    return {name: list(module.weight.shape[:2]) for name, module in layers.items()}


def with_sizes(network: str, classes: int, wanted: Sizes) -> nn.Module:
    """The network with such widths, initialised; a layer that is not named is gone."""
    model = build(network, classes)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            continue
        replacement: nn.Module = nn.Identity()
        if name in wanted:
            replacement = _resized(module, wanted[name])
        model.set_submodule(name, replacement)
    return initialise(model)


def _resized(module: nn.Module, size: list[int]) -> nn.Module:
    if isinstance(module, nn.BatchNorm2d):
        return nn.BatchNorm2d(size[0])
    outputs, inputs = size
    if isinstance(module, nn.Linear):
        return nn.Linear(inputs, outputs)
    how = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding")}
    return nn.Conv2d(inputs, outputs, **how, bias=module.bias is not None)


def replaceable(model: nn.Module) -> bool:
    """Whether only layers are in it that ``initialise`` knows."""
    try:
        same_widths(model)
    except TypeError:
        return False
    return True


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """On a GPU, channels last in memory."""
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model
