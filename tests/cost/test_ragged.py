from hardconcrete.cost.ragged import filled, joined, padded


def test_a_table_is_as_wide_as_a_power_of_two() -> None:
    assert padded([]).shape == (0, 1)
    assert padded([[1, 2, 3]]).tolist() == [[1, 2, 3, -1]]


def test_tables_of_nothing() -> None:
    assert joined([]).shape == (0, 1)
    assert filled([]).shape == (0, 1)
