import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import GateError
from hardconcrete.sparsifiers import RectifiedGates
from hardconcrete_paper.models import LeNet5
from tests.gating.networks import Net
from tests.gating.oracles import (
    Products,
    assert_as_by_hand,
    by_hand,
    gradients,
    next_draw,
    open_all,
    spread,
)

Maker = Callable[[], nn.Module]


Shape = tuple[int, ...]


LAYERS: dict[str, tuple[Maker, Shape, Shape]] = {
    "Linear": (lambda: nn.Linear(12, 9), (2, 12), (40, 12)),
    "Linear without bias": (lambda: nn.Linear(12, 9, bias=False), (2, 12), (40, 12)),
    "Linear on one example": (lambda: nn.Linear(12, 9), (12,), (30, 12)),
    "Linear on sequences": (lambda: nn.Linear(12, 9), (2, 3, 12), (4, 9, 12)),
    "Conv1d": (lambda: nn.Conv1d(4, 5, 3, padding=1), (2, 4, 3), (8, 4, 7)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 3, 3), (4, 3, 6, 6)),
    "Conv2d on one example": (lambda: nn.Conv2d(3, 4, 3), (3, 3, 3), (3, 9, 9)),
    "Conv2d, reflected": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False),
        (1, 3, 4, 4),
        (4, 3, 6, 6),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 2, 3, 2), (4, 2, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 5, 3, bias=False), (2, 4, 3), (8, 4, 7)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, bias=False),
        (1, 3, 4, 4),
        (4, 3, 6, 6),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, bias=False),
        (1, 2, 2, 2, 2),
        (4, 2, 3, 3, 3),
    ),
}


ROLES = {"in": [":in"], "out": [":out"], "each": [":each"], "in and out": [":in", ":out"]}


@pytest.mark.unwatched
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("sites", ROLES.values(), ids=ROLES.keys())
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, sites: list[str], size: str, dtype: torch.dtype) -> None:
    """Float32 as the gates are, where faster formulas may apply, and float64 for precision."""
    make, small, large = LAYERS[layer]
    shape = small if size == "small" else large
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert_as_by_hand(make().to(dtype), [*sites], x)


@pytest.mark.parametrize("shape", [(1, 4, 3, 3), (6, 4, 7, 7)])
@pytest.mark.parametrize(
    "sites",
    [
        [hc.Site("weight", 0)],
        [hc.Site("bias", 0)],
        [hc.Site("weight", 0), hc.Site("bias", 0)],
        [hc.Site("weight", 1)],
        [hc.Site("weight", 2), hc.Site("weight", -1)],
        [":out"],
    ],
    ids=["weight", "bias", "weight and bias apart", "group's inputs", "kernel", "out"],
)
def test_other_sites_of_a_grouped_convolution(sites: list[hc.Site | str], shape: Shape) -> None:
    model = nn.Conv2d(4, 6, 3, groups=2).double()
    assert_as_by_hand(model, sites, torch.randn(shape, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("batch", [2, 40])
def test_a_site_over_two_layers(batch: int) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    sites = [hc.Site(("0.weight", "2.weight"), 0), hc.Site("2.weight", 1)]
    assert_as_by_hand(model, sites, torch.randn(batch, 6).double().requires_grad_())


@pytest.mark.parametrize("batch", [2, 40])
@pytest.mark.parametrize(
    ("wrap", "site"),
    [
        (nn.utils.parametrizations.weight_norm, hc.Site("parametrizations.weight.original1", 1)),
        (nn.utils.parametrizations.weight_norm, hc.Site("bias", 0)),
        (nn.utils.spectral_norm, hc.Site("weight_orig", 0)),
    ],
    ids=["parametrized", "beside a parametrized one", "recomputed by a hook"],
)
def test_weights_that_are_computed(
    wrap: Callable[[nn.Module], nn.Module], site: hc.Site, batch: int
) -> None:
    """Layers whose weight is no parameter still read the parameters it is made of."""
    model, x = wrap(nn.Linear(6, 5)).eval(), torch.randn(batch, 6)
    expected = model(x)
    gated = open_all(hc.attach_gates(model, x, sites=[site]))
    assert torch.equal(gated(x), expected)
    assert not torch.allclose(spread(gated)(x), expected)


def test_the_smaller_tensor_is_multiplied() -> None:
    gated = hc.attach_gates(nn.Linear(12, 9), torch.zeros(1, 12), sites=[":in"])
    for batch, spared in ((2, (9, 12)), (40, (40, 12))):
        x = torch.randn(batch, 12, requires_grad=True)
        with Products() as products:
            gated(x)
        assert spared not in products.shapes
        assert {(9, 12), (batch, 12)} & products.shapes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [2, 70])
@pytest.mark.parametrize(
    ("make", "sites", "shape"),
    [
        (lambda: MLP(20, (9, 7)), ("fc1:in", "fc2:out", "fc3:each"), (20,)),
        (LeNet5, ("conv1:out", "conv2:out", "fc1:in", "fc2:in"), (1, 28, 28)),
        (Net, Net.sites, (1, 4, 4)),
        (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3)), ("0:in",), (2, 4, 4)),
    ],
    ids=["MLP", "LeNet5", "Net", "transposed"],
)
def test_open_gates_change_no_bit(
    make: Maker, sites: tuple[str, ...], shape: Shape, batch: int, training: bool
) -> None:
    model = make()
    plain = copy.deepcopy(model).train(training)
    x = torch.randn(batch, *shape, requires_grad=True)
    gated = open_all(hc.attach_gates(model, x, sites=sites)).train(training)
    expected, found = plain(x), gated(x)
    assert torch.equal(found, expected)
    pairs = zip(
        gradients(found.square().sum(), gated.model),
        gradients(expected.square().sum(), plain),
        strict=True,
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("batch", [2, 60])
def test_closed_gates_remove_the_unit(batch: int) -> None:
    """Whatever its weights are, and with no gradient into them."""
    gated = open_all(hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites))
    nn.init.constant_(gated.gates.log_alpha[:1], -100.0)  # the first map
    x = torch.randn(batch, 1, 4, 4, requires_grad=True)
    before = gated(x)
    weight = gated.model.conv._parameters["weight"]
    assert not torch.autograd.grad(before.square().sum(), weight)[0][0].any()
    nn.init.normal_(weight[0].detach())
    torch.testing.assert_close(gated(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [2, 40])
def test_masks_over_a_frozen_network(batch: int) -> None:
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).requires_grad_(False)
    plain = copy.deepcopy(model)
    gated = spread(hc.attach_gates(model, torch.zeros(2, 12), sites=["0:in", "2:out"]))
    x = torch.randn(batch, 12)
    z = next_draw(gated)
    found, expected = gated(x), by_hand(plain, gated, z, x)
    (ours,) = gradients(found.square().sum(), gated)  # of the gates, and of nothing else
    (theirs,) = torch.autograd.grad(expected.square().sum(), gated.gates.log_alpha)
    torch.testing.assert_close(ours, theirs)
    assert ours.count_nonzero() > 3
    assert not any(p.requires_grad for p in gated.model.parameters())


