"""When a run is live, and when it is over."""

import dataclasses
import os
import socket
import subprocess

import pytest

from ctxflow.factory.connection import Connection, Run, is_over, live_runs


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "ctxflow"


RUN = Run("abc", socket.gethostname(), os.getpid(), "/run/abc", "10.0.0.1", 9000, "/run/password", "/run/pyz", {}, {})


def test_a_run_ends_with_its_file(runtime):
    connection = Connection(RUN)
    assert live_runs() == [RUN] and not is_over(RUN)
    connection.close()
    assert live_runs() == [] and is_over(RUN)


def test_a_run_without_a_login_is_found_from_one(runtime, monkeypatch):
    with monkeypatch.context() as job:
        job.delenv("XDG_RUNTIME_DIR")
        connection = Connection(RUN)
    assert not runtime.exists() and live_runs() == [RUN] and not is_over(RUN)
    connection.close()
    assert live_runs() == [] and is_over(RUN)


def test_a_run_ends_with_its_driver(runtime):
    with subprocess.Popen(["sleep", "60"]) as driver:
        run = dataclasses.replace(RUN, pid=driver.pid)
        Connection(run)
        assert live_runs() == [run] and not is_over(run)
        driver.kill()
        os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)  # A zombie is dead.
        assert live_runs() == [] and is_over(run)
    assert live_runs() == [] and is_over(run)


def test_another_process_of_its_id_is_not_its_driver(runtime):
    Connection(RUN)
    os.utime(runtime / "abc.json", times=(1, 1))
    assert live_runs() == [] and is_over(RUN)


def test_a_place_that_cannot_be_seen_ends_no_run(runtime, monkeypatch):
    Connection(RUN)

    def stale(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    monkeypatch.setattr(os.path, "getmtime", stale)
    assert live_runs() == [] and not is_over(RUN)
