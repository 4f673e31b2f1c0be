"""Files that are written while the training goes on."""

from threading import Event

import pytest
import torch

from hardconcrete.errors import HardConcreteWarning
from hardconcrete_paper.training.background_writer import BackgroundWriter, Write

Tensors = dict[str, torch.Tensor]


def test_what_is_written_is_of_when_it_was_told_and_in_order() -> None:
    first, goes_on, written = torch.arange(6.0).view(2, 3).t(), Event(), list[Tensors]()

    def slowly(tensors: Tensors) -> None:
        assert goes_on.wait(10)
        written.append(tensors)

    with BackgroundWriter() as writer:
        writer.write({"x": first}, slowly)
        first.zero_()
        assert not written  # the training goes on meanwhile
        goes_on.set()
        writer.write({"x": first}, written.append)
    assert [tensors["x"].sum().item() for tensors in written] == [15.0, 0.0]
    assert written[0]["x"].is_contiguous()


def test_views_of_one_tensor_become_tensors_of_their_own() -> None:
    both, written = torch.ones(2, 3), list[Tensors]()
    with BackgroundWriter() as writer:
        writer.write({"a": both[0], "b": both[1]}, written.append)
    sizes = {tensor.untyped_storage().nbytes() for tensor in written[0].values()}
    assert sizes == {12}


def fail(_: Tensors) -> None:
    raise OSError("disk full")


def training(*writers: Write, interrupted: bool = False) -> None:
    with BackgroundWriter() as writer:
        for write in writers:
            writer.write({}, write)
        if interrupted:
            raise KeyboardInterrupt


def test_an_error_comes_with_the_next_file_or_at_the_end() -> None:
    written = list[Tensors]()
    with pytest.raises(OSError, match="disk full"):
        training(fail, written.append)
    assert not written
    with pytest.raises(OSError, match="disk full"):
        training(written.append, fail)
    assert len(written) == 1


def test_an_error_of_the_training_stays_the_one_that_is_told() -> None:
    told = pytest.warns(HardConcreteWarning, match="the last file was not written: disk full")
    with told, pytest.raises(KeyboardInterrupt):
        training(fail, interrupted=True)


def test_copies_lie_on_the_cpu_whatever_the_default() -> None:
    written = list[Tensors]()
    with torch.device("meta"):
        training_of = {"x": torch.ones(2, device="cpu")}
        with BackgroundWriter() as writer:
            writer.write(training_of, written.append)
    assert written[0]["x"].tolist() == [1.0, 1.0]
