"""Hostile changes of bytes, of JSON and of tensor files, all from one random generator."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hardconcrete.files import TensorFile

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**100, 0.5, -1e308, float("nan")),
    *(float("inf"), "", "x", "left", "left.forward", "__class__", "\0", "é" * 50, [], {}, [[]]),
    *([0], [-1], [0, 0], [1, 0], [2**40], ["0"], {"shape": [2**40], "dtype": "float32"}),
    *({"tuple": 5}, {"shape": [2] * 100, "dtype": "bool"}, {"shape": [], "dtype": "load"}),
)
"""Values that a reader may not expect."""


def mutated(content: bytes, draw: Random) -> bytes:
    """Bytes after one to four changes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place, size = draw.randint(0, len(data)), draw.choice([1, 1, 2, 4, 8, 64])
        match draw.randint(0, 5):
            case 0:
                del data[place:]
            case 1:
                del data[place : place + size]
            case 2:
                data[place:place] = draw.randbytes(size)
            case 3:
                data[place : place + size] = bytes([draw.choice([0, 255, 127, 32])]) * size
            case 4:
                data += data[place : place + size]
            case _ if place < len(data):
                data[place] ^= 1 << draw.randint(0, 7)
    return bytes(data)


def mutated_json(value: Any, draw: Random) -> Any:
    """A JSON value with one to three parts replaced, removed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return value
        holder, key = draw.choice(places)
        match draw.randint(0, 3):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 1:
                holder[draw.choice(["left", "head.x", "more", key.upper()])] = holder[key]
            case 2 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += draw.choice([-1, 1, 8])
            case _:
                holder[key] = copy.deepcopy(draw.choice(HOSTILE))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a JSON value, as its holder and its key there."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(parts):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def mutated_tensors(tensors: dict[str, Tensor], draw: Random) -> dict[str, Tensor]:
    """Tensors of which one has another shape, type, value or name, or is gone."""
    tensors = dict(tensors)
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    changes = [
        {},
        {f"{name}x": tensor},
        {name: torch.zeros(*tensor.shape, 1)},
        {name: tensor.new_zeros(0)},
        {name: torch.zeros(tensor.shape, dtype=torch.complex64)},
        {name: torch.zeros(tensor.shape, dtype=torch.int8)},
        {name: torch.full_like(tensor, 1e18)},
    ]
    return tensors | draw.choice(changes)


def forged(kind: TensorFile, source: Path, target: Path, draw: Random) -> None:
    """A tensor file with a changed text or other tensors, and the checksum of these."""
    with safe_open(source, "pt") as opened:
        text = opened.metadata()[kind.text_key]
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if draw.random() < 0.8:
        text = json.dumps(mutated_json(json.loads(text), draw))
    elif draw.random() < 0.3:
        text = mutated(text.encode(), draw).decode(errors="replace").replace("\ufffd", "?")
    else:
        tensors = mutated_tensors(tensors, draw)
    kind.write(target, tensors, text)
