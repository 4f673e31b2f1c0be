"""One hostile input after the other in a process that may take little time and memory."""

import faulthandler
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

from hardconcrete.errors import HardConcreteError

SECONDS = 5.0
"""The longest time for one input, of the processor: other tests run at the same time."""

WAITING_SECONDS = 60.0
"""The longest time that passes meanwhile, so that nothing waits for ever."""

SPARE_BYTES = 2**28
"""Memory for the inputs, twice the files and the models, which are small, and for torch."""

Attempt = Callable[[Random], object]
"""Does something with an input that it makes; only errors of hardconcrete may come out."""


def survive(attempt: Attempt, count: int, folder: Path) -> int:
    """Make so many attempts; return how many were accepted.

    The first is made without limits, because torch loads parts of itself on first use. A process
    that is out of time prints where it was and ends. Nothing is written outside of the folder.
    """
    before = sorted(folder.parent.iterdir())
    os.chdir(folder)
    _outcome(attempt, 0)
    faulthandler.register(signal.SIGPROF, chain=True)  # chain: and then it ends
    limit = _address_space() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    accepted = sum(_outcome(attempt, number) for number in range(1, count))
    assert sorted(folder.parent.iterdir()) == before
    return accepted


def _outcome(attempt: Attempt, number: int) -> bool:
    """Whether an input was accepted."""
    faulthandler.dump_traceback_later(WAITING_SECONDS, exit=True)
    if number:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(Random(number))
    except HardConcreteError as error:
        if "allocate" in str(error) or "MemoryError" in str(error):
            raise AssertionError(f"input {number} took all memory: {error}") from error
        return False
    except Exception as error:
        raise AssertionError(f"input {number} gave {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
    return True


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