@pytest.mark.parametrize("batch", [2, 60])
def test_autocast(batch: int) -> None:
    """Activations are bfloat16, gates and gradients float32; everything stays finite."""
    model = Net()
    plain = copy.deepcopy(model)
    gated = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites)
    gated.gates.log_alpha.data[:4] = torch.tensor([-100.0, -1.0, 1.0, 100.0])
    x = torch.randn(batch, 1, 4, 4)
    z = next_draw(gated)
    assert z.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = gated(x)
        loss = found.float().square().mean() + hc.L0Penalty(gated, 0.01)()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), by_hand(plain, gated, z, x), rtol=0.05, atol=0.05)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in gated.parameters())
    assert all(p.grad.isfinite().all() for p in gated.parameters())


def test_function_transforms() -> None:
    """torch.func calls the model with other parameters than its own."""
    gated = spread(hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites))
    gated.model.bn.eval()
    x = torch.randn(5, 1, 4, 4)
    parameters = dict(gated.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(gated, parameters, (x,)).square().sum()

    torch.manual_seed(3)
    expected = gradients(gated(x).square().sum(), gated)
    torch.manual_seed(3)
    found = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    torch.testing.assert_close([found[name] for name in parameters], expected)


@pytest.mark.parametrize("batch", [2, 40])
def test_gradients_of_gradients(batch: int) -> None:
    """As penalties on gradients and products with the Hessian need them."""
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))
    plain = copy.deepcopy(model)
    gated = spread(hc.attach_gates(model, torch.zeros(2, 12), sites=["0:in", "2:in"]))
    x, z = torch.randn(batch, 12, requires_grad=True), next_draw(gated)
    second = []
    for output, weights in ((gated(x), model), (by_hand(plain, gated, z, x), plain)):
        leaves = [x, gated.gates.log_alpha, *weights.parameters()]
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        norm = sum(slope.square().sum() for slope in first)
        second.append(torch.autograd.grad(norm, leaves))
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(6, 4), (4, 5, 5)])
def test_a_gate_per_example_needs_the_batch_in_front(shape: Shape) -> None:
    """Rows that were folded together, and an image without a batch."""
    layer = nn.Linear(4, 4) if len(shape) == 2 else nn.Conv2d(4, 4, 3)
    gated = hc.attach_gates(layer, torch.zeros(shape), sites=[":in"], sample="example")
    size = 2 if len(shape) == 2 else 4
    with gated.draw(size), pytest.raises(GateError, match="dimension 0 must be the batch"):
        gated(torch.zeros(shape))


class Standardised(nn.Conv2d):
    """A convolution that does something to its weight first."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight / (1 + weight.square().sum((1, 2, 3), keepdim=True))
        return super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize("site", ["0:in", "0:out"])
def test_what_a_convolution_does_to_its_weight_is_its_own(site: str) -> None:
    """The same function at every batch size: the gates multiply the weight before."""
    model = nn.Sequential(Standardised(8, 6, 3), nn.ReLU())
    gated = spread(hc.attach_gates(model, torch.randn(2, 8, 3, 3), sites=[site])).eval()
    x = torch.randn(64, 8, 3, 3)
    torch.testing.assert_close(gated(x)[:1], gated(x[:1]))


class StraightThrough(hc.HardConcrete):
    """A gate that has a gradient where it is shut."""

    def rsample(self, *args: Any, **kwargs: Any) -> Tensor:
        z = super().rsample(*args, **kwargs)
        return z.detach() + self.log_alpha - self.log_alpha.detach()


def test_gradients_of_gates_that_are_shut_but_not_flat() -> None:
    """The same from few examples as from many, which are gated on other sides."""
    found = []
    for count in (1, 400):
        torch.manual_seed(0)
        layer, x = nn.Linear(20, 3), torch.randn(1, 20)
        gated = hc.attach_gates(layer, x, sites=[":in"], method=RectifiedGates(StraightThrough))
        gated.gates.log_alpha.data.sub_(2.0)
        torch.manual_seed(1)
        gated(x.expand(count, -1)).square().mean().backward()
        found.append(gated.gates.log_alpha.grad)
    torch.testing.assert_close(*found)
    assert found[0].all()
