"""Executors that come and go: nothing leaks, several live side by side, and what cannot start says why."""

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings

import pytest
from executor_helpers import runs, started

from ctxflow import ContextExecutor, CtxflowError, RunEnded, batch_app, context, context_app
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.protocol import Patience
from ctxflow.host.library_messages import BuildFailed, ContextBuilt, LineOpened
from ctxflow.host.linux import descendants
from ctxflow.host.messages import LibraryDied
from ctxflow.host.wire import Trouble, frame, pack
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.testing.contract_hooks import ContractRun
from ctxflow.testing.worker_calls import wait_for
from waiting import FOREVER, eventually, finished, happened, nothing_left


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_leaks_from_executors_that_come_and_go(tmp_path):
    def once():
        with started(tmp_path / "run", workers=1) as executor:
            assert finished(executor.submit(pow, {}, 2, 3)).result() == 8

    once()
    children = set(descendants(os.getpid()))
    before, threads = descriptors(), threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(int(os.environ.get("ROUNDS", "4"))):
            once()
        eventually(lambda: descriptors() == before)
    eventually(lambda: threading.active_count() == threads)
    nothing_left(lambda: set(descendants(os.getpid())) - children, what="no process is left, not even as a zombie")


def test_a_cell_that_is_run_twice_leaves_one_executor(tmp_path, monkeypatch, capsys):
    first = started(tmp_path / "first", workers=1)
    first.start()
    second = started(tmp_path / "second", workers=1)
    second.start()
    assert finished(first.submit(pow, {}, 2, 3)).result() == 8, "in a program they live side by side"
    second.shutdown()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with started(tmp_path / "block", workers=1) as inside:
        assert finished(first.submit(pow, {}, 2, 3)).result() == 8
        third = started(tmp_path / "third", workers=1)
        third.start()
        assert finished(inside.submit(pow, {}, 2, 3)).result() == 8, "what a with statement ends stays"
    with pytest.raises(CtxflowError):
        first.submit(pow, {}, 2, 3)
    assert finished(third.submit(pow, {}, 2, 3)).result() == 8
    third.shutdown()
    assert "'ctxflow' is started again: the earlier one is ended" in capsys.readouterr().err


def test_an_executor_that_is_shut_down_while_its_workers_start(tmp_path):
    before = descriptors()
    for _ in range(3):
        executor = started(tmp_path / "run")
        executor.start()
        future = executor.submit(time.sleep, {}, FOREVER)
        executor.shutdown()
        with pytest.raises(RunEnded, match="submit it again in a new run"):
            finished(future).result()
    eventually(lambda: descriptors() == before)
    with pytest.raises(RunEnded, match="make calls while its executor is running"):
        executor.submit(pow, {}, 2, 3)


def test_shutdown_from_a_callback(tmp_path):
    executor = started(tmp_path / "run", workers=1)
    executor.start()
    done = threading.Event()
    future = executor.submit(pow, {}, 2, 3)
    future.add_done_callback(lambda _: (executor.shutdown(), done.set()))
    happened(done)
    eventually(lambda: not {"ctxflow-run", "ctxflow-watch"} & {thread.name for thread in threading.enumerate()})


def test_two_executors_at_once(tmp_path):
    @batch_app(executor="one")
    def on_one(numbers):
        return [os.getppid()] * len(numbers)

    with (
        started(tmp_path / "one", workers=1, label="one") as one,
        started(tmp_path / "two", workers=1, label="two") as two,
    ):
        hosts = [set(each.engine.worker_pids().values()) for each in (one, two) if each.submit(pow, {}, 2, 3).result()]
        assert set(on_one.map(range(10))) == hosts[0]
        assert set(on_one.using(executor="two").map(range(10))) == hosts[1]
        one.shutdown()
        assert finished(two.submit(pow, {}, 2, 3)).result() == 8


def test_an_executor_started_in_a_thread_that_ends(tmp_path):
    executor = started(tmp_path / "run")
    starter = threading.Thread(target=executor.start)
    starter.start()
    starter.join()
    try:
        assert finished(executor.submit(pow, {}, 2, 3)).result() == 8
        executor.engine.evict()
        eventually(lambda: executor.status().workers_joined == 3)
        assert [finished(executor.submit(pow, {}, n, 2)).result() for n in range(20)] == [n * n for n in range(20)]
    finally:
        executor.shutdown()


