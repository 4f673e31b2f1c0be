from hardconcrete.cost.ragged import concatenate_tables, pad_rows, repeat_to_width


def test_a_table_is_as_wide_as_a_power_of_two() -> None:
    assert pad_rows([]).shape == (0, 1)
    assert pad_rows([[1, 2, 3]]).tolist() == [[1, 2, 3, -1]]


def test_empty_tables() -> None:
    assert concatenate_tables([]).shape == (0, 1)
    assert repeat_to_width([]).shape == (0, 1)
