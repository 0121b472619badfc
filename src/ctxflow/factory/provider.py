"""The interface to batch systems: how worker jobs are requested, and how changes of them are reported."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ctxflow.errors import CtxflowError, counted

JobState = Literal["queued", "running", "evicted", "held", "ended"]
JOB_VARIABLE = "CTXFLOW_JOB"
_TAIL = 4096


class ProviderError(CtxflowError):
    """A request to a batch system failed; the message says what to do."""


@dataclass(frozen=True)
class WorkerJob:
    """What a provider needs to start one worker of a tier.

    :param command: its arguments, the program first, run in the job's scratch directory, where its files have their
        base names.
    :param files: paths on this machine that travel with the job and keep their modes: what must be secret (a
        password) has mode 0600 here, and there.
    :param environment: variables for the job. It gets CTXFLOW_JOB, its own id, besides.
    :param memory: bytes, as is `disk`, which is 0 if none is promised.
    :param options: the provider's own; its docstring names them.
    :param excluded: the hosts on which it is not to run, where the batch system can exclude hosts.

    >>> job = WorkerJob("any", ["python3", "worker.pyz"], files=["/srv/worker.pyz"])
    >>> job.cores, job.memory, job.gpus
    (1, 1000000000, 0)
    """

    tier: str
    command: Sequence[str]
    files: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    memory: int = 10**9
    disk: int = 10**9
    gpus: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobChange:
    """A change of a job's state, as a provider reports it.

    - `queued`: it is pending again, after it was held. Not reported of a job that was just submitted.
    - `running`: it began on a machine; each time is a new worker, unless `resumed` says that it is the one before.
    - `evicted`: the batch system took its machine while it ran. It runs again by itself, or is `held`, or `ended`.
    - `held`: it will not run before somebody sees to the reason.
    - `ended`: it left the batch system for good, by itself or because it was removed.

    :param reason: what the batch system says, if anything; `host`: the machine of a running job, if it is known, and
        where one was that runs no more.
    :param by_hand: for `held`: it was put on hold by hand, and will be released; for `ended`: somebody else than the
        user whose it is removed it.
    :param resumed: for `running`: it was not evicted, as was reported before: the batch system has found it again.
    :param ran: for `running`: seconds for which it has run that were not counted.
    :param waited: seconds from the request for it (or its last eviction) to `running`; filled in by the acquirer, as is
        `failed`, whether it ended, or was put on hold by the batch system, before its worker had joined.
    """

    job: str
    state: JobState
    reason: str = ""
    host: str | None = None
    waited: float | None = None
    by_hand: bool = False
    resumed: bool = False
    ran: float = 0.0
    failed: bool = False


@dataclass(frozen=True)
class PoolSurvey:
    """What a batch system has for the workers of a tier, at this moment.

    :param machines: how many slots or nodes meet the tier's requirements, busy or not; `free`, how many of those are
        free; `workers`, how many workers fit on them if nobody else used them; None where that is unknown.
    :param gpu_models: how many GPUs of which model those have, of those that will do.
    :param may_submit: whether the batch system takes jobs of this user.
    :param advice: what to change, each a sentence; where no machine will do, which requirement excludes them.
    """

    machines: int | None = None
    free: int | None = None
    gpu_models: Mapping[str, int] = field(default_factory=dict)
    may_submit: bool = True
    advice: tuple[str, ...] = ()
    workers: int | None = None

    def reason(self) -> str:
        """Return it as a reason to wait; "" if that says nothing.

        >>> print(PoolSurvey(machines=4, free=0).reason(), PoolSurvey(machines=1, free=1).reason(), sep="\\n")
        all 4 machines that would do are busy
        1 machine would do, and 1 of them is free: its jobs are to start soon
        """
        if not self.may_submit:
            return f"no more jobs are taken: {'; '.join(self.advice)}"
        if self.machines is None:
            return ""
        if self.machines == 0:
            return f"no machine will do: {'; '.join(self.advice) or 'change the requirements of the tier'}"
        if self.free == 0:
            many = f"all {self.machines:,} machines that would do are busy"
            return "the one machine that would do is busy" if self.machines == 1 else many
        free = f"{self.free:,} of them {'is' if self.free == 1 else 'are'} free"
        return f"{counted(self.machines, 'machine')} would do, and {free}: its jobs are to start soon"


@dataclass(frozen=True)
class FoundJob:
    """A worker's job in a batch system: its run's id, and the host where it runs, if it does and that is known."""

    job: str
    run: str
    state: JobState
    host: str | None = None


class Provider(Protocol):
    """What acquires and releases worker jobs. Its methods are called from one thread at a time.

    Ids of jobs consist of letters, digits, dots and hyphens, and mean something to their provider alone. A job that
    was evicted comes back under its id. All errors are of the class `ProviderError`.

    :ivar queries: how often the batch system was asked something since the start, submissions and removals aside.
    """

    queries: int

    def start(self, directory: str) -> None:
        """Make ready, once, before anything else.

        :param directory: of this provider alone, mode 0700, where it may keep files: logs, the output of jobs.
        """

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs that are all alike, and return their ids; fewer, if the batch system takes no more."""

    def remove(self, jobs: Sequence[str]) -> None:
        """End jobs, whether they run or wait; those that are gone already, or unknown, do not matter."""

    def changes(self) -> list[JobChange]:
        """Return what happened since the last call, in order. Cheap: called about once a second."""

    def last_words(self, job: str) -> str:
        """Return the last lines that a job wrote, "" where they cannot be had."""

    def survey(self, job: WorkerJob) -> PoolSurvey:
        """Return what the batch system has for such a job now. `start` need not have been called."""

    def find(self) -> list[FoundJob]:
        """Return all jobs of this user that are workers of some run, also of ended ones; `start` need not be called."""

    def discard(self, jobs: Sequence[str]) -> None:
        """End jobs that `find` found."""

    def stop(self) -> None:
        """End all jobs of this provider. Nothing of them is left but what is in its directory."""


