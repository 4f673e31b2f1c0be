"""Put gates on a model and take them off. Everything is checked before anything changes."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hardconcrete.errors import ArgumentError, HardConcreteError, SiteError
from hardconcrete.gating.activation_gates import with_activation_gates
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.class_swap import is_swapped, restore_all, swap
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.gating.groups import per_group
from hardconcrete.gating.module_gates import KEY, ModuleGates, Multiplier
from hardconcrete.gating.placement import placements
from hardconcrete.gating.select_groups import Patterns, SelectedGroups, select_groups
from hardconcrete.gating.sites import Site, each_weight
from hardconcrete.gating.weight_noise import log_variances
from hardconcrete.graph.example_inputs import as_inputs
from hardconcrete.graph.model_state import buffers_kept, in_mode
from hardconcrete.sparsifiers import Sparsifier, method_of
from hardconcrete.units import Group

TRACED_DROPRATE = 0.05
"""Of traced groups. The readout is exactly 1, so the outputs of a trained model do not change."""

SITE_DROPRATE = 0.5
"""Of named sites: the paper places them by hand and starts most of them here."""

Sample = Literal["batch", "example"]


@torch.inference_mode(False)  # gates learn, wherever they were attached
def attach_gates(
    model: nn.Module,
    example_inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    sites: str | Sequence[Site | str] = "auto",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    droprate: float | Mapping[str, float] | None = None,
    method: str | Sparsifier = "hard-concrete",
    sample: Sample = "batch",
    readout: str | None = None,
    keep_mean: bool = False,
    min_units: int = 1,
) -> GatedModel:
    """Put a gate on every unit of a model, in place.

    Args:
        model: any module; it stays the same object, with the same parameters.
        example_inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs (a
            dict, a ``BatchEncoding``) that the model can be called with.
        kwargs: keyword inputs of the same call.
        sites: ``"auto"`` finds the units by tracing (see ``find_groups``) and gates the weights
            that read them. Or a list of ``Site``s and shorthands, such as
            ``["conv1:out", "fc1:in"]``. It may also contain ``"auto"``; where groups overlap, the
            named site wins.
        include: patterns such as ``"layers.*"``: take only traced groups with such a name.
        exclude: patterns of names to leave alone.
        droprate: p in (0, 1), one number or one by group name: log_alpha starts near
            log((1 - p) / p). The default is 0.05 for groups found by tracing, and the paper's 0.5
            for named sites. At 0.05 the readout of the default gates is 1, so the outputs in
            evaluation mode do not change. At 0.5 it is about 0.5: train from scratch with that.
        method: a family of gates by its name, with the settings of its paper, or a ``Sparsifier``
            with yours, such as ``SBP(threshold=2.0)``. ``hardconcrete.sparsifiers.METHODS`` has the
            names. A family that is a module is registered: what all gates share is learned too.
        sample: ``"batch"`` draws one z per call, ``"example"`` one per example.
        readout: the rule for the gates at test time; see ``HardConcrete.readout``. The default is
            the first one of the family, which is ``"paper"`` for the default gates.
        keep_mean: divide the gated weights by E[z]. The mean output under the gates is then that
            of the model before, if it is linear in the weights.
        min_units: 0 lets groups lose all their units where the model still gets from its inputs to
            its outputs without them: the inside of a residual block, an attention, one of several
            towers. ``group.may_empty`` says which. Costs, budgets and ``compact`` follow.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4))
        >>> [(group.name, group.units) for group in gated.groups]
        [('0', 3)]
        >>> gated.gate_values()["0"].tolist()           # in evaluation mode nothing has changed
        [1.0, 1.0, 1.0]
        >>> model = hc.remove_gates(gated)
        >>> droprate = {"0:in": 0.2, "1:in": 0.5}
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), sites=[*droprate], droprate=droprate)
        >>> gated.gates.log_alpha.shape
        torch.Size([7])
    """
    _check_arguments(model, sample, min_units)
    family = method_of(method)
    args, keywords = as_inputs(example_inputs, kwargs)
    if family.per_weight and sites == "auto":
        sites = each_weight(model)
    selected = select_groups(model, args, keywords, sites, Patterns.of(include, exclude))
    selected = selected.that_may_empty() if min_units == 0 else selected
    bank = _bank(model, selected, droprate, family, readout)
    if family.has_noise:
        noisy = _gated_parameters(model, selected.groups)
        bank.log_variances = log_variances(noisy, family.log_variance, bank.device)
    placed = placements(model, selected.groups, bank)
    _refuse_modules(placed)
    if sample == "example":
        _refuse_without_activation(placed, bank)
    gated = GatedModel(model, bank, selected, sample, (args, keywords))
    gated.training = model.training
    try:
        for module, multipliers in placed.items():
            swap(module, ModuleGates(bank, tuple(multipliers)))
        _probe(gated, args, keywords)
    except BaseException:
        remove_gates(gated)
        raise
    bank.spread()  # last, so that a refused call draws no random numbers
    if keep_mean:
        _divide_by_mean(gated)
    return gated


def remove_gates(gated: GatedModel) -> nn.Module:
    """Take the gates off: the user's module, its classes and parameters as they were.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layer = torch.nn.Linear(4, 3)
        >>> gated = hc.attach_gates(layer, torch.zeros(2, 4), sites=[":in"])
        >>> hc.remove_gates(gated) is layer, type(layer)
        (True, <class 'torch.nn.modules.linear.Linear'>)
    """
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"remove_gates takes what attach_gates returned, not a {type(gated).__name__}"
        )
    swapped = [module for module in gated.model.modules() if is_swapped(module)]
    if any(module.__dict__[KEY].bank is not gated.gates for module in swapped):
        raise ArgumentError(
            "attach_gates was called on this model again; pass what the last call returned"
        )
    return restore_all(gated.model)


def _check_arguments(model: Any, sample: str, min_units: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"attach_gates takes a module, not a {type(model).__name__}")
    if any(is_swapped(module) for module in model.modules()) or isinstance(model, GatedModel):
        raise SiteError("this model has gates already; take them off first: hc.remove_gates(gated)")
    if sample not in ("batch", "example"):
        raise ArgumentError(f"sample={sample!r} is not known; use 'batch' or 'example'")
    if min_units not in (0, 1):
        raise ArgumentError(f"min_units={min_units!r}: a group keeps one unit (1), or none (0)")
    _refuse_weights(model)


def _refuse_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ArgumentError(f"{name} has no shape yet: call the model once on an example")
        if parameter.is_inference():
            raise ArgumentError(
                f"{name} was made in torch.inference_mode(), so it has no gradients: make the "
                "model outside of that mode"
            )
    if {parameter.device.type for parameter in model.parameters()} == {"meta"}:
        raise ArgumentError(
            "this model is on the meta device, and gates need weights: load them first; "
            "hc.find_groups shows the groups of such a model"
        )


def _bank(
    model: nn.Module,
    selected: SelectedGroups,
    droprate: float | Mapping[str, float] | None,
    family: Sparsifier,
    readout: str | None,
) -> GateBank:
    """The gates of the selected groups, on the device of the model."""
    droprates = _droprates(selected, family.droprate if droprate is None else droprate)
    start = family.start(_droprate_of_each_gate(model, selected.groups, droprates))
    sizes = [group.units for group in selected.groups]
    return GateBank(start, sizes, family, family.readouts[0] if readout is None else readout)


def _gated_parameters(model: nn.Module, groups: tuple[Group, ...]) -> dict[str, Tensor]:
    """The parameters with gates, by their first names."""
    names = {name for group in groups for name in group.gated_parameters}
    named = dict(model.named_parameters(remove_duplicate=False))
    gated = {id(named[name]) for name in names}
    return {name: value for name, value in model.named_parameters() if id(value) in gated}


def _droprates(
    selected: SelectedGroups, droprate: float | Mapping[str, float] | None
) -> list[float]:
    """One for each group."""
    groups = selected.groups
    if droprate is not None:
        return per_group(groups, droprate, "droprate")
    traced = {group.name for group in selected.analysis or ()}
    return [TRACED_DROPRATE if group.name in traced else SITE_DROPRATE for group in groups]


def _droprate_of_each_gate(
    model: nn.Module, groups: tuple[Group, ...], droprates: Sequence[float]
) -> Tensor:
    """In float64, on the device of the model."""
    device = model.get_parameter(groups[0].gated_parameters[0]).device
    parts: list[Tensor] = []
    for group, p in zip(groups, droprates, strict=True):
        if not isinstance(p, Real):
            raise ArgumentError(f"{group.name}: droprate={p!r} must be a number")
        if not 0 < float(p) < 1:
            raise ArgumentError(f"{group.name}: droprate={p} must lie between 0 and 1, exclusive")
        parts.append(torch.full((group.units,), float(p), device=device, dtype=torch.float64))
    return torch.cat(parts)


def _refuse_without_activation(placed: dict[nn.Module, list[Multiplier]], bank: GateBank) -> None:
    for module, multipliers in placed.items():
        gates = with_activation_gates(module, ModuleGates(bank, tuple(multipliers)))
        for multiplier in multipliers:
            if multiplier.dim is None:
                raise SiteError(
                    f"{multiplier.name}: single weights have no activation, so they "
                    "cannot have a gate per example; use sample='batch'"
                )
            if multiplier is not gates.inner and multiplier not in gates.outer:
                raise SiteError(
                    f"{multiplier.name}: a gate per example multiplies activations, known for the "
                    "inputs, or the outputs with their bias, of dense and convolutional layers, "
                    f"not for {type(module).__name__} here; use sample='batch'"
                )


def _refuse_modules(placed: dict[nn.Module, list[Multiplier]]) -> None:
    for module, multipliers in placed.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise SiteError(
                f"{multipliers[0].name}: TorchScript reads weights past Python, so they cannot "
                "have gates; attach the gates before torch.jit.script"
            )
        if isinstance(module, nn.RNNBase):
            raise SiteError(
                f"{multipliers[0].name}: a {type(module).__name__} keeps copies of its "
                "weights, which would hold a drawn gate after the call; gate what it reads from"
            )


def _divide_by_mean(gated: GatedModel) -> None:
    """Divide the gated weights by E[z], so that their mean under the gates is as before."""
    with torch.no_grad():
        mean = gated.gates.mean()
        values = gated.gates.by_group(mean)
        done: set[tuple[int, int | None]] = set()
        for module in gated.model.modules():
            for multiplier in module.__dict__[KEY].multipliers if is_swapped(module) else ():
                parameter: Any = module._parameters[multiplier.parameter]
                if (id(parameter), multiplier.dim) not in done:
                    done.add((id(parameter), multiplier.dim))
                    ones = torch.ones_like(parameter)
                    parameter.div_(multiplier.times(ones, gated.gates, values, frozenset()))


def _probe(gated: GatedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call the model once. Refuse gates on a parameter that its forward does not read."""
    bank = gated.gates
    devices = [bank.device] if bank.device.type == "cuda" else []
    bank.seen = set()
    restored = in_mode(gated, training=False), buffers_kept(gated.model)
    try:
        with restored[0], restored[1], torch.no_grad(), torch.random.fork_rng(devices=devices):
            _call(gated, args, kwargs)
        unread = _unread(gated, bank.seen)
    finally:
        bank.seen = None
    if unread:
        raise SiteError(
            f"{unread[0][0]}: the model's forward does not read {unread[0][1]} as an "
            "attribute of its module, so a gate there would do nothing; gate a parameter that it "
            "reads (recurrent layers keep copies of theirs)"
        )


def _call(gated: GatedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        gated(*args, **kwargs)
    except HardConcreteError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"the model cannot be called with these example inputs: {error!r}"
        ) from error


def _unread(gated: GatedModel, seen: set[tuple[nn.Module, str]]) -> list[tuple[str, str]]:
    """Groups with a parameter that was read under none of its names."""
    parameters = dict(gated.model.named_parameters(remove_duplicate=False))
    read = {id(module._parameters[name]) for module, name in seen}
    return [
        (group.name, name)
        for group in gated.groups
        for name in group.gated_parameters
        if id(parameters[name]) not in read
    ]
