import subprocess
import sys


def test_python_dash_m_is_the_command_line() -> None:
    command = [sys.executable, "-m", "hardconcrete", "--version"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert answer.startswith("hardconcrete ")
