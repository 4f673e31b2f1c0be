"""Re-fitting restores what can be restored, layer by layer, and names what it leaves alone."""

import copy
import math
import threading
import traceback
from contextlib import suppress
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.importance.refit import RefitResult, refit
from tests.importance.networks import KINDS, Kind, Residual, call, varied
from tests.zoo import ZOO
from tests.zoo.entry import Entry

module = import_module("hardconcrete.importance.refit")  # the package has a function of that name

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_the_rest_can_tell_is_restored(kind: Kind) -> None:
    """The contract of every kind of layer."""
    dense = kind.build().double()
    small = copy.deepcopy(dense)
    kind.prune(small)
    zeros = small.get_parameter(kind.weight) == 0
    batches = kind.batches()
    expected = dense(batches[0])
    scale = expected.std()
    assert (small(batches[0]) - expected).abs().max() > 1e-2 * scale
    result = refit(small, dense, batches, call, ridge=1e-9)
    assert (small(batches[0]) - expected).abs().max() < 1e-4 * scale
    assert result.fitted[kind.weight] < 1e-6
    assert not result.skipped
    assert (small.get_parameter(kind.weight)[zeros] == 0).all()


def design(x: Tensor) -> Tensor:
    """Rows of a 3 x 3 convolution with padding 1, written out, and a constant."""
    rows = F.unfold(x, 3, padding=1).mT.flatten(0, 1)
    return torch.cat([rows, torch.ones(len(rows), 1, dtype=x.dtype)], 1)


