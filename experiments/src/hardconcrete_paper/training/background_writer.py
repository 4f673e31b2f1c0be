"""Writing files while the training goes on."""

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hardconcrete.errors import HardConcreteWarning

Write = Callable[[dict[str, Tensor]], None]


class BackgroundWriter:
    """A thread that writes copies of tensors, one file after the other.

    At the end of the block everything is written. An error is raised with the next file or at the
    end. It is a warning if the block ends by another error.

    Example:
        >>> weight, written = torch.zeros(2), []
        >>> with BackgroundWriter() as writer:
        ...     writer.write({"weight": weight}, written.append)
        ...     _ = weight.add_(1)
        >>> written
        [{'weight': tensor([0., 0.])}]
    """

    def __enter__(self) -> Self:
        self._thread, self._last = ThreadPoolExecutor(1), Future[None]()
        self._last.set_result(None)
        return self

    def write(self, tensors: dict[str, Tensor], write: Write) -> None:
        """Copy tensors now. The copies are written after the file before."""
        copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
            for name, tensor in tensors.items()
        }
        self._last.result()
        self._last = self._thread.submit(write, copies)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self._last.result()
        elif (own := self._last.exception()) is not None and own is not error:
            warnings.warn(f"the last file was not written: {own}", HardConcreteWarning, 2)
