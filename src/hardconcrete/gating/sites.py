"""Sites: where you put gates by name, checked against a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hardconcrete.errors import SiteError


@dataclass(frozen=True)
class Site:
    """Parameters that share gates, one gate per index along a dimension.

    The shorthands ``"fc1:in"``, ``"conv1:out"`` and ``"fc1:each"`` name the paper's placements:
    the inputs of a layer, its outputs with their biases, and its single weights.

    Args:
        parameters: dotted name of a parameter, or of several with the same size along ``dim``.
        dim: the dimension whose indices are the units; None gives every single weight a gate.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), sites=[hc.Site("1.weight", dim=1)])
        >>> gated.groups[0].name, gated.groups[0].units
        ('1.weight:1', 3)
    """

    parameters: str | tuple[str, ...]
    dim: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, always as a tuple."""
        return (self.parameters,) if isinstance(self.parameters, str) else tuple(self.parameters)

    @property
    def label(self) -> str:
        """The name of the group that this site makes."""
        return f"{self.names[0]}:{'each' if self.dim is None else self.dim}"


def each_weight(model: nn.Module) -> list[Site | str]:
    """A site for the single weights of every dense and convolutional layer.

    Example:
        >>> each_weight(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        ['0:each', '2:each']
    """
    sites: list[Site | str] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if (
            isinstance(module, nn.Linear | _ConvNd)
            and weight is not None
            and id(weight) not in seen
        ):
            seen.add(id(weight))
            sites.append(f"{path}:each")
    if not sites:
        raise SiteError(
            f"{type(model).__name__} has no dense or convolutional layer whose weights could have "
            "gates: name parameters with hc.Site(name, None)"
        )
    return sites


def named_sites(model: nn.Module, sites: Sequence[Site | str]) -> dict[str, Site]:
    """Sites by name, in order, with shorthands resolved and everything checked."""
    if isinstance(sites, str | Site) or not isinstance(sites, Iterable):
        raise SiteError(f"sites takes a list; for one site write sites=[{sites!r}]")
    by_name: dict[str, Site] = {}
    for site in sites:
        if not isinstance(site, str) and not _is_site(site):
            raise SiteError(
                f"{site!r}: a site is a shorthand such as 'fc1:in', or a Site with names and the "
                "number of a dimension, or None"
            )
        name = site if isinstance(site, str) else site.label
        if name in by_name:
            raise SiteError(f"{name}: this site is named twice")
        by_name[name] = _checked(model, name, _resolve(model, site) if name is site else site)  # type: ignore[arg-type]
    if not by_name:
        raise SiteError('the list of sites is empty; name some, for example sites=["fc1:in"]')
    _refuse_overlaps(model, by_name)
    return by_name


def _is_site(site: object) -> bool:
    if not isinstance(site, Site) or not isinstance(site.parameters, str | tuple | list):
        return False
    named = bool(site.names) and all(isinstance(name, str) for name in site.names)
    return named and isinstance(site.dim, int | None) and not isinstance(site.dim, bool)


def _resolve(model: nn.Module, text: str) -> Site:
    """The site that a shorthand stands for."""
    path, colon, role = text.rpartition(":")
    if not colon or role not in ("in", "out", "each"):
        raise SiteError(f"{text!r}: a site is written MODULE:in, MODULE:out or MODULE:each")
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        raise SiteError(f"{text!r}: there is no module {path!r}{_nearest(path, list(modules))}")
    module = modules[path]
    prefix = f"{path}." if path else ""
    if not isinstance(module, nn.Linear | _ConvNd):
        raise SiteError(
            f"{text!r}: the shorthand knows dense and convolutional layers, and {path or 'this'} "
            f"is a {type(module).__name__}; {_advice(module, prefix)}"
        )
    if role == "each":
        return Site(f"{prefix}weight", None)
    if getattr(module, "groups", 1) != 1 and (role == "in" or isinstance(module, _ConvTransposeNd)):
        raise SiteError(f"{text!r}: {path} has groups={module.groups}, which share indices")
    inputs, outputs = (0, 1) if isinstance(module, _ConvTransposeNd) else (1, 0)
    if role == "in":
        return Site(f"{prefix}weight", inputs)
    if outputs == 1 and module.bias is not None:
        raise SiteError(
            f"{text!r}: weight and bias of the transposed {path} have their outputs along "
            "different dimensions; give it bias=False, or gate the inputs of what reads it"
        )
    bias = (f"{prefix}bias",) if module.bias is not None else ()
    return Site((f"{prefix}weight", *bias), outputs)


def _advice(module: nn.Module, prefix: str) -> str:
    """What to gate in place of a module that the shorthands do not know."""
    if isinstance(module, nn.RNNBase):
        return "it keeps copies of its weights, so gate what it reads from, or what reads it"
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim()]
    if not own:
        return "it has no parameters itself: name a layer that has"
    return f"name a parameter: hc.Site('{prefix}{own[0]}', dim=...)"


def _checked(model: nn.Module, name: str, site: Site) -> Site:
    """The site with its dimension counted from the front, if the model has what it names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = [_lookup(parameters, name, parameter) for parameter in site.names]
    if site.dim is None:
        return site
    lowest = min(tensor.dim() for tensor in tensors)
    if not -lowest <= site.dim < lowest:
        raise SiteError(f"{name}: dim={site.dim} is out of range for {_shapes(site, tensors)}")
    if site.dim < 0 and any(tensor.dim() != lowest for tensor in tensors):
        raise SiteError(f"{name}: dim={site.dim} is ambiguous for {_shapes(site, tensors)}")
    site = Site(site.parameters, site.dim % lowest)
    if len({tensor.shape[site.dim] for tensor in tensors}) != 1:  # type: ignore[index]
        raise SiteError(
            f"{name}: the parameters of a site need one size along dim={site.dim}, "
            f"found {_shapes(site, tensors)}"
        )
    return site


def _lookup(parameters: dict[str, nn.Parameter], site: str, name: str) -> nn.Parameter:
    if name not in parameters:
        nearest = _nearest(name, list(parameters))
        raise SiteError(f"{site}: the model has no parameter {name!r}{nearest}")
    tensor = parameters[name]
    if not tensor.is_floating_point():
        raise SiteError(f"{site}: {name} is {tensor.dtype}, which cannot be multiplied by a gate")
    return tensor


def _shapes(site: Site, tensors: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{name} {list(tensor.shape)}" for name, tensor in zip(site.names, tensors, strict=True)
    )


def _nearest(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.4) or sorted(filter(None, known))[:3]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _refuse_overlaps(model: nn.Module, sites: dict[str, Site]) -> None:
    """Refuse two gates on one dimension of a parameter, also under another name of it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    taken: list[tuple[nn.Parameter, int | None, str]] = []
    for name, site in sites.items():
        for parameter in site.names:
            tensor = parameters[parameter]
            for other, dim, owner in taken:
                if other is tensor and owner == name:
                    raise SiteError(f"{name}: {parameter} is named twice")
                if other is tensor and (dim == site.dim or None in (dim, site.dim)):
                    raise SiteError(f"{name} and {owner} overlap: both gate {parameter}")
            taken.append((tensor, site.dim, name))
