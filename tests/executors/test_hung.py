"""Processes of workers that hang: what they ran is tried again elsewhere, told with the cause, and the run goes on."""

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from executor_helpers import runs, started

from ctxflow import batch_app
from ctxflow.errors import CallTimeout
from ctxflow.executors import embedded
from ctxflow.executors.local_hosts import LocalWatch
from ctxflow.executors.protocol import Heartbeats, Patience
from ctxflow.host.linux import activity, descendants
from ctxflow.topology.machine import Device
from unkillable import stopped, unkillable
from waiting import FOREVER, eventually

HASTE = Patience(ask=0.4, answer=6.0, overdue=0.4, urgent=6.0)
"""Asked soon, but given time: a worker that only starts on a busy machine is not to be lost with the one that hangs."""


@batch_app(batch_size=1)
def where(items):
    """The processes that ran it: the library's and its host's."""

    time.sleep(0.05)
    return [(os.getpid(), os.getppid(), os.environ.get("CUDA_VISIBLE_DEVICES")) for _ in items]


@batch_app(batch_size=1, timeout=2.0)
def limited(items):

    time.sleep(max(items))
    return [os.getpid() for _ in items]


@pytest.fixture
def executor(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ctxflow")
    with started(tmp_path, patience=HASTE) as executor:
        yield executor


def losses(caplog):
    return [text for text in caplog.messages if "is lost" in text]


def test_a_host_that_is_stopped_is_lost_and_what_it_ran_is_answered_elsewhere(executor, caplog):
    with contextlib.closing(where.map(itertools.count())) as calls:
        _, host, _ = next(calls)
        stopped(host)
        assert any(losses(caplog) for _ in itertools.islice(calls, 10_000))
        assert host not in {each[1] for each in itertools.islice(calls, 100, 140)}
    [told] = losses(caplog)
    assert f"its host, process {host}, has not answered for " in told
    assert "what it ran is tried again elsewhere" in told
    eventually(lambda: not runs(host))
    status = executor.status()
    assert (status.workers_lost, status.evictions) == (1, 0)


def test_a_host_that_is_stopped_while_it_runs_nothing_is_lost(executor, caplog):
    _, host, _ = where(1).result()
    eventually(lambda: executor.status().workers == 2)
    stopped(host)
    eventually(lambda: losses(caplog))
    eventually(lambda: executor.status().workers == 2, what="another takes its place")


def test_the_driver_has_a_deadline_of_its_own_for_a_call_whose_host_is_stopped(tmp_path, caplog):
    # Its silence is never a reason to ask it.
    with started(tmp_path, workers=1, patience=Patience(ask=FOREVER, overdue=0.4, urgent=0.8)):
        _, host, _ = where(1).result()
        stopped(host)
        with pytest.raises(CallTimeout):
            limited(FOREVER).result()
        assert len(losses(caplog)) == 1


def test_a_call_that_a_stopped_library_process_never_began_times_out(executor, caplog):
    library = limited(0.0).result()
    for pid in [library, *(pid for each in set(executor.engine.worker_pids().values()) for pid in descendants(each))]:
        stopped(pid)
    with pytest.raises(CallTimeout, match=r"longer than its timeout of 2 s"):
        limited(0.0).result()
    assert limited(0.0).result() != library, "the context is built again"
    assert not losses(caplog), "which costs no worker"


def test_calls_that_wait_for_their_turn_are_not_overdue(tmp_path, caplog):
    with started(tmp_path, workers=1, slots=6, patience=Patience(overdue=0.1, urgent=2.0)):
        assert len(set(limited.map([0.5] * 6))) == 1, "all were answered by one library process"
    assert not losses(caplog)


def test_a_gpu_is_given_to_nobody_before_what_was_killed_has_let_go_of_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(embedded, "cuda_devices", lambda: [Device(f"GPU-{n}", "pretended") for n in range(2)])
    with started(tmp_path, patience=HASTE) as executor:
        eventually(lambda: executor.status().workers == 2)
        library, host, gpu = where(1).result()
        with unkillable(library):
            stopped(host)
            eventually(lambda: losses(caplog))
            assert {each[2] for each in where.map(range(20))} == {"GPU-0", "GPU-1"} - {gpu}
            assert executor.status().workers == 1
            assert any(f"process {library} " in text and "does not end" in text for text in caplog.messages)
        eventually(lambda: executor.status().workers == 2)
        eventually(lambda: gpu in {each[2] for each in where.map(range(20))})


BUSY = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def busy():
    """A process that gets on and answers nobody, as a host that is swapped out does."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def test_a_host_that_gets_on_is_not_taken_for_dead(busy):
    worker = SimpleNamespace(name="w", process=busy, lines={})
    vigil = LocalWatch(
        Patience(ask=0.2, answer=2.0, urgent=2.0), {"w": worker}, SimpleNamespace(ask=lambda worker: None)
    )
    vigil.begun("w")
    looks = itertools.count(0.0, 0.5)
    for _ in range(14):
        seen = activity(busy.pid)
        eventually(lambda seen=seen: activity(busy.pid) != seen)
        assert not vigil.look(next(looks))
    stopped(busy.pid)
    assert any(vigil.look(next(looks)) for _ in range(40))


def test_a_driver_that_was_stopped_itself_takes_nobody_for_dead():
    asked = []
    beats = Heartbeats(Patience(), asked.append)
    beats.watch("w")
    for now in range(7):
        assert beats.look(now) == []
    assert asked == ["w"]
    assert beats.look(10_000.0) == []
    beats.heard("w")
    assert beats.look(10_001.0) == []


def test_time_in_which_no_answer_could_come_does_not_count():
    beats = Heartbeats(Patience(), lambda worker: None)
    beats.watch("w")
    assert not any(beats.look(now, hearing=now < 10) for now in range(1_000))
    assert any(beats.look(now) for now in range(1_000, 1_020))


def test_with_the_patience_that_is_shipped(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ctxflow")
    with started(tmp_path), contextlib.closing(where.map(itertools.count())) as calls:
        _, host, _ = next(calls)
        stopped(host)
        assert any(losses(caplog) for _ in calls)
