"""Reports: what is counted by hand, and timing by a clock that the tests wind themselves."""

import copy
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.cost import Count, count
from hardconcrete.cost.latency import timing
from hardconcrete.cost.latency.timing import WARMUP_CALLS
from hardconcrete.errors import ArgumentError
from hardconcrete.report.comparison import Latency, Report
from hardconcrete.report.measure import _uses_cudnn_heuristics, measure


class Clock:
    """Stands still but for what is added to it, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    """Takes so many seconds per example, by the clock of the test; a multiple in channels_last."""

    clock: Clock  # of the class, so that copies share it
    calls: list[tuple[float, int]]

    def __init__(self, seconds: float, channels_last: float = 1.0) -> None:
        super().__init__()
        self.seconds, self.factor = seconds, channels_last
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, a: Tensor) -> Tensor:
        if a.is_meta:
            return self.conv(a)
        assert torch.is_inference_mode_enabled()
        assert not self.training
        last = self.conv.weight.stride(1) == a.stride(1) == 1
        Slow.clock.now += self.seconds * len(a) * (self.factor if last else 1)
        Slow.calls.append((self.seconds, len(a)))
        return self.conv(a)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    Slow.clock, Slow.calls = Clock(), []
    monkeypatch.setattr(timing, "perf_counter", Slow.clock)
    return Slow.clock


IMAGES = torch.zeros(3, 2, 4, 4)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def small_report(**changes: object) -> Report:
    values = {
        "before": Count(1000, 8000, 4000, 200),
        "after": Count(100, 1000, 400, 100),
        "latencies": (
            Latency(1, 0.25, 0.125, (0.2, 0.3), (0.12, 0.13)),
            Latency(64, 8.0, 2.0, (7.5, 8.25), (1.5, 2.5)),
        ),
        "repeats": 30,
    }
    return Report(**(values | changes))


@pytest.mark.usefixtures("clock")
def test_latency_by_the_clock() -> None:
    report = measure(Slow(0.004), Slow(0.001), IMAGES, repeats=4)
    one, many = report.latencies
    assert (one.batch, many.batch) == (1, 64)
    assert (one.before_ms, one.after_ms) == pytest.approx((4, 1))
    assert (many.before_ms, many.after_ms) == pytest.approx((256, 64))
    assert many.before_spread == pytest.approx((256, 256))
    assert report.speedup(1) == pytest.approx(4)
    assert report.realised == pytest.approx({1: 4, 64: 4})


@pytest.mark.usefixtures("clock")
def test_calls_are_warmed_up_and_then_alternate() -> None:
    measure(Slow(2), Slow(1), IMAGES, batches=[5], repeats=4)
    assert Slow.calls[: 2 * WARMUP_CALLS] == [(2, 5), (1, 5)] * WARMUP_CALLS
    assert [seconds for seconds, _ in Slow.calls[2 * WARMUP_CALLS :]] == [2, 1, 1, 2, 2, 1, 1, 2]


@pytest.mark.usefixtures("clock")
def test_each_model_is_reported_in_its_fastest_layout() -> None:
    layouts = ("contiguous", "channels_last")
    report = measure(Slow(1, 0.5), Slow(1, 2), IMAGES, batches=[2], repeats=2, layouts=layouts)
    (latency,) = report.latencies
    assert (latency.before_layout, latency.after_layout) == ("channels_last", "contiguous")
    assert (latency.before_ms, latency.after_ms) == pytest.approx((1000, 2000))
    assert report.layouts == layouts
    assert "  fastest layout" in str(report)
    only = measure(Slow(1, 0.5), Slow(1), IMAGES, batches=[2], repeats=2, layouts=layouts[1:])
    assert only.latencies[0].before_ms == pytest.approx(1000)


class Flattening(nn.Module):
    """Views its images flat, which channels_last forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, a: Tensor) -> Tensor:
        return self.conv(a).view(len(a), -1)


def test_layouts_that_a_model_cannot_run_in() -> None:
    layouts = ("contiguous", "channels_last")
    for model, inputs in (
        (Flattening(), torch.zeros(2, 2, 5, 5)),
        (nn.Conv3d(2, 1, 1), torch.zeros(2, 2, 5, 5, 5)),
        (mlp(4, 3), torch.zeros(2, 4)),
    ):
        report = measure(model, model, inputs, batches=[1], repeats=2, layouts=layouts)
        assert report.layouts == ("contiguous",)
        assert "layout" not in str(report)
    with pytest.raises(ArgumentError, match="the model does not run in layout channels_last"):
        measure(Flattening(), Flattening(), torch.zeros(2, 2, 5, 5), layouts=layouts[1:])


