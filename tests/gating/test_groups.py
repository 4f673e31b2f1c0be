import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import SiteError
from hardconcrete.gating.groups import per_group, site_groups
from hardconcrete.gating.sites import named_sites
from hardconcrete.units import Group
from hardconcrete.units.group import in_order
from hardconcrete_paper.models import LeNet5


def groups_of(model: nn.Module, *sites: hc.Site | str) -> tuple[Group, ...]:
    return in_order(site_groups(model, named_sites(model, sites)))


def test_groups_of_the_mlp() -> None:
    """784-300-100, |g| the fan-out of an input."""
    groups = groups_of(MLP(), "fc1:in", "fc2:in", "fc3:in")
    assert [(g.name, g.units, g.size, g.start) for g in groups] == [
        ("fc1:in", 784, 300, 0),
        ("fc2:in", 300, 100, 784),
        ("fc3:in", 100, 10, 1084),
    ]


def test_groups_of_lenet5() -> None:
    """20-50-800-500, |g| kernel * input maps + bias for a map, the fan-out for an input."""
    groups = groups_of(LeNet5(), "conv1:out", "conv2:out", "fc1:in", "fc2:in")
    assert [(g.units, g.size) for g in groups] == [(20, 26), (50, 501), (800, 500), (500, 10)]
    assert [g.slice for g in groups] == [
        slice(0, 20),
        slice(20, 70),
        slice(70, 870),
        slice(870, 1370),
    ]


def test_sizes_count_every_parameter_of_a_site() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 4, bias=False), nn.BatchNorm1d(3), nn.Linear(5, 2))
    across = hc.Site(("0.weight", "1.weight", "1.bias"), 0)
    groups = groups_of(model, across, "2:each")
    assert [(g.name, g.units, g.size) for g in groups] == [
        ("0.weight:0", 3, 2 * 4 + 2),
        ("2:each", 10, 1),
    ]


@pytest.mark.parametrize("site", [":in", ":out", ":each", hc.Site("weight", 3)])
def test_squared_norms(site: hc.Site | str) -> None:
    model = nn.Conv2d(2, 3, (2, 4))
    (group,) = groups_of(model, site)
    found = group.squared_norms(model)
    assert found.shape == (group.units,)
    for unit in range(group.units):
        total = 0.0
        for axis in group.gated:
            tensor = model.get_parameter(axis.tensor).detach()
            if axis.dim is None:
                total += tensor.flatten()[unit].item() ** 2
            else:
                total += sum(v**2 for v in tensor.select(axis.dim, unit).flatten().tolist())
        assert found[unit].item() == pytest.approx(total, rel=1e-6)


def test_squared_norms_of_half_precision_are_float32() -> None:
    model = nn.Linear(3, 2).bfloat16()
    (group,) = groups_of(model, ":in")
    assert group.squared_norms(model).dtype == torch.float32


def test_single_weights_are_one_parameter_at_a_time() -> None:
    with pytest.raises(SiteError, match=r"fc1.weight:each: single weights .* one parameter"):
        groups_of(MLP(), hc.Site(("fc1.weight", "fc1.bias"), None))


def test_a_setting_for_each_group() -> None:
    groups = groups_of(MLP(), "fc1:in", "fc2:in")
    assert per_group(groups, 0.3, "droprate") == [0.3, 0.3]
    assert per_group(groups, {"fc2:in": 2, "fc1:in": 1}, "lam") == [1, 2]
    with pytest.raises(SiteError, match="lam: 'fc2:in' has no entry; the groups are fc1:in, fc2"):
        per_group(groups, {"fc1:in": 1}, "lam")
    with pytest.raises(SiteError, match="droprate: 'fc3:in' is not a group; the groups are fc1:in"):
        per_group(groups, {"fc1:in": 1, "fc2:in": 2, "fc3:in": 3}, "droprate")
