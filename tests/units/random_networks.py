"""Random networks as source text: operations in orders that nobody thought of.

`python -m tests.units.random_networks 17` prints network 17 as a script that runs.
"""

import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

IMAGE, SEQUENCE, VECTOR = "image", "sequence", "vector"
EVERY = (IMAGE, SEQUENCE, VECTOR)
FLAT = (SEQUENCE, VECTOR)

VOCABULARY = 7
MOST_CHANNELS = 48
LARGEST_SIDE = 8
LONGEST = 36

TEMPLATE = '''\
# seed {seed}: {operations}
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


def lively(module: nn.Module) -> nn.Module:
    """Moves a norm's affine part and statistics away from 0 and 1, which would hide mistakes."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.3, 1.3)
    return module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        {setup}
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data *= 1.7  # what the default initialisation lacks to keep the scale
        self.double()

    def forward(self, {arguments}):
        {forward}


def inputs(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    return ({inputs},)
'''


@dataclass(frozen=True)
class Value:
    """A tensor of the script: its name, and its shape without the batch."""

    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        return (VECTOR, SEQUENCE, IMAGE)[len(self.shape) - 1]

    @property
    def axis(self) -> int:
        return 2 if self.kind == SEQUENCE else 1

    @property
    def channels(self) -> int:
        return self.shape[self.axis - 1]

    @property
    def side(self) -> int:
        return self.shape[-1]

    def wide(self, channels: int) -> tuple[int, ...]:
        """The same shape with another number of channels."""
        return (*self.shape[: self.axis - 1], channels, *self.shape[self.axis :])

    def at(self, index: str) -> str:
        """The expression that indexes the channels."""
        return f"{self}[{':, ' * self.axis}{index}]"


@dataclass
class Script:
    """The network so far."""

    rng: random.Random
    pool: list[Value] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    setup: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)

    def own(self, stem: str, code: str) -> str:
        """Makes a module or a parameter, and says what it is called."""
        name = f"self.{stem}{len(self.setup)}"
        self.setup.append(f"{name} = {code}")
        return name

    def parameter(self, rows: int, columns: int, fan_in: int) -> str:
        scale = round((3 * fan_in) ** -0.5, 3)
        return self.own("weight", f"nn.Parameter({scale} * torch.randn({rows}, {columns}))")

    def buffer(self, code: str) -> str:
        name = f"buffer{len(self.setup)}"
        self.setup.append(f'self.register_buffer("{name}", {code})')
        return f"self.{name}"

    def value(self, shape: tuple[int, ...]) -> Value:
        self.pool.append(Value(f"x{len(self.pool)}", shape))
        self.unused.add(self.pool[-1].name)
        return self.pool[-1]

    def put(self, expression: str, *shapes: tuple[int, ...]) -> Value:
        """Writes a line that makes one value per shape; returns the last."""
        self.unused.difference_update(re.findall(r"\bx\d+\b", expression))
        made = [self.value(shape) for shape in shapes]
        self.forward.append(f"{', '.join(map(str, made))} = {expression}")
        return made[-1]

    def width(self) -> int:
        return self.rng.choice((4, 6, 8, 8, 12))

    def pick(self, among: list[Value]) -> Value:
        """Mostly one that nothing has used yet, so that networks are deep rather than broad."""
        return self.rng.choices(among, [8 if v.name in self.unused else 1 for v in among])[0]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability


LedgerWriter = Callable[..., Value]
Test = Callable[[Value], bool]


@dataclass(frozen=True)
class Operation:
    """Something that may happen to a value, and how often among all that may."""

    weight: float
    kinds: tuple[str, ...]
    when: Test
    write: LedgerWriter

    def takes(self, x: Value) -> bool:
        return x.kind in self.kinds and self.when(x)


OPERATIONS: list[Operation] = []
CONTRACTIONS: list[Operation] = []


def anything(_: Value) -> bool:
    return True


def operation(
    weight: float, *kinds: str, when: Test = anything, table: list[Operation] = OPERATIONS
) -> Callable[[LedgerWriter], LedgerWriter]:
    """Registers what makes at least one new value of a value of these kinds."""

    def register(write: LedgerWriter) -> LedgerWriter:
        table.append(Operation(weight, kinds, when, write))
        return write

    return register


def contraction(weight: float, *kinds: str) -> Callable[[LedgerWriter], LedgerWriter]:
    """Registers a way in which a parameter contracts the channels and makes new ones."""
    return operation(weight, *kinds, table=CONTRACTIONS)


def apply_one(script: Script, table: list[Operation], x: Value, *arguments: int) -> Value:
    options = [operation for operation in table if operation.takes(x)]
    chosen = script.rng.choices(options, [operation.weight for operation in options])[0]
    script.operations.append(chosen.write.__name__)
    return chosen.write(script, x, *arguments)


def contract(s: Script, x: Value, out: int) -> Value:
    return apply_one(s, CONTRACTIONS, x, out)


def channels_second(x: Value, function: str) -> str:
    """Calls what wants the channels in dimension 1."""
    if x.kind == SEQUENCE:
        return f"{function}({x}.transpose(1, 2)).transpose(1, 2)"
    return f"{function}({x})"