def test_a_model_with_a_thousandth_of_the_multiply_adds_is_faster() -> None:
    """By the real clock; twice as fast is far below what any machine shows."""
    report = measure(mlp(1000, 1000, 1000), mlp(1000, 2), torch.zeros(1, 1000), repeats=5)
    assert report.promise == 1000
    assert report.speedup(64) > 2
    for latency in report.latencies:
        assert latency.before_spread[0] <= latency.before_ms <= latency.before_spread[1]
        assert 0 < latency.after_spread[0] <= latency.after_ms <= latency.after_spread[1]


def test_a_gated_model_stands_for_its_dense_one_and_is_left_alone() -> None:
    model = mlp(4, 3, 2)
    gated = hc.attach_gates(model, torch.zeros(2, 4), sites=["0:in", "1:in"]).train()
    before, kinds = copy.deepcopy(gated.state_dict()), [type(m) for m in gated.modules()]
    report = measure(gated, gated, torch.zeros(2, 4), repeats=2)
    assert report.before == report.after == count(mlp(4, 3, 2), torch.zeros(1, 4))
    assert [type(m) for m in gated.modules()] == kinds
    assert all(module.training for module in gated.modules())
    torch.testing.assert_close(gated.state_dict(), before, rtol=0, atol=0)
    assert gated.model is model


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure(model, model, IMAGES, repeats=2, layouts=("contiguous", "channels_last"))
    assert all(module.training for module in model.modules())
    assert model[0].weight.is_contiguous()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_counts_are_of_one_example() -> None:
    report = measure(mlp(4, 3), mlp(4, 2), torch.zeros(7, 4), batches=[2], repeats=2)
    assert (report.before, report.after) == (Count(15, 12, 60, 12), Count(10, 8, 40, 8))
    assert (report.compression, report.promise) == (1.5, 1.5)


