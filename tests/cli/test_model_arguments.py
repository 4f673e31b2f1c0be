import pytest
import torch
from torch import nn

from hardconcrete.cli.model_arguments import example_input, import_model
from hardconcrete.errors import ArgumentError


def test_a_class_a_function_or_a_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(import_model("hardconcrete.demo:MLP"), nn.Module)
    made = nn.Linear(2, 3)
    monkeypatch.setattr("hardconcrete.demo.ready", made, raising=False)
    assert import_model("hardconcrete.demo:ready") is made


def test_inputs_have_shapes_and_types() -> None:
    assert example_input("1,3,8").shape == (1, 3, 8)
    assert example_input("4").dtype == torch.float32
    assert example_input("2,5:int64").dtype == torch.int64


@pytest.mark.parametrize("text", ["", "a", "1,-2", "1,2:Tensor", "1,2:float99"])
def test_a_bad_shape_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="must be a shape such as"):
        example_input(text)
