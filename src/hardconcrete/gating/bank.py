"""The bank: one flat ``log_alpha`` for all gates of a model, and the values they have right now."""

import inspect
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.distributions import HardConcrete, Rectified
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating.checkpointing import (
    Draws,
    in_backward,
    loses_gradients,
    refuse_reentrant,
)
from hardconcrete.gating.compilation import if_own, in_graph

Gate = Callable[[Tensor], Rectified]
Values = tuple[Tensor, ...]
"""Values of all gates, one tensor per group."""

Held = tuple[Values | None, Tensor | None, Values | None]
"""What modules in training see; all of it, unless compiled code has drawn it; what others see."""

FLAT = (Rectified.rsample, Rectified.icdf, HardConcrete.rsample, HardConcrete.icdf)
"""How gates are drawn; what else a subclass may do has perhaps a gradient where it is shut."""

HISTORY = ("original", "checks")
"""What units were removed in training, and which may be next."""


class GateBank(nn.Module):
    """All gates of a model: their locations, their distribution and their current values.

    A drawn z belongs to one call. It is held while the call lasts and is no part of a copy, a
    pickle or a state_dict.

    Attributes:
        log_alpha: the locations, one flat parameter.
        original: where units were removed in training, the place that each gate that is left had
            among all of them; else None.
        checks: for how many checks in a row ``shrink`` has found each gate shut; None before.
        tables: which gate each index of a dimension has, where it is not one each. Neither these
            nor the two above are buffers: averages of models average those, integers too.
        held: the values that a call holds now.
        flat: whether a gate that is shut has no gradient, as a rectified sample has none.
        measured: the number of the budget by importance that measures the gates, 0 for none. Under
            one, training uses gates of 0 and 1: those that the readout opens are 1.
        measuring: whether log_alpha then gets the gradient of the gates. It costs some time, and is
            not needed in every step; a CUDA graph that is captured always has it.
    """

    generator: torch.Generator | None
    held: Held | None
    _draws: Draws

    def __init__(self, log_alpha: Tensor, sizes: Sequence[int], gate: Gate, rule: str) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(log_alpha)
        self.sizes = tuple(sizes)
        self.gate = gate
        self.rule = rule
        self.frozen = False
        self.measured, self.measuring = 0, True
        self.learnt: tuple[str, ...] = ()  # what was not fixed when the gates were frozen
        self.original: Tensor | None = None
        self.checks: Tensor | None = None
        self.tables: list[Tensor] = []
        self.seen: set[tuple[nn.Module, str]] | None = None
        self.__dict__.update(_nothing_held())
        if not callable(gate):
            raise ArgumentError(f"gate must be callable on log_alpha, not a {type(gate).__name__}")
        _refuse_signature(gate)
        gates = gate(self.log_alpha.detach())
        _refuse_unusable(gates, self.log_alpha, rule)
        kind = type(gates)
        self.flat = kind.rsample in FLAT and kind.icdf in FLAT

    def distribution(self) -> Rectified:
        """q(z | phi) of every gate, for the present locations."""
        if self.gate is HardConcrete:  # a check of values would wait for the device on each step
            return HardConcrete(self.log_alpha, validate_args=False)
        return self.gate(self.log_alpha)

    def open_probability(self) -> Tensor:
        """P(open) of every gate."""
        if self.gate is HardConcrete:
            return _open(self.log_alpha)
        return self.distribution().open_probability

    def readout(self) -> Tensor:
        """The test-time value of every gate."""
        return self.distribution().readout(self.rule)

    def draw(self, shape: tuple[int, ...] = ()) -> Tensor:
        """A sample of every gate, or the readout where the gates are frozen."""
        if self.frozen:
            return self.readout().detach().expand(*shape, -1)
        if self.measured:
            return self._constant().expand(*shape, -1)
        if self.gate is HardConcrete and self.generator is None:
            return _sample(self.log_alpha, shape)
        return self.distribution().rsample(shape, generator=self.generator)

    def _constant(self) -> Tensor:
        """1 for each gate that the readout opens, else 0; as a draw."""
        z = (self.readout().detach() > 0).to(self.log_alpha.dtype)
        if not torch.is_grad_enabled() or not (self.measuring or _is_capturing(z)):
            return z
        return z + (self.log_alpha - self.log_alpha.detach())  # zeros, with the slope of z

    def holding(self, drawn: Tensor | None, read: Tensor | None) -> "Holding":
        """While this lasts, modules in training see ``drawn`` and others see ``read``."""
        return Holding(self, drawn, read)

    def by_group(self, z: Tensor) -> Values:
        """Taken apart in one operation: slices would each be differentiated on their own."""
        return z.split_with_sizes(self.sizes, dim=-1)

    def values(self, training: bool) -> Values:
        """The gates as a module reads them now: a draw in training, else the readout."""
        drawn, outside, read = self.held or (None, None, None)
        if not training or (drawn is None and read is not None):
            return self.by_group(self.readout()) if read is None else read
        compiling = torch.compiler.is_compiling()
        if not compiling and in_backward():
            frozen = self.readout().detach() if self.frozen else None
            return self.by_group(self._draws.recomputed(frozen))
        if drawn is None:
            raise GateError(
                "gates have no value here: in training they are drawn for one call of the "
                "GatedModel; call it instead of its inner model, itself in training, put other "
                "methods inside `with gated.draw():`, or call gated.eval() for the test-time "
                "values. (Around layers that are compiled on their own, a checkpoint has to be "
                "compiled with them.)"
            )
        if compiling:
            return drawn if outside is None else self._if_own(drawn, outside)
        if loses_gradients(drawn[0]):
            refuse_reentrant()
        if self._draws.told != get_ident():
            self._draws.tell()
        return drawn

    def _if_own(self, values: Values, drawn: Tensor) -> Values:
        """A draw for compiled code that was made outside of it; by group, and whole."""
        exporting = torch.compiler._is_exporting_flag  # in torch 2.11 is_exporting() is always true
        if exporting or torch._C._functorch.maybe_current_level() is not None:
            return values  # nothing is recomputed there
        lost = loses_gradients(drawn)
        one = if_own(drawn.detach(), self._draws.number, self.frozen, lost)
        return tuple(z * one for z in values)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves to other devices, and never to another precision."""

        def moved(tensor: Tensor) -> Tensor:  # gradients, and what a gate learns, come here too
            found: Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        for name, values in self._history().items():
            setattr(self, name, values.to(self.log_alpha.device))
        self.tables[:] = [table.to(self.log_alpha.device) for table in self.tables]
        return self

    def _history(self) -> dict[str, Tensor]:
        """What ``shrink`` keeps here."""
        found = {name: getattr(self, name) for name in HISTORY}
        return {name: values for name, values in found.items() if values is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        history = self._history().items()  # copies: some averages write into what they find here
        destination.update({prefix + name: values.clone() for name, values in history})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """The history, too; by now the model has been shrunk to it."""
        rest = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in HISTORY}
        own = prefix + "log_alpha"
        if own in rest:  # never in another precision, also where a state is assigned
            rest[own] = rest[own].to(self.log_alpha.dtype)
        super()._load_from_state_dict(rest, prefix, *args)
        checks = state_dict.get(prefix + "checks")
        self.checks = None if checks is None else checks.to(self.log_alpha.device).clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_nothing_held()}


@in_graph
def _sample(log_alpha: Tensor, shape: tuple[int, ...]) -> Tensor:
    return HardConcrete(log_alpha, validate_args=False).rsample(shape)


@in_graph
def _open(log_alpha: Tensor) -> Tensor:
    return HardConcrete(log_alpha, validate_args=False).open_probability


class Holding:
    """A context manager in which a bank holds values.

    Not one made of a generator, and not by the setter of modules: compiled code would check, before
    each call, all that those look at.
    """

    def __init__(self, bank: GateBank, drawn: Tensor | None, read: Tensor | None) -> None:
        self._bank, self._drawn, self._read = bank, drawn, read

    def __enter__(self) -> None:
        bank, drawn, read = self._bank, self._drawn, self._read
        compiling = torch.compiler.is_compiling()
        self._before = bank.held
        self._noted = None  # or which draw whatever is recomputed of the call later shall see
        if drawn is not None and not compiling:
            self._noted = bank._draws.enter(drawn, bank.frozen)
        held = (
            None if drawn is None else bank.by_group(drawn),
            None if compiling else drawn,
            None if read is None else bank.by_group(read),
        )
        object.__setattr__(bank, "held", None if drawn is None and read is None else held)

    def __exit__(self, *_: object) -> None:
        object.__setattr__(self._bank, "held", self._before)
        if self._drawn is not None and not torch.compiler.is_compiling():
            self._bank._draws.leave(self._noted)


def _is_capturing(z: Tensor) -> bool:
    """Whether a CUDA graph is captured, which will be replayed in all steps."""
    if torch.compiler.is_compiling() or not z.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def _nothing_held() -> dict[str, Any]:
    """The attributes that no copy carries along."""
    return {
        "held": None,
        "_draws": Draws(),
        "generator": None,
    }


def _refuse_signature(gate: Gate) -> None:
    """Refuse what takes nothing, or more than log_alpha."""
    try:
        inspect.signature(gate).bind(None)
    except TypeError as error:
        raise ArgumentError(f"gate must be callable on log_alpha alone: {error}") from error
    except ValueError:  # some builtins do not tell
        return


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
