"""Contexts that give way to others: which are parked, which are unloaded, and what becomes of the parked ones."""

import dataclasses
import json

import pytest
from scheduler_bench import Bench, only, run_of
from test_steps import SessionBench, step_of

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line, read

DECLARED, BUILT = 60, 20  # Two that run calls do not fit on a worker of 100; one that is parked beside one does.


def bench_of(*names, room=100, **options):
    """A worker that is to serve these contexts, of which it can hold one at a time."""
    bench = Bench()
    for name in names:
        bench.context(name, **{"memory": DECLARED, **options})
        bench.app(name, name)
    bench.join("w1", memory=room, gpus=options.get("gpus", 0), gpu_memory=100)
    return bench


def build(bench, name, seconds=5.0, parks=True, memory=BUILT, **measured):
    """Have an item of an app answered by a context that is built for it; gives the commands up to the build."""
    commands = bench.submit(name, 1)
    bench.now += seconds
    ready = bench.tell(ev.ContextReady, "w1", name, seconds=seconds, memory=memory, parks=parks, **measured)
    bench.finish(run_of(ready))
    return commands


def say_parked(bench, name, seconds=0.1, memory=BUILT, gpu_memory=0):
    return bench.tell(ev.ContextParked, "w1", name, seconds, memory, gpu_memory)


def wake(bench, name, seconds=0.1):
    bench.now += seconds
    return bench.tell(ev.ContextWoken, "w1", name, seconds, BUILT)


def parked(bench):
    return sorted(bench.state.workers["w1"].parked)


def test_contexts_that_take_turns_are_parked_and_woken():
    bench = bench_of("a", "b")
    build(bench, "a")
    assert build(bench, "b") == [cmd.Park("w1", "a"), cmd.Load("w1", "b")]
    assert say_parked(bench, "a") == []
    for turn, (name, other) in enumerate((("a", "b"), ("b", "a")) * 3):
        assert bench.submit(name, 1) == [cmd.Park("w1", other), cmd.Wake("w1", name)]
        say_parked(bench, other)
        assert parked(bench) == [other]
        bench.finish(run_of(wake(bench, name)))
        assert bench.state.counters.wakes == turn + 1
    assert bench.state.counters.loads == 2


def test_a_context_is_woken_before_it_has_said_that_it_is_parked():
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    assert bench.submit("a", 1) == [cmd.Park("w1", "b"), cmd.Wake("w1", "a")]
    say_parked(bench, "a")
    assert parked(bench) == ["b"]
    assert only(wake(bench, "a"), cmd.Run)


def test_what_says_that_it_cannot_be_parked_is_unloaded():
    bench = bench_of("a", "b")
    build(bench, "a", parks=False)
    assert build(bench, "b") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]


def test_events_of_earlier_logs_park_nothing():
    event = ev.ContextReady(1.0, "w", "c", 5.0, memory=BUILT)
    written = json.loads(line(event, []))
    del written["event"]["parks"]
    [(again, _)] = read([json.dumps(written) + "\n"])
    assert again == event
    assert not again.parks


@pytest.mark.parametrize("level", ["none", "partial"])
def test_lower_levels_never_park(level):
    bench = bench_of("a", "b", level=level)
    bench.submit("a", 1)
    ready = bench.tell(ev.ContextReady, "w1", "a", seconds=5.0, memory=BUILT, parks=True)
    assert only(bench.finish(run_of(ready)), cmd.Unload), "it ends with its call, as ever"
    assert not only(build(bench, "b"), cmd.Park)


def test_where_the_hosts_memory_is_short_parking_would_not_help():
    bench = bench_of("a", "b")
    build(bench, "a", memory=DECLARED)
    assert build(bench, "b") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]


@pytest.mark.parametrize(("room", "way"), [(180, cmd.Park("w1", "a")), (179, cmd.Unload("w1", "a"))])
@pytest.mark.parametrize("measured", [{"gpu_memory": 100}, {}])
def test_gpu_memory_comes_to_the_host(room, way, measured):
    """Of unknown size it is taken to be all of it."""
    bench = bench_of("a", "b", room=room, gpus=1)
    build(bench, "a", **measured)
    assert build(bench, "b") == [way, cmd.Load("w1", "b")]


def test_what_is_parked_and_left_on_the_gpu_counts_there():
    bench = bench_of("a", "b", room=None, gpus=1, gpu_memory=90)
    build(bench, "a")
    assert build(bench, "b") == [cmd.Park("w1", "a"), cmd.Load("w1", "b")]
    assert say_parked(bench, "a", gpu_memory=5) == []
    assert say_parked(bench, "a", gpu_memory=30) == [cmd.Unload("w1", "a")]


