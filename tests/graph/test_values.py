import torch

from hardconcrete.graph.values import Component, Value


def weight() -> Value:
    """[3, 1, 4] with units along dimensions 0 and 2."""
    rows = Component(torch.arange(3).reshape(3, 1, 1), ("fc.weight", 0))
    columns = Component(torch.arange(3, 7).reshape(1, 1, 4), ("fc.weight", 2))
    return Value((3, 1, 4), (rows, columns), from_parameters=True)


def test_components_along_a_dimension() -> None:
    value = weight()
    assert [part.dims for part in value.components] == [(0,), (2,)]
    assert [part.axis for part in value.components_along(2)] == [("fc.weight", 2)]
    assert value.components_along(1) == ()


def test_alignment_adds_dimensions_in_front() -> None:
    value = weight().with_rank(5)
    assert value.shape == (1, 1, 3, 1, 4)
    assert [part.dims for part in value.components] == [(2,), (4,)]
    assert value.from_parameters


def test_dimensions_can_be_moved_among_others() -> None:
    value = weight().at_dims([3, 2, 0], 4)
    assert value.shape == (4, 1, 1, 3)
    assert [part.dims for part in value.components] == [(3,), (0,)]
    assert value.components[1].labels.flatten().tolist() == [3, 4, 5, 6]
    assert value.components[1].axis == ("fc.weight", 2)


def test_other_components_on_the_same_tensor() -> None:
    value = weight()
    assert value.with_components(value.components_along(0)).components == value.components_along(0)
