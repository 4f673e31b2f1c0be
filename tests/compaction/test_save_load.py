import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.graph_form import CompactedGraph
from hardconcrete.compaction.save_load import _tensors_of
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, CompactionError, DataError
from hardconcrete.files import tensors
from tests.compaction.networks import Joined, Maps, Sized, TiedWords, at_random, dense, with_shut
from tests.compaction.test_planner import Nested, nested


def same_state(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


MODELS = {
    "module": (Maps, Maps.example, "module"),
    "graph": (Maps, Maps.example, "graph"),
    "size in the forward": (Sized, Sized.example, "auto"),
    "tied": (TiedWords, lambda n=3: torch.randint(9, (n, 4)), "module"),
    "tied, as graph": (TiedWords, lambda n=3: torch.randint(9, (n, 4)), "graph"),
}


@pytest.mark.parametrize(("make", "example", "form"), MODELS.values(), ids=MODELS.keys())
def test_there_and_back(tmp_path: Path, make: type[nn.Module], example: object, form: str) -> None:
    gated = at_random(hc.attach_gates(make(), example()).eval())  # type: ignore[operator]
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    hc.save(tmp_path / "m", small)
    fresh = make().eval()
    before = copy.deepcopy(fresh.state_dict())
    again = hc.load(str(tmp_path / "m"), fresh)
    assert type(again) is type(small)
    assert hc.CompactionPlan.of(again) == hc.CompactionPlan.of(small)
    assert same_state(again, small)
    x = example(5)  # type: ignore[operator]
    assert torch.equal(again(x), small(x))
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())
    if make is TiedWords:
        assert again.words.weight is again.decoder.weight
    if type(small) is CompactedGraph:
        again.train()(x).sum().backward()
    hc.save(tmp_path / "again", again)
    assert same_state(hc.load(tmp_path / "again", make()), again)


def test_selected_inputs_come_back(tmp_path: Path) -> None:
    gated = hc.attach_gates(MLP(20, (9, 8)), torch.randn(2, 20), sites=["fc1:in", "fc2:in"])
    for form in ("module", "graph"):
        small = hc.compact(at_random(gated), form=form).eval()  # type: ignore[arg-type]
        hc.save(tmp_path / "m", small)
        again, x = hc.load(tmp_path / "m", MLP(20, (9, 8))).eval(), torch.randn(5, 20)
        assert again.fc1.weight.shape[1] < 20
        assert torch.equal(again(x), small(x))