def channels_last(x: Value, function: str) -> str:
    """Calls what wants the channels in the last dimension."""
    if x.kind == IMAGE:
        return f"{function}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"
    return f"{function}({x})"


# Contractions with a parameter.


def conv_code(s: Script, x: Value, out: int, kernel: int, stride: int = 1) -> str:
    groups = s.rng.choice([g for g in (1, 1, 1, 2, 4) if x.channels % g == out % g == 0])
    settings = f"{kernel}, stride={stride}, padding={kernel // 2}, groups={groups}"
    return f"nn.Conv2d({x.channels}, {out}, {settings}, bias={s.chance(0.6)})"


@contraction(8, IMAGE)
def conv(s: Script, x: Value, out: int) -> Value:
    return s.put(f"{s.own('conv', conv_code(s, x, out, s.rng.choice((1, 3))))}({x})", x.wide(out))


@contraction(6, *FLAT)
def linear(s: Script, x: Value, out: int) -> Value:
    layer = s.own("linear", f"nn.Linear({x.channels}, {out}, bias={s.chance(0.7)})")
    return s.put(f"{layer}({x})", x.wide(out))


@contraction(1, IMAGE)
def linear_channels_last(s: Script, x: Value, out: int) -> Value:
    layer = s.own("linear", f"nn.Linear({x.channels}, {out})")
    return s.put(channels_last(x, layer), x.wide(out))


@contraction(2, SEQUENCE)
def conv1d(s: Script, x: Value, out: int) -> Value:
    layer = s.own("conv", f"nn.Conv1d({x.channels}, {out}, 3, padding=1)")
    return s.put(channels_second(x, layer), x.wide(out))


@contraction(1.5, *FLAT)
def raw_linear(s: Script, x: Value, out: int) -> Value:
    bias = f", {s.own('bias', f'nn.Parameter(torch.rand({out}) - 0.5)')}" if s.chance(0.5) else ""
    return s.put(f"F.linear({x}, {s.parameter(out, x.channels, x.channels)}{bias})", x.wide(out))


@contraction(1.5, *FLAT)
def raw_matmul(s: Script, x: Value, out: int) -> Value:
    return s.put(f"{x} @ {s.parameter(x.channels, out, x.channels)}", x.wide(out))


@contraction(1.2, *EVERY)
def einsum(s: Script, x: Value, out: int) -> Value:
    source, result = {
        IMAGE: ("bchw", "bohw"),
        SEQUENCE: ("btc", "bto"),
        VECTOR: ("bc", "bo"),
    }[x.kind]
    rows, columns, order = s.rng.choice(((out, x.channels, "oc"), (x.channels, out, "co")))
    weight = s.parameter(rows, columns, x.channels)
    return s.put(f'torch.einsum("{source},{order}->{result}", {x}, {weight})', x.wide(out))


@contraction(0.8, *FLAT)
def weight_normed(s: Script, x: Value, out: int) -> Value:
    layer = s.own("linear", f"weight_norm(nn.Linear({x.channels}, {out}))")
    return s.put(f"{layer}({x})", x.wide(out))


@contraction(0.8, *FLAT)
def experts(s: Script, x: Value, out: int) -> Value:
    """Data choose two of three matrices for each row."""
    router = s.own("router", f"nn.Linear({x.channels}, 3)")
    scale = round((3 * x.channels) ** -0.5, 3)
    weight = f"nn.Parameter({scale} * torch.randn(3, {out}, {x.channels}))"
    matrices = s.own("experts", weight)
    chosen = f"{matrices}[{router}({x}).topk(2).indices]"
    letters = "btc,btkoc->btko" if x.kind == SEQUENCE else "bc,bkoc->bko"
    return s.put(f'torch.einsum("{letters}", {x}, {chosen}).sum({x.axis})', x.wide(out))


# Operations that only carry what a contraction made.

POINTWISE = (
    "F.relu({x})",
    "F.relu({x})",
    "F.gelu({x})",
    "torch.sigmoid({x})",
    "torch.tanh({x})",
    "torch.exp(-{x} * {x})",
    "{x} * 0.5 + 1",
    "F.leaky_relu({x}, 0.1)",
    "F.softplus({x})",
    "-{x}",
)
JOINS = (
    "{x} + {y}",
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "torch.maximum({x}, {y})",
    "{x} * torch.sigmoid({y})",
    # Continuous at the border: rounding must not decide between two different answers.
    "torch.where({x} > {y}, {x}, {y})",
    "torch.where({x} > 0, {x} * torch.sigmoid({y}), 0.5 * {x})",
)


@operation(5, *EVERY)
def pointwise(s: Script, x: Value) -> Value:
    return s.put(s.rng.choice(POINTWISE).format(x=x), x.shape)


@operation(4, *EVERY)
def batch_norm(s: Script, x: Value) -> Value:
    name = "BatchNorm2d" if x.kind == IMAGE else "BatchNorm1d"
    norm = s.own("norm", f"lively(nn.{name}({x.channels}, affine={s.chance(0.8)}))")
    return s.put(channels_second(x, norm), x.shape)


