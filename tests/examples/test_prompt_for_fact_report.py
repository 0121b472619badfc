import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report import Figures, LiveProgress, plot, results_table, throughput, verdict
from rich.console import Console
from scores import PairResult, Score


def result(model="m", note="", dev=(7, 10), test=(70, 100)):
    return PairResult(model, note, "t", Score(*dev), Score(*test), Score(3, 4), 0)


def printed(table):
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()


def test_the_table_shows_the_best_first_and_marks_random_weights():
    shown = printed(
        results_table([result("worse", "random weights", (1, 10)), result("better")], Score(33, 100), "REFUTED")
    )
    assert shown.index("better") < shown.index("worse (random weights)") < shown.index("majority class")
    assert "70.0 % [60.4, 78.1]" in shown
    assert "3 of 4" in shown


def test_the_verdict_says_whether_the_baseline_is_beaten():
    assert "intervals that do not meet" in verdict([result()], Score(33, 100))
    assert "not surely better" in verdict([result(test=(40, 100))], Score(33, 100))
    assert "random weights" in verdict([result(note="random weights")], Score(33, 100))


def test_the_closing_line_says_what_was_evicted_retried_and_lost():
    line = str(Figures(60.2, 5000, 2, 7, 320, 0, 9))
    assert line == ("5,000 items in 60 s: 7 workers evicted, 320 items retried, 0 lost, contexts built 9 times")


samples = st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 8), st.integers(0, 500)), min_size=2).map(
    lambda steps: [
        (sum(s[0] for s in steps[: i + 1]), steps[i][1], sum(s[2] for s in steps[: i + 1])) for i in range(len(steps))
    ]
)


@given(samples, st.floats(0.5, 10))
def test_throughput_is_never_negative_and_never_above_the_fastest_step(history, window):
    rates = throughput(history, window)
    steps = itertools.pairwise(history)
    fastest = max((after[2] - before[2]) / (after[0] - before[0]) for before, after in steps)
    assert len(rates) == len(history) - 1
    assert all(0 <= rate <= fastest * (1 + 1e-6) for _, rate in rates)


def test_a_plot_is_drawn_where_there_is_something_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "t.png"
    assert not plot([], path)
    assert not plot([(0.0, 1, 0)], path)
    assert not plot([(0.0, 1, 0), (1.0, 1, 0)], path)
    assert plot([(0.0, 1, 0), (1.0, 2, 10), (2.0, 1, 30)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_tells_stage_state_and_counts(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with LiveProgress(console, 10, lambda: "2 workers, 1 eviction") as progress:
        progress.stage("m / t")
        progress.advance(10)
    shown = console.file.getvalue()
    assert "m / t" in shown
    assert "2 workers, 1 eviction" in shown
    assert ("10/10" if terminal else "10 of 10 items") in shown