@runtime_checkable
class KeepsOutput(Protocol):
    """A provider that keeps what its jobs write where this machine can read it."""

    def output(self, job: str) -> str:
        """Return the path of what a job's present or last incarnation wrote."""


@runtime_checkable
class Excluding(Protocol):
    """A provider that can keep jobs from hosts after they were submitted."""

    def exclude(self, jobs: Sequence[str], hosts: Sequence[str]) -> list[str] | None:
        """Keep jobs that wait, or come to wait again, from these hosts, and from no others besides.

        :param jobs: those of one tier.
        :returns: pending jobs that cannot be changed: they are to be submitted again. None if no job can exclude hosts.
        """


def check_job(job: WorkerJob) -> None:
    """Check that a job can be submitted at all.

    :raises ProviderError: if its command is empty, a file cannot be read, or two have the same base name.

    >>> check_job(WorkerJob("any", ["true"], files=["/nowhere/password"]))
    Traceback (most recent call last):
    ...
    ctxflow.factory.provider.ProviderError: a worker's file /nowhere/password cannot be read: name one that is there
    """
    if not job.command:
        raise ProviderError(f"the workers of tier {job.tier} have no command: give the words of one")
    names: dict[str, str] = {}
    for path in job.files:
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise ProviderError(f"a worker's file {path} cannot be read: name one that is there")
        other = names.setdefault(os.path.basename(path), path)
        if other != path:
            raise ProviderError(f"a worker's files {other} and {path} have the same base name: rename one")


def arguments(job: WorkerJob) -> list[str]:
    """Return a job's command as it is run in the scratch directory, where its program may be one of its files.

    >>> arguments(WorkerJob("any", ["worker", "--cores", "2"], files=["/srv/worker"]))
    ['./worker', '--cores', '2']
    """
    program, *rest = job.command
    if program in map(os.path.basename, job.files):
        program = f"./{program}"
    return [program, *rest]


def how_ended(status: int) -> str:
    """Return how a process ended, by its status; minus a signal's number if that killed it.

    >>> how_ended(3), how_ended(-9)
    ('it ended with status 3', 'it was killed by SIGKILL')
    """
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:  # Those for real-time use have no names.
        return f"it was killed by signal {-status}"


def tail(path: str) -> str:
    """Return the last lines of a file, at most 4096 bytes of them; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    if length > _TAIL:  # The first line may be cut.
        text = text.partition("\n")[2] or text
    return text.strip()


_NOISE = re.compile(r"(creating|deleting) workspace|vine_worker: using \d+ cores|notice: stopping: could not connect")
_COMINGS = re.compile(r"^(dis)?connected (to|from) manager ")
_RESOLVE = re.compile(r"couldn't resolve hostname ([\w.-]+?)(?=couldn't resolve|\d{4}/\d\d/\d\d |$)", re.MULTILINE)
_CONNECT = re.compile(r"couldn't connect to (\S+?): (.+)")
_DISK = re.compile(r"less than the promised disk space .*?(\d+) < (\d+) MB")


def explaining_line(words: str, nothing: str = "no output") -> str:
    """Return the line that explains why a worker ended, of the last that it wrote, or the last that says something.

    :param nothing: what to return where none says anything.

    >>> print(explaining_line("has less than the promised disk space (--disk > disk total) 70000 < 3072 MB"))
    its scratch directory has 3.1 GB free, and disk_gb promises 70: write less, or have TMPDIR name a larger disk
    >>> explaining_line("vine_worker: creating workspace /tmp/x\\nno room\\nvine_worker: deleting workspace /tmp/x")
    'no room'
    """
    if found := _DISK.search(words):
        promised, there = (int(number) / 1000 for number in found.groups())
        has = f"its scratch directory has {there:.1f} GB free, and disk_gb promises {promised:g}"
        return f"{has}: write less, or have TMPDIR name a larger disk"
    if found := _RESOLVE.search(words):
        return f"it cannot resolve the run's address {found[1]}: write an IP address as address of the site"
    if found := _CONNECT.search(words):
        return (
            f"it cannot reach the run at {found[1]} ({found[2]}): have address of the site name this machine as the "
            "workers' machines reach it, and port one that no firewall closes"
        )
    lines = [line.strip() for line in words.splitlines() if line.strip() and not _NOISE.search(line)]
    return lines[-1] if lines else nothing


def why_gone(words: str) -> str:
    """Return why a worker that had joined is gone, by the last lines that it wrote; "" if none says so.

    >>> why_gone("connected to manager n1:9123 via local address n2:1\\nno room\\ndisconnected from manager n1:9123")
    'no room'
    >>> why_gone("vine_worker: using 1 cores\\nconnected to manager n1:9123 via local address n2:1")
    ''
    """
    return explaining_line("\n".join(each for each in words.splitlines() if not _COMINGS.search(each)), "")
