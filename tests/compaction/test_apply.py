import torch

import hardconcrete as hc
from hardconcrete.compaction.graph_form import CompactedGraph
from hardconcrete.compaction.plan import Cut, Scale
from tests.compaction.networks import dense

CUTS = (Cut("0.weight", 0, 6, (0, 1, 4)), Cut("0.bias", 0, 6, (0, 1, 4)),
        Cut("2.weight", 1, 6, (0, 1, 4)))  # fmt: skip
PLAN = hc.CompactionPlan("Sequential", {}, CUTS, (Scale("2.weight", 1, (0.5, 1, 0, 0, 2, 0)),))


def test_the_form_that_the_plan_names() -> None:
    model, x = dense(), torch.randn(3, 4)
    small = PLAN.apply(model)
    graph = hc.CompactionPlan("S", {}, CUTS, PLAN.scales, form="graph").apply(model, x)
    assert type(small) is type(model)
    assert type(graph) is CompactedGraph
    assert hc.CompactionPlan.of(small) is PLAN
    assert list(graph.state_dict()) == list(small.state_dict()) == list(model.state_dict())
    for name, tensor in small.state_dict().items():
        assert torch.equal(graph.state_dict()[name], tensor)
    expected = model[2].weight[:, [0, 1, 4]] * torch.tensor([0.5, 1.0, 2.0])
    assert torch.equal(small[2].weight, expected)


def test_the_dense_model_is_left_alone() -> None:
    model = dense()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    PLAN.apply(model)[0].weight.data.zero_()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
