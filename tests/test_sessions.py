"""Sessions as a person has them, on embedded workers: turns, prompts, faults, and what is kept through it all."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from ctxflow import (
    CallCrashed,
    ContextError,
    ContextExecutor,
    CtxflowError,
    TurnOver,
    context,
    idle,
    last,
    session_app,
)
from ctxflow.testing.evictions import Evictions
from ctxflow.testing.wandering import Wandering, take_all, walk
from waiting import eventually, patience


@context
def hundred():
    return 100


@session_app(hundred(), keep_every=2)
def talk(base, states, prompts):
    """Says each prompt's letters one by one, with how many it has said; idle after the last."""
    for state, new in zip(states, prompts, strict=True):
        said, left = state or (0, "")
        left += "".join(new)
        chunk = (left[0], base + said + 1)
        yield (chunk if left[1:] else idle(chunk)), (said + 1, left[1:])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    executor = ContextExecutor(workers=2)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture
def executor(shared):
    """Two workers, of which one may have to be started again after the test before."""
    yield shared
    shared.run.validate()
    assert shared.run.status().workers <= 2


def test_turns(executor):
    with talk.open("ab") as session:
        assert list(session) == [("a", 101), ("b", 102)]
        assert list(session) == []
        session.prompt("cde")
        assert [letter for letter, _ in session] == ["c", "d", "e"]
        assert session.status.idle and session.status.chunks == 5
    assert session.status is None
    with pytest.raises(CtxflowError, match="the session is over"):
        session.prompt("f")
    assert list(session) == []


def test_a_session_ends_itself(executor):
    @session_app
    def once(states, prompts):
        return [(last(new), None) for new in prompts]

    session = once.open(7)
    assert list(session) == [[7]]
    assert session.status is None


def test_prompts_on_the_way_reach_the_next_chunk(executor):
    @session_app(ahead=1)
    def collect(states, prompts):
        return [((state or []) + new, (state or []) + new) for state, new in zip(states, prompts, strict=True)]

    with collect.open(0) as session:
        for number in range(1, 6):
            session.prompt(number)

        def has_all():
            chunk = session.take(patience())
            assert chunk == list(range(len(chunk)))
            return len(chunk) == 6

        eventually(has_all)


def test_suspend_and_resume_on_whichever_worker(executor):
    @session_app(ahead=2, keep_every=None)
    def count(states, prompts):
        return [((state or 0) + 1, (state or 0) + 1) for state in states]

    with count.open() as session:
        assert [session.take(patience()) for _ in range(5)] == [1, 2, 3, 4, 5]
        session.suspend()
        eventually(lambda: session.status.state == "suspended")
        assert session.status.worker is None and session.status.state_bytes > 0
        with pytest.raises(TimeoutError):
            while True:
                session.take(0.1)
        session.resume()
        assert isinstance(session.take(patience()), int)


class Wanted:
    """As many workers as a test says."""

    count = 1

    def target(self, view):
        return dict.fromkeys(view.tiers, self.count)


def test_a_suspended_session_outlives_its_worker_that_is_given_back(tmp_path):
    @session_app(ahead=2, keep_every=None)
    def count(states, prompts):
        """Its state tells when it was made anew."""
        states = [state or (time.time(), 0) for state in states]
        return [((began, made), (began, made + 1)) for began, made in states]

    scaling = Wanted()
    executor = ContextExecutor(workers=1, scaling=scaling)
    executor.run_dir = str(tmp_path)
    with executor, count.open() as session:
        first = session.take(patience())
        session.suspend()
        eventually(lambda: session.status.state == "suspended")
        assert executor.run.status().sessions["suspended"] == 1 and executor.run.status().chunks > 0
        scaling.count = 0
        eventually(lambda: executor.run.status().workers == 0)
        scaling.count = 1
        session.resume()
        taken = [first, *(session.take(patience()) for _ in range(5))]
        assert taken == [(first[0], number) for number in range(6)]


