"""When a run is live, and when it is over."""

import dataclasses
import json
import logging
import os
import socket
import subprocess
import time

import pytest

from ctxflow.factory.run_files import Connection, PublishedRun, is_over, live_runs, may_discard
from ctxflow.factory.tier_providers import files_left
from ctxflow.ownership import birth_of


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "ctxflow"


RUN = PublishedRun(
    "abc", socket.gethostname(), os.getpid(), "/run/abc", "10.0.0.1", 9000, "/run/password", "/run/pyz", {}, {}
)
RUN = dataclasses.replace(RUN, born=birth_of(RUN.pid))


def test_a_run_ends_with_its_file(runtime):
    connection = Connection(RUN)
    assert live_runs() == [RUN] and not is_over(RUN)
    connection.close()
    assert live_runs() == [] and is_over(RUN) and may_discard(RUN)


def test_a_run_without_a_login_is_found_from_one(runtime, monkeypatch):
    with monkeypatch.context() as job:
        job.delenv("XDG_RUNTIME_DIR")
        connection = Connection(RUN)
    assert not runtime.exists() and live_runs() == [RUN] and not is_over(RUN)
    connection.close()
    assert live_runs() == [] and is_over(RUN)


def test_a_run_ends_with_its_driver(runtime):
    with subprocess.Popen(["sleep", "60"]) as driver:
        run = dataclasses.replace(RUN, pid=driver.pid, born=birth_of(driver.pid))
        Connection(run)
        assert live_runs() == [run] and not is_over(run)
        driver.kill()
        os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)  # A zombie is dead.
        assert live_runs() == [] and is_over(run)
    assert live_runs() == [] and is_over(run) and may_discard(run)


def test_another_process_of_its_id_is_not_its_driver(runtime):
    run = dataclasses.replace(RUN, born="1@an-earlier-boot")
    Connection(run)
    assert live_runs() == [] and is_over(run) and may_discard(run)


def test_a_run_in_a_container_counts_while_it_writes_and_nothing_of_it_is_removed(runtime, tmp_path):
    """Its driver has its number in another PID namespace, and may share the machine's name and the home."""
    start, boot, _ = RUN.born.split("@")
    run = dataclasses.replace(RUN, pid=2**22 + 1, born=f"{start}@{boot}@1", directory=str(tmp_path))
    Connection(run)
    (tmp_path / "status.json").touch()
    for hours, alive in ((0, True), (1, False)):
        then = time.time() - 3600 * hours
        for path in (runtime / "abc.json", tmp_path / "status.json"):
            os.utime(path, times=(then, then))
        assert live_runs() == [run] * alive and is_over(run) is not alive
        assert str(runtime / "abc.json") not in files_left() and not may_discard(run)


def test_no_clock_ends_a_run(runtime, clock_steps):
    """A file server's clock that is behind or ahead, and the machine's own that is set while the run goes on."""
    Connection(RUN)
    for seconds in (-3600, 3600):
        now = time.time() + seconds
        os.utime(runtime / "abc.json", times=(now, now))
        assert live_runs() == [RUN] and not is_over(RUN)
    for seconds in (-3600, 3600):
        with clock_steps(seconds):
            assert live_runs() == [RUN] and not is_over(RUN)


def test_a_file_that_others_may_have_written_is_no_run(runtime, monkeypatch):
    Connection(RUN)
    forged = runtime / "abc.json"
    forged.chmod(0o620)
    assert live_runs() == []
    forged.chmod(0o600)
    assert live_runs() == [RUN]
    forged.rename(runtime / "elsewhere")
    forged.symlink_to(runtime / "elsewhere")
    assert live_runs() == [], "a link is not followed"
    (runtime / "elsewhere").replace(forged)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert live_runs() == []


def test_a_folder_in_which_others_may_write_has_no_runs_and_gets_none(runtime, caplog):
    Connection(RUN)
    runtime.chmod(0o770)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        assert live_runs() == [] == live_runs()
        Connection(dataclasses.replace(RUN, id="new"))
    assert [path.name for path in runtime.iterdir()] == ["abc.json"]
    assert [record.getMessage() for record in caplog.records] == [
        f"others may write to {runtime}, so that it is not used: call chmod go-w {runtime}"
    ]


def test_what_another_version_says_beside_is_left_out(runtime):
    Connection(RUN)
    told = json.loads((runtime / "abc.json").read_text())
    (runtime / "abc.json").write_text(json.dumps({**told, "colour": "blue"}))
    (runtime / "b.json").write_text('{"pid": "?"}')
    assert live_runs() == [RUN]


def test_a_place_that_cannot_be_seen_ends_no_run(runtime, monkeypatch):
    Connection(RUN)

    def stale(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    monkeypatch.setattr(os, "stat", stale)
    assert live_runs() == [] and not is_over(RUN)
