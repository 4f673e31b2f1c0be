"""Re-fitting: after units went, the weights that are left reproduce what the dense model computes.

Layer by layer, in the order of the forward pass: with the inputs X that the small model makes now,
and the results Y that the dense model had there, the new weights solve a ridge regression,

    W = (A + r I)^-1 (X^T Y + r W_0),    A = X^T X,    r = RIDGE times the mean of A's diagonal.

No labels are needed, and no gradient. All batches walk through both models side by side, one layer
at a time, so each model runs once.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hardconcrete.errors import CompactionError
from hardconcrete.importance.batches import Loss
from hardconcrete.importance.contractions import Contraction, read_contraction
from hardconcrete.structure.undisturbed import in_mode, no_fast_path

RIDGE = 1e-2
"""How strongly weights are held where they were, as a part of the mean square of the inputs."""

MIN_ROWS = 32_768
"""Rows that a regression gets at least, where there are so many."""

ROWS_PER_COLUMN = 8
"""Rows for each unknown of an output, above that."""


@dataclass(frozen=True)
class Refit:
    """Which weights were re-fitted, and which were not, with the reason.

    Args:
        fitted: for every parameter the part of its output's variance that the dense model's
            activations still miss, after re-fitting.
        skipped: for every other parameter of a contraction that was seen, why.
    """

    fitted: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


def refit(
    small: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    ridge: float = RIDGE,
) -> Refit:
    """Give the weights of ``small``, in place, the values that imitate ``dense`` best.

    Both are modules of the same class and sizes, without gates. Weights of zero that read a unit,
    all of them, mean that it is gone: they stay zero.

    Args:
        small: the model to change; shut units are zeros in whatever reads them.
        dense: the model to imitate, which stays as it is.
        batches: seen by both; labels are not used.
        loss: calls the model it is given.
        ridge: see ``RIDGE``.
    """
    kept = list(batches)
    fitted: dict[str, float] = {}
    with in_mode(small, training=False), in_mode(dense, training=False), no_fast_path():
        order = _calls(dense, kept[0], loss)
        often = Counter(name for name, _ in order)
        skipped = {n: f"it is used {k} times in a call" for n, k in often.items() if k > 1}
        with _walking(dense, kept, loss, after=True) as teachers:
            with _walking(small, kept, loss, after=False) as students:
                for name, norm in order:
                    targets = [_expect(walk.advance(), name) for walk in teachers]
                    calls = [_expect(walk.advance(), name) for walk in students]
                    if often[name] == 1:
                        means = norm and (small.get_buffer(norm), dense.get_buffer(norm))
                        fitted[name] = _fit(calls, targets, ridge, means or None)
    return Refit(fitted, skipped)


@torch.no_grad()
def _fit(
    calls: Sequence[Contraction],
    targets: Sequence[Contraction],
    ridge: float,
    means: tuple[Tensor, Tensor] | None,
) -> float:
    """Solve for one weight, and its bias or the mean of the norm that follows.

    Args:
        calls: of the small model, one for each batch.
        targets: of the dense model.
        ridge: see ``RIDGE``.
        means: of the norm that follows at once, in the small and in the dense model.

    Returns:
        The part of the targets' variance that is not explained.
    """
    first = calls[0]
    before = first.matrix().float()
    used = (before != 0).any(1).any(0)
    if before.shape[0] > 1:
        used = torch.ones_like(used)
    if not used.any():
        return 1.0
    shifts = first.bias is not None or means is not None
    sums = _Sums()
    wanted = max(MIN_ROWS, ROWS_PER_COLUMN * int(used.sum()))
    for call, target in zip(calls, targets, strict=True):
        places = _sample(call.rows_in_all, -(-wanted // len(calls)), call.inputs.device)
        sums.add(call.rows(places, used), target.results(_output(target), places))
    alone = (before != 0).any(1)[:, used]  # of several groups, each has zeros of its own
    matrix, shift, missing = sums.solve(before[:, :, used], alone, ridge, shifts)
    new = torch.zeros_like(before)
    new[:, :, used] = matrix
    first.write(new.to(first.weight.dtype))
    if first.bias is not None:
        first.bias.copy_(shift.flatten())
    elif means is not None:  # norm(x + shift) is the norm with its mean moved
        means[0].copy_(means[1] - shift.flatten())
    return missing


def _output(call: Contraction) -> Tensor:
    if call.output is None:
        raise CompactionError(f"{call.name}: the dense model's output was not recorded")
    return call.output


def _sample(rows: int, wanted: int, device: torch.device) -> Tensor:
    """Some rows, the same in every run."""
    if rows <= wanted:
        return torch.arange(rows, device=device)
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(rows, (wanted,), generator=generator).to(device)


class _Sums:
    """Sums over rows, by group: of X, Y, X^T X, X^T Y and Y^2."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.movedim(1, 0), y.movedim(1, 0)  # [group, row, ...]
        new = x.sum(1), y.sum(1), x.mT @ x, x.mT @ y, y.square().sum(1)
        if self.rows:
            self.sums = tuple(a + b for a, b in zip(self.sums, new, strict=True))
        else:
            self.sums = new
        self.rows += x.shape[1]

    def solve(
        self, before: Tensor, alone: Tensor, ridge: float, shifts: bool
    ) -> tuple[Tensor, Tensor, float]:
        """The new matrix, what has to be added to its products, and the part not explained."""
        x, y, xx, xy, yy = (s.double() / self.rows for s in self.sums)
        yy = (yy - y.square()).sum() if shifts else yy.sum()
        if shifts:
            xx = xx - x[:, :, None] * x[:, None, :]
            xy = xy - x[:, :, None] * y[:, None, :]
        xx = xx * alone[:, :, None] * alone[:, None, :]
        xy = xy * alone[:, :, None]
        old = before.double().mT
        hold = ridge * xx.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
        held = xx + hold[:, None, None] * torch.eye(xx.shape[-1], dtype=xx.dtype, device=xx.device)
        new = torch.linalg.solve(held, xy + hold[:, None, None] * old)
        left = yy - 2 * (new * xy).sum() + (new * (xx @ new)).sum()
        shift = y - (x[:, None, :] @ new)[:, 0] if shifts else torch.zeros_like(y)
        return new.mT.float(), shift.float(), float(left / yy.clamp(min=1e-30))


