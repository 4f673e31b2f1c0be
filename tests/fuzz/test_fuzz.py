"""Hostile artefacts, plans and data files: only our errors, in seconds and without much memory.

The corpus was written once and is read by every later version, which is a test of its own.
"""

import gzip
import json
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from hashlib import md5
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.save_load import SMALL_MODEL
from hardconcrete.demo import MLP
from hardconcrete.demo.data import RemoteFile, Source, obtain
from tests.compaction.networks import Joined, Maps, Sized, TiedWords
from tests.fuzz.limits import survive
from tests.fuzz.mutations import forged, mutated, mutated_json
from tests.processes import in_processes

CORPUS = Path(__file__).parent / "corpus"

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "joined": (Joined, lambda: torch.randn(3, 4)),
    "maps": (Maps, Maps.example),
    "words": (TiedWords, lambda: torch.randint(9, (3, 4))),
    "selecting": (partial(MLP, 20, (9, 8)), lambda: torch.randn(2, 20)),
}
"""Models of the corpus in module form, and their inputs."""

GRAPHS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "graph": (Sized, Sized.example),
}
"""The same in graph form, which is traced for each input."""

DENSE = {name: make() for name, (make, _) in {**MODELS, **GRAPHS}.items()}


def a_model(names: list[str], draw: Random) -> tuple[str, nn.Module, Tensor]:
    name = draw.choice(names)
    _, example = {**MODELS, **GRAPHS}[name]
    return name, DENSE[name], example()


def load(path: Path, dense: nn.Module, x: Tensor) -> None:
    """A model that is accepted works."""
    small = hc.load(path, dense).eval()
    assert small(x).isfinite().all() or path.name == "forged"


def altered_file(folder: Path, names: list[str], draw: Random) -> None:
    name, dense, x = a_model(names, draw)
    content = (CORPUS / f"{name}.safetensors").read_bytes()
    (folder / "altered").write_bytes(mutated(content, draw))
    load(folder / "altered", dense, x)


def forged_file(folder: Path, names: list[str], draw: Random) -> None:
    name, dense, x = a_model(names, draw)
    forged(SMALL_MODEL, CORPUS / f"{name}.safetensors", folder / "forged", draw)
    load(folder / "forged", dense, x)


def plan_text(_: Path, names: list[str], draw: Random) -> None:
    name, dense, x = a_model(names, draw)
    with safe_open(CORPUS / f"{name}.safetensors", "pt") as opened:
        text = opened.metadata()["plan"]
    if draw.random() < 0.3:
        text = mutated(text.encode(), draw).decode(errors="replace")
    else:
        text = json.dumps(mutated_json(json.loads(text), draw))
    plan = hc.CompactionPlan.from_json(text)
    plan.apply(dense, x)
    assert isinstance(str(plan), str)


def data_file(folder: Path, _: list[str], draw: Random) -> None:
    """A packed or plain file of which the checksum is known; other contents are refused."""
    content = b"1234567890" * 200
    file = RemoteFile("file", md5_plain=md5(content).hexdigest(), max_bytes=len(content))
    packed = draw.random() < 0.7
    raw = gzip.compress(content, mtime=0) if packed else content
    for path in folder.glob("file*"):
        path.unlink()
    (folder / ("file.gz" if packed else "file")).write_bytes(mutated(raw, draw))
    assert obtain(Source("Digits", "digits", ("",)), [file], folder) == [content]


TARGETS = {"altered": altered_file, "forged": forged_file, "plan": plan_text, "data": data_file}


def fuzz(_: int, folder: Path, target: str, names: list[str], count: int) -> None:
    torch.set_num_threads(1)
    inside = folder / "inside"
    inside.mkdir()
    accepted = survive(partial(TARGETS[target], inside, names), count, inside)
    (folder / "accepted").write_text(str(accepted))


@pytest.mark.parametrize("name", [*MODELS, *GRAPHS])
def test_the_corpus_is_read(name: str) -> None:
    make, example = {**MODELS, **GRAPHS}[name]
    x = example()
    small = hc.load(CORPUS / f"{name}.safetensors", make()).eval()
    assert small(x).isfinite().all()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_inputs(tmp_path: Path, target: str) -> None:
    in_processes(1, fuzz, tmp_path, target, [*MODELS], 120)
    assert int((tmp_path / "accepted").read_text()) < 120


def test_hostile_graphs(tmp_path: Path) -> None:
    in_processes(1, fuzz, tmp_path, "forged", [*GRAPHS], 8)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_twenty_thousand_hostile_inputs(tmp_path: Path, target: str) -> None:
    in_processes(1, fuzz, tmp_path, target, [*MODELS], 20_000 // len(TARGETS))


@pytest.mark.slow
def test_hostile_graphs_at_length(tmp_path: Path) -> None:
    in_processes(1, fuzz, tmp_path, "forged", [*GRAPHS], 300)
    shutil.rmtree(tmp_path / "inside")
    in_processes(1, fuzz, tmp_path, "plan", [*GRAPHS], 300)


def bomb(_: int, folder: Path, size: int) -> None:
    """A small file that unpacks to more than this process may have."""

    def attempt(__: Random) -> None:
        file = RemoteFile("bomb", md5_plain="0" * 32, max_bytes=10_000)
        obtain(Source("Digits", "digits", ("",)), [file], folder / "inside")

    assert survive(attempt, 3, folder / "inside") == 0
    assert (folder / "inside" / "bomb.gz").stat().st_size < size // 500


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    size, zeros = 2**30, bytes(2**24)
    with gzip.open(tmp_path / "inside" / "bomb.gz", "wb", compresslevel=9) as file:
        for _ in range(size // len(zeros)):
            file.write(zeros)
    in_processes(1, bomb, tmp_path, size)


def claims(_: int, folder: Path) -> None:
    """A file of some kB that claims an example of 4 GB."""
    name = "joined"

    def attempt(draw: Random) -> None:
        with safe_open(CORPUS / f"{name}.safetensors", "pt") as opened:
            plan = json.loads(opened.metadata()["plan"])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        plan["inputs"] = [[{"shape": [2**30], "dtype": "float32"}], {}]
        plan["form"] = draw.choice(["module", "graph"])
        SMALL_MODEL.write(folder / "inside" / "claims", tensors, json.dumps(plan))
        hc.load(folder / "inside" / "claims", DENSE[name])

    assert 0 < survive(attempt, 20, folder / "inside") < 20


def test_memory_that_a_file_claims_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    in_processes(1, claims, tmp_path)


def test_a_member_that_claims_to_be_long(tmp_path: Path) -> None:
    from hardconcrete.demo.data import read_member

    with tarfile.open(tmp_path / "tar", "w") as archive:
        archive.add(__file__, "member")
    with tarfile.open(tmp_path / "tar") as archive, pytest.raises(OSError, match="more than 10 b"):
        read_member(archive, "member", 10)
