"""Labels through whole graphs: inner graphs, names, and shapes that depend on data."""

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.graph.operators import RULES
from hardconcrete.graph.propagate import first_names, module_path, operator_name, propagate
from hardconcrete.graph.trace import trace
from tests.graph.operators.contract import Network, dense


def counted(model: nn.Module, *args: object, **kwargs: object) -> dict[str, int]:
    return {group.name: group.units for group in hc.find_groups(model, args, kwargs)}


def test_labels_pass_through_inner_graphs() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = net.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            x = net.second(x).relu()
        return net.third(x)

    layers = {"first": nn.Linear(6, 12), "second": nn.Linear(12, 8), "third": nn.Linear(8, 4)}
    assert counted(Network(forward, **layers), torch.randn(2, 6)) == {"first": 12, "second": 8}


def test_branches_of_a_condition_are_fixed_and_named() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda h: h.relu(), lambda h: h.tanh(), (net.first(x),))
        return net.third(net.second(h).relu())

    layers = {"first": nn.Linear(6, 12), "second": nn.Linear(12, 8), "third": nn.Linear(8, 4)}
    found = hc.find_groups(Network(forward, **layers), torch.randn(2, 6))
    assert found.names == ("second",)
    assert "first: 12 fixed: this operator has no rule (cond" in str(found)


def test_an_unknown_operator_fixes_only_the_units_of_its_arguments() -> None:
    model = dense(lambda net, h: net.fc(torch.linalg.svdvals(h)).relu(), 12, 9, fc=nn.Linear(2, 9))
    found = hc.find_groups(model, torch.randn(2, 2, 6))
    assert {group.name: group.units for group in found} == {"fc": 9}
    (reason,) = [entry.reason for entry in found.fixed if entry.name == "inp"]
    assert (reason.text, reason.operator) == ("this operator has no rule", "linalg_svdvals")


def test_sizes_that_depend_on_data() -> None:
    """Rows chosen by a mask: their number is unknown, but their units are labelled."""
    layers = {"inp": nn.Linear(6, 12), "out": nn.Linear(12, 4)}
    model = Network(lambda net, x: net.out(net.inp(x)[x[:, 0] > 0].relu()), **layers)
    assert counted(model, torch.randn(4, 6)) == {"inp": 12}


def test_constants_of_the_forward_cannot_shrink_and_buffers_can() -> None:
    fixed = torch.randn(12)
    assert counted(dense(lambda _, h: h * fixed), torch.randn(2, 6)) == {}
    model = dense(lambda net, h: h * net.scale, scale=fixed)
    assert counted(model, torch.randn(2, 6)) == {"inp": 12}


def test_values_written_into_a_buffer_are_cut_with_it() -> None:
    def forward(net: nn.Module, h: Tensor) -> Tensor:
        net.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - net.mean

    found = hc.find_groups(dense(forward, mean=torch.zeros(12)), torch.randn(2, 6))
    assert [str(axis) for axis in found["inp"].coupled] == [
        "inp.weight[0]",
        "inp.bias[0]",
        "mean[0]",
    ]


def test_shared_tensors_have_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert first_names(model)["1.weight"] == "0.weight"
    assert first_names(model)["1.bias"] == "1.bias"
    found = propagate(trace(model, (torch.randn(2, 4),)), model)
    assert set(found.tensors) == {"0.weight", "0.bias", "1.bias"}


def test_operators_by_name_and_module() -> None:
    assert operator_name(torch.ops.aten.relu_.default) == "relu"
    assert operator_name(torch.ops.aten.__and__.Tensor) == "__and__"
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))
    graph = trace(model, (torch.randn(2, 4),))
    paths = [module_path(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert [path for path in paths if path] == ["0", "1.0"]


def test_every_tensor_can_be_sliced_along_one_dimension() -> None:
    """48 places as [6, 8]: only whole columns of 6 can be removed."""
    layers = {"inp": nn.Linear(6, 48), "out": nn.Linear(48, 4)}
    model = Network(
        lambda net, x: net.out(net.inp(x).view(-1, 6, 8).relu().transpose(1, 2).flatten(1)),
        **layers,
    )
    assert counted(model, torch.randn(2, 6)) == {"inp": 8}


def test_a_rule_that_fails_fixes_units_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("no such dimension")

    monkeypatch.setitem(RULES, "tanh", fail)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    found = hc.find_groups(model, torch.zeros(2, 4))
    assert found.names == ("2",)
    assert "its rule does not know this use of it (IndexError" in str(found.fixed[0])
