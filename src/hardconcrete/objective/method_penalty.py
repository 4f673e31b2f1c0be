"""The penalty that the paper of a method adds to the loss, for methods other than L0."""

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hardconcrete.arguments import refuse_no_number
from hardconcrete.errors import ArgumentError
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.gating.unit_weights import change_unit_weights, unit_weights
from hardconcrete.objective.budget import refuse_measured_gates
from hardconcrete.sparsifiers import MarkedUnits, UnitWeights
from hardconcrete.units import Group


class MethodPenalty:
    """The term of the method that the gates were attached with, for a mean loss in nats.

    It is the sum over gates of the divergence from the prior, or of the norm, that the paper of
    the method uses, divided by the number of examples. ``step()`` does what the method does after
    a step of the optimizer: a proximal step, and marking the units that go.

    Args:
        gated: the model, attached with such a method.
        examples: N, the number of training examples.
        optimizer: of the weights. A proximal step has its present learning rate; other methods do
            not need it.
        warm_up: steps in which the weight of the term rises from 0 to 1.
        strength: factor of the term. 1 is the bound of a Bayesian method.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), method="sbp")
        >>> penalty = hc.MethodPenalty(gated, examples=1000, warm_up=100)
        >>> loss = gated(torch.ones(2, 4)).square().mean() + penalty()
        >>> loss.backward()                 # then optimizer.step(), and
        >>> penalty.step()
    """

    def __init__(
        self,
        gated: GatedModel,
        examples: int,
        *,
        optimizer: Optimizer | None = None,
        warm_up: int = 0,
        strength: float = 1.0,
    ) -> None:
        if not isinstance(gated, GatedModel):
            raise ArgumentError(
                f"MethodPenalty takes what attach_gates returned, not a {type(gated).__name__}"
            )
        _refuse_numbers(examples, warm_up, strength)
        self.gated, self.examples = gated, int(examples)
        self.optimizer, self.warm_up, self.strength = optimizer, int(warm_up), strength
        self.steps = 0
        with torch.no_grad():
            self._complexity()
        if self._is_proximal and optimizer is None:
            raise ArgumentError(
                f"{type(gated.gates.family).__name__} takes a proximal step after each step of "
                "the optimizer, with its learning rate: pass optimizer="
            )

    @property
    def weight(self) -> float:
        """The present factor of the sum: strength / N, and less in the warm-up."""
        warm = min(1.0, self.steps / self.warm_up) if self.warm_up else 1.0
        return self.strength * warm / self.examples

    def __call__(self) -> Tensor:
        """The term. That of a proximal method has no gradient: ``step`` minimises it."""
        refuse_measured_gates(self.gated, "a MethodPenalty")
        total = self.weight * self._complexity().sum()
        return total.detach() if self._is_proximal else total

    @torch.no_grad()
    def step(self) -> None:
        """Take the proximal step of the method, if it has one, and mark the units that go."""
        self.steps += 1
        family, bank = self.gated.gates.family, self.gated.gates
        if not isinstance(family, MarkedUnits):
            return
        rates = self._rates(self.optimizer) if self.optimizer and family.proximal else []
        for group, rate in rates:
            shrunk = partial(family.shrunk, amount=self.weight * rate)
            change_unit_weights(self.gated, group, shrunk)
        stays = family.keeps(bank.gate_parameters(), unit_weights(self.gated))
        bank.get_buffer("mark").copy_(stays)

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: the position in the warm-up."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.steps = state["steps"]

    @property
    def _is_proximal(self) -> bool:
        family = self.gated.gates.family
        return isinstance(family, MarkedUnits) and family.proximal

    def _complexity(self) -> Tensor:
        bank = self.gated.gates
        weights = unit_weights(self.gated) if bank.family.reads_weights else UnitWeights(())
        return bank.family.complexity(bank.gate_parameters(), weights)

    def _rates(self, optimizer: Optimizer) -> list[tuple[Group, float]]:
        """The learning rate of the weights of each group."""
        rate = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
        named = dict(self.gated.model.named_parameters(remove_duplicate=False))
        rates: list[tuple[Group, float]] = []
        for group in self.gated.groups:
            found = {rate.get(id(named[name])) for name in group.gated_parameters}
            if len(found) != 1 or None in found:
                raise ArgumentError(
                    f"{group.name}: a proximal step needs one learning rate for "
                    f"{', '.join(group.gated_parameters)}, and the optimizer has "
                    f"{', '.join(map(str, found))}: pass the optimizer of these weights"
                )
            rates += [(group, value) for value in found if value is not None]
        return rates


def _refuse_numbers(examples: object, warm_up: object, strength: float) -> None:
    for name, value, least in (("examples", examples, 1), ("warm_up", warm_up, 0)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name}={value!r} must be a whole number, at least {least}")
    refuse_no_number(strength=strength)
    if not strength >= 0:
        raise ArgumentError(f"strength={strength} must not be negative")
