import pytest

from hardconcrete.pruning.progress import PruningProgress


def shown(show: bool | None, capsys: pytest.CaptureFixture[str]) -> str:
    with PruningProgress(2, show, "half of the MACs") as progress:
        progress.say(1, "importance")
        progress.say(2, "re-fit")
        progress.finish("verifying")
    return capsys.readouterr().err


def test_a_bar_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(True, capsys)
    assert "half of the MACs" in text
    assert "verifying" in text


@pytest.mark.parametrize("show", [False, None])
def test_nothing_without_a_terminal(show: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(show, capsys) == ""