def test_nested_inputs_come_back(tmp_path: Path) -> None:
    gated = at_random(hc.attach_gates(Nested(), nested(3), {"twice": True}))
    small = hc.compact(gated, form="graph").eval()
    hc.save(tmp_path / "m", small)
    again, inputs = hc.load(tmp_path / "m", Nested()).eval(), nested(5)
    assert torch.equal(again(*inputs, twice=True), small(*inputs, twice=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """A dense model of float32 gets the type that was saved."""
    gated = at_random(hc.attach_gates(Joined().to(dtype), torch.randn(3, 4, dtype=dtype)))
    small = hc.compact(gated)
    hc.save(tmp_path / "m", small)
    again = hc.load(tmp_path / "m", Joined())
    assert same_state(again, small)
    assert {p.dtype for p in again.parameters()} == {dtype}


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("make", [Joined, TiedWords])
def test_a_dense_model_on_the_meta_device(tmp_path: Path, form: str, make: type) -> None:
    x = torch.randn(3, 4) if make is Joined else torch.randint(9, (3, 4))
    small = hc.compact(at_random(hc.attach_gates(make(), x)), form=form)  # type: ignore[arg-type]
    hc.save(tmp_path / "m", small)
    with torch.device("meta"):
        empty = make()
    again = hc.load(tmp_path / "m", empty)
    assert all(p.is_meta for p in empty.parameters())
    assert same_state(again, small)
    assert torch.equal(again(x), small(x))
    if make is TiedWords:
        assert again.words.weight is again.decoder.weight


class Positions(nn.Module):
    """A buffer that no file has."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("places", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x + self.places).relu())


def test_a_buffer_that_no_file_has(tmp_path: Path) -> None:
    small = hc.compact(at_random(hc.attach_gates(Positions(), torch.randn(3, 4))))
    hc.save(tmp_path / "m", small)
    x = torch.randn(5, 4)
    assert torch.equal(hc.load(tmp_path / "m", Positions())(x), small(x))
    with torch.device("meta"):
        empty = Positions()
    with pytest.raises(CompactionError, match="places is on the meta device and not in the file"):
        hc.load(tmp_path / "m", empty)


def test_settings_of_the_dense_model_are_kept(file: Path) -> None:
    model = Joined().eval()
    model.left.requires_grad_(False)
    again = hc.load(file, model)
    assert not again.training
    assert [p.requires_grad for p in again.left.parameters()] == [False, False]
    assert again.head.weight.requires_grad


def test_nothing_is_unpickled(file: Path, small: nn.Module) -> None:
    """Plain tensors and text: any safetensors reader opens it."""
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(small.state_dict())
        about = opened.metadata()
    assert about["format"] == "hardconcrete.compacted"
    assert json.loads(about["plan"])["model"] == "Joined"


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    gated = at_random(hc.attach_gates(TiedWords(), torch.randint(9, (3, 4))))
    hc.save(tmp_path / "m", hc.compact(gated))
    with safe_open(tmp_path / "m", "pt") as opened:
        assert "words.weight" in opened.keys()  # noqa: SIM118
        assert "decoder.weight" not in opened.keys()  # noqa: SIM118


def test_a_write_that_fails_leaves_the_old_file(
    file: Path, small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fails(_: object, path: Path, __: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tensors, "save_file", fails)
    with pytest.raises(DataError, match=r"was not written: disk full.* is safe"):
        hc.save(file, small)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_kill_before_the_last_step_leaves_the_old_file(
    file: Path, small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written elsewhere first: the name changes hands in one step."""
    before = file.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    other = copy.deepcopy(small)
    other.head.bias.data.add_(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            hc.save(file, other)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_file_is_replaced_as_a_whole(file: Path, small: nn.Module) -> None:
    other = copy.deepcopy(small)
    other.head.bias.data.add_(1.0)
    hc.save(file, other)
    assert same_state(hc.load(file, Joined()), other)
    assert list(file.parent.iterdir()) == [file]


def test_only_compacted_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="this Sequential carries no plan"):
        hc.save(tmp_path / "m", dense())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path, small: nn.Module) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        hc.save(tmp_path / "nowhere" / "m", small)


class Extra(Joined):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: object) -> None: ...


def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    small = hc.compact(at_random(hc.attach_gates(Extra(), torch.randn(3, 4))))
    with pytest.raises(CompactionError, match="_extra_state is a dict: a file holds tensors only"):
        hc.save(tmp_path / "m", small)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match=r"is not a file; pass a file that hc\.save wrote"):
            hc.load(path, Joined())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match="is truncated or no safetensors file"):
        hc.load(file, Joined())


def test_every_altered_byte_is_noticed(file: Path) -> None:
    """A sample of all places, header and tensors."""
    content = file.read_bytes()
    for place in [*range(0, len(content), 37), len(content) - 1]:
        altered = bytearray(content)
        altered[place] ^= 1
        file.write_bytes(bytes(altered))
        with pytest.raises(DataError):
            hc.load(file, Joined())


def test_an_altered_tensor_has_another_checksum(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match="was altered: its content does not match its checksum"):
        hc.load(file, Joined())


def cut_graph(file: Path, **changes: str) -> None:
    """The same tensors, with other words about them."""
    with safe_open(file, "pt") as opened:
        about = opened.metadata() | changes
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, file, {key: value for key, value in about.items() if value})


def test_another_version(file: Path) -> None:
    cut_graph(file, version="7")
    with pytest.raises(
        DataError, match=r"has version 7 of the format, and this .* reads version 1"
    ):
        hc.load(file, Joined())


def test_an_altered_plan(file: Path, small: nn.Module) -> None:
    plan = hc.CompactionPlan.of(small).to_json()
    cut_graph(file, plan=plan.replace('"Joined"', '"Other"'))
    with pytest.raises(DataError, match="was altered"):
        hc.load(file, Joined())


