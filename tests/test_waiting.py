"""The waits of the tests themselves: what they return, and what a failure tells."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import cloudpickle
import pytest

import waiting
from waiting import (
    DeadlinePassed,
    eventually,
    eventually_async,
    exited,
    finished,
    gone,
    happened,
    joined,
    line,
    nothing_left,
    output,
    patience,
    scale_timeouts,
)

SLEEPS = [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(600)"]
BRIEF = 0.05


@pytest.fixture
def program():
    process = subprocess.Popen(SLEEPS, stdout=subprocess.PIPE, text=True)
    assert line(process.stdout) == "begun\n"
    yield process
    process.kill()
    process.communicate()


def test_a_condition_is_tried_until_it_holds_and_its_value_is_returned():
    values = iter([None, 0, "", [], "there", "never seen"])
    assert eventually(lambda: next(values)) == "there"
    assert next(values) == "never seen"


def test_what_is_left_is_told():
    found = iter([["a"], {"b"}, []])
    nothing_left(lambda: next(found))
    with pytest.raises(DeadlinePassed, match=r"Last: \['process 5'\]"):
        nothing_left(lambda: ["process 5"], within=BRIEF)


def test_the_value_of_an_async_wait_and_that_others_go_on_meanwhile():
    async def main():
        found = []
        asyncio.get_running_loop().call_later(BRIEF, found.append, 3)
        assert await eventually_async(lambda: found) == [3]
        with pytest.raises(DeadlinePassed, match="Last: \\[\\]"):
            await eventually_async(list, within=BRIEF)

    asyncio.run(main())


def test_an_error_is_tried_again_where_it_was_asked_for_only():
    answers = iter([AssertionError("not yet"), KeyError("neither"), True])

    def condition():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(AssertionError, match="not yet"):
        eventually(condition)
    assert eventually(condition, retry=(KeyError,))


def test_pauses_grow_with_what_was_waited(monkeypatch):
    now, pauses = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=pauses.append)
    monkeypatch.setattr(waiting, "time", clock)

    def later():
        now[0] += 0.5
        return now[0] > 4

    assert eventually(later, within=5)
    assert pauses == sorted(pauses) and pauses[0] >= 0.001 and pauses[-1] == waiting.LONGEST_PAUSE


def test_a_condition_that_holds_at_the_deadline_is_seen(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, 1e6))
    monkeypatch.setattr(waiting, "time", clock)
    assert eventually(lambda: now[0] > 0, within=1), "the whole machine may have been stopped"


def test_one_number_scales_all(monkeypatch):
    monkeypatch.setenv("CTXFLOW_TEST_PATIENCE", "0.25")
    assert patience(8) == 2
    monkeypatch.setenv("CTXFLOW_TEST_PATIENCE", "")
    assert patience(8) == 8
    monkeypatch.delenv("CTXFLOW_TEST_PATIENCE")
    assert patience() == waiting.SECONDS
    monkeypatch.setenv("CTXFLOW_TEST_PATIENCE", "0.001")
    for wait in (
        lambda: eventually(list), lambda: happened(threading.Event()), lambda: finished(concurrent.futures.Future()),
    ):  # fmt: skip
        with pytest.raises(DeadlinePassed, match="did not happen in 0 s"):
            wait()


def test_what_a_failure_tells(program):
    seen = "the last value"

    def a_thread_that_is_there(over):
        begun.set()
        over.wait()

    begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=a_thread_that_is_there, args=[over], name="beside")
    thread.start()
    happened(begun)
    run = SimpleNamespace(status=lambda: "two workers, nothing queued")
    try:
        with pytest.raises(DeadlinePassed) as failure:
            eventually(lambda: seen == "another" or None, within=BRIEF, run=run)
    finally:
        over.set()
        joined(thread)
    text = str(failure.value)
    assert 'eventually(lambda: seen == "another" or None' in text and "test_waiting.py:" in text
    assert "Last: None" in text
    assert "two workers, nothing queued" in text
    [told] = [each for each in text.splitlines() if each.strip().startswith(f"{program.pid} ")][:1]
    assert "time.sleep(600)" in told and told.split()[1] in "RSD"
    assert f"Stacks of {program.pid}:" in text
    assert "Thread beside:" in text and "a_thread_that_is_there" in text
    assert "Thread MainThread:" in text and "pluggy" not in text


def test_the_last_error_is_told_and_is_the_cause():
    def condition():
        raise ConnectionError("nobody listens")

    with pytest.raises(DeadlinePassed, match="ConnectionError: nobody listens") as failure:
        eventually(condition, within=BRIEF, retry=(OSError,), what="an answer")
    assert isinstance(failure.value.__cause__, ConnectionError)
    assert str(failure.value).startswith("an answer: it did not happen in ")


def test_what_is_said_of_the_end_is_asked_for_then():
    lines = []

    def what():
        return f"a line among {lines}"

    with pytest.raises(DeadlinePassed, match=r"a line among \['came late'\]: it did not"):
        eventually(lambda: lines.append("came late") if not lines else None, within=BRIEF, what=what)


def test_a_value_that_cannot_be_shown_and_a_run_that_does_not_answer_do_not_hide_the_failure(monkeypatch):
    class Odd:
        def __bool__(self):
            return False

        def __repr__(self):
            raise ValueError

    lock = threading.Lock()
    raised = pytest.raises(DeadlinePassed, match="Odd, whose repr raises ValueError")
    with lock, monkeypatch.context() as patch, raised as failure:
        patch.setattr(waiting, "_STATUS_SECONDS", BRIEF)
        eventually(Odd, within=BRIEF, run=SimpleNamespace(status=lambda: lock.acquire(timeout=60)))
    assert "it does not answer" in str(failure.value)
    with pytest.raises(DeadlinePassed, match="ZeroDivisionError"):
        eventually(list, within=BRIEF, run=SimpleNamespace(status=lambda: 1 / 0))


def test_runs_of_this_process_are_found(tmp_path):
    from ctxflow import ContextExecutor

    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        finished(executor.submit(pow, {}, 2, 3))
        with pytest.raises(DeadlinePassed, match=r"Run .*items_done=1"):
            eventually(list, within=BRIEF)
    with pytest.raises(DeadlinePassed) as failure:
        eventually((tmp_path / "never").exists, within=BRIEF)
    assert f"{executor.run!r}" not in str(failure.value), "it has ended"
    assert str(tmp_path / "never") in str(failure.value)


def test_futures():
    future = concurrent.futures.Future()
    with pytest.raises(DeadlinePassed, match="pending"):
        finished(future, within=BRIEF)
    threading.Timer(BRIEF, future.set_exception, [TimeoutError("its own")]).start()
    with pytest.raises(TimeoutError, match="its own"):
        finished(future).result()
    cancelled = concurrent.futures.Future()
    cancelled.cancel()
    assert finished(cancelled).cancelled()


def test_events_and_threads():
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    try:
        with pytest.raises(DeadlinePassed):
            happened(event, within=BRIEF)
        with pytest.raises(DeadlinePassed):
            joined(thread, within=BRIEF)
    finally:
        event.set()
    assert happened(event)
    joined(thread)


def test_programs(program):
    with pytest.raises(DeadlinePassed, match=f"{program.pid}"):
        exited(program, within=BRIEF)
    with pytest.raises(DeadlinePassed):
        output(program, within=BRIEF)
    with pytest.raises(DeadlinePassed, match=f"the end of process {program.pid}"):
        gone(program.pid, within=BRIEF)
    program.terminate()
    gone(program.pid)
    assert exited(program) == -signal.SIGTERM
    assert output(program) == ("", None)
    gone(program.pid)


def test_a_process_without_descriptors_of_processes(program, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with pytest.raises(DeadlinePassed):
        gone(program.pid, within=BRIEF)
    program.kill()
    gone(program.pid)


def test_lines(program):
    with pytest.raises(DeadlinePassed):
        line(program.stdout, within=BRIEF)
    program.kill()
    with open(os.devnull) as empty:
        assert line(empty) == ""
    with pytest.raises(ValueError, match="closed"):
        line(empty)


def test_the_timeouts_of_tests_scale_too(request, monkeypatch):
    monkeypatch.setenv("CTXFLOW_TEST_PATIENCE", "3")
    marks = []
    items = [
        SimpleNamespace(
            get_closest_marker=lambda name, mark=mark: mark and mark.mark,
            add_marker=lambda mark, append: marks.append((mark.args, mark.kwargs)),
        )
        for mark in (None, pytest.mark.timeout(10, func_only=True), pytest.mark.timeout(timeout=20))
    ]
    scale_timeouts(items, 100)
    assert marks == [((300,), {}), ((30,), {"func_only": True}), ((), {"timeout": 60})]


def test_functions_that_wait_travel_by_value(tmp_path):
    program = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer)(lambda: 5))"
    pickled = cloudpickle.dumps(eventually)
    done = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, check=True, cwd=tmp_path)
    assert done.stdout == b"5\n"