def test_a_worker_with_notice_finishes_and_is_replaced(tmp_path):
    with started(tmp_path / "run", workers=1) as executor:
        finished(executor.submit(pow, {}, 2, 3)).result()
        ((name, host),) = executor.engine.worker_pids().items()
        begun, go = tmp_path / "begun", tmp_path / "go"
        running = executor.submit(lambda: (begun.touch(), wait_for(go)), {})
        eventually(begun.exists)
        os.kill(host, 15)
        eventually(lambda: executor.run._scheduler.state.workers[name].noticed is not None)
        go.touch()
        assert finished(running).result() == (None, None)
        assert finished(executor.submit(pow, {}, 2, 3)).result() == 8
        status = executor.status()
        assert (status.evictions, status.retried_items) == (1, 0)
        eventually(lambda: not runs(host))


# --- what cannot start


def test_a_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    before = descriptors()
    executor = started(tmp_path / "file" / "run")
    with pytest.raises(
        CtxflowError, match=r"the run cannot keep its files in .*/file/run/ctxflow .*: start the program"
    ):
        executor.start()
    executor.shutdown()
    eventually(lambda: descriptors() == before)


def test_a_scratch_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    executor = ContextExecutor(Site(scratch=str(tmp_path / "file" / "scratch")))
    executor.run_dir = str(tmp_path / "run")
    before = descriptors()
    with pytest.raises(CtxflowError, match=r"workers have no place for their files .*: put scratch= of the site"):
        executor.start()
    executor.shutdown()
    eventually(lambda: descriptors() == before)


def test_workers_that_cannot_start(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'libpython is missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    executor = started(tmp_path / "run")
    executor.engine._local.rejoin_seconds = 0.001
    monkeypatch.setattr(sys, "executable", str(broken))
    with executor, caplog.at_level(logging.ERROR):
        future = executor.submit(pow, {}, 2, 3)
        with pytest.raises(CtxflowError, match=r"workers in a row did not start.*libpython is missing") as caught:
            finished(future).result()
        assert "see whether that program can be imported" in str(caught.value)
        with pytest.raises(CtxflowError, match="libpython is missing"):
            executor.submit(pow, {}, 2, 3)
    assert "libpython is missing" in caplog.text


def test_a_machine_without_processes_to_spare_is_waited_for(tmp_path, monkeypatch):
    spawn, failures = subprocess.Popen, [OSError(11, "Resource temporarily unavailable")] * 2

    def popen(*arguments, **options):
        if failures:
            raise failures.pop()
        return spawn(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    before = descriptors()
    with started(tmp_path / "run") as executor:
        assert finished(executor.submit(pow, {}, 2, 3)).result() == 8
        eventually(lambda: executor.status().workers == 2)
    eventually(lambda: descriptors() == before)


def test_long_paths_and_folders_with_modules_that_hide_others(tmp_path, monkeypatch):
    scratch = tmp_path / ("long" * 30)
    (tmp_path / "random.py").write_text("raise ImportError('this is not the one')")
    monkeypatch.chdir(tmp_path)
    executor = ContextExecutor(Site(workers=1, scratch=str(scratch)))
    with executor:
        assert finished(executor.submit(pow, {}, 2, 3)).result() == 8
    assert os.listdir(scratch) == []


def test_a_full_disk_under_the_event_log_ends_the_log_only(tmp_path, caplog):
    directory = tmp_path / "run" / "ctxflow"
    directory.mkdir(parents=True)
    (directory / "events.jsonl").symlink_to("/dev/full")
    with started(tmp_path / "run", workers=1) as executor:
        for number in range(200):
            assert finished(executor.submit(pow, {}, number, 2)).result() == number**2
    assert "the event log ends here" in caplog.text


# --- lines to library processes


@pytest.fixture
def engine(tmp_path, request):
    engine = EmbeddedEngine(workers=1, patience=getattr(request, "param", None))
    yield ContractRun(engine, str(tmp_path), "local")
    engine.stop()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0" * 11,
        pack(LineOpened("guess")),
        frame({}),
        frame({"key": ["list"]}),
        frame(["LineOpened", ["list"]]),
        frame([1]),
        b"\xff" * 50,
    ],
    ids=["nothing", "part", "guess", "no-key", "list", "a-list", "no-dict", "junk"],
)
def test_strangers_on_the_drivers_socket_do_no_harm(engine, said):
    (worker,) = engine.start()
    before = descriptors()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as stranger:
        silent.connect(engine.engine._lines.address)
        stranger.connect(engine.engine._lines.address)
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        engine.load(worker, ev.PLAIN)
        engine.apply(worker, pow, 2, 3)
        engine.wait(ev.BatchFinished)
        assert stranger.recv(1) == b""
        engine.engine.stop()
        assert silent.recv(1) == b""
    assert descriptors() < before


