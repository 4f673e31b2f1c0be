import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete.gating.select_groups import Patterns
from hardconcrete_paper.models import LeNet5
from tests.gating.networks import Net
from tests.gating.oracles import unchanged

X = torch.zeros(2, 1, 28, 28)


def names(gated: hc.GatedModel) -> list[str]:
    return [group.name for group in gated.groups]


def attached(**settings: object) -> hc.GatedModel:
    return hc.attach_gates(LeNet5(), X, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> hc.Analysis:
    return hc.find_groups(LeNet5(), X)


def test_every_group_that_is_found_gets_gates(found: hc.Analysis) -> None:
    gated = attached()
    assert names(gated) == list(found.names) == ["conv1", "conv2", "fc1"]
    assert [group.units for group in gated.groups] == [20, 50, 500]
    assert gated.gates.log_alpha.shape == (570,)
    assert gated.overruled == {}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ((), (), ["conv1", "conv2", "fc1"]),
        ("conv*", (), ["conv1", "conv2"]),
        (["fc1", "conv2"], (), ["conv2", "fc1"]),
        ((), "conv?", ["fc1"]),
        ("conv*", ["conv1"], ["conv2"]),
    ],
)
def test_patterns(found: hc.Analysis, include: object, exclude: object, left: list[str]) -> None:
    patterns = Patterns.of(include, exclude)  # type: ignore[arg-type]
    assert [group.name for group in patterns.matching(found)] == left


def test_patterns_choose_what_is_gated() -> None:
    assert names(attached(include="conv*", exclude="conv1")) == ["conv2"]
    for other in (3, None, ["conv1", 3]):
        with pytest.raises(ArgumentError, match="include and exclude are names or patterns, not"):
            attached(exclude=other)


@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_a_pattern_that_fits_nothing(setting: str) -> None:
    model = LeNet5()
    with (
        unchanged(model),
        pytest.raises(SiteError, match="'cnv' fits no group; there are conv1, conv2, fc1"),
    ):
        hc.attach_gates(model, X, **{setting: "cnv"})


def test_patterns_that_leave_nothing() -> None:
    with pytest.raises(SiteError, match="LeNet5 has no units that could be removed"):
        attached(exclude="*")


def test_a_model_without_units_says_why() -> None:
    with pytest.raises(SiteError, match=r"removed: .*the model's output"):
        hc.attach_gates(nn.Linear(3, 2), torch.zeros(2, 3))


def test_patterns_need_units_that_are_found() -> None:
    with pytest.raises(SiteError, match="include and exclude select traced groups"):
        attached(sites=["fc1:in"], include="fc1")


@pytest.mark.parametrize(
    ("sites", "groups", "overruled"),
    [
        (["auto", "fc1:in"], ["conv1", "fc1", "fc1:in"], {"conv2": "fc1:in"}),
        (["fc1:in", "auto"], ["fc1:in", "conv1", "fc1"], {"conv2": "fc1:in"}),
        (["conv1:out", "auto"], ["conv1:out", "conv2", "fc1"], {"conv1": "conv1:out"}),
        (["auto", "conv1:in"], ["conv1", "conv2", "fc1", "conv1:in"], {}),
        (["auto", "fc1:each"], ["conv1", "fc1:each"], {"conv2": "fc1:each", "fc1": "fc1:each"}),
        (
            ["conv1:out", "auto", hc.Site("fc2.weight", 1)],
            ["conv1:out", "conv2", "fc2.weight:1"],
            {"conv1": "conv1:out", "fc1": "fc2.weight:1"},
        ),
    ],
)
def test_a_named_site_wins(
    sites: list[str | hc.Site], groups: list[str], overruled: dict[str, str]
) -> None:
    gated = attached(sites=sites)
    assert names(gated) == groups
    assert gated.overruled == overruled


