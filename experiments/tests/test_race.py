"""The race compares fairly only if its own trainer and networks are right."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from benchmarks.race import all_jobs, parse
from benchmarks.racing import budgets, checkpoint_archive, methods, train
from benchmarks.racing import settings as settings_module
from benchmarks.racing.checkpoint import Checkpoint, Paused
from benchmarks.racing.data import Crops, Data
from benchmarks.racing.jobs import Job
from benchmarks.racing.latency import add_latencies
from benchmarks.racing.networks import (
    NETWORKS,
    ResNet,
    ViT,
    WideResNet,
    build,
    macs,
    narrow,
    same_widths,
    sizes,
    with_sizes,
)
from benchmarks.racing.plan import dense_passes, image_passes
from benchmarks.racing.run import read_lines, write_line
from benchmarks.racing.schedules import in_steps, one_cycle
from benchmarks.racing.settings import Outcome, Recipe, Settings
from benchmarks.racing.train import NesterovSGD, Trainer
from hardconcrete_paper.models import WideResNet as PaperWideResNet

EXAMPLES = {"lenet5": torch.zeros(1, 1, 28, 28)}
TINY = ResNet, (4, 4, 8, 4, 4, 8)
TINY_WIDE = WideResNet, (4, 8, 8, 8, 8, 8, 8)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss without labels."""
    return model(x).square().mean()


def test_the_optimiser_is_that_of_torch():
    torch.manual_seed(0)
    settings = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    first = nn.Linear(3, 2)
    second = nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    ours, theirs = (
        kind(model.parameters(), lr=0.1, **settings)
        for kind, model in ((NesterovSGD, first), (torch.optim.SGD, second))
    )
    rate = torch.zeros(())
    ours.param_groups[0]["lr"] = rate
    for value in (0.1, 0.3, 0.2):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = value
        x = torch.randn(4, 3)
        for model, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(first.weight, second.weight)


@pytest.mark.parametrize("steps", [1, 2, 20, 300])
def test_the_rate_rises_once_and_falls_to_nearly_zero(steps):
    rates = one_cycle(steps, 0.4)
    top = int(rates.argmax())
    assert len(rates) == steps
    assert rates[top] == pytest.approx(0.4)
    assert (rates[: top + 1].diff() > 0).all()
    assert (rates[top:].diff() < 0).all()


def test_a_rate_in_steps_falls_at_three_milestones():
    rates = in_steps(200, 0.1)
    expected = [0.1] * 60 + [0.02] * 60 + [0.004] * 40 + [0.0008] * 40
    assert rates.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("network", ["resnet20", "resnet20x4", "lenet5"])
@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_narrow_networks_keep_to_the_target(network, fraction):
    example = EXAMPLES.get(network, torch.zeros(1, 3, 32, 32))
    dense = macs(build(network, 10), example)
    part = macs(narrow(network, 10, fraction, example), example) / dense
    assert 0.85 * fraction < part <= fraction


@pytest.mark.parametrize("fraction", [0.5, 0.16])
def test_a_narrow_wide_network_keeps_to_the_target_in_multiples_of_eight(fraction, monkeypatch):
    monkeypatch.setitem(NETWORKS, "wide", (WideResNet, (16, 64, 128, 256, 64, 128, 256)))
    example = torch.zeros(1, 3, 32, 32)
    small = narrow("wide", 10, fraction, example, round_to=8)
    part = macs(small, example) / macs(build("wide", 10), example)
    assert 0.6 * fraction < part <= fraction
    channels = [m.num_features for m in small.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(number % 8 == 0 for number in channels)


def test_the_wide_network_is_that_of_the_paper():
    theirs = PaperWideResNet(16, 2)
    ours = WideResNet(10, (16, 32, 64, 128, 32, 32, 64, 64, 128, 128))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x))
    assert NETWORKS["wrn-28-10"][1] == (16, 160, 320, 640, *[160] * 4, *[320] * 4, *[640] * 4)


def test_the_wider_resnet_has_four_times_the_widths():
    assert NETWORKS["resnet20x4"][1] == tuple(4 * width for width in NETWORKS["resnet20"][1])


def test_a_pruned_wide_network_is_rebuilt_from_its_sizes(monkeypatch):
    monkeypatch.setitem(NETWORKS, "wide", TINY_WIDE)
    model, example = build("wide", 10), torch.zeros(1, 3, 32, 32)
    small = hc.prune(model, example, [torch.randn(4, 3, 32, 32)], mean_square, macs=0.5)
    again = with_sizes("wide", 10, sizes(small))
    assert macs(again, example) == macs(small, example) <= 0.5 * macs(model, example)


