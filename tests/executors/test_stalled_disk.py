"""A disk that stalls under a run's own files stops neither submissions nor answers."""

import contextlib
import os
import signal
import threading

import pytest
from executor_helpers import started

from ctxflow import batch_app, idle, session_app
from ctxflow.executors.kept_files import RunStatusFile
from ctxflow.executors.session_store import SessionStore
from ctxflow.scheduler.log import replay
from waiting import eventually, finished, happened, joined


@batch_app(batch_size=1)
def same(numbers):
    return numbers


@session_app(keep_every=1)
def count(states, prompts):
    for state, new in zip(states, prompts, strict=True):
        left = (new[0] if new else state) - 1
        yield (left if left else idle("end")), left


@pytest.fixture
def stalled():
    """An event that never comes while a test runs."""
    released = threading.Event()
    yield released
    released.set()


def test_the_event_log_is_written_when_its_disk_answers_again(tmp_path):
    """A pipe that nobody reads takes 64 KB."""
    path = tmp_path / "run" / "ctxflow" / "events.jsonl"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    reader, lines = os.open(path, os.O_RDONLY | os.O_NONBLOCK), []
    os.set_blocking(reader, True)

    def read():
        with open(reader) as file:
            lines.extend(file)

    reading = threading.Thread(target=read)
    with started(tmp_path / "run", workers=1) as executor:
        assert list(same.map(range(4000))) == [*range(4000)]
        eventually(lambda: executor.calls.run._disk.busy)
        reading.start()
    reading.join()
    assert replay(lines) > 4000


def test_nor_is_anybody_kept_waiting_by_the_status_file(tmp_path, monkeypatch, stalled):
    write, entered = RunStatusFile.write, threading.Event()

    def slow(self, status, *how):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            stalled.wait()
        write(self, status, *how)

    monkeypatch.setattr(RunStatusFile, "write", slow)
    with started(tmp_path, workers=1):
        happened(entered)
        assert list(same.map(range(20))) == [*range(20)]
        assert finished(same(1)).result() == 1
        stalled.set()


def test_a_state_that_is_being_kept_stops_no_submission(tmp_path, monkeypatch, stalled):
    keep, entered = SessionStore._keep, threading.Event()

    def slow(self, *what):
        entered.set()
        stalled.wait()
        return keep(self, *what)

    monkeypatch.setattr(SessionStore, "_keep", slow)
    with started(tmp_path, workers=2), count.open(3) as session:
        happened(entered)
        futures = []
        submitting = threading.Thread(target=lambda: futures.append(same(7)), daemon=True)
        submitting.start()
        joined(submitting)
        assert futures, "a submission waits for the disk"
        stalled.set()
        assert finished(futures[0]).result() == 7
        assert list(session) == [2, 1, "end"]


def submits(number):
    """Whether a call can be submitted by another thread; gives its future."""
    futures = []
    submitting = threading.Thread(target=lambda: futures.append(same(number)), daemon=True)
    submitting.start()
    joined(submitting)
    assert futures, "a submission waits for somebody else's data"
    return futures[0]


def test_nor_does_a_state_that_is_being_read(tmp_path, monkeypatch, stalled):
    read, entered = SessionStore._read, threading.Event()

    def slow(self, *what):
        entered.set()
        stalled.wait()
        return read(self, *what)

    monkeypatch.setattr(SessionStore, "_read", slow)
    with started(tmp_path, workers=2) as executor, count.open(2) as session, contextlib.ExitStack() as last:
        last.callback(stalled.set)
        assert list(session) == [1, "end"]
        for pid in executor.engine.worker_pids().values():
            os.kill(pid, signal.SIGKILL)
        prompting = threading.Thread(target=lambda: session.prompt(3), daemon=True)
        prompting.start()
        happened(entered)
        future = submits(7)
        stalled.set()
        assert finished(future).result() == 7
        joined(prompting)
        assert list(session) == [2, 1, "end"]


class Slow:
    """Takes its time to be pickled, on whichever thread does it."""

    entered, released = threading.Event(), threading.Event()

    def __reduce__(self):
        self.entered.set()
        self.released.wait()
        return int, (5,)


def test_nor_does_an_input_that_takes_long_to_be_pickled(tmp_path, stalled):
    Slow.entered, Slow.released = threading.Event(), stalled
    with started(tmp_path, workers=2) as executor, contextlib.ExitStack() as last:
        last.callback(stalled.set)
        assert finished(same(1)).result() == 1
        slow = []
        mapping = threading.Thread(target=lambda: slow.extend(same.map([1, Slow(), 3])), daemon=True)
        mapping.start()
        happened(Slow.entered)
        first, second = submits(7), submits(8)
        assert first.cancel()
        assert executor.outstanding > 0 and executor.calls.run.status() is not None
        stalled.set()
        assert finished(second).result() == 8
        joined(mapping)
        assert slow == [1, 5, 3]