class Rows(nn.Module):
    """Remembers what it was given."""

    seen: list[tuple[list[float], int]] = []  # noqa: RUF012

    def forward(self, a: Tensor, mask: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        if not a.is_meta:
            Rows.seen.append((a[:, 0].tolist(), len(mask)))
            assert len(extra["b"]) == len(a)
        return a


def test_rows_are_cut_or_repeated_and_other_tensors_stay() -> None:
    Rows.seen.clear()
    inputs = (torch.arange(3.0)[:, None], torch.zeros(9))
    kwargs = {"extra": {"b": torch.zeros(3, 2), "scale": 2.0}}
    measure(Rows(), Rows(), inputs, kwargs, batches=[2, 5], repeats=2)
    assert Rows.seen[0] == ([0, 1], 9)
    assert Rows.seen[-1] == ([0, 1, 2, 0, 1], 9)


def test_the_table() -> None:
    assert str(small_report(device="cpu with 2 threads")).splitlines() == [
        "                                   before                   after  ratio",
        "parameters                          1,000                     100  10.0x",
        "MACs                                8,000                   1,000   8.0x",
        "weights                            4.0 kB                   400 B  10.0x",
        "activations                         200 B                   100 B   2.0x",
        "latency, batch 1   0.250 (0.200-0.300) ms  0.125 (0.120-0.130) ms   2.0x",
        "latency, batch 64     8.00 (7.50-8.25) ms     2.00 (1.50-2.50) ms   4.0x",
        "Counts of one example; median latency (quartiles) of 30 calls on cpu with 2 threads.",
        "Of the 8.0x that the MACs promise, the clock shows 25% at batch 1 and 50% at batch 64.",
    ]


def test_the_table_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(small_report())
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(small_report()) == expected


def test_the_table_names_what_the_macs_lack() -> None:
    lacking = Count(1, 1, 1, 1, ("aten._fft_r2c",))
    lines = str(small_report(before=lacking, after=lacking)).splitlines()
    assert lines[-2] == "The MACs lack those of aten._fft_r2c."


def test_convolutions_that_cudnn_chose_by_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default; it took all that a GPU would have gained from a small network."""
    nets = nn.Conv2d(1, 2, 3), mlp(4, 3, 2)
    on_cpu, on_gpu = [torch.device("cpu")], [torch.device("cuda", 0)]
    assert _uses_cudnn_heuristics(on_gpu, nets)
    assert not _uses_cudnn_heuristics(on_cpu, nets)
    assert not _uses_cudnn_heuristics(on_gpu, nets[1:])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not _uses_cudnn_heuristics(on_gpu, nets)
    report = measure(nets[1], nets[1], ROWS, repeats=2)
    assert "cudnn.benchmark = True" not in str(report)
    assert "cudnn.benchmark = True" in str(replace(report, by_rules=True))


def test_for_json() -> None:
    report = small_report()
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert record["before"]["macs"] == 8000
    assert record["latencies"][1]["speedup"] == 4
    assert record["latencies"][0]["realised"] == 0.25
    assert (record["compression"], record["promise"]) == (10, 8)
    assert (record["repeats"], record["torch"]) == (30, torch.__version__)


def test_nothing_left_to_multiply() -> None:
    report = small_report(after=Count(0, 0, 0, 0))
    assert math.isinf(report.compression)
    assert json.dumps(report.to_dict(), allow_nan=False)
    assert "infx" in str(report)
    assert small_report(before=Count(0, 0, 0, 0), after=Count(0, 0, 0, 0)).compression == 1
    worse = small_report(before=Count(0, 0, 0, 0))
    assert math.isinf(worse.realised[1])
    assert json.dumps(worse.to_dict(), allow_nan=False)


def test_a_batch_size_can_be_timed_twice() -> None:
    report = measure(mlp(4, 3), mlp(4, 2), torch.zeros(1, 4), batches=[2, 2], repeats=2)
    assert len(report.to_dict()["latencies"]) == 2


def test_a_batch_that_was_not_measured() -> None:
    with pytest.raises(ArgumentError, match="batch 8 was not measured, only 1, 64"):
        small_report().speedup(8)


LINEAR, ROWS = nn.Linear(4, 3), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("args", "settings", "words"),
    [
        ((LINEAR, "small", ROWS), {}, r"after is a str; measure takes an nn\.Module"),
        ((LINEAR.forward, LINEAR, ROWS), {}, r"before is a method; measure takes"),
        ((LINEAR, LINEAR, 3), {}, "inputs need a tensor with at least one example"),
        ((LINEAR, LINEAR, torch.tensor(1.0)), {}, "inputs need a tensor with at least one example"),
        ((LINEAR, LINEAR, ROWS[:0]), {}, "the example inputs have no rows"),
        ((LINEAR, LINEAR, ROWS.to("meta")), {}, "meta tensors cannot be timed"),
        ((LINEAR, LINEAR, ROWS), {"batches": ()}, r"batches=\(\) must be one or more sizes"),
        ((LINEAR, LINEAR, ROWS), {"batches": (0,)}, r"batches=\(0,\) must be"),
        ((LINEAR, LINEAR, ROWS), {"repeats": 1}, "repeats=1 must be at least 2"),
        ((LINEAR, LINEAR, ROWS), {"layouts": ["blocked"]}, r"\['blocked'\] must be one or more of"),
        ((LINEAR, LINEAR, ROWS), {"layouts": ()}, "one or more of 'contiguous', 'channels_last'"),
    ],
)
def test_refusals(args: tuple[object, ...], settings: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        measure(*args, **settings)


def test_the_inside_of_a_gated_model_is_refused() -> None:
    gated = hc.attach_gates(mlp(4, 3), ROWS, sites=["0:in"])
    with pytest.raises(ArgumentError, match="after is the inside of a GatedModel"):
        measure(gated, gated.model, ROWS)


def test_exported_graphs() -> None:
    plain = mlp(4, 3, 2)
    batch = torch.export.Dim("batch", min=1)
    graph = torch.export.export(plain, (ROWS,), dynamic_shapes=((batch, None),)).module()
    assert measure(plain, graph, ROWS, repeats=2).promise == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_work_is_waited_for() -> None:
    """2 T multiply-adds take milliseconds on any GPU, and launching them microseconds."""
    large, small = nn.Linear(16384, 16384).cuda(), nn.Linear(16384, 1).cuda()
    report = measure(large, small, torch.zeros(1, 16384, device="cuda"), batches=[8192], repeats=3)
    assert report.latencies[0].before_ms > 1
    assert report.speedup(8192) > 2
    assert report.device == torch.cuda.get_device_name()


def test_a_shrunk_model_stands_for_its_dense_one() -> None:
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 4))
    gated.gates.log_alpha.data[:6] = -30.0
    hc.shrink(gated, None, pays=0.0)
    report = hc.measure(gated, hc.compact(gated), torch.randn(2, 4), batches=[1], repeats=2)
    assert (report.before.params, report.after.params) == (58, 16)