def test_no_more_than_is_taken_is_made(executor):
    @session_app(ahead=4)
    def count(states, prompts):
        return [((state or 0) + 1, (state or 0) + 1) for state in states]

    with count.open() as session:
        assert session.take(patience()) == 1
        eventually(lambda: session.status.idle)
        assert session.status.chunks == 4
        assert [session.take(patience()) for _ in range(20)] == list(range(2, 22))


def test_sessions_share_a_step(executor):
    @session_app(ahead=10_000)
    def together(states, prompts):
        time.sleep(0.002)
        return [(len(states), None) for _ in states]

    sessions = [together.open() for _ in range(8)]
    eventually(lambda: sessions[0].take(patience()) >= 4)  # Of two workers, each has four.


def test_what_the_function_raises_ends_its_session_alone(executor):
    @session_app(keep_every=3)
    def picky(states, prompts):
        made = []
        for state, new in zip(states, prompts, strict=True):
            count, bad = state or (0, new[0])
            if bad and count == 5:
                raise ValueError("bad")
            made.append(((count + 1), (count + 1, bad)))
        return made

    sessions = [picky.open(number == 3) for number in range(6)]
    given = [[session.take(patience()) for _ in range(5)] for session in sessions]
    assert given == [[1, 2, 3, 4, 5]] * 6
    for number, session in enumerate(sessions):
        if number == 3:
            with pytest.raises(ValueError, match="bad"):
                session.take(patience())
        else:
            assert [session.take(patience()) for _ in range(40)] == list(range(6, 46))


