"""Results that come one by one: what is answered stays so, and the rest goes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import Bench, only, run_of

from ctxflow.policies.simple import Fixed
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


def begun(items=100, size=100, batching=None):
    """A worker that runs a batch."""
    bench = Bench(batching=batching or {"policy": "fixed", "size": size, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", items)
    return bench, run_of(bench.worker_with("model"))


def delivered(commands):
    return [item for command in only(commands, cmd.Deliver) for item in command.items]


def test_a_notice_at_item_60_of_100_requeues_40():
    bench, run = begun()
    assert delivered(bench.some(run, 0, 50)) == list(range(50))
    assert bench.tell(ev.EvictionNotice, "w1") == []
    assert delivered(bench.some(run, 50, 10)) == list(range(50, 60))
    assert bench.end(run) == []
    assert bench.state.apps["verify"].backlog == 40
    bench.lose("w1", evicted=True)
    again = run_of(bench.worker_with("model", "w2"))
    assert list(again.items) == list(range(60, 100)), "in order, together: nobody suspects them"
    assert bench.state.counters.retried == 40
    assert delivered(bench.finish(again)) == list(range(60, 100))
    assert bench.state.counters.done == 100 and not bench.state.open


def test_a_kill_without_notice_costs_what_had_not_come():
    bench, run = begun()
    bench.some(run, 0, 45)
    bench.lose("w1")
    assert list(run_of(bench.worker_with("model", "w2")).items) == list(range(45, 100))


def test_an_answer_that_comes_twice_is_delivered_once():
    bench, run = begun(10)
    assert delivered(bench.some(run, 0, 4)) == [0, 1, 2, 3]
    [deliver] = only(bench.some(run, 2, 4), cmd.Deliver)
    assert (list(deliver.items), list(deliver.positions)) == ([4, 5], [2, 3]), "positions among these results"
    assert bench.some(run, 0, 6) == []
    assert delivered(bench.finish(run)) == [6, 7, 8, 9]
    assert bench.some(run, 0, 10) == [], "the attempt is over"


def test_the_pace_is_that_of_the_items_that_were_done():
    bench, run = begun()
    bench.some(run, 0, 50)
    bench.end(run)
    assert bench.view.workers["w1"].seconds_per_item("verify") == pytest.approx(1.0 / 50)


def test_a_batch_that_ends_before_its_first_item_goes_back_whole():
    bench, run = begun(5)
    bench.tell(ev.EvictionNotice, "w1")
    bench.end(run)
    assert bench.view.workers["w1"].seconds_per_item("verify") is None
    bench.lose("w1")
    assert list(run_of(bench.worker_with("model", "w2")).items) == list(range(5))


def test_a_crash_halves_only_what_had_not_come():
    bench, run = begun(10)
    bench.some(run, 0, 6)
    commands = bench.fail(run, "crash", lost_context=True)
    assert cmd.Load("w1", "model") in commands
    assert list(run_of(bench.ready("w1", "model")).items) == [6, 7]


# --- an item that raises


def test_an_item_that_raises_runs_alone_and_those_after_it_go_on():
    bench, run = begun()
    bench.some(run, 0, 30)
    alone = run_of(bench.fail(run, at=30))
    assert list(alone.items) == [30]
    commands = bench.fail(alone, at=0)
    assert [list(bury.items) for bury in only(commands, cmd.Bury)] == [[30]]
    rest = run_of(commands)
    assert list(rest.items) == list(range(31, 100)) and not bench.state.attempts[rest.attempt].group
    bench.finish(rest)
    assert (bench.state.counters.done, bench.state.counters.dead) == (99, 1)


def test_retries_are_counted_where_the_item_stands_alone():
    bench = Bench(batching={"policy": "fixed", "size": 10, "share": False})
    bench.app("verify", "model", retries=2)
    bench.submit("verify", 10)
    run = run_of(bench.worker_with("model"))
    bench.some(run, 0, 9)
    for _ in range(2):
        run = run_of(bench.fail(run, at=len(run.items) - 1))
        assert list(run.items) == [9]
    assert [list(bury.items) for bury in only(bench.fail(run, at=0), cmd.Bury)] == [[9]]


def fates(bench, run, bad, chunk):
    """Run everything to its end with an app that works on so many items at once before it yields their results."""
    dead, done, calls, runs = [], [], 0, [run]
    while runs:
        run, calls = runs.pop(0), calls + 1
        items = list(run.items)
        failing = next((n for n, item in enumerate(items) if item in bad), None)
        commands = []
        if failing is None:
            commands = bench.finish(run)
        else:
            at = failing // chunk * chunk
            if at:
                commands = bench.some(run, 0, at)
            commands = [*commands, *bench.fail(run, at=at)]
        dead += [item for bury in only(commands, cmd.Bury) for item in bury.items]
        done += delivered(commands)
        runs += only(commands, cmd.Run)
    return dead, done, calls


@given(bad=st.sets(st.integers(0, 39), max_size=6), chunk=st.sampled_from([1, 3, 8, 40]))
def test_only_bad_items_die_however_many_the_app_works_on_at_once(bad, chunk):
    bench, run = begun(40, size=40)
    dead, done, calls = fates(bench, run, bad, chunk)
    assert set(dead) == bad and sorted(dead + done) == list(range(40))
    assert calls <= 1 + 14 * len(bad), "no more than halving takes"


# --- duplicates


class DuplicateAll(Fixed):
    def duplicate(self, view, worker):
        others = [attempt.id for attempt in view.attempts.values() if attempt.worker != worker.id]
        return others[0] if others else None


def test_a_duplicate_takes_what_had_not_come_and_the_first_answer_of_each_item_wins():
    bench, run = begun(6, batching=DuplicateAll(6, share=False))
    bench.some(run, 0, 2)
    bench.join("w2")
    bench.submit("verify", 1)
    second = run_of(bench.finish(run_of(bench.ready("w2", "model"))))
    assert list(second.items) == [2, 3, 4, 5]
    assert delivered(bench.some(run, 2, 1)) == [2]
    assert delivered(bench.some(second, 0, 3)) == [3, 4]
    assert delivered(bench.some(run, 3, 2)) == []
    assert bench.lose("w1", evicted=True) == [] and bench.state.copies == {}
    assert delivered(bench.some(second, 3, 1)) == [5]
    bench.end(second)
    assert bench.state.counters.done == 7 and not bench.state.open


def test_an_item_that_raises_in_a_duplicate_costs_nothing_while_the_other_runs():
    bench, run = begun(4, batching=DuplicateAll(4, share=False))
    bench.join("w2")
    bench.submit("verify", 1)
    second = run_of(bench.finish(run_of(bench.ready("w2", "model"))))
    bench.some(second, 0, 1)
    bench.fail(second, at=1)
    assert not bench.state.raised and bench.state.apps["verify"].backlog == 0
    assert delivered(bench.finish(run)) == [1, 2, 3]


# --- cancelling


def test_cancel_with_stop_ends_a_batch_of_which_only_answers_are_kept():
    bench, run = begun(6)
    bench.some(run, 0, 2)
    assert only(bench.tell(ev.ItemsCancelled, [3], stop=True), cmd.Interrupt) == []
    commands = bench.tell(ev.ItemsCancelled, [2, 4, 5], stop=True)
    assert commands == [cmd.Interrupt("w1", run.attempt, "model")]
    bench, run = begun(6)
    bench.some(run, 0, 2)
    assert bench.tell(ev.ItemsCancelled, [0, 1], stop=True) == [], "those are answered"
    assert bench.tell(ev.ItemsCancelled, [2, 3, 4, 5], stop=True) == [cmd.Interrupt("w1", run.attempt, "model")]
    bench.some(run, 2, 2)
    assert not only(bench.fail(run, "cancelled", at=4), cmd.Deliver)