def _calls(model: nn.Module, batch: Any, loss: Loss) -> list[tuple[str, str | None]]:
    """Every contraction of a call, in order, with the running mean of a norm right behind it."""
    walk = _Walk(model, batch, loss, after=True)
    found: list[tuple[str, str | None]] = []
    while (call := walk.advance()) is not None:
        found.append((call.name, None))
    for k, name in walk.norms.items():
        found[k] = found[k][0], name
    return found


def _expect(call: Contraction | None, name: str) -> Contraction:
    if call is None or call.name != name:
        found = "none" if call is None else call.name
        raise CompactionError(
            f"re-fitting needs the same layers in every call: {name} was expected, and {found} "
            "came; the forward of the model depends on its inputs"
        )
    return call


class _Stop(BaseException):
    """Ends a forward pass that is not needed any more."""


class _Walk(TorchFunctionMode):
    """One call of ``loss(model, batch)``, in a thread that waits at each contraction.

    Only one of all threads runs at a time, when ``advance`` lets it.

    Args:
        model: without gates.
        batch: for ``loss``.
        loss: calls the model.
        after: wait after the operator, with its output; otherwise before it.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, *, after: bool) -> None:
        super().__init__()
        self.after = after
        self.norms: dict[int, str] = {}
        self._names = {id(p): n for n, p in reversed([*model.named_parameters(remove_duplicate=False)])}
        self._buffers = {id(b): n for n, b in model.named_buffers()}
        self._last: tuple[int, Tensor] | None = None
        self._count = 0
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._come: SimpleQueue[Contraction | BaseException | None] = SimpleQueue()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        work = (model, batch, loss, device, torch.get_default_device())
        self._thread = threading.Thread(target=self._work, args=work, daemon=True)
        self._thread.start()

    def advance(self) -> Contraction | None:
        """Go on to the next contraction; None at the end."""
        self._go.put(True)
        found = self._come.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """Leave the forward pass where it is."""
        self._go.put(False)
        self._thread.join()

    def _wait(self) -> None:
        if not self._go.get():
            raise _Stop

    def _work(
        self, model: nn.Module, batch: Any, loss: Loss, device: torch.device, default: torch.device
    ) -> None:
        try:
            self._wait()
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.no_grad(), default, self:
                loss(model, batch)
            self._come.put(None)
        except _Stop:
            return
        except BaseException as error:
            self._come.put(error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Wait where a parameter is multiplied; note where a norm follows at once."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            self._note_norm(args, kwargs)
        call = read_contraction(func, args, kwargs, self._names)
        if call is None:
            return func(*args, **kwargs)
        if not self.after:
            self._come.put(call)
            self._wait()
        output = func(*args, **kwargs)
        if self.after:
            call.output = output
            self._last = self._count, output
            self._count += 1
            self._come.put(call)
            self._wait()
        return output

    def _note_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "running_mean"), args, strict=False)) | kwargs
        name = self._buffers.get(id(given.get("running_mean")))
        if self._last is not None and given["input"] is self._last[1] and name is not None:
            self.norms[self._last[0]] = name


@contextmanager
def _walking(
    model: nn.Module, batches: Sequence[Any], loss: Loss, *, after: bool
) -> Iterator[list[_Walk]]:
    """A walk for each batch; none is left waiting."""
    walks = [_Walk(model, batch, loss, after=after) for batch in batches]
    try:
        yield walks
    finally:
        for walk in walks:
            walk.stop()
