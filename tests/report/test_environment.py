from importlib import import_module

import pytest
import torch

from hardconcrete.report import environment

module = import_module("hardconcrete.report.environment")  # the package has a function of that name


def test_the_environment_names_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARDCONCRETE_COMMIT", raising=False)
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["device"].endswith("CPU cores")

    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40
    monkeypatch.setattr(module.subprocess, "run", no_git)
    assert environment(torch.device("cpu"))["commit"] is None


def test_the_commit_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDCONCRETE_COMMIT", "0935998")
    assert environment(torch.device("cpu"))["commit"] == "0935998"


def test_where_there_is_no_checkout_the_commit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", "/nowhere/site-packages/hardconcrete/report/x.py")
    monkeypatch.delenv("HARDCONCRETE_COMMIT", raising=False)
    assert environment(torch.device("cpu"))["commit"] is None
    monkeypatch.setenv("HARDCONCRETE_COMMIT", "0935998")
    assert environment(torch.device("cpu"))["commit"] == "0935998"