def test_a_network_is_rebuilt_from_its_sizes_and_starts_anew():
    builder, _ = NETWORKS["resnet20"]
    small = builder(10, [5, 6, 7, 3, 2, 4, 8, 9, 1, 2, 3, 4])
    again, fresh = with_sizes("resnet20", 10, sizes(small)), same_widths(small)
    example = torch.zeros(1, 3, 32, 32)
    assert sizes(again) == sizes(small) == sizes(fresh)
    assert macs(again, example) == macs(small, example)
    assert not torch.equal(fresh.conv.weight, small.conv.weight)


def test_batches_are_crops_of_the_images_some_mirrored(tmp_path):
    train = torch.randint(1, 256, (5004, 3, 32, 32), dtype=torch.uint8)
    file = {"images": train, "labels": torch.arange(5004) % 10}
    torch.save(file, tmp_path / "cifar10-train.pt")
    data = Data("cifar10", True, tmp_path, torch.device("cpu"), smoke=False)
    assert (len(data), len(data.test_labels)) == (4, 5000)
    places = [torch.tensor([column]) for column in ([2, 3], [4, 0], [4, 8], [0, 1])]
    images, labels = data.batch(Crops(*places), torch.tensor([0]))
    assert labels.tolist() == [2, 3]
    torch.testing.assert_close(images[0], data.normalise(train[2]))
    # Four rows of black above; four columns further right; mirrored.
    torch.testing.assert_close(images[1, :, 4:, 4:], data.normalise(train[3])[:, :28, 4:].flip(2))


class Interrupted(Checkpoint):
    """The time is over every few steps."""

    def over(self) -> bool:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls % 7 == 0


