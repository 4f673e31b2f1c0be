"""Latencies of the networks of table 2, dense and compacted, on a CPU and on a GPU."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import hardconcrete as hc

WARM_UP = 3
"""Calls before a forward is captured, in which libraries choose their kernels."""


class Replayed(nn.Module):
    """A network whose forward is captured as a CUDA graph when it is first called on a GPU.

    Called kernel by kernel, a small network on a GPU waits for Python.

    Example:
        >>> import torch
        >>> Replayed(torch.nn.ReLU())(torch.tensor([-1.0, 2.0]))    # on a CPU as ever
        tensor([0., 2.])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._captured: tuple[Any, Tensor, Tensor] | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Of the same shape in every call."""
        if not images.is_cuda:
            return self.model(images)  # type: ignore[no-any-return]
        if self._captured is None:
            self._captured = self._capture(images)
        graph, inputs, result = self._captured
        inputs.copy_(images)
        graph.replay()
        return result

    def _capture(self, images: Tensor) -> tuple[Any, Tensor, Tensor]:
        inputs, graph, stream = images.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.model(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            result = self.model(inputs)
        return graph, inputs, result


def latencies(
    dense: nn.Module, small: nn.Module, device: torch.device, repeats: int = 30
) -> dict[str, tuple[float, float]]:
    """Milliseconds of both networks in turn, each in its fastest layout; by device and batch.

    On a GPU cuDNN tries its convolutions first.

    Example:
        >>> import torch
        >>> net = torch.nn.Conv2d(3, 4, 3)
        >>> [*latencies(net, net, torch.device("cpu"), repeats=2)]
        ['cpu, float32, batch 1']
    """
    milliseconds = {}
    settings = [("cpu", torch.float32, 1)]
    if device.type == "cuda":
        settings += [("cuda", torch.bfloat16, batch) for batch in (1, 128)]
    for kind, dtype, batch in settings:
        before, after = (Replayed(copy.deepcopy(net).to(kind, dtype)) for net in (dense, small))
        images = torch.randn(batch, 3, 32, 32).to(kind, dtype)
        how: Any = {"repeats": repeats, "layouts": ("contiguous", "channels_last")}
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            report = hc.measure(before, after, images, batches=[batch], **how)
        setting = f"{kind}, {str(dtype).removeprefix('torch.')}, batch {batch}"
        (time,) = report.latencies
        milliseconds[setting] = round(time.before_ms, 4), round(time.after_ms, 4)
    return milliseconds
