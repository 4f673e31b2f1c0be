"""Networks that step as one do what each would do alone."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor.async_compile import AsyncCompile

import hardconcrete as hc
from hardconcrete.demo import MLP, scaled
from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import cacheable
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.mnist.experiment import MnistExperiment, learner
from hardconcrete_paper.models import with_dropout
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.stacked_learners import (
    ConvolutionsAsProducts,
    StackedLearners,
    start_compilers,
)

COMPILED = "hardconcrete_paper.training.stacked_learners._compiled"
CPU = torch.device("cpu")
HALVES = slice(10), slice(10, 20)


@pytest.fixture(scope="module")
def noise() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Images(images, torch.arange(60) % 10, "noise")


def networks(experiment: MnistExperiment, seeds: range = range(3)) -> list[Learner]:
    made = [learner(experiment, seed, 60_000, CPU) for seed in seeds]
    for each in made:
        kept = {"clamp": each.recipe.clamp, "per_example": each.recipe.per_example}
        each.recipe = Recipe(epochs=2, batch_size=20, **kept)  # type: ignore[arg-type]
    return made


def in_double(learners: list[Learner]) -> list[Learner]:
    """The same networks in float64, gates included, which otherwise keep float32."""
    for each in learners:
        for model in (each.model, each.average):
            model.double()
            for parameter in model.parameters():
                parameter.data = parameter.data.double()
    return learners


def stopped_after_three(one: Learner, data: Images) -> dict[str, torch.Tensor]:
    """Its state after three epochs."""
    for epoch in Engine([one], data):
        if epoch == 3:
            break
    return {name: tensor.clone() for name, tensor in one.state().items()}


@pytest.mark.unwatched
@pytest.mark.parametrize(
    "experiment",
    [
        MnistExperiment("mlp", (0.1, 0.5, 5.0)),
        MnistExperiment("mlp", (0.1,), per_example=True),
        MnistExperiment("lenet5", (10.0, 0.5, 0.1, 10.0), weight_decay=0.01),
        MnistExperiment("lenet5", (0.1,), per_example=True),
        MnistExperiment("lenet5", (), method="dense"),
        MnistExperiment("lenet5", (0.1,), quirks=("clamp", "bias")),
    ],
    ids=lambda experiment: experiment.name,
)
def test_stacked_networks_learn_what_each_would_alone(
    experiment: MnistExperiment, noise: Images
) -> None:
    alone, together = in_double(networks(experiment)), in_double(networks(experiment))
    engine = Engine(alone, noise, prepare=lambda x: scaled(x).double())
    list(engine)
    stacked = Engine(together, noise, stacked=True, prepare=lambda x: scaled(x).double())
    list(stacked)
    assert stacked.losses == pytest.approx(engine.losses, rel=1e-6)
    for one, other in zip(alone, together, strict=True):
        for name, tensor in one.state().items():
            gap = (other.state()[name] - tensor).abs().max()
            assert gap <= 1e-9 * tensor.abs().max(), name


def test_a_stacked_run_is_resumed_from_the_states_of_its_learners(noise: Images) -> None:
    experiment = MnistExperiment("mlp")
    whole, parts = networks(experiment), networks(experiment)
    list(Engine(whole, noise, stacked=True))
    first = Engine(parts, noise, stacked=True)
    next(iter(first))
    saved = [{k: v.clone() for k, v in each.state().items()} for each in parts]
    again = networks(experiment)
    second = Engine(again, noise, stacked=True)
    for each, state in zip(again, saved, strict=True):
        each.restore(state)
    second.done = 1
    assert list(second) == [2]
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.model.gates.log_alpha, other.model.gates.log_alpha)


@pytest.mark.early
@pytest.mark.unwatched
@pytest.mark.parametrize(("network", "count"), [("mlp", 1), ("mlp", 2), ("lenet5", 2)])
def test_what_is_compiled_gives_the_same_gradients(
    network: str, count: int, noise: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    if network == "lenet5":  # all but the compiler's last step, which takes a minute on a CPU
        quickly = partial(torch.compile, dynamic=False, backend="aot_eager")
        monkeypatch.setattr(COMPILED, quickly)
    experiment = MnistExperiment(network)
    images, labels = noise.images, noise.labels
    stacks = [
        StackedLearners(
            networks(experiment, range(count)), images, labels, prepare=scaled, compiled=compiled
        )
        for compiled in (False, True, True)
    ]
    for stack in stacks:
        torch._dynamo.reset()  # as in a process that goes on
        counters.clear()
        stack.begin_epoch(0)
        stack.step()
    gradients = [[each.grad for each in stack._trained] for stack in stacks]
    for eager, compiled, again in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(again, compiled, rtol=0, atol=0)
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    assert hits == (network == "mlp")  # what is not compiled to the end is not kept


@pytest.mark.parametrize("settings", [{"variant": "budget"}, {"paper_gates": True}])
def test_torchs_cache_takes_a_wide_network(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has it, in bfloat16, up to what the compiler would do with it."""

    def stop(graph: torch.fx.GraphModule, _: Any) -> Any:
        check_cacheable(graph)
        raise ZeroDivisionError

    quickly = partial(torch.compile, dynamic=False, backend=stop)
    monkeypatch.setattr(
        "hardconcrete_paper.training.stacked_learners._compiled", lambda f, **_: quickly(f)
    )
    one = cifar_learner(CifarExperiment(network="wrn-10-1", **settings), 50_000, CPU)
    images = torch.zeros(128, 3, 32, 32, dtype=torch.uint8)
    stack = StackedLearners([one], images, torch.arange(128) % 10, prepare=scaled, compiled=True)
    stack._bf16 = True
    stack.begin_epoch(0)
    with torch._inductor.config.patch(cacheable()), pytest.raises(Exception, match="ZeroDivision"):
        stack.step()
    with pytest.raises(Exception, match="Unsupported call_function target"):
        stack.step()


