"""The bank: the parameters of all gates of a model, and the values the gates have right now."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from hardconcrete.distributions import HardConcrete, Rectified
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating.budget_mask import BudgetMask
from hardconcrete.gating.checkpointing import (
    Draws,
    in_backward,
    loses_gradients,
    refuse_reentrant,
)
from hardconcrete.gating.compilation import check_draw, in_graph
from hardconcrete.gating.holding import Held, Holding, Values
from hardconcrete.gating.products import is_transformed
from hardconcrete.sparsifiers import GateParameters, RectifiedGates, Sparsifier

HISTORY = ("original", "checks")
"""What ``shrink`` keeps in the bank: the units that it removed, and those that may be next."""


class GateBank(nn.Module):
    """All gates of a model: their parameters, their family and their current values.

    A drawn z belongs to one call. It is held while the call lasts and is no part of a copy, a
    pickle or a state_dict.

    The parameters of the gates are attributes of the bank under the names that the family gives
    them.

    Args:
        parameters: the first parameters, as ``Sparsifier.start`` gives them.
        sizes: the number of gates of each group.
        family: of the gates.
        rule: of the readout.

    Attributes:
        family: the ``Sparsifier`` of the gates.
        gate: what makes rectified gates, else the family; registered if it is a module.
        original: where units were removed in training, the place that each remaining gate had
            among all of them; else None.
        checks: for how many checks in a row ``shrink`` has seen each gate closed; None before.
        tables: which gate each index of a dimension has, where it is not one each. Neither these
            nor the two above are buffers: averages of models average those, integers too.
        held: the values that a call holds now.
        log_variances: of the noise of each gated parameter, where the family has noise.
        flat: whether a closed gate has no gradient (``Sparsifier.is_flat``).
        measured: the number of the budget by importance that measures the gates, 0 for none. Under
            one, training uses the gates of ``budget_mask``.
        budget_mask: the gates with which a budget by importance trains; None without one.
        measuring: whether ``location`` then gets the gradient of the gates. It costs some time, and
            is not needed in every step; a CUDA graph that is captured always has it.
    """

    family: Sparsifier
    log_alpha: nn.Parameter  # typed for you; only rectified gates have it
    generator: torch.Generator | None
    held: Held | None
    draws: Draws

    def __init__(
        self, parameters: GateParameters, sizes: Sequence[int], family: Sparsifier, rule: str
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.gate = family.gate if isinstance(family, RectifiedGates) else family
        self.__dict__["family"] = family  # not as a module: ``gate`` is registered
        self.rule = rule
        self.frozen = family.constant
        self.measured, self.measuring = 0, True
        self.budget_mask: BudgetMask | None = None
        self.learned: tuple[str, ...] = ()  # what was not fixed when the gates were frozen
        self.original: Tensor | None = None
        self.checks: Tensor | None = None
        self.tables: list[Tensor] = []
        self.seen: set[tuple[nn.Module, str]] | None = None
        self.__dict__.update(_no_values())
        with torch.no_grad():
            family.refuse_parameters(parameters, rule)
            self.flat = family.is_flat(parameters)
        self.log_variances: nn.ParameterDict | None = None
        self.names = tuple(parameters)
        for name, values in parameters.items():
            self._refuse_parameter(name, values)
            if name in family.fixed:
                self.register_buffer(name, values)
            else:
                self.register_parameter(name, nn.Parameter(values))

    def _refuse_parameter(self, name: str, values: Tensor) -> None:
        """Refuse names that the bank uses, and another number of gates."""
        family = type(self.family).__name__
        if not name.isidentifier() or hasattr(type(self), name) or hasattr(self, name):
            raise ArgumentError(
                f"{family} gates cannot have a parameter {name!r}: the bank of the gates needs "
                "another name as its attribute"
            )
        if len(values) != sum(self.sizes):
            raise ArgumentError(
                f"{family}.start must give one entry per gate, and {name} has {len(values)} for "
                f"{sum(self.sizes)} gates"
            )

    def gate_parameters(self) -> dict[str, Tensor]:
        """The parameters of the gates, as the family takes them."""
        return {name: getattr(self, name) for name in self.names}

    @property
    def count(self) -> int:
        """The number of gates."""
        return len(self._first)

    @property
    def device(self) -> torch.device:
        """Where the gates are."""
        return self._first.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the gates."""
        return self._first.dtype

    @property
    def _first(self) -> Tensor:
        first: Tensor = getattr(self, self.names[0])
        return first

    @property
    def location(self) -> Tensor:
        """The parameter that places the gates (``Sparsifier.location``)."""
        if self.family.location is None:
            raise GateError(f"{type(self.family).__name__} gates have no location parameter")
        location: Tensor = getattr(self, self.family.location)
        return location

    def moved_to(self, location: Tensor) -> dict[str, Tensor]:
        """The parameters of the gates with another ``location``."""
        return {**self.gate_parameters(), cast(str, self.family.location): location}

    def openness(self) -> Tensor:
        """A number that is larger the more open a gate is, without gradient."""
        return self.ranking() if self.family.location is None else self.location.detach()

    def ranking(self) -> Tensor:
        """Numbers from 0 on, larger for units that are better kept (``Sparsifier.ranking``)."""
        return self.family.ranking(self.gate_parameters()).detach()

    @property
    def learns(self) -> bool:
        """Whether a parameter of the gates is learned, frozen or not."""
        return self.family.has_noise or any(n not in self.family.fixed for n in self.names)

    @torch.no_grad()
    def spread(self) -> None:
        """Let the family add its noise to new gates, group by group."""
        parts = {name: self.by_group(values) for name, values in self.gate_parameters().items()}
        for group in range(len(self.sizes)):
            self.family.spread({name: values[group] for name, values in parts.items()})

    @torch.no_grad()
    def set_open(self, is_open: Tensor) -> None:
        """Open and close gates with certainty."""
        for name, values in self.family.certain(is_open).items():
            getattr(self, name).copy_(values)

    def set_budget_mask(self, is_open: Tensor) -> None:
        """Draw these gates of 0 and 1 from now on, as a budget by importance wants it."""
        if self._mask is None:
            self.budget_mask = BudgetMask(is_open, self.sizes, self.dtype)
        else:
            self._mask.set(is_open, self.sizes)

    @property
    def _mask(self) -> BudgetMask | None:
        """The mask of the budget; None where ``shrink`` has removed units since."""
        known = self.budget_mask
        return known if known is not None and len(known.values) == self.count else None

    def open_groups(self) -> frozenset[int]:
        """The groups whose gates are all 1 in the next draw, as far as the host knows.

        Compiled code and CUDA graphs would keep that, and transforms need each product.
        """
        if torch.compiler.is_compiling() or not self.measured or self._mask is None:
            return frozenset()
        no_shortcut = is_transformed() or _is_capturing(self._first)
        return frozenset() if no_shortcut else self._mask.open_groups

    def can_be_left_out(self, groups: frozenset[int]) -> bool:
        """Whether a call runs in which all gates of these groups are 1, without gradients."""
        held = self.held
        return (
            held is not None
            and not torch.compiler.is_compiling()  # it would keep the answer
            and held[3].issuperset(groups)
            and held[1] is not None
            and not held[1].requires_grad
            and not in_backward()
        )

    def groups_at_one(self, training: bool) -> frozenset[int]:
        """The groups whose gates in ``values(training)`` are all 1 for certain."""
        if not training or not self.measured or torch.compiler.is_compiling():
            return frozenset()
        if in_backward():
            return self.open_groups()
        return self.held[3] if self.held else frozenset()

    def distribution(self) -> Rectified:
        """q(z | phi) of every gate, of a family of rectified gates."""
        if self.gate is HardConcrete:  # a check of values would wait for the device on each step
            return HardConcrete(self.location, validate_args=False)
        if not isinstance(self.family, RectifiedGates):
            raise GateError(
                f"{type(self.family).__name__} gates have no Rectified distribution: ask the bank "
                "for open_probability(), mean() or readout()"
            )
        return self.family.distribution(self.gate_parameters())

    def open_probability(self) -> Tensor:
        """P(open) of every gate."""
        if self.gate is HardConcrete:
            return _open(self.location)
        return self.family.open_probability(self.gate_parameters())

    def mean(self) -> Tensor:
        """E[z] of every gate."""
        return self.family.mean(self.gate_parameters())

    def readout(self) -> Tensor:
        """The test-time value of every gate."""
        if self.gate is HardConcrete:
            return self.distribution().readout(self.rule)
        return self.family.readout(self.gate_parameters(), self.rule)

    @torch.no_grad()
    def is_open(self) -> Tensor:
        """Whether the unit of each gate stays, as booleans."""
        return self.family.is_open(self.gate_parameters(), self.rule)

    def draw(self, shape: tuple[int, ...] = ()) -> Tensor:
        """A sample of every gate, or the readout where the gates are frozen."""
        if self.measured:
            return self._zero_or_one().expand(*shape, -1)
        if self.frozen:
            return self.readout().detach().expand(*shape, -1)
        if self.gate is HardConcrete and self.generator is None:
            return _sample(self.location, shape)
        return self.family.sample(self.gate_parameters(), shape, self.generator)

    def _zero_or_one(self) -> Tensor:
        """The mask as a draw."""
        z = self.is_open().to(self.dtype) if self._mask is None else self._mask.values
        learns = torch.is_grad_enabled() and not self.frozen
        if not learns or not (self.measuring or _is_capturing(z)):
            return z
        return z + (self.location - self.location.detach())  # zeros, with the slope of z

    def freeze(self, frozen: bool) -> None:
        """Fix the gates at their readout, or let them learn again what they learned before."""
        if frozen and not self.frozen:
            self.learned = tuple(n for n, p in self.named_parameters() if p.requires_grad)
        self.frozen = frozen or self.family.constant
        for name in self.learned:
            parameter = self.get_parameter(name).requires_grad_(not frozen)
            if frozen:
                parameter.grad = None  # else an optimizer applies the last one again

    def holding(
        self, drawn: Tensor | None, read: Tensor | None, at_one: frozenset[int] = frozenset()
    ) -> "Holding":
        """A context in which modules in training see ``drawn``, and others see ``read``.

        Of the groups ``at_one`` all drawn gates are 1.
        """
        return Holding(self, drawn, read, at_one)

    def is_constant(self, drawn: Tensor) -> bool:
        """Whether a draw is the same until the gates are written, so that nothing tracks it."""
        alike = self.frozen or self.family.noiseless
        return alike or (bool(self.measured) and not drawn.requires_grad)

    def by_group(self, z: Tensor) -> Values:
        """One tensor per group. One split is faster than slices, which have a gradient each."""
        return z.split_with_sizes(self.sizes, dim=-1)

    def values(self, training: bool) -> Values:
        """The gates that a module multiplies with now: a draw in training, else the readout."""
        drawn, outside, read = self.held[:3] if self.held else (None, None, None)
        if not training or (drawn is None and read is not None):
            return self.by_group(self.readout()) if read is None else read
        compiling = torch.compiler.is_compiling()
        if not compiling and in_backward():
            return self.by_group(self.draws.recomputed(self._constant()))
        if drawn is None:
            raise GateError(
                "gates have no value here: in training they are drawn for one call of the "
                "GatedModel; call it instead of its inner model, itself in training, put other "
                "methods inside `with gated.draw():`, or call gated.eval() for the test-time "
                "values. (Compile an activation checkpoint together with the layers in it.)"
            )
        if compiling:
            return drawn if outside is None else self._checked_draw(drawn, outside)
        if loses_gradients(drawn[0]):
            refuse_reentrant()
        if self.draws.recorded_thread != get_ident():
            self.draws.record_again()
        return drawn

    def _constant(self) -> Tensor | None:
        """The gates of all draws without gradients, if they are the same in each."""
        if self.measured and self._mask is not None:
            return self._mask.recomputed()
        if self.measured:
            return self.is_open().to(self.dtype)
        return self.draw().detach() if self.frozen or self.family.noiseless else None

    def _checked_draw(self, values: Values, drawn: Tensor) -> Values:
        """A draw that compiled code did not make, by group; ``drawn`` holds all groups."""
        exporting = torch.compiler._is_exporting_flag  # in torch 2.11 is_exporting() is always true
        if exporting or torch._C._functorch.maybe_current_level() is not None:
            return values  # nothing is recomputed there
        lost = loses_gradients(drawn)
        constant = self.is_constant(drawn)
        one = check_draw(drawn.detach(), self.draws.number, constant, lost)
        return tuple(z * one for z in values)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move to another device, and never to another precision."""

        def moved(tensor: Tensor) -> Tensor:  # gradients, and parameters of the family, come too
            result: Tensor = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        for name, values in self._history().items():
            setattr(self, name, values.to(self.device))
        self.tables[:] = [table.to(self.device) for table in self.tables]
        if self.budget_mask is not None:
            self.budget_mask.to(self.device)
        return self

    def _history(self) -> dict[str, Tensor]:
        """The tensors of ``HISTORY`` that exist."""
        history = {name: getattr(self, name) for name in HISTORY}
        return {name: values for name, values in history.items() if values is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        history = self._history().items()  # copies, for some averages write into a state
        destination.update({prefix + name: values.clone() for name, values in history})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load the history, too; the model was shrunk to it before."""
        rest = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in HISTORY}
        for name, values in self.gate_parameters().items():
            if prefix + name in rest:  # never in another precision, also where a state is assigned
                rest[prefix + name] = rest[prefix + name].to(values.dtype)
        super()._load_from_state_dict(rest, prefix, *args)
        if self.budget_mask is not None:
            self.set_budget_mask(self.is_open())
        checks = state_dict.get(prefix + "checks")
        self.checks = None if checks is None else checks.to(self.device).clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_no_values()}


@in_graph
def _sample(location: Tensor, shape: tuple[int, ...]) -> Tensor:
    return HardConcrete(location, validate_args=False).rsample(shape)


@in_graph
def _open(location: Tensor) -> Tensor:
    return HardConcrete(location, validate_args=False).open_probability


def _is_capturing(z: Tensor) -> bool:
    """Whether a CUDA graph is captured: all steps will replay it."""
    if torch.compiler.is_compiling() or not z.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def _no_values() -> dict[str, Any]:
    """The attributes that no copy gets."""
    return {
        "held": None,
        "draws": Draws(),
        "generator": None,
    }
