"""Local workers: real processes, evicted and ended as a batch system would."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxflow.factory import LocalProvider, ProviderError, WorkerJob
from ctxflow.host.library_process import KeptLogs
from ctxflow.testing.evictions import JobWatch
from waiting import eventually


def sh(script: str, *files: Path) -> WorkerJob:
    return WorkerJob("any", ["sh", "-c", script], files=[str(file) for file in files], environment={"COLOUR": "blue"})


class Watched(LocalProvider):
    """A provider whose changes can be waited for, and whose pause is over when a test says so."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        watch = JobWatch(self)
        self.until, self.told = watch.until, watch.changes
        super().__init__(pause=1.0, clock=lambda: self.now)
        self.start(str(directory))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Watched]:
    directory = tmp_path / "provider"
    directory.mkdir(0o700)
    provider = Watched(directory)
    yield provider
    provider.stop()
    assert [entry.name for entry in directory.iterdir() if entry.is_dir()] == []


def test_a_worker_has_its_files_its_environment_and_its_job(local: Watched, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o600)
    jobs = local.submit(sh("echo $CTXFLOW_JOB $COLOUR $(cat password) $(stat -c %a password . | xargs)", password), 2)
    for job in jobs:
        assert local.until(job, "running").host == os.uname().nodename
        assert local.until(job, "ended").reason == "it ended with status 0"
        assert local.last_words(job) == f"{job} blue secret 600 700"
    assert len(set(jobs)) == 2
    assert password.read_text() == "secret"


def test_a_program_may_travel(local: Watched, tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\necho I am $1\n")
    worker.chmod(0o700)
    [job] = local.submit(WorkerJob("any", ["worker", "here"], files=[str(worker)]), 1)
    local.until(job, "ended")
    assert local.last_words(job) == "I am here"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo alas >&2; exit 3", "it ended with status 3"),
        ("echo alas; kill -KILL $$", "it was killed by SIGKILL"),
        ("echo alas; kill -40 $$", "it was killed by signal 40"),
    ],
)
def test_how_a_worker_failed(local: Watched, script: str, reason: str) -> None:
    [job] = local.submit(sh(script), 1)
    assert local.until(job, "ended").reason == reason
    assert local.last_words(job) == "alas"


def test_an_evicted_worker_runs_again_after_a_pause(local: Watched) -> None:
    [job] = local.submit(sh("test -e before && echo stale; touch before; echo up; sleep 600"), 1)
    local.until(job, "running")
    eventually(lambda: local.last_words(job) == "up")
    local.evict(job)
    local.until(job, "evicted")
    assert local.changes() == []
    local.evict(job)  # It does not run.
    local.notify(job)
    assert local.changes() == []
    local.now += 1
    local.until(job, "running")
    eventually(lambda: local.last_words(job) == "up")  # In a fresh scratch directory.
    local.remove([job])
    assert local.until(job, "ended").reason == "it was removed"


def test_a_worker_with_notice_ends_by_itself_and_runs_again(local: Watched) -> None:
    [job] = local.submit(sh("trap 'echo notice; exit 0' TERM; echo up; sleep 600 & wait"), 1)
    local.until(job, "running")
    eventually(lambda: local.last_words(job) == "up")
    local.notify(job)
    assert "notice" in local.until(job, "evicted").reason
    assert local.last_words(job) == "up\nnotice"
    local.now += 1
    local.until(job, "running")


def test_a_worker_that_does_not_heed_the_notice_is_killed_after_the_grace(local: Watched) -> None:
    [job] = local.submit(sh("trap '' TERM; echo up; sleep 600"), 1)
    local.until(job, "running")
    eventually(lambda: local.last_words(job) == "up")
    local.notify(job, grace=5)
    local.now += 4.9
    assert local.changes() == []
    local.notify(job, grace=5)  # The second does not prolong the first.
    local.now += 0.2
    assert [change.state for change in local.changes()] == ["evicted"]


ORPHANS = "(sleep 601 &); setsid sleep 602 & (setsid setsid sleep 603 &); echo $$; {}"


@pytest.mark.parametrize("how", ["evict", "remove", "stop", "by itself"])
def test_nothing_of_a_worker_is_left(local: Watched, tmp_path: Path, how: str) -> None:
    [job] = local.submit(sh(ORPHANS.format("sleep 0.2" if how == "by itself" else "sleep 604")), 1)
    eventually(lambda: local.last_words(job))
    scratch = str(tmp_path / "provider" / job)
    eventually(lambda: how == "by itself" or len(working_in(scratch)) == 5)
    if how == "by itself":
        local.until(job, "ended")
    else:
        {"evict": local.evict, "remove": lambda job: local.remove([job]), "stop": lambda _: local.stop()}[how](job)
    eventually(lambda: working_in(scratch) == [])  # The last may still be on its way out.


def working_in(directory: str) -> list[str]:
    """The processes whose working directory is, or was, a directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd").removesuffix(" (deleted)") == directory:
                found.append(entry.name)
    return found


def test_what_is_gone_or_unknown_may_be_removed(local: Watched) -> None:
    [job] = local.submit(sh("true"), 1)
    local.until(job, "ended")
    local.remove([job, "local-99", "else"])
    assert local.changes() == []
    assert local.last_words("local-99") == ""


def test_a_worker_that_cannot_start_is_refused_and_none_is_left(local: Watched, tmp_path: Path) -> None:
    for command in (["no-such-worker"], ["sh", "zero\0byte"]):
        with pytest.raises(ProviderError, match="tier any cannot be started"):
            local.submit(WorkerJob("any", command), 2)
    with pytest.raises(ProviderError, match="no option 'image'"):
        local.submit(WorkerJob("any", ["true"], options={"image": "debian"}), 1)
    assert local.changes() == []


def test_a_worker_that_cannot_start_again_has_ended(local: Watched, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch()
    [job] = local.submit(sh("sleep 600", password), 1)
    local.evict(job)
    password.unlink()
    local.now += 1
    assert "cannot be started again" in local.until(job, "ended").reason


def test_output_is_for_nobody_else_where_the_directory_is_not(local: Watched, tmp_path: Path) -> None:
    [job] = local.submit(sh("true"), 1)
    local.until(job, "ended")
    assert stat.S_IMODE((tmp_path / "provider").stat().st_mode) == 0o700
    assert [entry.name for entry in (tmp_path / "provider").iterdir()] == [f"{job}.out"]


def test_a_worker_s_temporary_files_go_with_it(local: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "touch $TMPDIR/left; echo $TMPDIR; stat -c %a $TMPDIR; "
    ended, runs = local.submit(sh(script), 1)[0], local.submit(sh(script + "sleep 1000"), 1)[0]
    local.until(ended, "ended")
    where, mode = local.last_words(ended).split()
    assert where.startswith(f"{tmp_path}/ctxflow-") and mode == "700" and not os.path.exists(where)
    other = eventually(lambda: local.last_words(runs)).split()[0]
    assert other != where and os.path.exists(f"{other}/left")
    local.evict(runs)
    assert not os.path.exists(other)
    local.stop()
    assert list(tmp_path.glob("ctxflow-*")) == []


def test_the_output_of_what_ended_long_ago_is_not_kept(local: Watched, tmp_path: Path) -> None:
    local._kept_logs = KeptLogs(3)
    [runs] = local.submit(sh("sleep 1000"), 1)
    for _ in range(6):
        [job] = local.submit(sh("echo words"), 1)
        local.until(job, "ended")
    there = sorted(path.stem for path in (tmp_path / "provider").glob("*.out"))
    assert len(there) == 3 and runs in there and local.last_words(job) == "words"