def least_squares(x: Tensor, y: Tensor, before: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and intercept by lstsq on the rows written out, without the channels that went."""
    columns = kept.repeat_interleave(9)
    rows = design(x)[:, torch.cat([columns, torch.tensor([True])])]
    hold = module.RIDGE * (rows - rows.mean(0))[:, :-1].square().mean()
    ridge = (hold * len(rows)).sqrt() * torch.eye(rows.shape[1], dtype=x.dtype)[:-1]
    targets = torch.cat([y.movedim(1, -1).flatten(0, -2), (ridge @ _column(before, columns))])
    solution = torch.linalg.lstsq(torch.cat([rows, ridge]), targets).solution
    weight = torch.zeros_like(before).flatten(1)
    weight[:, columns] = solution[:-1].T
    return weight.view_as(before), solution[-1]


def _column(before: Tensor, columns: Tensor) -> Tensor:
    weights = before.flatten(1)[:, columns].T
    return torch.cat([weights, weights.new_zeros(1, weights.shape[1])])


@pytest.mark.parametrize("compensate", [True, False])
def test_a_residual_network_layer_by_layer(compensate: bool) -> None:
    """Against the same steps written down for this one network, one after the other."""
    dense = varied(Residual())
    small, x = copy.deepcopy(dense), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    stream, inner = torch.arange(6) != 2, torch.arange(6) < 4
    with torch.no_grad():
        small.conv1.weight[:, ~stream] = 0
        small.fc.weight[:, ~stream] = 0
        small.conv2.weight[:, ~inner] = 0
    expected = copy.deepcopy(small)
    result = refit(small, dense, x.split(5), call, compensate=compensate)
    with torch.no_grad():
        a, b = (m.bn(m.stem(x)).relu() for m in (dense, expected))
        assert torch.equal(a, b)
        y = dense.conv1(a)
        e = expected
        e.conv1.weight[:], shift = least_squares(b, y, e.conv1.weight, stream)
        e.bn1.running_mean -= shift
        inside = e.bn1(e.conv1(b)).relu()
        y = dense.conv2(dense.bn1(y).relu())
        total = dense.bn2(y) + a
        if compensate:  # here the shortcut has no error: it is the same equation
            scale = e.bn2.weight / (e.bn2.running_var + e.bn2.eps).sqrt()
            per_channel = (slice(None), None, None)
            y = (total - b - e.bn2.bias[per_channel]) / scale[per_channel]
            y = y + e.bn2.running_mean[per_channel]
        e.conv2.weight[:], shift = least_squares(inside, y, e.conv2.weight, inner)
        e.bn2.running_mean -= shift
    for name in ("conv1", "conv2"):
        assert torch.allclose(getattr(small, name).weight, getattr(expected, name).weight)
    for name in ("bn1", "bn2"):
        mean = getattr(expected, name).running_mean
        assert torch.allclose(getattr(small, name).running_mean, mean)
    assert set(result.fitted) == {f"{name}.weight" for name in ("stem", "conv1", "conv2", "fc")}
    assert result.fitted["stem.weight"] < 1e-9
    assert 0 < result.fitted["conv2.weight"] < 1


class Sum(nn.Module):
    """A shortcut that loses a unit, and a branch that could make up for it."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        x = self.second(hidden)  # what this misses...
        x = x + self.norm(self.branch(hidden))  # ...that can know
        return self.last(x.tanh())


@pytest.mark.parametrize("norm", [False, True])
def test_a_branch_makes_up_for_its_shortcut(norm: bool) -> None:
    dense = Sum(norm).double().eval()
    small, x = copy.deepcopy(dense), torch.randn(64, 4, dtype=torch.float64)
    with torch.no_grad():
        small.second.weight[:, :4] = 0  # two inputs cannot tell what four dimensions were
    errors = []
    for compensate in (False, True):
        copied = copy.deepcopy(small)
        refit(copied, dense, x.split(16), call, ridge=1e-9, compensate=compensate)
        errors.append((copied(x) - dense(x)).abs().max().item())
    assert errors[1] < 1e-6 < 1e-3 < errors[0]


def test_a_channel_that_a_norm_erases_keeps_its_weights() -> None:
    dense = Sum(norm=True).double().eval()
    nn.init.zeros_(dense.norm.weight[0])
    small, x = copy.deepcopy(dense), torch.randn(64, 4, dtype=torch.float64)
    with torch.no_grad():
        small.second.weight[:, :4] = 0
    refit(small, dense, x.split(16), call)
    assert torch.equal(small.branch.weight[0], dense.branch.weight[0])
    assert not torch.equal(small.branch.weight[1], dense.branch.weight[1])
    assert all(p.isfinite().all() for p in small.parameters())


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_a_model_re_fitted_to_itself_stays_what_it_is(entry: Entry) -> None:
    dense = entry.build().double().eval()
    args, kwargs = tree_map(doubled, entry.inputs(4))
    small = copy.deepcopy(dense)
    refit(small, dense, [(args, kwargs)] * 2, lambda m, batch: m(*batch[0], **batch[1]))
    with torch.no_grad():
        pairs = (tree_leaves(model(*args, **kwargs)) for model in (small, dense))
        for new, old in zip(*pairs, strict=True):
            assert torch.allclose(new, old, rtol=1e-6, atol=1e-6)


def doubled(leaf: object) -> object:
    is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if is_floating else leaf  # type: ignore[attr-defined]


def pruned(dense: nn.Module, *names: str) -> nn.Module:
    """A copy of which the first half of what some weights read went."""
    small = copy.deepcopy(dense)
    with torch.no_grad():
        for name in names:
            weight = small.get_parameter(name)
            weight[:, : weight.shape[1] // 2] = 0
    return small


class Kinds(nn.Module):
    """Parameters that cannot be re-fitted, for one reason each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mix, self.experts = nn.Parameter(torch.eye(4)), nn.Parameter(torch.randn(2, 4, 4))
        self.unused = nn.Linear(4, 4)
        self.bag = nn.EmbeddingBag(10, 4)
        self.register_buffer("fixed", torch.eye(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        x = self.twice(self.twice(x).relu()) + self.bag(input_ids)[:, None]
        x = torch.einsum("btc,dc->btd", x, self.mix)
        x = F.linear(self.once(x), self.fixed)
        x = torch.bmm(x[:2], self.experts)
        return F.linear(x, self.table.weight)


def test_what_is_not_re_fitted_is_named() -> None:
    dense = Kinds()
    names = ("mix", "experts", "unused.weight", "twice.weight", "table.weight", "bag.weight")
    small = pruned(dense, *names, "once.weight")
    batches = [{"input_ids": torch.randint(10, (5, 3))} for _ in range(2)]
    before = {name: small.get_parameter(name).clone() for name in names}
    result = refit(small, dense, batches, lambda model, batch: model(**batch))
    assert result.skipped == {
        "table.weight": "embedding uses it, too",
        "twice.weight": "it is used 2 times in a call",
        "mix": "einsum uses it, which re-fitting does not know",
        "experts": "bmm uses it, which re-fitting does not know",
        "unused.weight": "nothing uses it in this call",
        "bag.weight": "embedding_bag uses it, which re-fitting does not know",
    }
    assert set(result.fitted) == {"once.weight"}
    assert all(torch.equal(small.get_parameter(name), before[name]) for name in names)
    assert "not re-fitted: mix (einsum uses it" in str(result)


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("MAX_INPUTS", 5, "its 6 inputs need a Gram matrix of 0 GiB"),
        ("MAX_SOLVE_COST", 100, "its zeros lie scattered: solving takes 2e\\+02 multiply-adds"),
    ],
)
def test_what_would_take_too_much_is_named(
    limit: str, value: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hardconcrete.importance.fit_layer.{limit}", value)
    dense = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refit(dense, dense, [torch.randn(8, 6)], call).skipped["0.weight"])


def test_inputs_that_are_no_numbers_are_named() -> None:
    dense = nn.Sequential(nn.Linear(2, 2))
    small = copy.deepcopy(dense)
    result = refit(small, dense, [torch.tensor([[1.0, torch.nan]])], call)
    assert result.skipped == {"0.weight": "its solution is not finite in torch.float32"}
    assert torch.equal(small[0].weight, dense[0].weight)


def test_scattered_zeros_stay_zero_and_shut_outputs_stay_shut() -> None:
    dense = nn.Sequential(nn.Linear(6, 4))
    small = copy.deepcopy(dense)
    with torch.no_grad():
        small[0].weight[torch.rand(4, 6) < 0.4] = 0
        small[0].weight[3], small[0].bias[3] = 0, 0
    zeros = small[0].weight == 0
    refit(small, dense, [torch.randn(64, 6)], call)
    assert torch.equal(small[0].weight == 0, zeros)
    assert small[0].bias[3] == 0
    assert not torch.equal(small[0].bias[:3], dense[0].bias[:3])


def test_a_layer_without_inputs_gives_the_mean() -> None:
    dense, x = nn.Sequential(nn.Linear(6, 4)).double(), torch.randn(64, 6, dtype=torch.float64)
    small = copy.deepcopy(dense)
    nn.init.zeros_(small[0].weight)
    refit(small, dense, [x], call)
    assert torch.allclose(small(x), dense(x).mean(0).expand(64, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_solved_in_float32_or_better(dtype: torch.dtype) -> None:
    dense = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    small = pruned(dense, "2.weight")
    x = torch.randn(256, 8, dtype=dtype)
    before = (small(x) - dense(x)).float().square().mean()
    refit(small, dense, x.split(64), call)
    assert small[2].weight.dtype == dtype
    assert (small(x) - dense(x)).float().square().mean() < 0.9 * before


def test_autocast_in_the_loss_and_around() -> None:
    dense = varied(Residual()).float()
    small = pruned(dense, "conv1.weight", "conv2.weight")
    x = torch.randn(16, 3, 8, 8)
    seen = set()

    def cast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return noted(model, x)

    def noted(model: nn.Module, x: Tensor) -> Tensor:
        seen.add(model(x).dtype)
        return torch.zeros(())

    inside, outside = copy.deepcopy(small), copy.deepcopy(small)
    refit(inside, dense, x.split(8), cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refit(outside, dense, x.split(8), noted)
    assert seen == {torch.bfloat16}
    for a, b in zip(inside.parameters(), outside.parameters(), strict=True):
        assert torch.equal(a, b)
    before = (small(x) - dense(x)).square().mean()
    assert (inside(x) - dense(x)).square().mean() < 0.5 * before


def test_frozen_weights_buffers_and_modes() -> None:
    dense = varied(Residual()).train()
    dense.requires_grad_(False)
    small = pruned(dense, "conv2.weight").train()
    small.bn.eval()
    before = copy.deepcopy(dense.state_dict())
    result = refit(small, dense, torch.randn(4, 8, 3, 8, 8, dtype=torch.float64).unbind(), call)
    assert "conv2.weight" in result.fitted
    assert not any(p.requires_grad for p in small.parameters())
    assert small.training
    assert not small.bn.training
    assert dense.training
    for name, value in dense.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_same_twice() -> None:
    dense = varied(Residual()).float()
    small = pruned(dense, "conv1.weight", "conv2.weight", "fc.weight")
    batches = torch.randn(5, 16, 3, 24, 24).unbind()  # more rows than are sampled
    copies = [copy.deepcopy(small) for _ in range(2)]
    for copied in copies:
        refit(copied, dense, batches, call)
    for a, b in zip(copies[0].state_dict().values(), copies[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_parametrized_weights_are_left_alone() -> None:
    dense = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    small = pruned(dense, "1.weight")
    result = refit(small, dense, [torch.randn(32, 4)], call)
    assert set(result.fitted) == {"1.weight"}


def test_a_compiled_model_is_seen_as_well() -> None:
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    small = pruned(dense, "1.weight")
    compiled = [torch.compile(model) for model in (small, dense)]
    result = refit(*compiled, [torch.randn(32, 4)], call)
    assert set(result.fitted) == {"_orig_mod.0.weight", "_orig_mod.1.weight"}


def threads() -> int:
    return threading.active_count()


class CustomError(Exception):
    """Of a user's code."""


def test_an_error_of_the_loss_ends_all_threads_and_keeps_its_traceback() -> None:
    dense = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before, small = threads(), copy.deepcopy(dense)

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model[0](x)
        if x[0, 0] == 2 and model is small:
            raise CustomError("no")
        return model[2](hidden)

    batches = [torch.full((3, 4), float(k)) for k in range(4)]
    with pytest.raises(CustomError) as error:
        refit(small, dense, batches, failing)
    assert "failing" in {frame.name for frame in traceback.extract_tb(error.value.__traceback__)}
    assert threads() == before


def test_an_error_of_a_forward_ends_all_threads() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 2:
                raise CustomError("here")
            return super().forward(x)

    dense, before = nn.Sequential(nn.Linear(4, 4), Fails(4, 2)), threads()
    nn.init.eye_(dense[0].weight)
    nn.init.zeros_(dense[0].bias)
    with pytest.raises(CustomError, match="here"):
        refit(copy.deepcopy(dense), dense, [torch.full((3, 4), float(k)) for k in range(4)], call)
    assert threads() == before


def test_code_that_swallows_every_exception_still_ends() -> None:
    class Swallows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(BaseException):
                return super().forward(x)
            return x

    dense = nn.Sequential(Swallows(4, 4), Swallows(4, 4), nn.Linear(4, 4))
    before = threads()

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model[0](x)
        raise CustomError

    with pytest.raises(CustomError):
        refit(copy.deepcopy(dense), dense, [torch.zeros(2, 4)] * 3, failing)
    swallowed = refit(copy.deepcopy(dense), dense, [torch.randn(9, 4)] * 3, call)
    assert len(swallowed.fitted) == 3
    assert threads() == before


class Turns(nn.Module):
    """The order of its layers depends on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            return self.b(self.a(x))
        return self.a(self.b(x)) if x.shape[0] == 3 else self.a(x)


@pytest.mark.parametrize("size", [3, 4])
def test_an_order_that_depends_on_the_inputs_is_refused(size: int) -> None:
    before, model = threads(), Turns()
    with pytest.raises(CompactionError, match="the forward of the model depends on its inputs"):
        refit(copy.deepcopy(model), model, [torch.zeros(2, 4), torch.zeros(size, 4)], call)
    assert threads() == before


def test_a_sum_that_does_not_come_is_refused() -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y + x if len(x) == 2 else y)

    model = Maybe()
    with pytest.raises(CompactionError, match=r"an addition was expected, and b\.weight came"):
        refit(copy.deepcopy(model), model, [torch.zeros(2, 4), torch.zeros(3, 4)], call)


def test_other_inputs_in_the_small_model_are_refused() -> None:
    class Random(nn.Linear):
        size = 3

        def forward(self, x: Tensor) -> Tensor:
            Random.size += 1
            return super().forward(x[: Random.size])

    model = nn.Sequential(Random(4, 4))
    with pytest.raises(CompactionError, match=r"its inputs are \[6, 4\] in the small model"):
        refit(copy.deepcopy(model), model, [torch.zeros(9, 4)], call)


def test_arguments_that_are_wrong_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="ridge=0 must be above 0"):
        refit(model, model, [torch.zeros(1, 2)], call, ridge=0)
    with pytest.raises(ArgumentError, match="batches is empty"):
        refit(model, model, [], call)
    with pytest.raises(ArgumentError, match="only dense has a parameter bias"):
        refit(nn.Linear(2, 2, bias=False), model, [torch.zeros(1, 2)], call)
    with pytest.raises(ArgumentError, match=r"weight is \[3, 2\] in small and \[2, 2\] in dense"):
        refit(nn.Linear(2, 3), model, [torch.zeros(1, 2)], call)


def test_no_more_batches_than_threads_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BATCHES", 3)
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield torch.randn(8, 2)

    model = nn.Linear(2, 2)
    refit(copy.deepcopy(model), model, endless(), call)
    assert len(taken) == 3


def test_few_threads_compute_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardconcrete.importance.lockstep.MAX_COMPUTE_THREADS", 1)
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def noting(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return model(x)

    model = nn.Linear(2, 2)
    try:
        refit(copy.deepcopy(model), model, [torch.randn(8, 2)] * 2, noting)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen[1:] == [1] * 4  # the first is recorded


def test_context_variables_reach_the_calls() -> None:
    import contextvars

    scale = contextvars.ContextVar("scale", default=1.0)
    scale.set(3.0)
    seen = []

    def noting(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(scale.get())
        return model(x)

    model = nn.Linear(2, 2)
    refit(copy.deepcopy(model), model, [torch.randn(8, 2)], noting)
    assert set(seen) == {3.0}


@pytest.mark.parametrize(("mebibytes", "batches"), [(0, 1), (8, 2), (1024, 5)])
def test_memory_limits_the_batches(
    mebibytes: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 1,024 rows of 64 floats, in and out, is half a MiB; it is kept eight times."""
    monkeypatch.setattr(module, "memory_of", lambda _: 4 * mebibytes * 2**20)
    dense, seen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), []

    def noting(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(model)
        return model(x)

    refit(copy.deepcopy(dense), dense, torch.randn(5, 1024, 64).unbind(), noting)
    assert len(seen) == 1 + 2 * batches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_does_as_the_cpu() -> None:
    dense = varied(Residual())
    small = pruned(dense, "conv1.weight", "conv2.weight", "fc.weight")
    x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    on_gpu = copy.deepcopy(small).cuda()
    refit(small, dense, x.split(16), call)
    with torch.cuda.stream(torch.cuda.Stream()):
        refit(on_gpu, copy.deepcopy(dense).cuda(), x.cuda().split(16), call)
    for a, b in zip(small.parameters(), on_gpu.parameters(), strict=True):
        assert torch.allclose(a, b.cpu(), atol=1e-6)


def test_with_gates_of_a_traced_model() -> None:
    """As ``prune`` uses it: units are shut, gates taken off, the rest re-fitted, gates put on."""
    dense = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    gated = hc.attach_gates(copy.deepcopy(dense), torch.zeros(2, 6, dtype=torch.float64))
    with torch.no_grad():
        gated.gates.log_alpha[:6] = -9
        gated.model[2]._parameters["weight"][:, :6] = 0
    small = hc.remove_gates(gated)
    x = torch.randn(256, 6, dtype=torch.float64)
    before = (small(x) - dense(x)).square().mean()
    result = refit(small, dense, x.split(64), call)
    assert (small(x) - dense(x)).square().mean() < 0.5 * before
    assert (small[2].weight[:, :6] == 0).all()
    assert math.isclose(result.fitted["0.weight"], 0, abs_tol=1e-9)
    assert isinstance(result, RefitResult)
