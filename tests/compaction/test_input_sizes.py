import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.graph_form import CompactedGraph
from hardconcrete.compaction.input_sizes import FixedSizeError, another_batch, other_lengths
from tests.exactness import apart, outputs


def test_rows_are_drawn_again() -> None:
    x, one = torch.randn(3, 2), torch.randn(1)
    (again,), kwargs = another_batch(((x,), {"mask": x > 0, "one": one, "flag": True}))
    assert len(again) == 4
    assert all((row == x).all(1).any() for row in again)
    assert torch.equal(kwargs["mask"], again > 0)
    assert kwargs["one"] is one
    assert kwargs["flag"] is True
    assert another_batch(((), {"flag": True})) == ((), {"flag": True})


def test_each_length_is_changed_in_all_tensors() -> None:
    tokens, mask = torch.arange(10).view(2, 5), torch.ones(5, 5)
    pairs = [*other_lengths(((tokens,), {"mask": mask, "image": torch.ones(2, 1, 7)}))]
    shapes = [
        [tuple(x.shape) for x in (args[0], *kwargs.values())]
        for pair in pairs
        for args, kwargs in pair
    ]
    assert shapes == [
        [(2, 6), (6, 6), (2, 1, 7)], [(2, 4), (4, 4), (2, 1, 7)],
        [(2, 5), (5, 5), (2, 1, 8)], [(2, 5), (5, 5), (2, 1, 6)],
    ]  # fmt: skip
    assert pairs[0][0][0][0].tolist() == [[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 5]]
    assert not [*other_lengths(((), {"flag": True}))]


class Encoder(nn.Module):
    """Two layers of attention with embeddings and a mask; heads as a number in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        batch, length = tokens.shape
        h = self.words(tokens) + self.places(torch.arange(length))
        q, k, v = self.qkv(h).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 2 + (1 - mask)[:, None, None] * -1e4
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 16)
        h = self.norm(h + self.o(mixed))
        return h + self.down(self.up(h).relu())


def batch_of(size: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(size * length).view(size, length) % 20
    return tokens, (tokens > 2).float()


Models = tuple[hc.GatedModel, nn.Module]


@pytest.fixture(scope="module")
def models() -> Models:
    torch.manual_seed(0)
    gated = hc.attach_gates(Encoder(), batch_of(2, 5)).eval()
    gated.gates.log_alpha.data.normal_(0, 3)
    return gated, hc.compact(gated, form="graph")


@pytest.mark.parametrize("shape", [(3, 9), (1, 12), (4, 2), (2, 1)])
def test_a_graph_takes_any_length(models: Models, shape: tuple[int, int]) -> None:
    gated, small = models
    assert not hc.CompactionPlan.of(small).fixed_sizes
    example = batch_of(*shape), {}
    assert apart(outputs(gated, example), outputs(small, example)) < 1e-5


def test_a_saved_graph_takes_any_length(models: Models, tmp_path: Path) -> None:
    _, small = models
    hc.save(tmp_path / "small.safetensors", small)
    example = batch_of(3, 8), {}
    loaded = hc.load(tmp_path / "small.safetensors", Encoder()).eval()
    assert apart(outputs(small, example), outputs(loaded, example)) < 1e-6


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # the exporter uses it
def test_onnx_takes_any_length(models: Models) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    _, small = models
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = {"args": (sizes, sizes)}
    program = torch.onnx.export(small.eval(), batch_of(2, 5), dynamo=True, dynamic_shapes=shapes)
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue())
    names = [each.name for each in session.get_inputs()]
    for shape in ((2, 5), (3, 9)):
        values = batch_of(*shape)
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        (result,) = session.run(None, feed)
        torch.testing.assert_close(torch.from_numpy(result), small(*values), atol=1e-5, rtol=1e-4)


class OneLength(nn.Module):
    """Has a parameter for each of five places, and a width written into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(5, 4))
        self.up, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(x + self.places).view(*x.shape[:2], 6))


def test_sizes_that_a_graph_has_written_into_it_are_checked() -> None:
    small = hc.compact(OneLength(), torch.ones(2, 5, 4), keep={"up": [0, 2, 3]})
    assert type(small) is CompactedGraph
    assert small(torch.ones(3, 5, 4)).shape == (3, 5, 2)
    with pytest.raises(FixedSizeError, match="size 6 along dimension 1, and this graph was traced"):
        small(torch.ones(2, 6, 4))


class Branches(nn.Module):
    """Does something else with long inputs, which one graph cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu().view(*x.shape[:2], 8))
        return h if x.shape[1] < 6 else -h


def test_a_graph_that_is_wrong_at_another_length_is_for_one() -> None:
    x = torch.randn(2, 5, 4)
    small = hc.compact(Branches(), x, keep={"up": [1, 2]}, form="graph")
    assert hc.CompactionPlan.of(small).fixed_sizes
    assert str(hc.CompactionPlan.of(small)).startswith("Branches, as graph for one size")
    assert small(x[:1]).shape == (1, 5, 4)
    with pytest.raises(FixedSizeError, match="traced for 5"):
        small(torch.randn(2, 6, 4))
    plan = hc.CompactionPlan.from_json(hc.CompactionPlan.of(small).to_json())
    with pytest.raises(FixedSizeError, match="traced for 5"):
        plan.apply(Branches(), x)(torch.randn(2, 7, 4))
