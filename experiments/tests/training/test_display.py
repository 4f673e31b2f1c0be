from hardconcrete.demo import Status
from hardconcrete_paper.training.display import Sweep, SweepDisplay


def test_a_resumed_run_of_a_sweep_counts_what_was_done_before() -> None:
    with SweepDisplay(["a"], epochs=4, dense=100.0, sweep=Sweep("second", 2, 3)) as display:
        display.show(3, [Status(0.25, (3, 2), 50.0, 60.0)])
        assert display.tasks[0].completed == 4 + 3
