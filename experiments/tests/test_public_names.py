"""The experiments use the library as everybody does: by its public names."""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import hardconcrete

EXPERIMENTS = Path(__file__).parents[1]
LIBRARY = Path(hardconcrete.__file__).parent
FILES = sorted(EXPERIMENTS.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def public(module: str) -> frozenset[str] | None:
    """The public names of the library, or of one of its folders; None of any other module."""
    found: ModuleType = importlib.import_module(module)
    is_folder = hasattr(found, "__path__") or module == "hardconcrete.errors"
    names = getattr(found, "__all__", None) if is_folder else None
    return None if names is None else frozenset(names)


def imports(path: Path) -> Iterator[str]:
    """Imports of the library that are not public."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("hardconcrete."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == (
            "hardconcrete"
        ):
            names = public(str(node.module)) or frozenset()
            yield from (f"{node.module}.{x.name}" for x in node.names if x.name not in names)


def attributes(path: Path) -> Iterator[str]:
    """Attributes of ``hc`` that are not public, and private names of the library on anything."""
    names = public("hardconcrete") or frozenset()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner in ("hc", "hardconcrete") and node.attr not in {*names, "__version__", "__file__"}:
            yield f"{owner}.{node.attr}"
        if node.attr in private_names() and owner not in ("self", "cls"):
            yield f"{owner or '...'}.{node.attr}"


@cache
def private_names() -> frozenset[str]:
    """What the library calls private, and neither the experiments nor torch do."""
    own = frozenset().union(*map(defined, FILES))
    torchs = {"_parameters", "_buffers", "_modules", "_dynamo", "_inductor"}
    return frozenset().union(*map(defined, LIBRARY.rglob("*.py"))) - own - torchs


def defined(path: Path) -> frozenset[str]:
    """Private functions, classes and attributes that a file makes."""
    made = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            made.add(node.attr)
    return frozenset(name for name in made if name[0] == "_" and not name.endswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_only_public_names_of_the_library_are_used(path: Path) -> None:
    assert [*imports(path), *attributes(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import hardconcrete.gating",
        "from hardconcrete.gating.bank import GateBank",
        "from hardconcrete.gating import nothing",
        "from hardconcrete import gating",
        "import hardconcrete as hc; hc.gating",
        "budget._steps = 3",
    ],
)
def test_anything_else_is_noticed(code: str, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert [*imports(path), *attributes(path)]


def test_every_public_folder_has_documented_names() -> None:
    for folder in (each.parent for each in LIBRARY.rglob("__init__.py")):
        module = ".".join(["hardconcrete", *folder.relative_to(LIBRARY).parts])
        found = importlib.import_module(module)
        for name in public(module) or ():
            thing = getattr(found, name)
            if callable(thing) and getattr(thing, "__module__", "").startswith("hardconcrete"):
                assert thing.__doc__, f"{module}.{name}"