@pytest.mark.parametrize(
    ("network", "convolutions", "products"),
    [("lenet5", True, True), ("lenet5", False, False), ("mlp", True, False)],
)
def test_products_are_rounded_as_the_convolutions_they_stand_for(
    network: str,
    convolutions: bool,
    products: bool,
    noise: Images,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, seen = torch.backends.cuda.matmul, []
    before = torch.get_float32_matmul_precision()

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*inputs: Any) -> Any:
            seen.append(backend.allow_tf32)
            return function(*inputs)

        return called

    monkeypatch.setattr(COMPILED, compiled)
    pair = networks(MnistExperiment(network), range(2))
    stack = StackedLearners(pair, noise.images, noise.labels, prepare=scaled, compiled=True)
    stack.begin_epoch(0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=convolutions):
        stack.step()
    assert seen == [products]
    assert torch.get_float32_matmul_precision() == before


def test_dropout_differs_between_stacked_networks_and_repeats_by_epoch(noise: Images) -> None:
    def losses(epoch: int) -> list[float]:
        models = []
        for _ in range(2):  # equal networks, equal data
            torch.manual_seed(0)
            models.append(with_dropout(MLP(), {"fc2:in": 0.5}))
        pair = [Learner("", 0, model, Recipe(epochs=1, batch_size=20)) for model in models]
        stack = StackedLearners(pair, noise.images, noise.labels, prepare=scaled, compiled=False)
        stack.begin_epoch(epoch)
        stack.step()
        return stack.loss.tolist()

    first, second = losses(0)
    assert first != second
    assert losses(0) == [first, second]
    assert losses(1) != [first, second]


def test_spatial_dropout_can_be_stacked(noise: Images) -> None:
    pair = networks(MnistExperiment("lenet5", (), method="dropout"), range(2))
    list(Engine(pair, noise, stacked=True))
    assert all(each.model.conv1[0].weight.isfinite().all() for each in pair)


def test_dropout_on_a_cpu_does_not_depend_on_company(noise: Images) -> None:
    def trained(*seeds: int) -> torch.Tensor:
        experiment = MnistExperiment("mlp", (), method="dropout")
        learners = [learner(experiment, seed, 60, CPU) for seed in seeds]
        for each in learners:
            each.recipe = Recipe(epochs=2, batch_size=20)
        state = torch.get_rng_state()
        list(Engine(learners, noise))
        assert torch.equal(torch.get_rng_state(), state)
        return learners[0].model.fc3[1].weight

    alone = trained(0)
    assert torch.equal(trained(0, 1), alone)


