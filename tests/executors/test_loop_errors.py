"""Whatever goes wrong in the run's loop, nobody waits for ever: a worker goes, or all are told."""

import itertools
import logging
import threading

import pytest
from executor_helpers import started

from ctxflow import batch_app, session_app
from ctxflow.executors import local_hosts
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.local_hosts import LocalHosts
from ctxflow.executors.pending import Waiting
from waiting import eventually, finished, patience


@batch_app(batch_size=1)
def same(numbers):
    return numbers


@session_app
def endless(states, prompts):
    return [(n or 0, (n or 0) + 1) for n in states]


def raising_once(monkeypatch, owner, name, after=0, error=None):
    """Have one call of a method raise, that with so many before it."""
    real, calls = getattr(owner, name), []

    def flaky(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise error or OSError(24, "Too many open files")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, flaky)
    return calls


@pytest.fixture
def executor(tmp_path):
    with started(tmp_path, workers=2) as executor:
        assert list(same.map(range(4))) == [0, 1, 2, 3]
        yield executor


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_worker_that_cannot_be_told_is_given_up_and_its_items_run_elsewhere(executor, monkeypatch, caplog, after):
    calls = raising_once(monkeypatch, LocalHosts, "tell", after)
    assert list(same.map(range(12))) == [*range(12)]
    assert len(calls) > after + 1
    eventually(lambda: executor.connected_workers == 2)
    assert [each for each in caplog.messages if "is given up" in each and "Too many open files" in each]


def test_an_answer_that_cannot_be_taken_costs_its_worker_alone(executor, monkeypatch):
    raising_once(monkeypatch, local_hosts, "events_of", 2, KeyError("seconds"))
    assert list(same.map(range(12))) == [*range(12)]


def test_an_error_amid_an_event_ends_the_run_and_is_told_to_everybody(executor, monkeypatch, caplog):
    """One future was to be told when it came, others wait, and a session is open."""
    with endless.open() as session:
        assert session.take(patience()) == 0
        mapped = same.map(itertools.count())
        raising_once(monkeypatch, Waiting, "answer", 3, ValueError("half done"))
        errors = []
        with pytest.raises(EngineFailed, match=r"ValueError came at .*: half done; please report it"):
            while True:
                errors.append(finished(same(1)).exception())
        assert set(map(type, errors)) <= {type(None), EngineFailed}
        with pytest.raises(EngineFailed, match="half done"):
            list(mapped)
        with pytest.raises(EngineFailed):
            while session.take(patience()) is not None:
                pass
        with pytest.raises(EngineFailed):
            same(1)


def test_what_was_to_be_told_when_an_engine_fails_is_told(executor, monkeypatch):
    """The event's own answers have left the table of those who wait, and its next command fails."""
    execute = executor.engine.execute
    eventually(lambda: executor.connected_workers == 2)
    list(same.map(range(40)))
    # So that no worker has still to be told something else.
    eventually(lambda: executor.status().contexts[""] == {"ready": 2})

    def on_this_thread(*what):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(24, "Too many open files")
        execute(*what)

    monkeypatch.setattr(executor.engine, "execute", on_this_thread)
    answers = list(same.map(range(12), on_error="return"))
    assert {type(each) for each in answers} == {int, EngineFailed}
    assert [each for each in answers if isinstance(each, int)] == [n for n, each in enumerate(answers) if each == n]


def test_nor_does_an_engine_that_raises_when_it_is_asked_hang(executor, monkeypatch):
    mapped = same.map(itertools.count())
    monkeypatch.setattr(executor.engine, "poll", raising(RuntimeError("no events today")))
    with pytest.raises(EngineFailed, match="no events today"):
        list(mapped)


def raising(error):
    def raises(*args, **kwargs):
        raise error

    return raises


def test_what_only_tells_of_the_run_does_not_end_it(executor, monkeypatch, caplog):
    run = executor.calls.run
    monkeypatch.setattr(run, "_write_status", raising(ValueError("no figures")))
    with caplog.at_level(logging.ERROR):
        eventually(lambda: "what is done each second failed" in caplog.text)
    assert list(same.map(range(4))) == [0, 1, 2, 3]
    monkeypatch.undo()
