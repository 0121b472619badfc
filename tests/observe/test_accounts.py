"""What workers' time went into: every second once, in made-up logs and in those of the real scheduler."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import Played

from ctxflow.observe.accounts import PARTS, Accounts, AccountsReader
from ctxflow.observe.history_reader import read_history
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line

FAILURE = ev.Failure("exception", "ValueError", "no")


def read(*told):
    """The accounts of a log of (event, its commands)."""
    return read_history(line(event, commands) + "\n" for event, *commands in told).accounts


def spec(name="w", slots=1, gpus=1, tier="t", model="A10"):
    return ev.WorkerSpec(name, f"host of {name}", tier, slots=slots, gpus=gpus, gpu_model=model)


def parts(group):
    return {part: pytest.approx(seconds) for part, seconds in group.seconds.items() if seconds}


def test_a_worker_from_its_joining_to_its_eviction():
    accounts = read(
        (ev.ItemsSubmitted(1.0, "a", range(20)),),
        (ev.WorkerJoined(2.0, spec()), cmd.Stage("w", "c")),
        (ev.ContextStaged(5.0, "w", "c"), cmd.Load("w", "c")),
        (ev.ContextReady(9.0, "w", "c", 4.0), cmd.Run("w", 1, "a", "c", range(10))),
        (ev.BatchFinished(12.0, "w", 1, 2.5, tokens=70), cmd.Deliver(1, range(10))),
        (ev.Tick(13.0), cmd.Run("w", 2, "a", "c", range(10, 20))),
        (ev.EvictionNotice(14.0, "w"),),
        (ev.WorkerLost(15.0, "w"),),
        (ev.Tick(20.0),),
    )
    [group] = accounts.groups
    assert parts(group) == {
        "staging": 3.0, "loading": 4.0, "useful": 2.5, "sending": 0.5, "idle": 1.0, "evicted": 2.0,
    }  # fmt: skip
    assert (group.connected, group.items, group.tokens) == (13.0, {"a": 10}, 70)
    assert group.presence == [(2.0, 1), (15.0, -1)]
    assert (accounts.begin, accounts.end) == (1.0, 12.0)


def test_steps_of_sessions_are_useful_as_far_as_their_chunks_are_new():
    accounts = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Step("w", 1, "a", "c", (), [cmd.Order(1), cmd.Order(2)])),
        # One of the two chunks had been delivered before.
        (ev.StepFinished(4.0, "w", 1, 4.0, [{"made": 1}, {"made": 1}]), cmd.DeliverChunk(1, 7, 0)),
        (ev.Tick(5.0), cmd.Step("w", 2, "a", "c", (), [cmd.Order(1, then="freeze")])),
        (ev.StepFinished(6.0, "w", 2, 1.0, [{"frozen": ["", 5]}]),),
    )
    [group] = accounts.groups
    assert parts(group) == {"useful": 3.0, "unneeded": 2.0, "idle": 1.0}


def test_what_came_to_nothing():
    accounts = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Run("w", 1, "a", "c", range(4))),
        (ev.BatchFailed(1.0, "w", 1, FAILURE), cmd.Run("w", 2, "a", "c", range(4))),
        # Three of the four were answered by another.
        (ev.BatchFinished(5.0, "w", 2, 4.0, tokens=8), cmd.Deliver(2, [3], [3]), cmd.Run("w", 3, "a", "c", [5])),
        (ev.ItemsCancelled(7.0, [5], stop=True), cmd.Abandon("w", 3, "c"), cmd.Load("w", "c")),
        (ev.ContextFailed(8.5, "w", "c", FAILURE), cmd.Load("w", "c")),
        (ev.ContextReady(9.0, "w", "c", 0.5), cmd.Run("w", 4, "a", "c", [6])),
        (ev.WorkerLost(12.0, "w"),),
        (ev.WorkerJoined(12.0, spec("v")), cmd.Run("v", 5, "a", "c", [6])),
        (ev.Tick(16.0),),
    )
    [group] = accounts.groups
    assert parts(group) == {
        "failed": 1.0, "useful": 1.0, "unneeded": 3.0 + 2.0, "loading": 1.5 + 0.5, "lost": 3.0, "unfinished": 4.0,
    }  # fmt: skip
    assert (group.items, group.tokens) == ({"a": 1}, 2)


def test_what_a_call_answered_before_its_eviction_is_useful():
    [group] = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Run("w", 1, "a", "c", range(10))),
        (ev.ItemsFinished(4.0, "w", 1, 0, 4, tokens=40), cmd.Deliver(1, range(4))),
        (ev.ItemsFinished(6.0, "w", 1, 4, 2, tokens=20), cmd.Deliver(1, [4], [0])),
        (ev.WorkerLost(9.0, "w", evicted=True),),
    ).groups
    assert parts(group) == {"useful": 5.0, "unneeded": 1.0, "evicted": 3.0}
    assert (group.items, group.app_seconds, group.tokens) == ({"a": 5}, {"a": 5.0}, 50)


def test_a_call_that_answers_one_by_one_and_ends():
    [group] = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Run("w", 1, "a", "c", range(3))),
        (ev.ItemsFinished(5.0, "w", 1, 0, 3), cmd.Deliver(1, range(3))),
        (ev.BatchEnded(6.0, "w", 1, 4.0),),
    ).groups
    assert parts(group) == {"useful": 4.0, "sending": 2.0}


def test_a_worker_that_was_given_back_was_not_evicted():
    [group] = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Run("w", 1, "a", "c", [0]), cmd.Release("w")),
        (ev.WorkerLost(3.0, "w", evicted=True),),
    ).groups
    assert parts(group) == {"lost": 3.0}


def test_calls_that_share_a_worker_share_its_time():
    [group] = read(
        (ev.WorkerJoined(0.0, spec(slots=2)), cmd.Run("w", 1, "a", "c", [0]), cmd.Run("w", 2, "b", "d", [1])),
        (ev.BatchFinished(4.0, "w", 1, 4.0), cmd.Deliver(1, [0])),
        (ev.BatchFinished(6.0, "w", 2, 5.0), cmd.Deliver(2, [1])),
        (ev.Tick(7.0),),
    ).groups
    assert parts(group) == {"useful": 6.0, "idle": 1.0}
    assert group.app_seconds == {"a": 2.0, "b": 4.0}


def test_a_context_that_is_unloaded_for_the_next_load_is_loading():
    [group] = read(
        (ev.WorkerJoined(0.0, spec()), cmd.Load("w", "c")),
        (ev.ContextReady(1.0, "w", "c", 1.0), cmd.Run("w", 1, "a", "c", [0])),
        (ev.BatchFinished(2.0, "w", 1, 1.0), cmd.Deliver(1, [0]), cmd.Unload("w", "c"), cmd.Load("w", "c")),
        (ev.ContextUnloaded(2.5, "w", "c"),),
        (ev.ContextReady(4.0, "w", "c", 1.5),),
    ).groups
    assert parts(group) == {"loading": 3.0, "useful": 1.0}


WORKERS, CONTEXTS, ATTEMPTS = st.sampled_from("uvw"), st.sampled_from("cd"), st.integers(1, 6)
COUNTS = st.integers(1, 3)
EVENTS = st.one_of(
    st.builds(lambda w, slots, gpus: ("WorkerJoined", spec(w, slots, gpus)), WORKERS, COUNTS, COUNTS),
    st.builds(lambda w, e: ("WorkerLost", w, e), WORKERS, st.booleans()),
    st.builds(lambda w: ("EvictionNotice", w), WORKERS),
    st.builds(lambda w, c: ("ContextStaged", w, c), WORKERS, CONTEXTS),
    st.builds(lambda w, c: ("ContextReady", w, c, 1.0), WORKERS, CONTEXTS),
    st.builds(lambda w, c: ("ContextFailed", w, c, FAILURE), WORKERS, CONTEXTS),
    st.builds(lambda w, a, s: ("BatchFinished", w, a, s), WORKERS, ATTEMPTS, st.floats(0, 50)),
    st.builds(lambda w, a, s: ("BatchEnded", w, a, s), WORKERS, ATTEMPTS, st.floats(0, 50)),
    st.builds(lambda w, a, n: ("ItemsFinished", w, a, 0, n), WORKERS, ATTEMPTS, COUNTS),
    st.builds(lambda w, a: ("BatchFailed", w, a, FAILURE), WORKERS, ATTEMPTS),
    st.just(("Tick",)),
)
COMMANDS = st.one_of(
    st.builds(cmd.Stage, WORKERS, CONTEXTS),
    st.builds(cmd.Load, WORKERS, CONTEXTS),
    st.builds(cmd.Unload, WORKERS, CONTEXTS),
    st.builds(cmd.Release, WORKERS),
    st.builds(lambda w, a, c, n: cmd.Run(w, a, "app", c, range(n)), WORKERS, ATTEMPTS, CONTEXTS, st.integers(1, 9)),
    st.builds(cmd.Abandon, WORKERS, ATTEMPTS, CONTEXTS),
    st.builds(lambda a, n: cmd.Deliver(a, range(n)), ATTEMPTS, st.integers(1, 9)),
)


def there(presence, end):
    """The seconds of all workers that came and went."""
    return sum((end - time) * change for time, change in presence)


@given(st.lists(st.tuples(st.floats(0, 30), EVENTS, st.lists(COMMANDS, max_size=3)), max_size=40))
def test_whatever_happens_the_parts_add_up_to_what_was_connected(steps):
    now, reader = 0.0, AccountsReader(Accounts())
    for seconds, (kind, *fields), commands in steps:
        now += seconds
        told = json.loads(line(getattr(ev, kind)(now, *fields), commands))
        reader.take(told["event"], told["commands"])
    reader.end(now)
    for group in reader.accounts.groups:
        assert set(group.seconds) == set(PARTS)
        assert min(group.seconds.values()) >= -1e-9
        assert sum(group.seconds.values()) == pytest.approx(group.connected, abs=1e-6)
        assert there(group.presence, now) == pytest.approx(group.connected, abs=1e-6)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(500, 3000))
def test_runs_of_the_real_scheduler_add_up(seed, items):
    lines = []
    Played(lines, items, seed).play()
    history = read_history(lines)
    groups = history.accounts.groups
    for group in groups:
        assert sum(group.seconds.values()) == pytest.approx(group.connected, abs=1e-6)
    assert sum(group.connected for group in groups) == pytest.approx(history.workers.worker_seconds)
    assert sum(sum(group.items.values()) for group in groups) == history.items.done == items
    loads = 25.0 * sum(group.joined for group in groups)  # As long as one takes there; some are cut short.
    assert 0 < sum(group.seconds["loading"] for group in groups) <= loads + 1e-6
