"""The script ./run where things are missing: played with stand-ins for Python, pip and sleep."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$*" in
  *version_info\\ \\<*) exit {old} ;;
  *ensurepip*) exit {no_venv} ;;
  *print*) echo 3.11 ;;
  --version) echo Python 3.11.0 ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$*" >>attempts; echo "ERROR: no wheel for torch" >.venv/install.log
     exit {no_network} ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "experiments").mkdir()
    for name in ("run", "pyproject.toml", "experiments/pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    write(tools / "sleep", "#!/bin/sh\n")
    for tool in ("dirname", "cat", "cksum", "grep", "tail", "mkdir", "cp", "rm"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def python(project: Path, old: int = 0, no_venv: int = 0, no_network: int = 0) -> None:
    text = PYTHON.format(old=old, no_venv=no_venv, no_network=no_network)
    write(project / "tools/python3", text)


def call(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(project / "tools"), "HOME": str(project), **variables}
    command = [shutil.which("sh"), str(project / "run"), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_venv_module_is_answered_with_its_package(project: Path) -> None:
    python(project, no_venv=1)
    answer = call(project, "test")
    assert answer.returncode == 1
    assert "apt install python3.11-venv" in answer.stderr


def test_an_old_or_missing_python_is_named(project: Path) -> None:
    for prepare in (lambda: None, lambda: python(project, old=1)):
        prepare()
        answer = call(project, "demo")
        assert answer.returncode == 1
        assert "No Python 3.11 or newer was found as python3" in answer.stderr
    python(project)
    answer = call(project, "demo", PYTHON="python3.99")
    assert answer.returncode == 1
    assert "found as python3.99" in answer.stderr


def test_a_failed_download_is_retried_then_named(project: Path) -> None:
    python(project, no_network=1)
    answer = call(project, "demo")
    assert answer.returncode == 1
    assert len((project / "attempts").read_text().splitlines()) == 3
    assert "ERROR: no wheel for torch" in answer.stderr
    assert "PIP_INDEX_URL" in answer.stderr


def test_a_second_call_skips_what_is_done(project: Path) -> None:
    python(project)
    write(project / "tools/hardconcrete", '#!/bin/sh\necho "demo ran with $*"\n')
    first, second = call(project, "demo"), call(project, "demo", "--out", "there")
    assert "installing" in first.stdout
    assert second.stdout == "demo ran with demo --out there\n"
    (project / "constraints.txt").write_text("torch==0\n")
    assert "installing" in call(project, "demo").stdout
    assert "making .venv" not in call(project, "demo").stdout
    assert "installing" in call(project, "demo", PIP_EXTRA_INDEX_URL="https://example.org").stdout


def test_the_test_environment_serves_the_demo(project: Path) -> None:
    python(project)
    for tool in ("ruff", "mypy", "lint-imports", "pytest", "hardconcrete"):
        write(project / "tools" / tool, f'#!/bin/sh\necho "{tool} $*"\n')
    assert "pytest -n 2 --dist worksteal --cov --cov-report=term\n" in call(project, "test").stdout
    assert "pytest -k kl\n" in call(project, "test", "-k", "kl").stdout
    assert call(project, "demo").stdout == "hardconcrete demo\n"


def test_the_experiments_are_installed_for_the_tests_alone(project: Path) -> None:
    python(project)
    for tool in ("ruff", "mypy", "lint-imports", "pytest", "hardconcrete"):
        write(project / "tools" / tool, "#!/bin/sh\n")
    call(project, "demo")
    call(project, "test")
    demo, test = (project / "attempts").read_text().splitlines()
    assert demo.endswith("-c constraints.txt -e .[demo]")
    assert test.endswith("-c constraints.txt -e .[dev] -e experiments")


def test_a_moved_project_makes_its_environment_anew(project: Path) -> None:
    python(project)
    write(project / "tools/hardconcrete", "#!/bin/sh\n")
    call(project, "demo")
    moved = project.rename(project.with_name("moved here"))
    assert "making .venv" in call(moved, "demo").stdout


def test_a_link_to_it_is_refused(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "run").symlink_to(project / "run")
    shutil.copytree(project / "tools", elsewhere / "tools", symlinks=True)
    assert "is not the project" in call(elsewhere, "demo").stderr


def test_help_and_unknown_jobs(project: Path) -> None:
    assert "usage" in call(project).stdout
    answer = call(project, "fly")
    assert answer.returncode == 2
    assert "usage" in answer.stderr


def test_it_is_executable_and_posix() -> None:
    assert os.access(ROOT / "run", os.X_OK)
    assert (ROOT / "run").read_text().startswith("#!/bin/sh\n")
    subprocess.run([shutil.which("sh"), "-n", str(ROOT / "run")], check=True)