def test_what_has_left_nothing_on_the_gpu_stays_whatever_others_take_there():
    bench = bench_of("a", "b", room=None, gpus=1, gpu_memory=90)
    build(bench, "a")
    bench.submit("b", 1)
    say_parked(bench, "a")
    bench.tell(ev.ContextReady, "w1", "b", seconds=5.0, memory=BUILT, parks=True, gpu_memory=120)
    assert parked(bench) == ["a"]


def test_what_is_left_on_the_gpu_stays_beside_what_is_loading_and_of_unknown_size():
    bench = bench_of("a", "b", room=None, gpus=1)
    build(bench, "a", gpu_memory=60)
    assert bench.submit("b", 1) == [cmd.Park("w1", "a"), cmd.Load("w1", "b")]
    assert say_parked(bench, "a", gpu_memory=5) == []
    assert bench.fail_context("w1", "b") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]


def test_a_build_that_fails_on_a_gpu_is_tried_without_what_is_parked():
    bench = bench_of("a", "b", room=None, gpus=1, gpu_memory=90)
    build(bench, "a")
    bench.submit("b", 1)
    say_parked(bench, "a")
    assert bench.fail_context("w1", "b") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]
    assert not bench.state.contexts["b"].suspects


def test_parking_that_takes_longer_than_a_build_is_not_done_again():
    bench = bench_of("a", "b")
    build(bench, "a", seconds=1.0)
    build(bench, "b", seconds=1.0)
    say_parked(bench, "a", seconds=0.7)
    bench.submit("a", 1)
    bench.finish(run_of(wake(bench, "a", seconds=0.7)))
    assert bench.submit("b", 1) == [cmd.Unload("w1", "a"), cmd.Wake("w1", "b")]


def test_what_nobody_uses_any_more_is_not_parked_and_goes_first():
    bench = bench_of("a", "b", "c")
    build(bench, "a")
    bench.tell(ev.Retired, ["a"])
    assert build(bench, "b") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]
    assert build(bench, "c") == [cmd.Park("w1", "b"), cmd.Load("w1", "c")]
    bench.tell(ev.Retired, ["b"], ["b"])
    assert parked(bench) == ["b"]
    assert "b" in bench.state.contexts, "whoever uses it again need not have it built"


def test_the_least_valuable_of_those_that_are_parked_goes_when_memory_is_short():
    bench = bench_of("a", "b", "c", "d")
    build(bench, "a", seconds=50.0)
    build(bench, "b", seconds=5.0)
    say_parked(bench, "a")
    build(bench, "c", seconds=20.0)
    say_parked(bench, "b")
    assert parked(bench) == ["a", "b"]
    commands = bench.submit("d", 1)
    assert commands == [cmd.Unload("w1", "b"), cmd.Park("w1", "c"), cmd.Load("w1", "d")]
    assert parked(bench) == ["a", "c"]


def test_one_that_turns_out_larger_makes_room():
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    assert say_parked(bench, "a", memory=41) == [cmd.Unload("w1", "a")]
    bench.submit("a", 1)
    ready = bench.tell(ev.ContextReady, "w1", "a", seconds=5.0, memory=BUILT, parks=True)
    assert bench.state.workers["w1"].parked.keys() == {"b"}
    bench.finish(run_of(ready))
    assert bench.submit("b", 1) == [cmd.Unload("w1", "a"), cmd.Wake("w1", "b")], "what was measured is remembered"


def test_a_context_that_is_built_larger_than_thought_unloads_what_is_parked():
    bench = bench_of("a", "b")
    build(bench, "a")
    bench.submit("b", 1)
    ready = bench.tell(ev.ContextReady, "w1", "b", seconds=5.0, memory=95, parks=True)
    assert only(ready, cmd.Unload) == [cmd.Unload("w1", "a")]


def test_one_that_cannot_be_parked_is_told_of_once_and_unloaded_from_then_on():
    bench = bench_of("a", "b")
    build(bench, "a")
    bench.submit("b", 1)
    failure = ev.Failure("exception", "OSError", "no memory")
    [note] = bench.tell(ev.ParkFailed, "w1", "a", failure)
    assert note.trouble
    assert "model" in note.text or "a" in note.text
    assert "OSError: no memory" in note.text
    bench.finish(run_of(bench.tell(ev.ContextReady, "w1", "b", seconds=5.0, memory=BUILT, parks=True)))
    assert build(bench, "a") == [cmd.Park("w1", "b"), cmd.Load("w1", "a")]
    assert bench.submit("b", 1) == [cmd.Unload("w1", "a"), cmd.Wake("w1", "b")]


