"""How a gated model is called: with the signature and the attributes of the model inside."""

import copy
import gc
import inspect
import io
import pickle
import weakref
from functools import partial
from inspect import Parameter

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating.calls import examples_in, stack


class Config:
    hidden = 8


class Classifier(nn.Module):
    """Named inputs, a configuration and a method of its own, as models of the Hub have."""

    kind = "classifier"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def score(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids).relu())

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,  # noqa: ARG002
        **extra: object,  # noqa: ARG002
    ) -> Tensor:
        return self.score(input_ids)


def make(model: nn.Module | None = None) -> hc.GatedModel:
    return hc.attach_gates(model or Classifier(), torch.zeros(2, 4))


def test_the_signature_is_that_of_the_model() -> None:
    gated = make()
    shown = inspect.signature(gated.forward)
    assert list(shown.parameters) == ["input_ids", "labels", "samples", "extra"]
    assert shown.parameters["input_ids"].annotation is Tensor
    assert shown.parameters["samples"].kind is Parameter.KEYWORD_ONLY
    assert shown.return_annotation is Tensor
    other = make(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    assert list(inspect.signature(other.forward).parameters) == ["input", "samples"]
    assert inspect.signature(gated.forward) == shown
    assert isinstance(gated, hc.GatedModel)
    assert repr(gated).startswith("GatedModel(")
    assert gated(input_ids=torch.zeros(2, 4), labels=None).shape == (2, 3)


def test_a_model_with_an_argument_called_samples_keeps_it() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor, samples: int = 1) -> Tensor:
            return super().forward(x) * samples

    gated = hc.attach_gates(Own(4, 3), torch.zeros(2, 4), sites=[":in"])
    assert str(inspect.signature(gated.forward)).startswith("(x: torch.Tensor, samples: int = 1)")


def forward_of(x: Tensor, model: nn.Module) -> Tensor:
    return model[1](model[0](x))


def test_a_model_among_the_defaults_of_its_forward_is_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.forward = partial(forward_of, model=model)
    gated, gone = make(model), weakref.ref(model)
    assert type(gated) is type(copy.copy(gated))
    del model, gated
    gc.collect()  # the class
    gc.collect()  # the model
    assert gone() is None


def test_defaults_that_cannot_be_hashed() -> None:
    class Listed(nn.Linear):
        def forward(self, x: Tensor, sizes: list[int] = [1, 2]) -> Tensor:  # noqa: ARG002, B006
            return super().forward(x)

    gated = hc.attach_gates(Listed(4, 3), torch.zeros(2, 4), sites=[":in"])
    assert list(inspect.signature(gated.forward).parameters) == ["x", "sizes", "samples"]


def test_a_forward_without_a_signature() -> None:
    class Silent:
        __signature__ = 3

        def __call__(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    gated = make(model)
    model.forward = Silent()
    other = copy.deepcopy(gated)
    assert list(inspect.signature(other.forward).parameters) == ["args", "samples", "kwargs"]


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: AveragedModel(m).module,
        lambda m: torch.load(_saved(m), weights_only=False),
    ],
)
def test_copies_keep_the_signature_and_the_attributes(copied: object) -> None:
    gated = make()
    other = copied(gated)
    assert inspect.signature(other.forward) == inspect.signature(gated.forward)
    assert other.config.hidden == 8
    x = torch.randn(2, 4)
    assert torch.equal(other.eval()(x), gated.eval()(x))


def _saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_attributes_of_the_model() -> None:
    gated, x = make(), torch.randn(2, 4)
    assert gated.config is gated.model.config
    assert gated.kind == "classifier"
    assert gated.head is gated.model.head
    with pytest.raises(GateError, match="in training they are drawn"):
        gated.score(x)
    with gated.draw():
        assert gated.score(x).shape == (2, 3)
    assert torch.equal(gated.eval().score(x), gated.model.score(x))


def test_attributes_that_nobody_has() -> None:
    gated = make()
    words = "neither the GatedModel nor its model, a Classifier, has an attribute 'generate'"
    with pytest.raises(AttributeError, match=words):
        gated.generate()
    assert not hasattr(gated, "generate")
    assert not hasattr(gated, "__len__")
    empty = hc.GatedModel.__new__(hc.GatedModel)
    with pytest.raises(AttributeError, match="has no attribute 'model'"):
        _ = empty.anything


def test_tools_that_unwrap_models_stop_at_the_gates() -> None:
    gated = make(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    gated.model.module = nn.Identity()
    assert not hasattr(gated, "module")
    assert not hasattr(gated, "_orig_mod")


@pytest.mark.unwatched
def test_export_names_the_inputs_of_the_model() -> None:
    gated, x = make().eval(), torch.randn(2, 4)
    program = torch.export.export(gated, (), {"input_ids": x})
    assert [spec.arg.name for spec in program.graph_signature.input_specs][-1] == "input_ids"
    torch.testing.assert_close(program.module()(input_ids=x), gated(x))


@pytest.mark.unwatched
def test_compiled_code_sees_one_class_for_one_signature() -> None:
    first, second, x = make(), make(), torch.randn(2, 4)
    assert type(first) is type(second)
    compiled = torch.compile(first, backend="aot_eager", fullgraph=True)
    assert compiled(x).shape == (2, 3)
    assert compiled.config.hidden == 8


def test_stacked_outputs_and_batch_sizes() -> None:
    assert stack(torch.zeros(2), torch.ones(2)).shape == (2, 2)
    assert stack(3, 3) == 3
    with pytest.raises(ArgumentError, match="a int that differs between draws"):
        stack(3, 4)
    assert examples_in((torch.tensor(1.0), torch.zeros(5, 2)), {}) == 5