def test_a_plan_that_cannot_be_read(file: Path, small: nn.Module) -> None:
    cut_graph(file, plan="{}", sha256=tensors.digest(_tensors_of(small), "{}"))
    with pytest.raises(DataError, match="carries a plan that cannot be read"):
        hc.load(file, Joined())


def test_other_safetensors_files(file: Path) -> None:
    save_file({"a": torch.zeros(2)}, file)
    with pytest.raises(DataError, match=r"was not written by hc\.save: it carries no plan"):
        hc.load(file, Joined())
    file.write_text("no such thing")
    with pytest.raises(DataError, match="is truncated or no safetensors file"):
        hc.load(file, Joined())


def test_another_class(file: Path) -> None:
    with pytest.raises(CompactionError, match="holds a Joined, and dense_model is a Seq"):
        hc.load(file, dense())


def wider() -> Joined:
    model = Joined()
    model.left, model.head = nn.Linear(4, 8), nn.Linear(13, 3)
    return model


def with_more() -> Joined:
    model = Joined()
    model.more = nn.Linear(2, 2)
    return model


def with_less() -> Joined:
    model = Joined()
    model.head = nn.Linear(11, 3, bias=False)
    return model


def with_other_outputs() -> Joined:
    model = Joined()
    model.head = nn.Linear(11, 5)
    return model


@pytest.mark.parametrize("make", [wider, with_more, with_less, with_other_outputs])
@pytest.mark.parametrize("form", ["module", "graph"])
def test_another_architecture(tmp_path: Path, make: object, form: str) -> None:
    gated = at_random(hc.attach_gates(Joined(), torch.randn(3, 4)), seed=1)
    hc.save(tmp_path / "m", hc.compact(gated, form=form))  # type: ignore[arg-type]
    with pytest.raises(CompactionError, match="for another architecture"):
        hc.load(tmp_path / "m", make())  # type: ignore[operator]


@pytest.mark.parametrize("make", [Maps, TiedWords, dense])
def test_a_model_that_was_made_small_twice(tmp_path: Path, make: type[nn.Module]) -> None:
    """Its file loads into the dense model, and its plan makes a dense model small."""
    example = torch.randint(9, (3, 4)) if make is TiedWords else Maps.example()
    example = torch.randn(3, 4) if make is dense else example
    model = make().eval()
    small = hc.compact(at_random(hc.attach_gates(copy.deepcopy(model), example), seed=1))
    smaller = hc.compact(at_random(hc.attach_gates(copy.deepcopy(small), example), seed=2))
    hc.save(tmp_path / "m", smaller)
    again = hc.load(tmp_path / "m", make())
    assert same_state(again, smaller)
    plan = hc.CompactionPlan.of(smaller)
    assert plan == hc.CompactionPlan.of(again)
    for group in hc.find_groups(model, example).groups:
        assert plan.groups[group.name].units == group.units
    torch.testing.assert_close(plan.apply(model)(example), smaller.eval()(example))


def test_a_model_that_was_changed_in_between_keeps_its_second_plan() -> None:
    small = hc.compact(with_shut(hc.attach_gates(dense(), torch.randn(3, 4)), {"0": [0]}))
    layers = *small[:4], nn.ReLU(), nn.Linear(small[4].in_features, 3)  # type: ignore[index,operator]
    changed = nn.Sequential(*layers)
    changed.__dict__.update({key: value for key, value in small.__dict__.items() if "plan" in key})
    smaller = hc.compact(with_shut(hc.attach_gates(changed, torch.randn(3, 4)), {"0": [1, 2]}))
    assert hc.CompactionPlan.of(smaller).groups["0"].units == 5


def test_threads_save_to_one_path(tmp_path: Path, small: nn.Module) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: hc.save(tmp_path / "m", small), range(24)))
    assert same_state(hc.load(tmp_path / "m", Joined()), small)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_graph_with_large_examples_is_not_saved(tmp_path: Path, small: nn.Module) -> None:
    plan = hc.CompactionPlan.of(small)
    large = replace(plan, form="graph", inputs=[[{"shape": [2**40], "dtype": "bool"}], {}])
    with pytest.raises(ArgumentError, match="compact the model with fewer examples"):
        hc.save(tmp_path / "m", large.put_on(copy.deepcopy(small)))
