import torch

from hardconcrete.graph.labels import Labels, Reason


def reason(text: str) -> Reason:
    return Reason(text, "block.fc", "softmax")


def test_new_labels_are_separate() -> None:
    labels = Labels()
    first, second = labels.fresh(3), labels.fresh(2000)
    assert len({*first.tolist(), *second.tolist()}) == 2003
    assert torch.equal(labels.find(second), second)


def test_uniting_is_transitive_whatever_the_order() -> None:
    """Random pairs against sets that are joined one by one."""
    generator = torch.Generator().manual_seed(0)
    labels, sets = Labels(), {k: {k} for k in range(60)}
    labels.fresh(60)
    for _ in range(6):
        a, b = torch.randint(60, (2, 7), generator=generator)
        labels.unite(a, b)
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            joined = sets[x] | sets[y]
            sets.update(dict.fromkeys(joined, joined))
    assert labels.find(torch.arange(60)).tolist() == [min(sets[k]) for k in range(60)]


def test_shapes_broadcast() -> None:
    labels = Labels()
    table = labels.fresh(12).reshape(3, 4)
    labels.unite(table, table[:, :1])
    assert labels.find(table).tolist() == [[0] * 4, [4] * 4, [8] * 4]


def test_united_labels_keep_their_first_reason() -> None:
    labels = Labels()
    a, b, c = labels.fresh(2), labels.fresh(2), labels.fresh(2)
    labels.fix(b, reason("first"))
    labels.fix(a[:1], reason("second"))
    labels.unite(a, b)
    assert {root: why.text for root, why in labels.why_fixed().items()} == {0: "first", 1: "first"}
    assert not {*c.tolist()} & labels.why_fixed().keys()


def test_lost_zeros_survive_a_union() -> None:
    labels = Labels()
    a, b = labels.fresh(2), labels.fresh(2)
    labels.mark_zero_lost(b[1:])
    assert labels.zero_lost() == {3}
    labels.unite(a, b)
    assert labels.zero_lost() == {1}


def test_a_reason_names_operator_and_module() -> None:
    assert str(reason("it is read")) == "it is read (softmax in block.fc)"
    assert str(Reason("it is read", "", "output")) == "it is read (output in the model itself)"