@pytest.fixture
def exact() -> Iterator[None]:
    """Rounding order does not matter: two runs have different layouts in memory.

    oneDNN has no kernels for float64; its float32 ones for AVX2 abort on some layers as narrow.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """64 images, in steps of 16."""
    monkeypatch.setitem(NETWORKS, "tiny", TINY)
    monkeypatch.setattr(train, "BATCH", 16)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (5064, 3, 32, 32), dtype=torch.uint8, generator=generator)
    torch.save({"images": images, "labels": torch.arange(5064) % 10}, tmp_path / "cifar10-train.pt")
    return Data("cifar10", True, tmp_path, torch.device("cpu"), smoke=False)


def run_to_the_end(method: methods.Method, data: Data, checkpoint: Checkpoint) -> Outcome:
    """Start the method again as often as it is interrupted."""
    while True:
        torch.manual_seed(0)
        settings = Settings("tiny", 0.4, 40, 0.05, 0, schedule="step", checkpoint=checkpoint)
        try:
            return method(nn.Module(), data, settings)
        except Paused:
            checkpoint = Interrupted(checkpoint.file)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("method", ["ours-scratch", "narrow", "dense"])
def test_an_interrupted_training_ends_like_one_that_is_not(method, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "STEPS_TO_CAPTURE", 0)
    straight = run_to_the_end(methods.METHODS[method], tiny, Checkpoint())
    checkpoint = Interrupted(tmp_path / "state.pt")
    resumed = run_to_the_end(methods.METHODS[method], tiny, checkpoint)
    assert torch.load(checkpoint.file)["pieces"] == 40 // 7
    assert sizes(resumed.model) == sizes(straight.model)
    for name, value in straight.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("exact")
def test_a_transformer_trains_with_adamw_and_continues(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", (ViT, (16, 3, 3, 24, 24)))
    monkeypatch.setattr(settings_module, "ADAMW", ("tiny",))
    monkeypatch.setattr(budgets, "STEPS_TO_CAPTURE", 0)
    straight = run_to_the_end(methods.METHODS["ours-scratch"], tiny, Checkpoint())
    resumed = run_to_the_end(
        methods.METHODS["ours-scratch"], tiny, Interrupted(tmp_path / "state.pt")
    )
    example = torch.zeros(1, 3, 32, 32)
    assert macs(straight.model, example) <= 0.4 * macs(build("tiny", 10), example)
    for name, value in straight.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("exact")
def test_units_are_taken_out_more_than_once(tiny, monkeypatch):
    monkeypatch.setattr(budgets, "STEPS_TO_CAPTURE", 0)
    outcome = budgets.from_scratch(nn.Module(), tiny, Settings("tiny", 0.25, 60, 0.05, 0))
    assert len(outcome.more["shrinks"]) == 4
    assert all(words.startswith("from ") for words in outcome.more["shrinks"])
    example = torch.zeros(1, 3, 32, 32)
    assert macs(outcome.model, example) <= 0.25 * macs(build("tiny", 10), example)


@pytest.mark.parametrize(
    ("target", "steps", "cost", "expected"),
    [
        (0.25, 105, 300, 1),  # a short training
        (0.47, 27300, 300, 3),  # a fourth one would take out less than a fifth
        (0.25, 27300, 300, 4),
        (0.5, 27300, 3000, 1),  # compiling takes longer than what it saves
        (0.16, 27300, 3000, 2),
        (0.9, 27300, 0, 1),
    ],
)
def test_units_are_taken_out_as_often_as_it_pays(target, steps, cost, expected):
    assert budgets.shrinks(target, steps, cost) == expected


@pytest.mark.usefixtures("exact")
def test_a_training_that_has_no_file_stops_in_time(tiny):
    trainer = Trainer(
        build("tiny", 10), tiny, Recipe(5, 0.1), checkpoint=Checkpoint(deadline=-math.inf)
    )
    with pytest.raises(Paused):
        trainer.run()
    assert trainer.done == 1


@pytest.mark.usefixtures("exact")
def test_a_compiled_training_learns_the_same(tiny, monkeypatch):
    def compiled(function):
        return torch.compile(function, dynamic=False, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(train, "compiled", compiled)
    monkeypatch.setattr(budgets, "STEPS_TO_COMPILE", 10_000)
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        settings = Settings("tiny", 0.4, 20, 0.05, 0, compiled=on)
        small = budgets.from_scratch(nn.Module(), tiny, settings).model.eval()
        images, labels = next(tiny.batches(64))
        losses.append(nn.functional.cross_entropy(small(images), labels))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)


def test_what_is_kept_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_archive, "MAX_PART_BYTES", 30_000)
    work, folder, other = (tmp_path / name for name in ("work", "kept", "other"))
    work.mkdir()
    files = [work / name for name in ("first.pt", "large.pt", "last.pt")]
    for file, size in zip(files, (50_000, 90_000, 5_000), strict=True):
        file.write_bytes(bytes(range(250)) * (size // 250))
    assert checkpoint_archive.keep(files, folder) == [files[1]]
    assert len(list(folder.iterdir())) > 1
    assert all(part.stat().st_size <= 30_000 for part in folder.iterdir())
    checkpoint_archive.restore(folder, other)
    assert {file.name: file.read_bytes() for file in other.iterdir()} == {
        file.name: file.read_bytes() for file in (files[0], files[2])
    }
    next(folder.iterdir()).unlink()
    with pytest.raises(FileNotFoundError, match="parts of an archive"):
        checkpoint_archive.restore(folder, tmp_path)


def test_a_command_can_have_several_lists_of_jobs(tmp_path):
    words = f"run --out {tmp_path} --cells scratch --methods narrow --targets 0.5 --and "
    words += "--network wrn-28-10 --cells scratch --methods narrow --targets 0.16 --schedule step"
    first, second = all_jobs(parse(words.split()))
    assert (first.network, first.target, first.schedule) == ("resnet20", 0.5, "one-cycle")
    assert (second.network, second.target, second.schedule) == ("wrn-28-10", 0.16, "step")
    assert dense_passes(second) < image_passes(second) == 24 * 390 * 128


def test_lines_from_before_a_setting_existed_count(tmp_path):
    words = f"run --out {tmp_path} --cells scratch --methods narrow --targets 0.5".split()
    (job,) = all_jobs(parse(words))
    line = asdict(job)
    del line["schedule"], line["compiled"]
    assert Job.key_of(line) == Job.key_of(asdict(job))
    assert Job.key_of(line | {"schedule": "step"}) != Job.key_of(asdict(job))


def test_latencies_are_measured_once_for_the_first_seed(tmp_path):
    model = build("lenet5", 10)
    settings = {"network": "lenet5", "dataset": "mnist", "cell": "none", "method": "ours"}
    more = {"target": 1.0, "peak_lr": 0.0, "round_to": 1, "latency": None, "widths": sizes(model)}
    cost = {"macs": macs(model, EXAMPLES["lenet5"])}
    for seed, validate in ((1, False), (0, False), (0, True)):
        write_line(tmp_path, "x", settings | more | cost | {"seed": seed, "validate": validate})
    for _ in range(2):
        add_latencies(tmp_path, "cpu", threads=torch.get_num_threads())
        second, first, held_out = read_lines(tmp_path)
        assert second["latency"] is None
        assert held_out["latency"] is None
        assert first["latency"]["cpu 64"]["small_ms"] > 0
        first["latency"]["cpu 64"]["small_ms"] = 1.0
        (tmp_path / "x.jsonl").write_text("")
        for line in (second, first, held_out):
            write_line(tmp_path, "x", line)
    assert read_lines(tmp_path)[1]["latency"]["cpu 64"]["small_ms"] == 1.0