@pytest.mark.parametrize("report", ["died", "failed"])
def test_a_library_process_that_ends_before_its_line_is_there(engine, report):
    (worker,) = engine.start()
    here = engine.engine
    engine.execute(cmd.Load(worker, ev.PLAIN))
    line = here._local.there[worker].lines[ev.PLAIN]
    trouble = Trouble("crash", "LibraryDied", "gone")
    ended = {
        "died": LibraryDied(ev.PLAIN, line.key, [], trouble),
        "failed": BuildFailed(ev.PLAIN, line.key, trouble),
    }[report]
    with here._lock:
        held = here._local.there[worker]
        ready = ContextBuilt(ev.PLAIN, line.key, 1.0, 1, None)
        if report == "died":
            assert list(here._translate(held, ready)) == []
        told = list(here._translate(held, ended))
        stale = list(here._translate(held, ended))
    kinds = [type(event) for event in told]
    assert kinds == ([ev.ContextReady, ev.ContextUnloaded] if report == "died" else [ev.ContextFailed])
    assert stale == [], "what is said about an earlier load is of no account"
    assert not here._lines._expected
    engine.execute(cmd.Unload(worker, ev.PLAIN), cmd.Load(worker, ev.PLAIN))
    engine.wait(ev.ContextReady)


@pytest.mark.parametrize("engine", [Patience(report=0.5)], indirect=True)
@pytest.mark.parametrize("built", [True, False])
def test_a_line_that_ends_while_its_library_process_lives_is_not_waited_for_long(engine, built):
    (worker,) = engine.start()
    lines = engine.engine._local.there[worker].lines
    if built:
        engine.load(worker, ev.PLAIN)
    else:
        engine.execute(cmd.Load(worker, ev.PLAIN))
        engine.until(lambda: lines[ev.PLAIN].channel is not None)
    lines[ev.PLAIN].channel.socket.shutdown(socket.SHUT_RDWR)
    engine.until(lambda: ev.PLAIN in lines and lines[ev.PLAIN].channel is None)
    if built:
        engine.apply(worker, pow, 2, 3)
    else:
        engine.wait(ev.ContextReady)
    engine.wait(ev.ContextUnloaded)
    assert not engine.all(ev.BatchFailed)
    engine.load(worker, ev.PLAIN)
    engine.apply(worker, pow, 2, 3)
    engine.wait(ev.BatchFinished)


# --- memory of contexts


def test_the_least_recently_used_context_makes_room(tmp_path):
    """Three contexts of which two fit on the worker: using them in turn unloads the one not used for longest."""
    import psutil

    share = int(psutil.virtual_memory().total * 0.4)

    def make(letter):
        def build():
            with open(tmp_path / "builds", "a") as file:
                file.write(letter)
            return letter

        build.__name__ = f"context_{letter}"

        @context_app(context(memory=share, park=False)(build)())
        def app(state):
            return state

        return app

    apps = {letter: make(letter) for letter in "abc"}
    with started(tmp_path / "run", workers=1) as executor:
        for letter in "abacbab":
            assert finished(apps[letter]()).result() == letter
            assert len(executor.status().contexts) <= 2
    #      a  b  a  c unloads b  b unloads a  a unloads c  b
    assert (tmp_path / "builds").read_text() == "abcba"
