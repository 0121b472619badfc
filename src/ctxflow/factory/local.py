"""Run workers as processes of this machine: for one server, for tests, and to try a cluster's engine without one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctxflow.factory.provider import (
    JOB_VARIABLE,
    FoundJob,
    JobChange,
    PoolSurvey,
    ProviderError,
    WorkerJob,
    arguments,
    check_job,
    how_ended,
    tail,
)
from ctxflow.host.library_process import KeptLogs
from ctxflow.host.linux import ended_within, kill_marked, kill_session, kill_tree
from ctxflow.host.local_files import Scratch, sweep

_PATIENCE = 5.0
_MOST_LOGS = 100
_SCRATCH_VARIABLE = "CTXFLOW_SCRATCH"  # By which processes are found that left their parents and their session.


@dataclass
class _Job:
    """A job, and its present incarnation."""

    id: str
    asked: WorkerJob
    process: subprocess.Popen[bytes] | None = None  # None while it waits to run again.
    again_at: float = 0.0
    kill_at: float | None = None  # Set once it has notice of its eviction.


class LocalProvider:
    """Jobs as processes of this machine, each in a scratch directory and a session of its own.

    A job's files are hard-linked into its scratch directory where the disk allows. Cores, memory, disk and GPUs are
    neither limited nor assigned: give what a worker shall see in its environment. With a job end all processes that it
    started, its scratch directory and its TMPDIR. It knows no options. Any thread may call it.

    :param pause: seconds after which an evicted job runs again.
    :param clock: seconds, for tests.

    >>> import tempfile, time
    >>> provider = LocalProvider()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     provider.start(directory)
    ...     [job] = provider.submit(WorkerJob("any", ["sh", "-c", "echo $CTXFLOW_JOB; exit 3"]), 1)
    ...     changes = provider.changes()
    ...     while changes[-1].state != "ended":
    ...         time.sleep(0.01)
    ...         changes += provider.changes()
    ...     print([change.state for change in changes], changes[-1].reason, provider.last_words(job) == job)
    ...     provider.stop()
    ['running', 'ended'] it ended with status 3 True
    """

    def __init__(self, pause: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.queries = 0
        self._pause = pause
        self._clock = clock
        self._lock = threading.RLock()  # Whoever evicts is seldom the thread that asks for changes.
        self._directory = ""
        self._count = 0
        self._kept_logs = KeptLogs(_MOST_LOGS)
        self._temporary: Scratch | None = None
        self._jobs: dict[str, _Job] = {}  # Those that have not ended.
        self._news: list[JobChange] = []

    def start(self, directory: str) -> None:
        """Take the directory; to be called once, before anything else."""
        self._directory = os.path.abspath(directory)

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Start processes that are all alike, and return their ids."""
        check_job(job)
        if job.options:
            raise ProviderError(f"local workers know no option {next(iter(job.options))!r}: leave it out")
        with self._lock:
            return self._submit(job, count)

    def _submit(self, job: WorkerJob, count: int) -> list[str]:
        ids: list[str] = []
        for _ in range(count):
            self._count += 1
            new = _Job(f"local-{os.getpid()}-{self._count}", job)  # Nobody else's, also in a run of two factories.
            self._jobs[new.id] = new
            self._kept_logs.add(self.output(new.id), list(map(self.output, self._jobs)))
            ids.append(new.id)
            try:
                self._begin(new)
            except (OSError, ValueError) as error:  # ValueError: a zero byte among the arguments.
                self.remove(ids)
                gone = set(ids)
                self._news = [change for change in self._news if change.job not in gone]
                raise ProviderError(f"a worker of tier {job.tier} cannot be started here: {error}") from None
        return ids

    def remove(self, jobs: Sequence[str]) -> None:
        """End jobs, with all their processes, at once; those that are gone already do not matter."""
        with self._lock:
            for name in jobs:
                if name in self._jobs:
                    job = self._jobs.pop(name)
                    self._finish(job)
                    self._news.append(JobChange(job.id, "ended", "it was removed"))

    def changes(self) -> list[JobChange]:
        """Return what happened since the last call, in order."""
        with self._lock:
            for job in list(self._jobs.values()):
                self._advance(job)
            news, self._news = self._news, []
            return news

    def output(self, job: str) -> str:
        """Return the path of what a job's present or last incarnation wrote."""
        return os.path.join(self._directory, f"{job}.out")

    def last_words(self, job: str) -> str:
        """Return the last lines that a job's present or last incarnation wrote."""
        return tail(self.output(job))

    def stop(self) -> None:
        """End all jobs, with all their processes."""
        with self._lock:
            self.remove(list(self._jobs))
            if self._temporary is not None:
                self._temporary.close()
                self._temporary = None

    def survey(self, job: WorkerJob) -> PoolSurvey:
        """Return this machine, which has as many workers as are requested."""
        return PoolSurvey(machines=1, free=1)

    def find(self) -> list[FoundJob]:
        """Return nothing: no process outlives its driver."""
        return []

    def discard(self, jobs: Sequence[str]) -> None:
        """Do nothing, as `find` finds nothing."""

    def evict(self, job: str) -> None:
        """Evict a job without notice, if it runs: all its processes are killed, and it runs again after the pause."""
        with self._lock:
            its = self._jobs[job]
            if its.process is not None and not _has_ended(its.process):
                self._requeue(its, "it was evicted")

    def notify(self, job: str, grace: float = 10.0) -> None:
        """Evict a job with notice: SIGTERM to its first process; the rest are killed after it, or `grace` seconds."""
        with self._lock:
            its = self._jobs[job]
            if its.process is not None and its.kill_at is None and not _has_ended(its.process):
                its.kill_at = self._clock() + grace
                its.process.terminate()

    def _advance(self, job: _Job) -> None:
        if job.process is None:
            if self._clock() >= job.again_at:
                try:
                    self._begin(job)
                except OSError as error:
                    del self._jobs[job.id]
                    self._finish(job)
                    self._news.append(JobChange(job.id, "ended", f"it cannot be started again: {error}"))
            return
        ended = _has_ended(job.process)
        if job.kill_at is not None and (ended or self._clock() >= job.kill_at):
            self._requeue(job, "it was evicted, with notice")
        elif ended:
            del self._jobs[job.id]
            self._finish(job)
            self._news.append(JobChange(job.id, "ended", how_ended(job.process.returncode)))

    def _begin(self, job: _Job) -> None:
        """Start an incarnation of a job in a fresh scratch directory."""
        scratch = self._scratch(job.id)
        os.makedirs(scratch, mode=0o700)
        if self._temporary is None:
            sweep()
            self._temporary = Scratch()
        temporary = os.path.join(self._temporary.path, job.id)
        os.makedirs(temporary, mode=0o700)
        for path in job.asked.files:
            _link_or_copy(path, os.path.join(scratch, os.path.basename(path)))
        ours = {JOB_VARIABLE: job.id, _SCRATCH_VARIABLE: scratch}
        with open(self.output(job.id), "wb") as output:
            job.process = subprocess.Popen(
                arguments(job.asked),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": temporary, **job.asked.environment, **ours},
                cwd=scratch,
                start_new_session=True,  # Ctrl-C is the driver's; and the job can be ended as a whole.
            )
        job.kill_at = None
        self._news.append(JobChange(job.id, "running", host=socket.gethostname()))

    def _requeue(self, job: _Job, reason: str) -> None:
        self._finish(job)
        job.process = None
        job.again_at = self._clock() + self._pause
        self._news.append(JobChange(job.id, "evicted", reason))

    def _finish(self, job: _Job) -> None:
        """Kill what is left of a job's incarnation, wait for that, and remove its files."""
        if job.process is not None:
            kill_tree(job.process.pid)
            kill_session(job.process.pid)
            kill_marked(_SCRATCH_VARIABLE, self._scratch(job.id), _PATIENCE)  # Also what left both.
            ended_within(job.process, _PATIENCE)
        shutil.rmtree(self._scratch(job.id), ignore_errors=True)
        if self._temporary is not None:
            shutil.rmtree(os.path.join(self._temporary.path, job.id), ignore_errors=True)

    def _scratch(self, job: str) -> str:
        return os.path.join(self._directory, job)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it until all that belongs to it is killed."""
    if process.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # Another disk, or one that has no hard links.
        shutil.copy2(source, target)
