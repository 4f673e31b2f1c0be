"""Files are replaced as a whole, by any number of threads, and killed writes leave nothing."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from hardconcrete.errors import DataError
from hardconcrete.files import append_text, as_path, read_text, replace_file
from hardconcrete.files.replace import STALE_SECONDS


def write(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: temporary.write_text(text))


def test_threads_write_one_path(tmp_path: Path) -> None:
    path, errors = tmp_path / "file", []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                write(path, str(number) * 1000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(path.read_text())) == 1
    assert [*tmp_path.iterdir()] == [path]


def killed_write(path: Path) -> None:
    child = os.fork()
    if child == 0:
        replace_file(path, lambda temporary: (temporary.write_text("ha"), os.kill(os.getpid(), 9)))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_what_a_killed_write_left_is_removed_later(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "old")
    killed_write(path)
    (left,) = (each for each in tmp_path.iterdir() if each != path)
    assert path.read_text() == "old"
    write(path, "new")
    assert left.exists()  # another process may be writing it
    before = time.time() - STALE_SECONDS - 1
    os.utime(left, (before, before))
    write(path, "newer")
    assert [*tmp_path.iterdir()] == [path]
    killed_write(path)
    replace_file(path, lambda temporary: temporary.write_text("newest"), stale_after=0)
    assert [*tmp_path.iterdir()] == [path]


def test_a_full_disk(tmp_path: Path) -> None:
    """A process that may write 100 bytes a file gets the same error as a full disk."""
    path = tmp_path / "file"
    write(path, "old")
    append_text(path, "er")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        caught = 0
        for change in (write, append_text):
            try:
                change(path, "x" * 1000)
            except DataError as error:
                named = str(path) in str(error) and "safe" in str(error)
                caught += named and "\n" not in str(error)
        os._exit(caught)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert path.read_text().startswith("older")
    assert [*tmp_path.iterdir()] == [path]


def test_odd_paths(tmp_path: Path) -> None:
    for odd in (tmp_path, Path(os.devnull)):
        with pytest.raises(DataError, match="cannot be written: it is a folder or a device"):
            write(odd, "text")
        with pytest.raises(DataError, match="is not a file"):
            read_text(odd)
    with pytest.raises(DataError, match="was not written: Not a directory"):
        write(Path(__file__) / "inside", "text")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path / "bytes")
    with pytest.raises(ValueError, match="path has a zero byte"):
        as_path("a\0b")