def test_a_state_that_cannot_be_pickled_ends_its_session_alone(executor):
    @session_app(keep_every=4)
    def odd(states, prompts):
        made = []
        for state, new in zip(states, prompts, strict=True):
            count, lock = state or (0, threading.Lock() if new[0] else None)
            made.append((count + 1, (count + 1, lock)))
        return made

    good, bad = odd.open(False), odd.open(True)
    assert [bad.take(patience()) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(Exception, match="the state of the session cannot be sent"):
        [bad.take(patience()) for _ in range(2)]
    assert [good.take(patience()) for _ in range(20)] == list(range(1, 21))


def test_a_state_that_grows_past_the_memory_ends_its_session_alone(tmp_path):
    @context(memory=200_000_000)
    def small():
        return 0

    @session_app(small(), keep_every=None)
    def grow(_, states, prompts):
        time.sleep(0.1)
        made = []
        for state, new in zip(states, prompts, strict=True):
            count, size, _ = state or (0, new[0], b"")
            made.append((count + 1, (count + 1, size, b"x" * size * (count + 1))))
        return made

    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        thin, fat = grow.open(10), grow.open(30_000_000)
        with pytest.raises(CallCrashed, match="more than the"):
            for _ in range(50):
                fat.take(patience())
        assert [thin.take(patience()) for _ in range(12)] == list(range(1, 13))


def test_a_crash_costs_no_chunk(executor, tmp_path):
    mark = str(tmp_path / "crashed")

    @session_app(keep_every=3)
    def fragile(states, prompts):
        made = [((state or 0) + 1, (state or 0) + 1) for state in states]
        if made[0][0] == 8 and not os.path.exists(mark):
            open(mark, "w").close()
            os.abort()
        return made

    sessions = [fragile.open() for _ in range(4)]
    for session in sessions:
        assert [session.take(patience()) for _ in range(30)] == list(range(1, 31))
    assert os.path.exists(mark)


def test_a_context_that_cannot_be_built_ends_its_sessions(executor):
    @context
    def broken():
        raise OSError("no weights")

    @session_app(broken())
    def never(_, states, prompts):
        return []

    with pytest.raises(ContextError, match="no weights"):
        never.open().take(patience())


def test_a_session_that_nobody_holds_is_closed(executor):
    session = talk.open("a" * 1000)
    number = session.number
    session.take(patience())
    del session
    gc.collect()
    eventually(lambda: number not in executor.run._scheduler.state.sessions)
    assert not os.path.exists(os.path.join(executor.run.directory, "sessions", f"{number}.state"))


def test_mistakes_are_told(executor):
    with pytest.raises(TypeError, match="a session app has no option 'size'"):
        session_app(size=3)
    with pytest.raises(ValueError, match="keep_every=0 makes no sense: give a number of chunks, 1 or more"):
        session_app(keep_every=0)
    with pytest.raises(TypeError, match="hundred is a context function, not a recipe"):
        session_app(hundred)
    with pytest.raises(TypeError, match="the prompt cannot be sent"):
        talk.open(threading.Lock())

    @session_app
    def wrong(states, prompts):
        return [1 for _ in states]

    with pytest.raises(TypeError, match="one pair of chunk and state for each"):
        wrong.open().take(patience())


def test_an_ended_run_ends_its_sessions(tmp_path):
    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        session = talk.open("ab")
    with pytest.raises(CtxflowError, match="the run was stopped"):
        for _ in range(5):
            session.take(patience())
    session.close()
    with pytest.raises(CtxflowError, match="the run was stopped"):
        session.prompt("c")


@pytest.mark.parametrize("notice", [None, 5.0])
def test_wandering_sessions_give_what_undisturbed_ones_do(tmp_path, notice):
    placement = Wandering(per_second=60, at_most=60)
    executor = ContextExecutor(workers=3, sessions=placement)
    executor.run_dir = str(tmp_path)
    with executor:
        with Evictions(executor, per_minute=60, seed=1, rejoin_seconds=0.2, at_most=3, notice=notice) as evictions:
            walked = take_all(walk(0.002), sessions=20, chunks=60, suspensions=8)
        counters = executor.run._scheduler.state.counters
        executor.run.validate()
    assert (walked.right, walked.wrong, walked.errors) == (20, {}, [])
    assert counters.migrations and counters.suspensions and evictions.count


def test_the_log_of_sessions_can_be_replayed(tmp_path):
    executor = ContextExecutor(workers=2, sessions="turboserve")
    executor.run_dir = str(tmp_path)
    with executor, Evictions(executor, per_minute=120, seed=1, rejoin_seconds=0.2, at_most=2):
        assert take_all(walk(0.002), sessions=6, chunks=80, suspensions=4).right == 6
    # In another process, so that sets of names have another order.
    program = "import sys; from ctxflow.scheduler.log import replay; print(replay(open(sys.argv[1])))"
    words = [sys.executable, "-W", "ignore", "-c", program, os.path.join(executor.run.directory, "events.jsonl")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    told = subprocess.run(words, capture_output=True, check=False, text=True, env=environment, timeout=patience())
    assert told.returncode == 0 and int(told.stdout) > 50, told.stderr


@pytest.mark.parametrize(
    "option",
    [
        {"chunk_target": "0.2"},
        {"chunk_target": float("nan")},
        {"keep_every": "often"},
        {"keep_every": 1.5},
        {"ahead": None},
        {"ahead": True},
        {"timeout": float("nan")},
        {"retries": "2"},
    ],
)
def test_an_option_that_is_no_number_is_refused_by_its_name(option):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(option))}=.* makes no sense"):
        session_app(**option)(lambda states, prompts: [])


def test_what_is_no_function_is_no_session_app():
    with pytest.raises(TypeError, match="a session app is made of a function, not of a generator"):
        session_app(None)(each for each in ())


def test_the_end_of_a_turn_passes_through_a_generator_as_what_it_is(executor):
    def chunks(session):
        while True:
            yield session.take(patience())

    with talk.open("ab") as session, pytest.raises(TurnOver, match="turn is over"):
        list(chunks(session))
    with pytest.raises(EOFError):
        session.take()
