"""The bank: one flat ``log_alpha`` for all gates of a model, and the values they have right now."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributions import Distribution

from hardconcrete.distributions import Rectified
from hardconcrete.errors import ArgumentError, GateError

Gate = Callable[[Tensor], Rectified]
Values = tuple[Tensor, ...]
"""Values of all gates, one tensor per group."""

REMEMBERED = 8
"""Draws that a recomputation in backward can still find."""


class GateBank(nn.Module):
    """All gates of a model: their locations, their distribution and their current values.

    A drawn z belongs to one call. It is held while the call lasts and is no part of a copy, a
    pickle or a state_dict.
    """

    generator: torch.Generator | None
    _drawn: Values | None
    _read: Values | None
    _recent: deque[tuple[Node, Values]]
    _owners: dict[Node, Values]

    def __init__(self, log_alpha: Tensor, sizes: list[int], gate: Gate, rule: str) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(log_alpha)
        self.sizes = sizes
        self.gate = gate
        self.rule = rule
        self.frozen = False
        self.seen: set[tuple[nn.Module, str]] | None = None
        self.__dict__.update(_nothing_held())
        if not callable(gate):
            raise ArgumentError(f"gate must be callable on log_alpha, not a {type(gate).__name__}")
        _refuse_unusable(gate(self.log_alpha.detach()), self.log_alpha, rule)

    def distribution(self) -> Rectified:
        """q(z | phi) of every gate, for the present locations."""
        if torch.compiler.is_compiling():
            return self.gate(self.log_alpha)
        with _without_validation():
            return self.gate(self.log_alpha)

    def readout(self) -> Tensor:
        """The test-time value of every gate."""
        return self.distribution().readout(self.rule)

    def draw(self, shape: tuple[int, ...] = ()) -> Tensor:
        """A sample of every gate, or the readout where the gates are frozen."""
        if self.frozen:
            return self.readout().detach().expand(*shape, -1)
        return self.distribution().rsample(shape, generator=self.generator)

    @property
    def held(self) -> bool:
        """Whether a call holds values now."""
        return self._drawn is not None or self._read is not None

    @contextmanager
    def holding(self, drawn: Tensor | None, read: Tensor | None) -> Iterator[None]:
        """While this lasts, modules in training see ``drawn`` and others see ``read``."""
        before = self._drawn, self._read
        self._drawn = None if drawn is None else self._by_group(drawn)
        self._read = None if read is None else self._by_group(read)
        if drawn is not None and not torch.compiler.is_compiling():
            if torch._C._current_graph_task_id() != -1 and drawn.requires_grad:
                self._refuse_another_draw(drawn)
            else:
                self._remember(drawn)
        try:
            yield
        finally:
            self._drawn, self._read = before

    def _remember(self, drawn: Tensor) -> None:
        self._owners.clear()
        # Under torch.func nothing is recomputed, and no leaf can be made.
        if drawn.grad_fn is not None and torch._C._functorch.maybe_current_level() is None:
            leaf = drawn.detach().requires_grad_()
            leaf.register_hook(_refuse_lost_gradient)
            self._recent.append((drawn.grad_fn, self._by_group(leaf)))

    def _refuse_another_draw(self, drawn: Tensor) -> None:
        if not torch.equal(torch.cat(self._of_recomputed_forward(), -1), drawn):
            raise GateError(
                "a recomputation in backward drew other gates than its forward: checkpoint with "
                "preserve_rng_state=True and without a generator, or checkpoint inside the model"
            )

    def _by_group(self, z: Tensor) -> Values:
        """Taken apart in one operation: slices would each be differentiated on their own."""
        return torch.split(z, self.sizes, dim=-1)

    def values(self, training: bool) -> Values:
        """The gates as a module reads them now: a draw in training, else the readout."""
        if not training or (self._drawn is None and self._read is not None):
            return self._by_group(self.readout()) if self._read is None else self._read
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return self._of_recomputed_forward()
        if self._drawn is None:
            raise GateError(
                "gates have no value here: in training they are drawn for one call of the "
                "GatedModel; call it instead of its inner model, put other methods inside "
                "`with gated.draw():`, or call gated.eval() for the test-time values"
            )
        return self._drawn

    def _of_recomputed_forward(self) -> Values:
        """The draw of the forward that activation checkpointing is recomputing in this backward.

        The node being differentiated lies in the graph of its own forward: from there only the
        draw of that forward can be reached.
        """
        if self.frozen:
            return self._by_group(self.readout().detach())
        node = torch._C._current_autograd_node()
        if node not in self._owners:
            visited = _reachable(node)
            draws = [z for source, z in self._recent if source in visited]
            if len(draws) != 1:
                raise GateError(
                    f"a recomputation in backward finds {len(draws)} draws of the gates that could "
                    "be its own: use checkpoint(..., use_reentrant=False), at most "
                    f"{REMEMBERED} forwards per backward, and no forward that feeds another one"
                )
            self._owners.update(dict.fromkeys(visited, draws[0]))
        return self._owners[node]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves to other devices, and never to another precision."""
        before = self.log_alpha.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.log_alpha.dtype != before.dtype:
            self.log_alpha.data = before.to(self.log_alpha.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_nothing_held()}


def _refuse_lost_gradient(_: Tensor) -> None:
    raise GateError(
        "reentrant activation checkpointing loses the gradients of the gates: use "
        "checkpoint(..., use_reentrant=False)"
    )


def _nothing_held() -> dict[str, Any]:
    """The attributes that no copy carries along."""
    return {
        "_drawn": None,
        "_read": None,
        "_recent": deque(maxlen=REMEMBERED),
        "_owners": {},
        "generator": None,
    }


def _reachable(node: Node) -> set[Node]:
    visited, waiting = {node}, [node]
    while waiting:
        for successor, _ in waiting.pop().next_functions:
            if successor is not None and successor not in visited:
                visited.add(successor)
                waiting.append(successor)
    return visited


@contextmanager
def _without_validation() -> Iterator[None]:
    """Checking arguments looks at their values: a synchronisation with the device on each step."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _refuse_unusable(gates: Rectified, log_alpha: Tensor, rule: str) -> None:
    if not isinstance(gates, Rectified):
        raise ArgumentError(
            f"gate must turn log_alpha into a Rectified, and gave {type(gates).__name__}"
        )
    if gates.batch_shape != log_alpha.shape:
        raise ArgumentError(
            f"gate must keep the shape of log_alpha, {list(log_alpha.shape)}, "
            f"and gave {list(gates.batch_shape)}"
        )
    gates.readout(rule)
