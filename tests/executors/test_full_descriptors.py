"""A table of file descriptors that is full costs no row, is told with what to do, and makes nobody spin."""

import contextlib
import errno
import os
import resource
import signal
import threading

import pytest
from executor_helpers import first_free, runs, started

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.errors import ContextError, CtxflowError
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.taskvine import engine as taskvine_engine
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from waiting import eventually, joined, looked

WORDS = "raise `ulimit -n`"


@context
def base(number):
    return number


@batch_app(batch_size=10)
def plus(base, numbers):
    return [number + base for number in numbers]


@contextlib.contextmanager
def full_table():
    """This process has no descriptor left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # The standard three, which nobody closes meanwhile.
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_more_descriptors(pid):
    limit = first_free(pid)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))


def test_workers_wait_for_a_descriptor_of_the_driver(tmp_path, monkeypatch, caplog):
    answers, rounds = [], []
    with started(tmp_path, workers=1) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
        poll = executor.engine.poll
        monkeypatch.setattr(executor.engine, "poll", lambda seconds: (rounds.append(seconds), poll(seconds))[1])
        mapping = threading.Thread(target=lambda: answers.extend(plus.using(base(2)).map(range(50))), daemon=True)
        with full_table():
            mapping.start()
            lines = executor.engine._lines._expected
            eventually(lambda: [line for line in list(lines.values()) if line.ready and line.channel is None])
            rounds.clear()
            looked(executor.run, 2)
            assert len(rounds) < 50, "it spins"
            assert not answers
        joined(mapping)
        assert answers == [*range(2, 52)]
    [said] = [each for each in caplog.messages if "connections of workers have to wait" in each]
    assert WORDS in said


def test_a_worker_that_dies_meanwhile_costs_no_row(tmp_path, caplog):
    with started(tmp_path, workers=1) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
        [(name, pid)] = executor.engine.worker_pids().items()
        answers = []
        mapping = threading.Thread(target=lambda: answers.extend(plus.using(base(1)).map(range(50))), daemon=True)
        with full_table():
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: name not in executor.engine._local.there)
            mapping.start()
            looked(executor.run, 1)
        joined(mapping)
        assert answers == [*range(1, 51)]
        assert not runs(pid)


def test_a_context_that_one_worker_has_no_descriptors_for_is_built_on_another(tmp_path):
    with started(tmp_path, workers=2) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
        no_more_descriptors(min(executor.engine.worker_pids().values()))
        for number in range(2, 5):
            assert list(plus.using(base(number)).map(range(40))) == [*range(number, 40 + number)]


def test_and_who_has_no_other_is_told_what_to_do(tmp_path):
    with started(tmp_path, workers=1) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
        no_more_descriptors(*executor.engine.worker_pids().values())
        with pytest.raises(ContextError, match=WORDS):
            list(plus.using(base(2)).map(range(3)))
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]


def test_a_status_that_cannot_be_rewritten_is_told_once(tmp_path, caplog):
    with started(tmp_path, workers=1) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
        with full_table():
            eventually(lambda: any("status.json cannot be rewritten" in each for each in caplog.messages))
            looked(executor.run, 2)  # It is tried again each second.
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]
    [said] = [each for each in caplog.messages if "status.json" in each]
    assert WORDS in said


@pytest.mark.parametrize("engine", ["embedded", "taskvine"])
def test_a_run_that_has_none_to_start_with_says_what_to_do(tmp_path, monkeypatch, engine):
    failure = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def fail(*arguments, **named):
        raise failure

    if engine == "embedded":
        monkeypatch.setattr(EmbeddedEngine, "start", fail)
        site = Site(workers=1)
    else:
        monkeypatch.setattr(taskvine_engine, "require_ndcctools", lambda: None)
        monkeypatch.setattr(taskvine_engine, "ManagerLink", fail)
        tiers = (Tier(name="one", provider="local", workers=1),)
        site = Site(engine="taskvine", tiers=tiers, taskvine={"address": "127.0.0.1"})
    executor = ContextExecutor(site=site)
    executor.run_dir = str(tmp_path)
    with pytest.raises(CtxflowError, match=rf"^the run cannot start: .*{WORDS}"):
        executor.start()


def test_a_run_that_its_loop_has_none_for_ends_with_what_to_do(tmp_path, monkeypatch):
    with started(tmp_path, workers=1) as executor:
        assert list(plus.using(base(1)).map(range(3))) == [1, 2, 3]

        def poll(seconds):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(executor.engine, "poll", poll)
        with pytest.raises(EngineFailed, match=WORDS) as caught:
            while True:  # What the engine knew before is answered yet.
                list(plus.using(base(1)).map(range(3)))
    assert "report" not in str(caught.value)
