import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import SiteError
from hardconcrete.gating.sites import named_sites
from tests.gating.networks import Net, Tied
from tests.gating.oracles import unchanged

WEIGHT, BOTH = ("layer.weight",), ("layer.weight", "layer.bias")


def zoo() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "fc1": nn.Linear(6, 4),
            "fc2": nn.Linear(4, 3),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "up": nn.ConvTranspose2d(4, 3, 2),
            "up_grouped": nn.ConvTranspose2d(4, 4, 2, groups=2, bias=False),
            "bn": nn.BatchNorm1d(4),
            "table": nn.ParameterDict(
                {
                    "whole": nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False),
                    "complex": nn.Parameter(torch.ones(4, dtype=torch.complex64)),
                    "scalar": nn.Parameter(torch.tensor(1.0)),
                }
            ),
        }
    )


@pytest.mark.parametrize(
    ("layer", "role", "names", "dim"),
    [
        (nn.Linear(6, 4), "in", WEIGHT, 1),
        (nn.Linear(6, 4), "out", BOTH, 0),
        (nn.Linear(6, 4, bias=False), "out", WEIGHT, 0),
        (nn.Linear(6, 4), "each", WEIGHT, None),
        (nn.Conv1d(6, 4, 3), "in", WEIGHT, 1),
        (nn.Conv2d(6, 4, 3), "out", BOTH, 0),
        (nn.Conv3d(6, 4, 3, bias=False), "out", WEIGHT, 0),
        (nn.Conv2d(6, 4, 3, groups=2), "out", BOTH, 0),
        (nn.Conv2d(6, 4, 3, groups=2), "each", WEIGHT, None),
        (nn.ConvTranspose1d(6, 4, 3), "in", WEIGHT, 0),
        (nn.ConvTranspose2d(6, 4, 3, bias=False), "out", WEIGHT, 1),
        (nn.ConvTranspose3d(6, 4, 3), "each", WEIGHT, None),
    ],
)
def test_shorthands(layer: nn.Module, role: str, names: tuple[str, ...], dim: int | None) -> None:
    model = nn.ModuleDict({"layer": layer})
    (site,) = named_sites(model, [f"layer:{role}"]).values()
    assert (site.names, site.dim) == (names, dim)


def test_names_and_labels() -> None:
    assert hc.Site("fc1.weight", 1).names == ("fc1.weight",)
    assert hc.Site(("fc1.weight", "fc1.bias"), 0).label == "fc1.weight:0"
    assert hc.Site("fc1.weight", None).label == "fc1.weight:each"


def test_sites_keep_their_order_and_are_named_as_they_were_given() -> None:
    sites = named_sites(zoo(), ["fc2:in", hc.Site("bn.weight", 0), "fc1:each"])
    assert list(sites) == ["fc2:in", "bn.weight:0", "fc1:each"]


def test_a_dimension_may_be_counted_from_the_end() -> None:
    (site,) = named_sites(zoo(), [hc.Site("fc1.weight", -1)]).values()
    assert site.dim == 1


def test_a_bare_layer_is_its_own_model() -> None:
    (site,) = named_sites(nn.Linear(6, 4), [":out"]).values()
    assert site == hc.Site(("weight", "bias"), 0)