def test_the_summary_says_what_was_overruled(capsys: pytest.CaptureFixture[str]) -> None:
    attached(sites=["auto", "fc1:in"]).summary()
    assert "conv2: the site fc1:in is gated instead" in capsys.readouterr().out


def test_a_tied_name_overlaps_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x))

    gated = hc.attach_gates(Tied(), torch.zeros(2, 3).long(), sites=["auto", "out:in"])
    assert (names(gated), gated.overruled) == (["out:in"], {"words": "out:in"})


def test_sites_alone_do_not_trace() -> None:
    """A model that cannot be traced can still be gated by hand."""

    class Chooses(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    gated = hc.attach_gates(Chooses(), torch.zeros(2, 1, 4, 4), sites=Net.sites)
    assert names(gated) == [*Net.sites]


def test_a_site_that_is_wrong_is_refused_first() -> None:
    with pytest.raises(SiteError, match="there is no module 'fc9'"):
        attached(sites=["auto", "fc9:in"])


@pytest.mark.parametrize("mixed", [False, True])
def test_settings_by_the_names_of_groups(mixed: bool) -> None:
    extra = {"fc1:in": 0.3} if mixed else {"conv2": 0.3}
    droprate = {"conv1": 0.1, "fc1": 0.9, **extra}
    gated = attached(sites=["auto", "fc1:in"] if mixed else "auto", droprate=droprate)
    for name, probability in gated.by_group(gated.gates.log_alpha.detach().sigmoid()).items():
        assert probability.mean().item() == pytest.approx(1 - droprate[name], abs=0.01)
    lam = {name: 10 * p for name, p in droprate.items()}
    assert hc.L0Penalty(gated, lam).lam == lam


def test_settings_for_a_group_that_is_not_there() -> None:
    with pytest.raises(SiteError, match="droprate: 'conv9' is not a group; the groups are conv1"):
        attached(droprate={"conv1": 0.1, "conv2": 0.1, "fc1": 0.1, "conv9": 0.5})
    with pytest.raises(SiteError, match="droprate: 'fc1' has no entry"):
        attached(droprate={"conv1": 0.1, "conv2": 0.1})
    with pytest.raises(SiteError, match="lam: 'conv2' has no entry"):
        hc.L0Penalty(attached(exclude="conv1"), {"fc1": 0.1})


def test_a_span_of_units_is_named_by_its_name() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.m, self.o = nn.Linear(3, 8), nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.c(x).chunk(2, 1)
            return self.o(torch.cat([a, b + self.m(b)], 1))

    found = hc.find_groups(Halves(), torch.randn(2, 3))
    assert found.names == ("c[0:4]", "c[4:8]")
    gated = hc.attach_gates(Halves(), torch.randn(2, 3), exclude="c[0:4]")
    assert [group.name for group in gated.groups] == ["c[4:8]"]
    with pytest.raises(hc.HardConcreteError, match=r"there is no group 'd'; there are c\[0:4\]"):
        found["d"]


def test_inputs_that_the_model_does_not_take_are_said_in_words() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(hc.HardConcreteError, match="cannot be called with these example inputs"):
        hc.attach_gates(model, torch.randn(2, 5), sites=["0:in"])
    assert type(model[0]) is nn.Linear


def test_sites_from_a_generator_and_none() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 4), sites=(s for s in ("0:in", "1:in")))  # type: ignore[arg-type]
    assert [group.name for group in gated.groups] == ["0:in", "1:in"]
    model = hc.remove_gates(gated)
    with pytest.raises(SiteError, match="sites takes a list"):
        hc.attach_gates(model, torch.zeros(2, 4), sites=None)  # type: ignore[arg-type]
    for site in (hc.Site("0.weight", 1.0), hc.Site("0.weight", "in"), hc.Site(3, 0)):  # type: ignore[arg-type]
        with pytest.raises(SiteError, match="a Site with names and the number of a dimension"):
            hc.attach_gates(model, torch.zeros(2, 4), sites=[site])