def test_a_budget_is_resumed_bit_identically_and_is_not_stacked(noise: Images) -> None:
    def budgeted() -> Learner:
        return learner(MnistExperiment("mlp", (), epochs=6, method="budget", macs=0.5), 0, 300, CPU)

    whole, first, second = budgeted(), budgeted(), budgeted()
    for each in (whole, first, second):
        each.recipe = Recipe(epochs=6, batch_size=20, gate_lr=0.1)
    list(Engine([whole], noise))
    saved = stopped_after_three(first, noise)
    engine = Engine([second], noise)
    second.restore(saved)
    engine.done = 3
    list(engine)
    assert {"budget.steps", "budget.log_scale"} <= saved.keys()
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, second.state()[name]), name
    with pytest.raises(ArgumentError, match="cannot be stacked"):
        Engine([budgeted(), budgeted()], noise, stacked=True)


def test_training_gets_smaller_and_is_resumed_where_it_was(noise: Images) -> None:
    def shrinking() -> Learner:
        one = learner(MnistExperiment("lenet5", (0.1,), epochs=5, shrink=2), 0, 60, CPU)
        one.recipe = Recipe(epochs=5, batch_size=20, shrink=2)
        with torch.no_grad():
            one.model.gates.log_alpha[:12] = -12.0  # 12 of the 20 maps of conv1
        one.average.module.load_state_dict(one.model.state_dict())
        return one

    whole, first, second = shrinking(), shrinking(), shrinking()
    engine = Engine([whole], noise)
    sizes = [whole.model.model.conv1.out_channels for _ in engine]
    assert sizes == [20, 8, 8, 8, 8]
    assert whole.averaged.model.conv1.out_channels == 8
    small = hc.compact(whole.averaged)
    assert small.conv1.out_channels == 8
    saved = stopped_after_three(first, noise)
    engine = Engine([second], noise)
    second.restore(saved)
    engine.build()
    engine.done = 3
    list(engine)
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, second.state()[name]), name


def test_gates_are_clamped_after_each_step(noise: Images) -> None:
    (one,) = networks(MnistExperiment("mlp", quirks=("clamp",)), range(1))
    with torch.no_grad():
        one.model.gates.log_alpha.fill_(30.0)
    list(Engine([one], noise))
    assert one.model.gates.log_alpha.max().item() == pytest.approx(math.log(100))


def test_gradients_of_convolutions_as_products() -> None:
    convolution = torch.nn.Conv2d(3, 4, (5, 2), dtype=torch.float64)
    x = torch.randn(6, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    wanted = [x, *convolution.parameters()]
    plain = torch.autograd.grad(convolution(x).sin().sum(), wanted)
    with ConvolutionsAsProducts():
        found = torch.autograd.grad(convolution(x).sin().sum(), wanted)
    for gradient, other in zip(found, plain, strict=True):
        torch.testing.assert_close(gradient, other)


def test_convolutions_with_stride_or_padding_stay_as_they_are() -> None:
    x = torch.randn(2, 3, 9, 9)
    for convolution in (torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.Conv2d(3, 4, 3, padding=1)):
        with ConvolutionsAsProducts():
            inside = convolution(x)
        assert torch.equal(inside, convolution(x))


def test_one_image_without_a_batch_is_convolved() -> None:
    x, convolution = torch.randn(3, 9, 9), torch.nn.Conv2d(3, 4, 3)
    with ConvolutionsAsProducts():
        inside = convolution(x)
    assert torch.equal(inside, convolution(x))


def test_compilers_are_started_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("warm_pool", "wakeup"):
        monkeypatch.setattr(AsyncCompile, name, partial(called.append, name))
    start_compilers(CPU)
    assert not called
    start_compilers(torch.device("cuda"))
    assert called == ["warm_pool", "wakeup"]


def test_each_of_two_draws_is_for_its_half_of_the_batch(noise: Images) -> None:
    gated = hc.attach_gates(MLP(), torch.zeros(2, 1, 28, 28), sites=["fc1:in"])
    one = Learner("", 0, gated, Recipe(batch_size=20, draws=2))
    stack = StackedLearners([one], noise.images, noise.labels, prepare=scaled, compiled=False)
    uniform = torch.rand(2, 784, generator=torch.Generator().manual_seed(0))
    images, labels = scaled(noise.images[:20]), noise.labels[:20]
    halves = [one.objective(uniform[i], images[s], labels[s]) for i, s in enumerate(HALVES)]
    whole = stack._losses(uniform, images, labels[None])
    torch.testing.assert_close(whole, torch.stack(halves).mean()[None])
    assert not torch.allclose(whole, stack._losses(uniform.flip(0), images, labels[None]))
    assert stack.noise is not None
    stack.begin_epoch(0)
    stack.step()
    assert not torch.equal(*stack.noise)
