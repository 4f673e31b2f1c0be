import pytest
import torch

from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value


def units(state: PropagationState, shape: tuple[int, ...], *dims: int) -> Value:
    """A tensor with new labels over some dimensions."""
    sizes = [size if dim in dims else 1 for dim, size in enumerate(shape)]
    labels = state.labels.fresh(torch.Size(sizes).numel()).reshape(sizes)
    return Value(shape, (Component(labels),))


def found(state: PropagationState, part: Component) -> list[int]:
    return state.labels.find(part.labels).flatten().tolist()


def test_keep_whole_keeps_labels_along_other_dimensions() -> None:
    """(2 heads, 3 dimensions): keeping the second whole leaves the heads."""
    state = PropagationState()
    value = state.keep_whole(units(state, (5, 2, 3), 1, 2), [-1], "attention")
    assert [part.dims for part in value.components] == [(1,)]
    assert found(state, value.components[0]) == [0, 3]
    assert not state.labels.why_fixed()


def test_keep_whole_fixes_a_dimension_and_says_why() -> None:
    state = PropagationState()
    state.call = OperatorCall("softmax", {}, ((5, 4),), "head", torch.softmax)
    value = state.keep_whole(units(state, (5, 4), 1), [1], "all are read")
    assert value.components == ()
    assert value.why_rigid == "all are read (softmax)"
    assert str(state.labels.why_fixed()[0]) == "all are read (softmax in head)"


def test_merged_tensors_share_units_where_they_share_dimensions() -> None:
    state = PropagationState()
    first, second = units(state, (2, 3, 4), 1), units(state, (1, 3, 4), 2)
    third = units(state, (1, 3, 1), 1)
    apart = state.merged([first, second], (2, 3, 4))
    assert apart == []  # each is full where the other has no units
    state = PropagationState()
    first, third = units(state, (2, 3, 4), 1), units(state, (1, 3, 1), 1)
    (part,) = state.merged([first, third], (2, 3, 4))
    assert found(state, part) == found(state, third.components[0]) == [0, 1, 2]


def test_a_tensor_without_labels_fixes_units_unless_it_broadcasts() -> None:
    state = PropagationState()
    value = units(state, (2, 3), 1)
    assert len(state.merged([value, Value((2, 1))], (2, 3))) == 1
    assert state.merged([value, Value((1, 3), why_rigid="the input x")], (2, 3)) == []
    reason = state.labels.why_fixed()[0]
    assert "it is combined with a tensor that cannot shrink: the input x (" in str(reason)
    assert reason.cause == "the input x"


def test_what_all_heads_share_stays_whole_when_they_do() -> None:
    """(2 heads, 3 features) times (3 features), as with a rotary embedding."""
    state = PropagationState()
    heads, features = units(state, (5, 2, 3), 1, 2), units(state, (1, 1, 3), 2)
    (part,) = state.merged([heads, features], (5, 2, 3))
    assert part.dims == (1, 2)
    state.keep_whole(Value((5, 2, 3), (part,)), [2], "attention")
    state.settle_shared_entries()
    assert found(state, heads.components[0]) == [0, 0, 0, 3, 3, 3]
    assert found(state, features.components[0]) == [6, 6, 6]
    (reason,) = state.labels.why_fixed().values()
    assert reason.text == "entries of this tensor are used by several units"


@pytest.mark.parametrize("whole", [True, False])
def test_what_all_heads_share_is_cut_along_with_their_features(whole: bool) -> None:
    """The same, where heads cannot be removed, or where nothing else decides."""
    state = PropagationState()
    heads, features = units(state, (5, 2, 3), 1, 2), units(state, (1, 1, 3), 2)
    (part,) = state.merged([heads, features], (5, 2, 3))
    if whole:
        state.keep_whole(Value((5, 2, 3), (part,)), [1], "a mean over heads")
    state.settle_shared_entries()
    assert found(state, heads.components[0]) == [0, 1, 2, 0, 1, 2]
    assert found(state, features.components[0]) == [0, 1, 2]
    assert not state.labels.why_fixed()


def test_copies_do_not_displace_units() -> None:
    """[2 heads, 4 copies] flattened to 8, as with grouped queries."""
    state = PropagationState()
    heads, copies = units(state, (2, 4), 0), units(state, (2, 4), 1)
    flat = [p.labels.expand(2, 4).reshape(8) for p in (*copies.components, *heads.components)]
    parts = Component(flat[0], copies=True), Component(flat[1])
    (part,) = state.merged([Value((8,), parts)], (8,))
    assert found(state, part) == [0] * 4 + [1] * 4


def test_of_two_components_along_one_dimension_the_one_with_more_units_stays() -> None:
    """[2, 3] flattened to 6: the rows become fixed, and the columns stay units."""
    state = PropagationState()
    rows, columns = units(state, (2, 3), 0), units(state, (2, 3), 1)
    flat = [p.labels.expand(2, 3).reshape(6) for p in (*rows.components, *columns.components)]
    (part,) = state.merged([Value((6,), tuple(map(Component, flat)))], (6,))
    assert found(state, part) == [2, 3, 4, 2, 3, 4]
    assert found(state, rows.components[0]) == [0, 0]


def test_make_sliceable_keeps_the_longest_dimension() -> None:
    state = PropagationState()
    value = state.make_sliceable(units(state, (2, 3), 0, 1))
    assert [part.dims for part in value.components] == [(1,)]
    assert found(state, value.components[0]) == [0, 1, 2]


def test_arguments_of_a_call_by_name() -> None:
    value = Value((2,))
    call = OperatorCall("cat", {"tensors": [value, value], "dim": 1}, ((4,),), "", torch.cat)
    assert (call["dim"], call.get("other"), call.shape) == (1, None, (4,))
    assert call.values == [value, value]
