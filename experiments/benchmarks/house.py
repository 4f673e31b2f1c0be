"""How large the code is, and how long the way from a model to a small one takes.

Lines, files, long functions and long signatures; imports; and for a ResNet-18 and a BERT-base-like
encoder the exports, forwards and seconds of find_groups, attach_gates and compact.

    python experiments/benchmarks/house.py --out results/house.json
"""

import argparse
import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc

ROOT = Path(__file__).resolve().parent
while not (ROOT / ".git").exists():
    ROOT = ROOT.parent


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            layers = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            self.shortcut = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 224 x 224."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    for before, width in zip([64, *widths], widths, strict=False):
        layers.append(Block(before, width, 1 if before == width else 2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*layers)


def encoder() -> nn.Module:
    """Twelve layers of BERT-base's sizes."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet18, (2, 3, 224, 224)),
    "encoder": (encoder, (2, 32, 768)),
}


COUNTS = {"exports": 0, "forwards": 0}
"""Exports, and forwards of a model and of all its copies that are no part of one."""


def count_forward(*_: object) -> None:
    """A hook that copies of a model share."""
    COUNTS["forwards"] += not torch.compiler.is_compiling()


@contextmanager
def counted() -> Iterator[None]:
    """While this lasts, exports are counted."""
    export = torch.export.export

    def counted_export(*args: Any, **kwargs: Any) -> Any:
        before = COUNTS["forwards"]
        result = export(*args, **kwargs)
        COUNTS.update(exports=COUNTS["exports"] + 1, forwards=before)
        return result

    torch.export.export = counted_export  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.export.export = export


def path(name: str) -> dict[str, dict[str, float]]:
    """Exports, forwards and seconds of each step from a model to a small one."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    found: dict[str, dict[str, float]] = {}
    model.register_forward_pre_hook(count_forward)
    with counted():

        def step(what: str, do: Callable[[], Any]) -> Any:
            before, start = dict(COUNTS), time.perf_counter()
            result = do()
            found[what] = {
                **{key: COUNTS[key] - before[key] for key in COUNTS},
                "seconds": round(time.perf_counter() - start, 2),
            }
            return result

        step("find_groups", lambda: hc.find_groups(model, x))
        gated = step("attach_gates", lambda: hc.attach_gates(model, x))
        step("expected", lambda: gated.expected("macs"))
        with torch.no_grad():
            for group in gated.groups:  # the second half of every group goes
                gated.gates.log_alpha[group.slice][group.units // 2 :] = -9.0
        step("compact", lambda: hc.compact(gated))
    found["in all"] = {
        key: round(sum(each[key] for each in found.values()), 2)
        for key in ("exports", "forwards", "seconds")
    }
    return found


def functions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Lines without docstring, and arguments, of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            lines = (node.end_lineno or 0) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
            yield lines, len(node.args.args) + len(node.args.kwonlyargs)


def sizes(files: list[Path]) -> dict[str, int]:
    """Of some files: how many, lines, and functions that are long or take much."""
    texts = [file.read_text() for file in files]
    all_functions = [each for text in texts for each in functions(ast.parse(text))]
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in texts),
        "functions": len(all_functions),
        "over 30 lines": sum(lines > 30 for lines, _ in all_functions),
        "over 8 arguments": sum(arguments > 8 for _, arguments in all_functions),
    }


def parts() -> dict[str, list[Path]]:
    """The files that git tracks, by what they are."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    found: dict[str, list[Path]] = {"library": [], "experiments": [], "tests": []}
    for name in listed:
        tests = name.startswith(("tests/", "conftest.py", "experiments/tests/"))
        paper = name.startswith(("benchmarks/", "experiments/", "src/hardconcrete/paper/"))
        paper = paper or name.endswith("cli/reproduce.py")
        kind = "tests" if tests else "experiments" if paper else "library"
        found[kind].append(ROOT / name)
    return found


def import_seconds() -> float:
    """``import hardconcrete``, the least of five, in a new process each."""
    code = (
        "import time; t = time.perf_counter(); import hardconcrete; print(time.perf_counter() - t)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(5)]
    return round(min(map(float, runs)), 4)


def main() -> None:
    """Print all, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    record = {
        "commit": commit.strip(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "code": {kind: sizes(files) for kind, files in parts().items()},
        "import_seconds": import_seconds(),
        "path": {name: path(name) for name in NETWORKS},
    }
    text = json.dumps(record, indent=1)
    print(text)
    if a.out:
        a.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