def test_inputs_and_outputs_of_a_layer_do_not_overlap() -> None:
    assert len(named_sites(zoo(), ["fc1:in", "fc1:out"])) == 2


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ("fc1:in", r"sites takes a list; for one site write sites=\['fc1:in'\]"),
        ([], r'the list of sites is empty; name some, for example sites=\["fc1:in"\]'),
        (["fc1"], "'fc1': a site is written MODULE:in, MODULE:out or MODULE:each"),
        (["fc1:up"], "'fc1:up': a site is written MODULE:in"),
        (["fc3:in"], "'fc3:in': there is no module 'fc3'; did you mean 'fc[12]' or 'fc[12]'"),
        (["bn:out"], r"and bn is a BatchNorm1d; .* hc.Site\('bn.weight', dim=...\)"),
        (["depthwise:in"], "'depthwise:in': depthwise has groups=4, which share indices"),
        (["up_grouped:in"], "up_grouped has groups=2"),
        (["up_grouped:out"], "up_grouped has groups=2"),
        (["up:out"], "outputs along different dimensions; give it bias=False, or gate the inputs"),
        (["fc1:in", "fc2:in", "fc1:in"], "fc1:in: this site is named twice"),
        ([hc.Site("fc1.weight", 1)] * 2, "fc1.weight:1: this site is named twice"),
        ([hc.Site("fc1.wieght", 1)], "no parameter 'fc1.wieght'; did you mean 'fc1.weight'"),
        ([hc.Site("qqq", 1)], "the model has no parameter 'qqq'; did you mean"),
        ([hc.Site("bn.running_mean", 0)], "the model has no parameter 'bn.running_mean'"),
        ([hc.Site("fc1.weight", True)], "with names and the number of a dimension, or None"),
        ([hc.Site("fc1.weight", 2)], r"dim=2 is out of range for fc1.weight \[4, 6\]"),
        ([hc.Site("fc1.weight", -3)], r"dim=-3 is out of range for fc1.weight \[4, 6\]"),
        ([hc.Site("table.scalar", 0)], r"dim=0 is out of range for table.scalar \[\]"),
        ([hc.Site(("fc1.weight", "fc1.bias"), 1)], "dim=1 is out of range for"),
        ([hc.Site(("fc1.weight", "fc1.bias"), -1)], "dim=-1 is ambiguous for fc1.weight"),
        (
            [hc.Site(("fc1.weight", "fc2.weight"), 0)],
            r"need one size along dim=0, found fc1.weight \[4, 6\], fc2.weight \[3, 4\]",
        ),
        ([hc.Site("table.whole", 0)], "table.whole is torch.int64, which cannot be multiplied"),
        ([hc.Site("table.complex", 0)], "table.complex is torch.complex64"),
        (
            ["fc1:in", hc.Site("fc1.weight", 1)],
            "fc1.weight:1 and fc1:in overlap: both gate fc1.weight",
        ),
        ([hc.Site("fc1.weight", -1), "fc1:in"], "fc1:in and fc1.weight:-1 overlap"),
        (["fc1:each", "fc1:in"], "fc1:in and fc1:each overlap"),
        (["fc1:out", "fc1:each"], "fc1:each and fc1:out overlap"),
        (["fc1:out", hc.Site("fc1.bias", 0)], "overlap: both gate fc1.bias"),
    ],
)
def test_refusals(sites: list[hc.Site | str], words: str) -> None:
    """The same from ``attach_gates``, which has then changed nothing."""
    model = zoo()
    with pytest.raises(SiteError, match=words):
        named_sites(model, sites)
    with unchanged(model), pytest.raises(hc.HardConcreteError, match=words):
        hc.attach_gates(model, torch.zeros(2, 6), sites=sites)


@pytest.mark.parametrize("sites", [hc.Site("fc1.weight", 1), [3], [("fc1.weight", 1)], None])
def test_sites_of_another_type_are_refused(sites: object) -> None:
    with pytest.raises(SiteError):
        named_sites(Net(), sites)


def test_a_site_without_parameters_is_refused() -> None:
    with pytest.raises(SiteError):
        named_sites(Net(), [hc.Site((), 0)])


def test_a_site_that_names_a_parameter_twice_is_refused() -> None:
    """It would be multiplied once and paid for twice."""
    with pytest.raises(SiteError, match="twice"):
        named_sites(Net(), [hc.Site(("fc1.weight", "fc1.weight"), 0)])


def test_two_names_of_one_parameter_overlap() -> None:
    with pytest.raises(SiteError, match="overlap"):
        named_sites(Tied(), ["first:in", "second:in"])


def test_a_shared_module_is_known_under_all_its_names() -> None:
    layer = nn.Linear(4, 4)
    (site,) = named_sites(nn.Sequential(layer, layer), ["1:in"]).values()
    assert site == hc.Site("1.weight", 1)


def test_a_shorthand_for_a_layer_that_has_no_weight() -> None:
    """A message names parameters that exist."""
    for layer, words in (
        (nn.LSTM(4, 3), "it keeps copies of its weights, so gate what it reads from"),
        (nn.Embedding(4, 3), r"name a parameter: hc.Site\('0.weight', dim=...\)"),
        (nn.PReLU(), r"name a parameter: hc.Site\('0.weight', dim=...\)"),
        (nn.Bilinear(4, 4, 3), r"hc.Site\('0.weight', dim=...\)"),
        (nn.ReLU(), "it has no parameters itself: name a layer that has"),
    ):
        with pytest.raises(SiteError, match=words):
            named_sites(nn.Sequential(layer), ["0:in"])