@operation(2.5, IMAGE, when=lambda x: x.side > 1)
def instance_norm(s: Script, x: Value) -> Value:
    norm = s.own("norm", f"lively(nn.InstanceNorm2d({x.channels}, affine=True))")
    return s.put(f"{norm}({x})", x.shape)


@operation(1.5, *EVERY)
def prelu(s: Script, x: Value) -> Value:
    activation = s.own("prelu", f"lively(nn.PReLU({x.channels}))")
    return s.put(channels_second(x, activation), x.shape)


@operation(1, *EVERY)
def dropout(s: Script, x: Value) -> Value:
    if s.chance(0.5):
        return s.put(f"F.dropout({x}, 0.0, self.training)", x.shape)
    return s.put(f"{s.own('dropout', 'nn.Dropout(0.0)')}({x})", x.shape)


@operation(1.5, *EVERY)
def constant(s: Script, x: Value) -> Value:
    """A constant per channel is added, or a parameter per channel multiplies."""
    draw = f"torch.rand({x.channels}{', 1, 1' if x.kind == IMAGE else ''})"
    if s.chance(0.6):
        return s.put(f"{x} + {s.buffer(draw)}", x.shape)
    return s.put(f"{x} * {s.own('scale', f'nn.Parameter({draw})')}", x.shape)


@operation(5, IMAGE, when=lambda x: x.side >= 2)
def pool_space(s: Script, x: Value) -> Value:
    half = x.side // 2
    expression, side = s.rng.choice(
        (
            (f"F.max_pool2d({x}, 2)", half),
            (f"F.avg_pool2d({x}, 2)", half),
            (f"F.max_pool2d({x}, 3, 1, 1)", x.side),
            (f"F.adaptive_avg_pool2d({x}, 2)", 2),
            (f"F.adaptive_max_pool2d({x}, 2)", 2),
            (f"F.adaptive_avg_pool2d({x}, 1)", 1),
        )
    )
    return s.put(expression, (x.channels, side, side))


