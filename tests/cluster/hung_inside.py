"""Runs inside the testbed: each process of a run on TaskVine is stopped in turn, and the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ctxflow import ContextExecutor, batch_app
from ctxflow.errors import CallTimeout
from ctxflow.executors.protocol import Patience
from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.factory.run_files import live_runs
from ctxflow.host.linux import process_state
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from unkillable import unkillable
from waiting import FOREVER, eventually, finished

HASTE = Patience(ask=1.0, answer=3.0, overdue=1.0, urgent=3.0, leave=3.0, manager=4.0)
TIER = {"provider": "local", "cores": 1, "memory_gb": 2, "disk_gb": 2, "gpus": 0}


@batch_app(batch_size=1)
def where(items):
    """The processes that ran it: the library's, its host's and the wrapper's."""
    import os
    import time

    time.sleep(0.05)
    return [(os.getpid(), os.getppid(), int(os.environ["CTXFLOW_WORKER_PID"])) for _ in items]


@batch_app(batch_size=1, timeout=2.0)
def limited(items):
    import time

    time.sleep(max(items))
    return list(items)


@contextlib.contextmanager
def running(
    directory: Path, workers: int = 2, patience: Patience | None = HASTE, **site: Any
) -> Iterator[ContextExecutor]:
    tiers = (Tier(name="local", workers=workers, **TIER),)
    keepalive = {"keepalive_interval": 1, "keepalive_timeout": 5} if patience else {}
    options = {"address": "127.0.0.1", **keepalive}
    executor = ContextExecutor(Site(engine="taskvine", tiers=tiers, taskvine=options, **site))
    executor.run_dir = str(directory)
    executor.engine = TaskVineEngine(executor.resolved_site, patience=patience)
    with executor:
        yield executor


def told(caplog: pytest.LogCaptureFixture, text: str = "is lost") -> list[str]:
    return [each for each in caplog.messages if re.search(text, each)]


def process_of(kind: str, executor: ContextExecutor, ran: tuple[int, int, int]) -> int:
    library, host, wrapper = ran
    vine_worker = psutil.Process(host).ppid()
    if psutil.Process(vine_worker).name() in ("sh", "bash"):
        vine_worker = psutil.Process(vine_worker).ppid()
    return {
        "library": library,
        "host": host,
        "vine_worker": vine_worker,
        "wrapper": wrapper,
        "manager": executor.engine._link.process.pid,
    }[kind]


SAID = {
    "host": "has not answered for",
    "wrapper": "is stopped",
    "vine_worker": "is lost|is gone",  # As its host or TaskVine fails to hear of it first.
    "manager": "TaskVine's manager has hung",
}


def stop_one(kind: str, executor: ContextExecutor) -> float:
    """Stop a process while items are answered all the time: seconds until the run knew, which then goes on."""
    with contextlib.closing(where.map(itertools.count())) as calls:
        pid = process_of(kind, executor, next(calls))
        eventually(lambda: executor.status().workers == 2, what="both are there")
        lost = executor.status().workers_lost
        begun = time.monotonic()
        os.kill(pid, signal.SIGSTOP)

        def is_noticed() -> bool:
            if kind != "manager":  # Else no answer comes.
                next(calls)
            return executor.status().workers_lost > lost

        eventually(is_noticed, what=f"that the {kind} is stopped is noticed")
        noticed = time.monotonic() - begun
        assert len(list(itertools.islice(calls, 100))) == 100
    eventually(lambda: executor.status().workers == 2, what="another worker takes its place")
    eventually(lambda: process_state(pid) in ("", "Z"), what="what was stopped is ended")
    return noticed


@pytest.mark.parametrize("kind", SAID)
def test_what_is_stopped_is_noticed_and_the_run_goes_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, patience=None) as executor:
        noticed = stop_one(kind, executor)
        status = executor.status()
    print(f"{kind}: noticed after {noticed:.1f} s")
    assert (status.items_dead, status.workers_lost) == (0, 2 if kind == "manager" else 1)
    assert len(told(caplog, SAID[kind])) == 1, caplog.messages


NEVER_ASKED = dataclasses.replace(HASTE, ask=FOREVER)
"""A worker is lost only for a call that is overdue."""


def test_a_host_that_is_stopped_under_a_call_with_a_timeout(tmp_path: Path) -> None:
    with running(tmp_path, patience=NEVER_ASKED) as executor:
        limited(0.0).result()
        ran = where(1).result()
        os.kill(ran[1], signal.SIGSTOP)
        calls = [limited(FOREVER) for _ in range(2)]
        eventually(lambda: executor.status().workers_lost)
        for call in calls:
            with pytest.raises(CallTimeout):
                finished(call).result()


def test_a_library_process_that_is_stopped_misses_its_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, workers=1):
        os.kill(where(1).result()[0], signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            finished(limited(0.0)).result()
        assert finished(limited(0.0)).result() == 0
    assert not told(caplog)


def test_a_library_process_that_cannot_be_killed_costs_the_worker_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, workers=1):
        ran = where(1).result()
        with unkillable(ran[0]):
            with pytest.raises(CallTimeout):
                finished(limited(FOREVER)).result()
            assert finished(where(1)).result()[2] != ran[2], "another worker, though this one is there no more"
            assert process_state(ran[0]) == "t"
    [line] = told(caplog)
    assert f"process {ran[0]} was killed and does not end" in line


def test_a_manager_that_is_killed_is_replaced_and_files_come_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ctxflow import context

    (tmp_path / "weights").write_text("x" * 5000)

    @context(files={"weights": str(tmp_path / "weights")})
    def read(weights):  # type: ignore[no-untyped-def]
        with open(weights) as file:
            return len(file.read())

    @batch_app(read())
    def count(length, items):  # type: ignore[no-untyped-def]
        return [length + item for item in items]

    with running(tmp_path / "run", workers=1) as executor:
        assert count(1).result() == 5001
        for number in range(2):
            executor.engine._link.process.kill()
            assert count(number).result() == 5000 + number
        assert executor.status().workers_lost == 2
        assert executor.status().items_dead == 0
    assert len(told(caplog, "another takes its place")) == 2


def test_a_manager_that_ends_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="TaskVine's manager ended"), running(tmp_path) as executor:
        while True:
            executor.engine._link.process.kill()
            where(1).result()


def test_a_worker_that_comes_back_is_told_to_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, workers=1) as executor:
        ran = where(1).result()
        run = next(run for run in live_runs() if run.id == executor.calls.run.id)
        words = run.commands["local"]
        with subprocess.Popen(words, cwd=tmp_path) as by_hand:
            try:
                eventually(lambda: executor.status().workers == 2)
                with contextlib.closing(where.map(itertools.count())) as calls:
                    other = next(each for each in calls if each[2] != ran[2])
                    os.kill(other[1], signal.SIGSTOP)
                    assert any(told(caplog) for _ in calls)
                    os.kill(other[1], signal.SIGCONT)
                    eventually(lambda: by_hand.poll() is not None, what="it is told to go")
                    assert other[2] not in {each[2] for each in itertools.islice(calls, 50)}
            finally:
                by_hand.kill()
        status = executor.status()
        assert (status.workers_lost, status.items_dead) == (1, 0)


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ctxflow")
