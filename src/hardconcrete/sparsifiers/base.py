"""What a family of gates offers.

A gate is a number z in [0, 1] that multiplies the weights of a unit. A family says which parameters
a gate has, how z is drawn from them in training, and which value z has at test time. The rest of
the library (costs, penalties, budgets, shrinking, compaction, files) asks the family and never
reads its parameters.

A family has no state for single gates. Its methods take the parameters of all gates as a mapping:
each tensor is one-dimensional and has one entry per gate. The ``GateBank`` owns these tensors,
moves them, saves them and cuts them when units are removed. What all gates share, such as a learned
temperature, belongs to the family: make it an ``nn.Module`` too, and the bank registers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.unit_weights import UnitWeights

GateParameters = Mapping[str, Tensor]
"""The parameters of all gates by name, each with one entry per gate."""


class Sparsifier(ABC):
    """A family of gates. Pass an instance to ``attach_gates(method=...)``.

    Attributes:
        readouts: the rules that ``readout`` knows, the default first.
        location: name of the parameter that places a gate: the larger it is, the more open is the
            gate. Budgets by importance write dL/dz into its gradient, and ``check_run`` follows it.
            None for gates that cannot be moved.
        fixed: names of the parameters that are not learned; the bank keeps them as buffers.
        constant: whether a draw is always the readout.
        noiseless: whether every draw is the same, without a gradient.
        has_l0: whether gates are 0 in some draws, so that ``open_probability`` has a gradient.
            ``L0Penalty`` and budgets by gates need it.
        droprate: where gates start if the user does not say so; None for the library's defaults.
        has_noise: whether each gated weight has Gaussian noise in training, whose variance is
            learned. The bank keeps the logarithms of the variances.
        log_variance: where these begin.
        per_weight: whether units are single weights: ``sites="auto"`` then gates each weight of
            dense and convolutional layers.
        reads_weights: whether ``complexity`` needs the weights.

    Example:
        >>> import hardconcrete as hc
        >>> class Mask(Sparsifier):
        ...     readouts, fixed, constant = ("mask",), ("mask",), True
        ...     def start(self, droprate):
        ...         return {"mask": (droprate < 0.5).float()}
        ...     def sample(self, parameters, shape, generator=None):
        ...         return parameters["mask"].expand(*shape, -1)
        ...     def open_probability(self, parameters):
        ...         return parameters["mask"]
        ...     def readout(self, parameters, rule):
        ...         return parameters["mask"]
        ...     def certain(self, is_open):
        ...         return {"mask": is_open.float()}
        >>> layers = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), method=Mask())
        >>> _ = gated.gates.mask.copy_(torch.tensor([1.0, 0.0, 1.0]))
        >>> hc.compact(gated)[0]
        Linear(in_features=4, out_features=2, bias=True)
    """

    readouts: ClassVar[tuple[str, ...]]
    location: ClassVar[str | None] = None
    fixed: ClassVar[tuple[str, ...]] = ()
    constant: ClassVar[bool] = False
    noiseless: ClassVar[bool] = False
    has_l0: ClassVar[bool] = True
    droprate: ClassVar[float | None] = None
    has_noise: ClassVar[bool] = False
    log_variance: ClassVar[float] = -9.0
    per_weight: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False

    @abstractmethod
    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """The parameters to begin with, in floating point.

        Args:
            droprate: one probability per gate, in float64. How the parameters follow from it is the
                choice of the family; the gate should be open more often where it is smaller.
        """

    def spread(self, parameters: GateParameters) -> None:  # noqa: B027  (most families need none)
        """Add noise to new parameters of one group, in place, so that no two gates are equal."""

    @abstractmethod
    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw z of shape ``(*shape, gates)``, differentiable where the gates are learned."""

    @abstractmethod
    def open_probability(self, parameters: GateParameters) -> Tensor:
        """P(z != 0) of every gate, differentiable: the term that the L0 penalty sums (eq. 6).

        Of a family without ``has_l0`` it is 1 for a unit that stays, and 0 for one that goes.
        """

    def ranking(self, parameters: GateParameters) -> Tensor:
        """Numbers from 0 on, larger for a unit that is better kept, where some must be chosen."""
        return self.open_probability(parameters)

    def mean(self, parameters: GateParameters) -> Tensor:
        """E[z] of every gate. The default is for gates of 0 and 1."""
        return self.open_probability(parameters)

    def variance(self, parameters: GateParameters) -> Tensor:
        """Var[z] of every gate. Families with ``has_noise`` give it."""
        raise NotImplementedError(f"{type(self).__name__} has noise and must define variance")

    @abstractmethod
    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """The value of every gate at test time, by one of the rules in ``readouts``."""

    def is_open(self, parameters: GateParameters, rule: str) -> Tensor:
        """Whether the unit of each gate stays, as booleans."""
        return self.readout(parameters, rule) > 0

    def is_flat(self, parameters: GateParameters) -> bool:  # noqa: ARG002
        """Whether a closed gate has no gradient: layers then skip its computation."""
        return False

    @abstractmethod
    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Parameters of gates that are open or closed with certainty, on the device of ``is_open``.

        Under every rule their readout is 1 or 0, where the family can read out 1 and 0.
        """

    def removed(self, is_open: Tensor) -> dict[str, Tensor]:
        """Parameters of gates whose units were removed; ``is_open`` is False for all of them."""
        return self.certain(is_open)

    def divergence(self, parameters: GateParameters, prior: Any) -> Tensor:  # noqa: ARG002
        """The family's term of a penalty with a prior: KL(q(z) || p(z)) of every gate."""
        return torch.zeros_like(self.open_probability(parameters))

    @property
    def has_penalty(self) -> bool:
        """Whether the family has a penalty of its own, its ``complexity``."""
        return type(self).complexity is not Sparsifier.complexity

    def complexity(
        self,
        parameters: GateParameters,  # noqa: ARG002
        weights: UnitWeights,  # noqa: ARG002
    ) -> Tensor:
        """The family's own penalty of every gate, in nats for all examples; see ``MethodPenalty``.

        It is a divergence from the prior of the family's paper, or a norm of the weights.
        """
        raise ArgumentError(
            f"{type(self).__name__} gates have no penalty of their own: use hc.L0Penalty(gated, "
            "lam) or hc.Budget"
        )

    def refuse_prior(self, parameters: GateParameters, prior: Any) -> None:  # noqa: ARG002
        """Raise an ``ArgumentError`` unless every gate has a finite divergence from this prior."""
        raise ArgumentError(
            f"{type(self).__name__} gates have no divergence from a prior: leave out prior="
        )

    def refuse_parameters(self, parameters: GateParameters, rule: str) -> None:
        """Raise an ``ArgumentError`` unless gates with these parameters can be drawn and read."""
        name = type(self).__name__
        if not isinstance(parameters, Mapping) or not parameters:
            raise ArgumentError(f"{name}.start gave no parameters; a gate needs one at least")
        first = next(iter(parameters.values()))
        for key, tensor in parameters.items():
            if tensor.dim() != 1 or not tensor.is_floating_point() or len(tensor) != len(first):
                raise ArgumentError(
                    f"{name}.start must give floating-point tensors with one entry per gate, and "
                    f"{key} is {tensor.dtype} of shape {list(tensor.shape)}"
                )
        for key in (*self.fixed, *([] if self.location is None else [self.location])):
            if key not in parameters:
                raise ArgumentError(
                    f"{name} names {key!r} in location or fixed, and start gives "
                    f"{', '.join(parameters)}"
                )
        if rule not in self.readouts:
            known = ", ".join(map(repr, self.readouts))
            raise ArgumentError(f"readout {rule!r} is not known to {name}; use one of {known}")
        self._refuse_results(parameters, rule)

    def _refuse_results(self, parameters: GateParameters, rule: str) -> None:
        """Call each method once, and refuse results of another shape. No random number is used."""
        name, first = type(self).__name__, next(iter(parameters.values()))
        closed = torch.zeros_like(first, dtype=torch.bool)
        with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []):
            results = {
                "open_probability(parameters)": self.open_probability(parameters),
                "mean(parameters)": self.mean(parameters),
                f"readout(parameters, {rule!r})": self.readout(parameters, rule),
                "sample(parameters, (2,))": self.sample(parameters, (2,)),
            }
        certain = self.certain(closed)
        if certain.keys() != parameters.keys():
            raise ArgumentError(
                f"{name}.certain gives {', '.join(certain)}, and start gives "
                f"{', '.join(parameters)}"
            )
        results |= {f"certain(is_open)[{key!r}]": values for key, values in certain.items()}
        for call, values in results.items():
            shape = (2, *first.shape) if call.startswith("sample") else tuple(first.shape)
            if tuple(values.shape) != shape or not values.is_floating_point():
                raise ArgumentError(
                    f"{name}.{call} must be floating-point of shape {list(shape)}, and is "
                    f"{values.dtype} of shape {list(values.shape)}"
                )