def test_one_that_dies_at_it_is_parked_again_until_it_has_died_often():
    bench = bench_of("a", "b")
    build(bench, "a")
    for died in range(1, 4):
        bench.tell(ev.ContextUnloaded, "w1", "b")
        bench.submit("b", 1)
        notes = bench.tell(ev.ParkFailed, "w1", "a", ev.Failure("crash", "LibraryDied", "killed"))
        assert len(only(notes, cmd.Note)) == (died == 3)
        bench.finish(run_of(bench.tell(ev.ContextReady, "w1", "b", seconds=5.0, memory=BUILT, parks=False)))
        build(bench, "a")
    assert bench.submit("b", 1) == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_does_not_wake_is_built(dies):
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    bench.submit("a", 1)
    failure = ev.Failure("exception", "OSError", "no memory")
    event = (ev.ContextUnloaded, "w1", "a") if dies else (ev.ParkFailed, "w1", "a", failure)
    commands = bench.tell(*event)
    assert only(commands, cmd.Load) == [cmd.Load("w1", "a")]
    assert only(bench.tell(ev.ContextReady, "w1", "a", seconds=5.0, memory=BUILT, parks=True), cmd.Run)


def test_one_that_dies_while_it_is_parked_is_forgotten():
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    assert bench.tell(ev.ContextUnloaded, "w1", "a") == []
    assert bench.submit("a", 1) == [cmd.Park("w1", "b"), cmd.Load("w1", "a")]


def test_a_worker_that_is_lost_while_it_wakes_a_context_is_no_fault_of_that():
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    bench.submit("a", 1)
    bench.lose("w1")
    assert bench.state.contexts["a"].losses == 0
    assert bench.join("w2", memory=100) == [cmd.Load("w2", "a")]


def test_work_goes_to_the_worker_that_has_its_context_parked():
    bench = bench_of("a", "b")
    build(bench, "a")
    build(bench, "b")
    bench.join("w2", memory=100)
    assert bench.submit("a", 1) == [cmd.Park("w1", "b"), cmd.Wake("w1", "a")]


def test_late_events_are_without_effect():
    bench = bench_of("a", "b")
    build(bench, "a")
    for event in (
        ev.ContextParked(0.0, "w1", "a", 0.1, 5),
        ev.ContextWoken(0.0, "w1", "a", 0.1, 5),
        ev.ParkFailed(0.0, "w1", "a", ev.Failure("exception", "E", "late")),
        ev.ContextParked(0.0, "gone", "never", 0.1, 5),
        ev.ParkFailed(0.0, "gone", "never", ev.Failure("exception", "E", "late")),
    ):
        fields = [getattr(event, field.name) for field in dataclasses.fields(event) if field.name != "time"]
        assert bench.tell(type(event), *fields) == []
    assert bench.state.workers["w1"].contexts["a"].state == "ready"
    assert bench.state.contexts["a"].parks


class ParkingSessions(SessionBench):
    """A worker that has parked the context of the session 1, which is suspended, for that of a batch app."""

    def __init__(self):
        Bench.__init__(self)
        for name in ("model", "other"):
            self.context(name, memory=DECLARED)
        self.app("talk", "model", batch=False, sessions=True, keep_every=2)
        self.app("batch", "other")
        self.join("w1", memory=100)
        step = step_of(self.open(1))
        self.tell(ev.SessionSuspended, 1)
        frozen = self.finish(step)
        if only(frozen, cmd.Step):
            self.finish(step_of(frozen))
        assert self.state.sessions[1].state == "suspended"
        self.parked = self.submit("batch", 1)
        self.tell(ev.ContextParked, "w1", "model", 0.1, BUILT, 0)
        self.run = run_of(self.said)

    def tell(self, kind, *values, **named):
        commands = Bench.tell(self, kind, *values, **named)
        for load in only(commands, cmd.Load):
            self.now += 5.0
            self.said = self.tell(ev.ContextReady, load.worker, load.context, 5.0, BUILT, parks=True)
        return commands + (self.said if only(commands, cmd.Load) else [])


def test_a_suspended_session_goes_on_in_the_context_that_was_parked_meanwhile():
    bench = ParkingSessions()
    assert only(bench.parked, cmd.Park) == [cmd.Park("w1", "model")]
    Bench.finish(bench, bench.run)
    assert only(bench.tell(ev.SessionResumed, 1), cmd.Wake) == [cmd.Wake("w1", "model")]
    [order] = step_of(wake(bench, "model")).orders
    assert (order.session, order.thaw, order.chunk) == (1, "frozen", 1)


def test_a_state_that_nobody_wants_any_more_is_dropped_once_its_context_is_awake():
    bench = ParkingSessions()
    bench.tell(ev.SessionClosed, 1)
    Bench.finish(bench, bench.run)
    assert parked(bench) == ["model"], "to drop a state is not worth to wake it"
    assert only(bench.open(2), cmd.Wake) == [cmd.Wake("w1", "model")]
    orders = step_of(wake(bench, "model")).orders
    assert [(order.session, order.then) for order in orders] == [(1, "drop"), (2, "")]