@operation(1.5, SEQUENCE, when=lambda x: x.shape[0] >= 4)
def pool_time(s: Script, x: Value) -> Value:
    return s.put(
        f"F.avg_pool1d({x}.transpose(1, 2), 2).transpose(1, 2)", (x.shape[0] // 2, x.channels)
    )


@operation(3, IMAGE, when=lambda x: x.side <= LARGEST_SIDE // 2)
def interpolate(s: Script, x: Value) -> Value:
    mode = s.rng.choice(("nearest", "bilinear"))
    shape = (x.channels, 2 * x.side, 2 * x.side)
    return s.put(f'F.interpolate({x}, scale_factor=2, mode="{mode}")', shape)


@operation(2, IMAGE, when=lambda x: x.side < LARGEST_SIDE)
def pad_space(s: Script, x: Value) -> Value:
    return s.put(f"F.pad({x}, (1, 0, 0, 1))", (x.channels, x.side + 1, x.side + 1))


@operation(1, *EVERY)
def pad_channels(s: Script, x: Value) -> Value:
    before, after = s.rng.choice(((0, 2), (1, 1), (2, 0), (0, 4)))
    space = "0, 0, 0, 0, " if x.kind == IMAGE else ""
    return s.put(f"F.pad({x}, ({space}{before}, {after}))", x.wide(x.channels + before + after))


@operation(1, IMAGE, SEQUENCE)
def softmax_elsewhere(s: Script, x: Value) -> Value:
    """Over space or time, which leaves the channels alone."""
    if x.kind == IMAGE:
        return s.put(f"torch.softmax({x}.flatten(2), -1).view_as({x}) * {x.side}", x.shape)
    return s.put(f"torch.softmax({x}, 1) * 2", x.shape)


# Operations that join values.


def partner(s: Script, x: Value) -> Value:
    """A value shaped like x: one that is there, or a projection of one that differs in width."""
    there = [v for v in s.pool if v.shape == x.shape and v is not x]
    if there and s.chance(0.5):
        return s.pick(there)
    return contract(s, neighbour(s, x), x.channels)


def neighbour(s: Script, x: Value) -> Value:
    """A value that differs from x at most in its width."""
    return s.pick([v for v in s.pool if v.wide(x.channels) == x.shape])


@operation(6, *EVERY)
def join(s: Script, x: Value) -> Value:
    y = partner(s, x)
    return s.put(s.rng.choice(JOINS).format(x=x, y=y), x.shape)


@operation(4, *EVERY, when=lambda x: x.channels <= 16)
def cat(s: Script, x: Value) -> Value:
    parts = [x]
    for _ in range(s.rng.choice((1, 1, 2))):
        near = neighbour(s, x)
        fresh = near is x or near.channels > 16 or s.chance(0.4)
        parts.append(contract(s, near, s.width()) if fresh else near)
    s.rng.shuffle(parts)
    joined = ", ".join(map(str, parts))
    return s.put(f"torch.cat([{joined}], {x.axis})", x.wide(sum(v.channels for v in parts)))


@operation(1.2, *EVERY)
def cat_zeros(s: Script, x: Value) -> Value:
    sizes = ", ".join(map(str, x.wide(2)))
    zeros = f"torch.zeros({x}.size(0), {sizes}, dtype={x}.dtype)"
    parts = s.rng.choice((f"{x}, {zeros}", f"{zeros}, {x}"))
    return s.put(f"torch.cat([{parts}], {x.axis})", x.wide(x.channels + 2))


@operation(1, *EVERY, when=lambda x: x.channels <= 12)
def interleave(s: Script, x: Value) -> Value:
    axis, y = x.axis, partner(s, x)
    expression = f"torch.stack([{x}, {y}], {axis + 1}).flatten({axis}, {axis + 1})"
    return s.put(expression, x.wide(2 * x.channels))


@operation(2, IMAGE)
def modulate(s: Script, x: Value) -> Value:
    """Every map of x is multiplied by an entry of a vector."""
    vectors = [v for v in s.pool if v.kind == VECTOR]
    source = s.rng.choice(vectors) if vectors else s.put(f"{x}.mean((2, 3))", (x.channels,))
    gate = contract(s, source, x.channels)
    return s.put(f"{x} * torch.sigmoid({gate})[:, :, None, None]", x.shape)


# Operations that move channels.


def even(x: Value) -> bool:
    return x.channels % 2 == 0 and x.channels >= 4


@operation(3, *EVERY, when=even)
def halve(s: Script, x: Value) -> Value:
    axis, half = x.axis, x.wide(x.channels // 2)
    expression = s.rng.choice(
        (
            f"{x}.chunk(2, {axis})",
            f"{x}.split({x.channels // 2}, {axis})",
            f"{x}.unflatten({axis}, (2, -1)).unbind({axis})",
        )
    )
    b = s.put(expression, half, half)
    a = s.pool[-2]
    if s.chance(0.5):  # otherwise the halves go their own ways
        glued = (
            (f"{a} * torch.sigmoid({b})", half),
            (f"{a} + {b}", half),
            (f"torch.cat([{b}, F.relu({a})], {axis})", x.shape),
        )
        return s.put(*s.rng.choice(glued))
    return b


@operation(1.5, *EVERY, when=lambda x: x.channels >= 4)
def split_unequal(s: Script, x: Value) -> Value:
    first = s.rng.randint(1, x.channels - 2)
    sizes = [first, x.channels - first]
    return s.put(f"{x}.split({sizes}, {x.axis})", *(x.wide(size) for size in sizes))


@operation(1.5, *EVERY, when=lambda x: x.channels >= 6)
def cut(s: Script, x: Value) -> Value:
    channels = x.channels
    expression, size = s.rng.choice(
        (
            (x.at("1:5"), 4),
            (x.at("::2"), (channels + 1) // 2),
            (x.at("1::2"), channels // 2),
            (x.at("-3:"), 3),
            (x.at(":-2"), channels - 2),
            (f"{x}.narrow({x.axis}, 2, 4)", 4),
        )
    )
    return s.put(expression, x.wide(size))


@operation(1.2, *EVERY)
def select(s: Script, x: Value) -> Value:
    """By a constant index, with or without repeats."""
    size = s.rng.randint(min(3, x.channels), x.channels)
    chosen = s.rng.sample(range(x.channels), size)
    if s.chance(0.3):
        chosen.append(chosen[0])
    index = s.buffer(f"torch.tensor({chosen})")
    direct = f"torch.index_select({x}, {x.axis}, {index})"
    return s.put(s.rng.choice((direct, x.at(index))), x.wide(len(chosen)))


@operation(1.2, *EVERY)
def flip(s: Script, x: Value) -> Value:
    return s.put(f"{x}.flip({x.axis})", x.shape)


@operation(1, *EVERY)
def roll(s: Script, x: Value) -> Value:
    return s.put(f"torch.roll({x}, {s.rng.choice((1, -1, 2))}, dims={x.axis})", x.shape)


@operation(1, *EVERY, when=lambda x: x.channels <= MOST_CHANNELS // 4)
def repeat(s: Script, x: Value) -> Value:
    times = ["1"] * (len(x.shape) + 1)
    times[x.axis] = "2"
    whole = f"{x}.repeat({', '.join(times)})"
    each = f"{x}.repeat_interleave(2, dim={x.axis})"
    return s.put(s.rng.choice((whole, each)), x.wide(2 * x.channels))


@operation(1.5, *EVERY, when=even)
def shuffle(s: Script, x: Value) -> Value:
    a, shape = x.axis, ", ".join(map(str, x.shape))
    groups = s.rng.choice([g for g in (2, 3, 4) if x.channels % g == 0])
    if s.chance(0.5):
        return s.put(
            f"{x}.unflatten({a}, ({groups}, -1)).transpose({a}, {a + 1}).flatten({a}, {a + 1})",
            x.shape,
        )
    apart = [*x.shape[: a - 1], groups, x.channels // groups, *x.shape[a:]]
    view = f"reshape(-1, {', '.join(map(str, apart))})"
    return s.put(f"{x}.{view}.transpose({a}, {a + 1}).reshape(-1, {shape})", x.shape)


@operation(1.2, *EVERY, when=even)
def regroup(s: Script, x: Value) -> Value:
    """Channels as pairs, in one way or another."""
    a, half = x.axis, x.channels // 2
    expression, size = s.rng.choice(
        (
            (f"{x}.unflatten({a}, (2, {half})).flatten({a}, {a + 1})", x.channels),
            (f"{x}.unflatten({a}, (2, -1)).amax({a})", half),
            (f"{x}.unflatten({a}, (-1, 2)).mean({a + 1})", half),
        )
    )
    return s.put(expression, x.wide(size))


@operation(1.5, IMAGE)
def there_and_back(s: Script, x: Value) -> Value:
    activated = f"F.relu({x}.permute(0, 2, 3, 1).contiguous())"
    return s.put(f"{activated}.permute(0, 3, 1, 2)", x.shape)


@operation(3, IMAGE, when=lambda x: x.side <= LARGEST_SIDE // 2)
def pixel_shuffle(s: Script, x: Value) -> Value:
    if x.channels % 4 or x.channels < 8:
        x = contract(s, x, s.rng.choice((8, 12, 16)))
    return s.put(f"F.pixel_shuffle({x}, 2)", (x.channels // 4, 2 * x.side, 2 * x.side))


@operation(2.5, IMAGE, when=lambda x: x.side % 2 == 0 and 4 * x.channels <= MOST_CHANNELS)
def pixel_unshuffle(s: Script, x: Value) -> Value:
    return s.put(f"F.pixel_unshuffle({x}, 2)", (4 * x.channels, x.side // 2, x.side // 2))


# Operations in which every channel matters to every other.


@operation(0.6, *EVERY, when=lambda x: x.channels > 1)
def softmax_channels(s: Script, x: Value) -> Value:
    return s.put(f"torch.softmax({x}, {x.axis}) * {x.channels}", x.shape)


@operation(0.8, *EVERY)
def mean_channels(s: Script, x: Value) -> Value:
    mean = f"{x}.mean({x.axis}, keepdim=True)"
    return s.put(s.rng.choice((f"{x} * torch.sigmoid({mean})", f"{x} - {mean}")), x.shape)


@operation(1.2, *EVERY, when=lambda x: x.channels > 2)
def layer_norm(s: Script, x: Value) -> Value:
    name = s.rng.choice(("LayerNorm", "LayerNorm", "RMSNorm"))
    norm = s.own("norm", f"lively(nn.{name}({x.channels}))")
    return s.put(channels_last(x, norm), x.shape)


@operation(2, IMAGE, VECTOR)
def group_norm(s: Script, x: Value) -> Value:
    # Never on a bare input: the backward of torch 2.13 crashes (a segmentation fault) when the
    # norm's parameters need a gradient and its input, laid out channels last, does not.
    x = contract(s, x, s.rng.choice((6, 8, 12)))
    groups = s.rng.choice([g for g in (1, 2, 2, 3, 4) if x.channels % g == 0])
    return s.put(f"{s.own('norm', f'lively(nn.GroupNorm({groups}, {x.channels}))')}({x})", x.shape)


@operation(1, SEQUENCE)
def outer_product(s: Script, x: Value) -> Value:
    y = partner(s, x)
    length = x.shape[0]
    return s.put(f"{x} @ {y}.transpose(1, 2) / {x.channels}", (length, length))


# Blocks.


@operation(7, *EVERY)
def contract_again(s: Script, x: Value) -> Value:
    return contract(s, x, s.width())


@operation(3.5, IMAGE, when=lambda x: x.side >= 4)
def strided_conv(s: Script, x: Value) -> Value:
    out, side = s.width(), (x.side + 1) // 2
    return s.put(f"{s.own('conv', conv_code(s, x, out, 3, 2))}({x})", (out, side, side))


@operation(5, IMAGE, when=lambda x: x.channels <= MOST_CHANNELS // 2)
def depthwise(s: Script, x: Value) -> Value:
    out = x.channels * s.rng.choice((1, 1, 2))
    settings = f"3, padding=1, groups={x.channels}, bias={s.chance(0.5)}"
    return s.put(
        f"{s.own('conv', f'nn.Conv2d({x.channels}, {out}, {settings})')}({x})", x.wide(out)
    )


@operation(3, IMAGE)
def transposed_conv(s: Script, x: Value) -> Value:
    out, doubles = s.width(), x.side <= LARGEST_SIDE // 2
    groups = s.rng.choice([g for g in (1, 2) if x.channels % g == 0])
    settings = "2, stride=2" if doubles else "3, padding=1"
    code = f"nn.ConvTranspose2d({x.channels}, {out}, {settings}, groups={groups})"
    side = 2 * x.side if doubles else x.side
    return s.put(f"{s.own('conv', code)}({x})", (out, side, side))


@operation(3, IMAGE)
def conv_block(s: Script, x: Value) -> Value:
    out = s.width()
    parts = f"{conv_code(s, x, out, 3)}, lively(nn.BatchNorm2d({out})), nn.ReLU(inplace=True)"
    return s.put(f"{s.own('block', f'nn.Sequential({parts})')}({x})", x.wide(out))


def hidden(s: Script, x: Value, out: int) -> Value:
    """Two contractions with something removable between them."""
    inner = contract(s, x, s.width())
    if s.chance(0.4):
        inner = batch_norm(s, inner)
    return contract(s, pointwise(s, inner), out)


@operation(4.5, *EVERY)
def bottleneck(s: Script, x: Value) -> Value:
    return hidden(s, x, s.width())


@operation(4, *EVERY)
def residual(s: Script, x: Value) -> Value:
    return s.put(f"{x} + {hidden(s, x, x.channels)}", x.shape)


def square_layer(s: Script, x: Value) -> str:
    if x.kind == IMAGE:
        return s.own("tied", f"nn.Conv2d({x.channels}, {x.channels}, 3, padding=1)")
    return s.own("tied", f"nn.Linear({x.channels}, {x.channels})")


@operation(1.5, *EVERY)
def tied(s: Script, x: Value) -> Value:
    """One module, used twice: in a row, or on two values."""
    layer = square_layer(s, x)
    first = s.put(f"{layer}({x})", x.shape)
    return s.put(f"{layer}({s.rng.choice((pointwise, partner))(s, first)})", x.shape)


@operation(1.5, *FLAT)
def tied_transpose(s: Script, x: Value) -> Value:
    out = s.width()
    layer = s.own("tied", f"nn.Linear({x.channels}, {out})")
    inner = pointwise(s, s.put(f"{layer}({x})", x.wide(out)))
    return s.put(f"F.linear({inner}, {layer}.weight.t())", x.shape)


@operation(2, IMAGE)
def squeeze_excite(s: Script, x: Value) -> Value:
    pooled = s.put(f"F.adaptive_avg_pool2d({x}, 1)", (x.channels, 1, 1))
    squeezed = s.own("squeeze", f"nn.Conv2d({x.channels}, 4, 1)")
    excited = s.own("excite", f"nn.Conv2d(4, {x.channels}, 1)")
    gate = s.put(f"{excited}(F.relu({squeezed}({pooled})))", pooled.shape)
    return s.put(f"{x} * torch.sigmoid({gate})", x.shape)


@operation(1.5, *EVERY)
def glu(s: Script, x: Value) -> Value:
    out = s.width()
    return s.put(f"F.glu({contract(s, x, 2 * out)}, {x.axis})", x.wide(out))


@operation(1.5, *FLAT)
def swiglu(s: Script, x: Value) -> Value:
    out = s.width()
    gate, up = contract(s, x, out), contract(s, x, out)
    return contract(s, s.put(f"F.silu({gate}) * {up}", up.shape), x.channels)


@operation(1.5, SEQUENCE)
def attention(s: Script, x: Value) -> Value:
    out = s.width()
    q, k, v = (contract(s, x, out) for _ in range(3))
    scores = f"torch.softmax({q} @ {k}.transpose(1, 2) / {out**0.5:.3f}, -1)"
    return contract(s, s.put(f"{scores} @ {v}", v.shape), x.channels)


def heads_mixed(s: Script, q: str, k: str, v: str, heads: int, lengths: tuple[int, int]) -> str:
    """Attention of [batch, heads, time, size] tensors, written in one way or another."""
    length, others = lengths
    mask = s.buffer(f"torch.randn(1, {s.rng.choice((1, heads))}, {length}, {others})")
    scores = s.rng.choice((
        f"({q} @ {k}.transpose(-2, -1)) * 0.7",
        f"{q} @ {k}.mT + {mask}",
        f"({q} @ {k}.mT).masked_fill({mask} < -0.5, -1e4)",
        f'torch.einsum("bhtd,bhsd->bhts", {q}, {k})',
        f"torch.matmul(F.normalize({q}, dim=-1), {k}.transpose(2, 3))",
    ))  # fmt: skip
    return s.rng.choice((
        f"F.scaled_dot_product_attention({q}, {k}, {v})",
        f"F.scaled_dot_product_attention({q}, {k}, {v}, {mask}, scale=0.4)",
        f"F.scaled_dot_product_attention({q}, {k}, {v}, {mask} > -0.5)",
        f"torch.softmax({scores}, -1) @ {v}",
        f'torch.einsum("bhts,bhsd->bhtd", torch.softmax({scores}, -1), {v})',
        f"{q} @ ({k}.mT @ {v}) / {others}",
    ))  # fmt: skip


@operation(2, SEQUENCE)
def attention_heads(s: Script, x: Value) -> Value:
    heads, size = s.rng.choice((2, 3, 4)), s.rng.choice((2, 4))
    width = heads * size
    if s.chance(0.4):
        fused = contract(s, x, 3 * width)
        layout = s.rng.choice((
            f"{fused}.unflatten(-1, (3, {heads}, {size})).permute(2, 0, 3, 1, 4).unbind(0)",
            f"{fused}.unflatten(-1, ({heads}, {3 * size})).transpose(1, 2).chunk(3, -1)",
            f"[part.unflatten(-1, ({heads}, -1)).transpose(1, 2) for part in "
            f"{fused}.split({width}, -1)]",
        ))  # fmt: skip
        q, k, v = (f"{fused}_{name}" for name in "qkv")
        s.put(f"{fused}.clone()", fused.shape)
        s.forward.append(f"{q}, {k}, {v} = {layout}")
    else:
        views = f".view(-1, {x.shape[0]}, {heads}, {size}).transpose(1, 2)"
        parts = [s.put(f"{contract(s, x, width)}.contiguous()", x.wide(width)) for _ in range(3)]
        q, k, v = (f"{part}{views}" for part in parts)
    mixed = heads_mixed(s, q, k, v, heads, (x.shape[0], x.shape[0]))
    return contract(s, s.put(f"({mixed}).transpose(1, 2).flatten(2)", x.wide(width)), x.channels)


@operation(1.5, SEQUENCE)
def grouped_queries(s: Script, x: Value) -> Value:
    """Several query heads on a head of keys and values, with rotary embeddings or without."""
    groups, times, size = s.rng.choice((1, 2, 3)), s.rng.choice((2, 3)), s.rng.choice((2, 4))
    heads, length = groups * times, x.shape[0]
    q = f"{contract(s, x, heads * size)}.unflatten(-1, (-1, {size})).transpose(1, 2)"
    k, v = (
        f"{contract(s, x, groups * size)}.unflatten(-1, (-1, {size})).transpose(1, 2)"
        for _ in range(2)
    )
    s.forward.append(f"q, k, v = {q}, {k}, {v}")
    if s.chance(0.5):
        cos, sin = (s.buffer(f"torch.randn({length}, {size})") for _ in range(2))
        turn = f"t * {cos} + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * {sin}"
        s.forward.append(f"q, k = ({turn} for t in (q, k))")
    copies = s.rng.choice((
        f"t.repeat_interleave({times}, dim=1)",
        f"t[:, :, None].expand(-1, {groups}, {times}, {length}, {size}).flatten(1, 2)",
        f"t[:, :, None].expand(-1, -1, {times}, -1, -1).reshape(-1, {heads}, {length}, {size})",
    ))  # fmt: skip
    if s.chance(0.3):
        mixed = "F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True)"
    else:
        s.forward.append(f"k, v = ({copies} for t in (k, v))")
        mixed = heads_mixed(s, "q", "k", "v", heads, (length, length))
    done = s.put(f"({mixed}).transpose(1, 2).flatten(2)", x.wide(heads * size))
    return contract(s, done, x.channels)


@operation(1.5, SEQUENCE)
def cross_heads(s: Script, x: Value) -> Value:
    """Keys and values from any sequence."""
    heads, size = s.rng.choice((2, 3, 4)), s.rng.choice((2, 3))
    width = heads * size
    y = s.pick([value for value in s.pool if value.kind == SEQUENCE])
    split = f".unflatten(-1, ({heads}, -1)).transpose(1, 2)"
    q, k, v = (f"{contract(s, source, width)}{split}" for source in (x, y, y))
    mixed = heads_mixed(s, q, k, v, heads, (x.shape[0], y.shape[0]))
    return contract(s, s.put(f"({mixed}).transpose(1, 2).flatten(2)", x.wide(width)), x.channels)


@operation(1.5, SEQUENCE, when=lambda x: x.channels % 2 == 0)
def torch_attention(s: Script, x: Value) -> Value:
    """Torch's own layers; their width is what they read."""
    heads = s.rng.choice([h for h in (2, 3, 4) if x.channels % h == 0])
    settings = f"{x.channels}, {heads}, batch_first=True, dtype=torch.float64"
    if s.chance(0.3):
        norm = f"norm_first={s.chance(0.5)}, dropout=0.0"
        layer = f"nn.TransformerEncoderLayer({settings}, dim_feedforward=6, {norm})"
        return s.put(f"{s.own('layer', layer)}({x})", x.shape)
    code = f"nn.MultiheadAttention({settings}, bias={s.chance(0.8)}, add_bias_kv={s.chance(0.2)})"
    layer, y = s.own("attend", code), s.pick([v for v in s.pool if v.channels == x.channels
                                             and v.kind == SEQUENCE])  # fmt: skip
    weights = f"need_weights={s.chance(0.5)}"
    return s.put(f"{layer}({x}, {y}, {y}, {weights})[0]", x.shape)


# Ways from one kind of tensor to another.


def flat(s: Script, x: Value, size: int) -> str:
    ways = (
        f"{x}.flatten(1)",
        f"{x}.reshape({x}.size(0), -1)",
        f"{x}.contiguous().view(-1, {size})",
    )
    return s.rng.choice(ways)


@operation(1.5, IMAGE, SEQUENCE)
def to_vector(s: Script, x: Value) -> Value:
    size = math.prod(x.shape)
    if size <= 256 and s.chance(0.6):
        return s.put(flat(s, x, size), (size,))
    space = "(2, 3)" if x.kind == IMAGE else "1"
    ways = [f"{x}.mean({space})", f"{x}.amax({space})"]
    if x.kind == SEQUENCE:
        ways.append(f"{x}[:, 0]")
    return s.put(s.rng.choice(ways), (x.channels,))


@operation(2.5, IMAGE, when=lambda x: x.side**2 <= LONGEST)
def image_to_sequence(s: Script, x: Value) -> Value:
    area = x.side**2
    ways = (
        f"{x}.flatten(2).transpose(1, 2)",
        f"{x}.permute(0, 2, 3, 1).reshape({x}.size(0), {area}, {x.channels})",
    )
    return s.put(s.rng.choice(ways), (area, x.channels))


@operation(4, SEQUENCE, when=lambda x: x.shape[0] in (1, 4, 9, 16, 25, 36))
def sequence_to_image(s: Script, x: Value) -> Value:
    side = round(x.shape[0] ** 0.5)
    turned = f"{x}.transpose(1, 2)"
    ways = (
        f"{turned}.unflatten(2, ({side}, {side}))",
        f"{turned}.reshape(-1, {x.channels}, {side}, {side})",
    )
    return s.put(s.rng.choice(ways), (x.channels, side, side))


@operation(5, VECTOR, when=lambda x: x.channels % 4 == 0 and x.channels >= 8)
def vector_to_sequence(s: Script, x: Value) -> Value:
    shape = (4, x.channels // 4)
    ways = (f"{x}.unflatten(1, (4, -1))", f"{x}.view(-1, {shape[0]}, {shape[1]})")
    return s.put(s.rng.choice(ways), shape)


@operation(3.5, VECTOR)
def vector_to_image(s: Script, x: Value) -> Value:
    shape = (s.rng.choice((4, 6)), 4, 4)
    return s.put(f"{contract(s, x, shape[0] * 16)}.view(-1, {shape[0]}, 4, 4)", shape)


# A whole network.


def begin(s: Script) -> tuple[str, str]:
    """Draws the inputs: the arguments of `forward`, and the expression that makes them."""
    draws = [draw_input(s) for _ in range(s.rng.choice((1, 1, 1, 2)))]
    for x in list(s.pool):
        if s.chance(0.85):
            contract(s, x, s.width())
    return ", ".join(name for name, _ in draws), ", ".join(code for _, code in draws)


def draw_input(s: Script) -> tuple[str, str]:
    kind = s.rng.choices((IMAGE, SEQUENCE, VECTOR, "tokens"), (9, 4, 3, 3))[0]
    channels, side = s.rng.randint(3, 12), s.rng.choice((4, 4, 5, 6, 7, 8))
    length = s.rng.choice((4, 5, 6, 9))
    if kind == "tokens":
        name, width = f"tokens{len(s.pool)}", s.width()
        table = s.own("embedding", f"nn.Embedding({VOCABULARY}, {width})")
        s.operations.append("embedding")
        s.put(f"{table}({name})", (length, width))
        return name, f"torch.randint({VOCABULARY}, (batch, {length}), generator=generator)"
    shape = {IMAGE: (channels, side, side), SEQUENCE: (length, channels), VECTOR: (channels,)}[kind]
    sizes = ", ".join(map(str, ("batch", *shape)))
    code = f"torch.randn({sizes}, generator=generator, dtype=torch.float64)"
    return s.value(shape).name, code


def head(s: Script, x: Value) -> Value:
    """An output: mostly logits of a linear layer or of a convolution, or else x itself."""
    if s.chance(0.06):
        return x
    if x.kind != VECTOR and s.chance(0.6):
        x = to_vector(s, x)
    out = hidden(s, x, 3) if s.chance(0.3) else contract(s, x, 3)
    return s.put(f"torch.softmax({out}, {out.axis})", out.shape) if s.chance(0.15) else out


def finish(s: Script) -> None:
    """Turns every value that nothing has used into an output, alone or together."""
    ends = [value for value in s.pool if value.name in s.unused]
    if len(ends) > 1 and s.chance(0.6):
        vectors = [end if end.kind == VECTOR else to_vector(s, end) for end in ends]
        joined, size = ", ".join(map(str, vectors)), sum(v.channels for v in vectors)
        ends = [s.put(f"torch.cat([{joined}], 1)", (size,))]
    outputs = [str(head(s, end)) for end in ends]
    plain = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    named = "{" + ", ".join(f'"out{i}": {name}' for i, name in enumerate(outputs)) + "}"
    s.forward.append(f"return {named if s.chance(0.2) else plain}")


def random_script(seed: int) -> str:
    """Source that defines `class Net(nn.Module)` and `def inputs(batch)`, always the same."""
    s = Script(random.Random(seed))
    arguments, draws = begin(s)
    for _ in range(s.rng.randint(4, 14)):
        apply_one(s, OPERATIONS, s.pick(s.pool))
    finish(s)
    return TEMPLATE.format(
        seed=seed,
        operations=", ".join(s.operations),
        setup="\n        ".join(s.setup),
        forward="\n        ".join(s.forward),
        arguments=arguments,
        inputs=draws,
    )


def random_network(seed: int) -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]], str]:
    """The network in float64, its inputs for a batch size, and its source."""
    source = random_script(seed)
    names: dict[str, Callable] = {"__name__": f"random_network_{seed}"}
    exec(compile(source, f"<random network {seed}>", "exec"), names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = names["Net"]()
    return network, names["inputs"], source


def main() -> None:
    seed = int(sys.argv[1])
    run = f"\n\ntorch.manual_seed({seed})\nnet = Net().eval()\nprint(net(*inputs(2)))"
    print(random_script(seed) + run)


if __name__ == "__main__":
    main()
