"""What nobody uses is forgotten, by driver and workers, and made anew for who uses it again."""

import gc
import weakref

import pytest
from executor_helpers import started

from ctxflow import batch_app, context, context_app, idle, session_app
from ctxflow.executors import declarations
from ctxflow.scheduler.log import replay
from waiting import eventually


@context
def base(value):
    return value


@batch_app
def shift(numbers, *, by=b""):
    return [number + len(by) for number in numbers]


@session_app
def count(states, prompts):
    for state, new in zip(states, prompts, strict=True):
        left = (new[0] if new else state) - 1
        yield (left if left else idle("end")), left


def kept_by_worker(_):
    """How many functions and constants its library process has."""
    [library] = [each for each in gc.get_objects() if type(each).__qualname__ == "LibraryCalls"]
    return len(library._functions)


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor of one worker that remembers little of what is not in use."""
    monkeypatch.setattr(declarations, "MOST_IDLE", 4)
    with started(tmp_path, workers=1) as executor:
        yield executor


def known(executor):
    run = executor.calls.run
    return len(run._declared.apps), len(run._declared.parts._held), len(run._scheduler.state.apps)


def test_constants_and_apps_of_maps_that_are_over_are_forgotten_and_may_come_again(executor):
    for size in [*range(30), *range(30)]:
        assert list(shift.map([1, 2], by=bytes(size))) == [1 + size, 2 + size]
    assert max(known(executor)) < 20
    assert len(shift.variants) < 20
    eventually(lambda: executor.submit(kept_by_worker, {}, None).result() < 20)


def test_large_constants_are_forgotten_sooner(executor, monkeypatch):
    monkeypatch.setattr(declarations, "MOST_IDLE", 1000)
    monkeypatch.setattr(declarations, "MOST_BYTES", 5_000_000)
    for size in range(1_000_000, 1_000_030):
        assert list(shift.map([1], by=bytes(size))) == [1 + size]
    run = executor.calls.run
    assert sum(len(part().body) for part in list(run._declared.parts._held.values()) if part() is not None) < 12_000_000


def test_calls_of_many_different_options_and_functions_leave_nothing(executor):
    functions = []
    for n in range(40):

        def add(x, n=n):
            return x + n

        functions.append(weakref.ref(add))
        assert [executor.submit(add, {"priority": n}, x).result() for x in range(3)] == [n, n + 1, n + 2]
        del add
    gc.collect()
    assert not any(each() for each in functions), "what is kept of a function holds it"
    assert max(known(executor)) < 20
    eventually(lambda: executor.submit(kept_by_worker, {}, None).result() < 20)


def test_contexts_are_forgotten_with_their_apps_once_no_worker_keeps_them(executor):
    @context_app
    def value(there):
        return there

    for n in range(12):
        assert value.using(base(n))().result() == n
    executor.engine.evict()
    assert value.using(base(100))().result() == 100
    run = executor.calls.run
    eventually(lambda: (run._each_second(run.clock()), len(run._declared.contexts))[1] < 10)
    assert run._declared.contexts.keys() == run._scheduler.state.contexts.keys()
    assert value.using(base(3))().result() == 3


def forget_all(executor, monkeypatch):
    """All that is not in use now."""
    with monkeypatch.context() as patch:
        patch.setattr(declarations, "IDLE_SECONDS", 0.0)
        executor.calls.run._each_second(executor.calls.run.clock())
        executor.calls.run._each_second(executor.calls.run.clock())


def test_who_goes_on_after_a_rest_finds_everything(executor, monkeypatch):
    mapped = shift.map(range(10), by=b"ab", window=2)
    assert [next(mapped) for _ in range(4)] == [2, 3, 4, 5]
    eventually(lambda: executor.outstanding == 0)
    with count.open(3) as first:
        assert list(first) == [2, 1, "end"]
        forget_all(executor, monkeypatch)
        assert list(executor.calls.run._declared.apps) == [count._declaration.id], "it has a session"
        assert list(mapped) == [6, 7, 8, 9, 10, 11]
        first.prompt(2)
        assert list(first) == [1, "end"]
    state = executor.calls.run._scheduler.state
    # A step takes the session's state away first.
    eventually(lambda: (forget_all(executor, monkeypatch), not state.apps)[1])
    with count.open(2) as second:
        assert list(second) == [1, "end"]


def test_the_run_is_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr(declarations, "MOST_IDLE", 2)
    with started(tmp_path, workers=1):
        for size in [*range(6), *range(6)]:
            assert list(shift.map([1], by=bytes(size))) == [1 + size]
    log = tmp_path / "ctxflow" / "events.jsonl"
    assert '"is":"Retired"' in log.read_text()
    with log.open() as lines:
        assert replay(lines) > 40


def test_an_hour_of_use_is_a_use(tmp_path):
    """By the clock: what was used within a minute stays, and only then goes."""
    with started(tmp_path, workers=1) as executor:
        run = executor.calls.run
        before, state = run.clock(), run._scheduler.state
        list(shift.map([1]))
        with run._lock:
            assert run._retirement.retired(state, before + 59.0) is None
            event = run._retirement.retired(state, run.clock() + 61.0)
        assert [*event.apps] == [*state.apps]


def test_what_is_noted_each_second_covers_the_whole_run_in_bounded_memory(executor, monkeypatch):
    monkeypatch.setattr("ctxflow.executors.live_run._MOST_SAMPLES", 10)
    run = executor.calls.run
    for second in range(1, 101):
        run._each_second(float(1000 * second))
    seen = [at for at, _, _ in executor.history() if at >= 1000]
    assert len(seen) <= 10 and seen == sorted(seen)
    assert seen[0] < 40_000 and seen[-1] >= 99_000
