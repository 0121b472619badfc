"""Decide what to do about one tier's worker jobs, and say why it lacks workers. Pure: no I/O, no clock.

`TierJobs` says how many jobs to submit now and which to give up; `Places` keeps the jobs that are pinned to machines;
`shortfall` is the reason that those who wait are told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ctxflow.factory.provider import JobChange, JobState, PoolSurvey, Provider, ProviderError, WorkerJob
from ctxflow.topology import Topology, to_graph
from ctxflow.wording import counted

_STUCK_SECONDS = 300.0  # A queue in which nothing began for so long does not move.
_LONGEST_PAUSE = 60.0
_PATIENCE = 5  # Workers in a row that may be refused.


@dataclasses.dataclass
class TrackedJob:
    """A job, as it is known to the tier.

    :ivar asked: when it was submitted, or began to wait again.
    :ivar since: since when it is in its state.
    :ivar joined: whether its present worker has.
    :ivar host: the machine that it runs on, or ran on last, None if that is not known.
    """

    asked: float
    since: float
    state: JobState = "queued"
    joined: bool = False
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class NextJobs:
    """What to do about a tier's jobs now.

    :ivar submit: how many jobs to ask for.
    :ivar surplus: jobs that wait and are not wanted any more.
    :ivar absent: jobs that run, and whose workers should have joined by now.
    """

    submit: int = 0
    surplus: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


class TierJobs:
    """The jobs of a tier, and the pace at which more are submitted.

    So many jobs as the tier says may wait in the queue at first. Whenever all that were asked for have begun, twice as
    many may wait from then on; when nothing has begun for five minutes, as many as at first. So a pool that gives
    much is filled in a few rounds, and one that gives nothing is not flooded. After each failure there is a pause,
    each twice as long as the one before, until a worker joins.

    :param waiting: how many jobs may wait at first.
    :param join_timeout: seconds that a job may run before its worker has joined.

    >>> jobs = TierJobs(waiting=2, join_timeout=60)
    >>> jobs.wanted = 200
    >>> jobs.plan(now=0).submit
    2
    >>> jobs.submitted(["1.0", "1.1"], now=0)
    >>> jobs.plan(now=1).submit  # Both wait.
    0
    >>> for job in ("1.0", "1.1"):
    ...     _ = jobs.changed(JobChange(job, "running"), now=2)
    >>> jobs.plan(now=3).submit
    4
    """

    def __init__(self, waiting: int = 20, join_timeout: float = 300.0) -> None:
        self.wanted = 0
        self.jobs: dict[str, TrackedJob] = {}
        self.refusals = 0  # In a row.
        self.first = self._most_waiting = waiting
        self._join_timeout = join_timeout
        self._moved = 0.0  # When a job last began, or the first of those that wait was asked for.
        self._failures = 0  # In a row.
        self._again_at = float("-inf")

    # --- what happens

    def submitted(self, jobs: list[str], now: float) -> None:
        """Record jobs that the batch system has taken."""
        if not self._waiting():
            self._moved = now
        self.jobs.update((job, TrackedJob(asked=now, since=now)) for job in jobs)

    def changed(self, change: JobChange, now: float) -> TrackedJob | None:
        """Record a change; return the job as it was before, None if it is not the tier's."""
        job = self.jobs.get(change.job)
        if job is None:
            return None
        before = dataclasses.replace(job)
        allowed = self._allowed(now)
        if change.state == "ended":
            del self.jobs[change.job]
        else:
            began = change.state == "running"
            job.asked = job.asked if began or job.state == "queued" else now
            job.state, job.since, job.joined = change.state, now, job.joined and began
            if began:
                job.host = change.host
                self._moved, self._most_waiting = now, allowed
                if not self._waiting():
                    self._most_waiting = min(2 * allowed, max(self.first, self.wanted))
        return before

    def joined(self, job: str) -> None:
        """Record that the worker of a job has joined."""
        if job in self.jobs:
            self.jobs[job].joined = True
        self._failures = self.refusals = 0
        self._again_at = float("-inf")

    def removed(self, jobs: list[str]) -> None:
        """Forget jobs that were given up."""
        for job in jobs:
            self.jobs.pop(job, None)

    def failed(self, now: float, refused: bool = False) -> float:
        """Record a failure; return the seconds until more is submitted."""
        self._failures += 1
        self.refusals += refused
        pause = min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(self._failures, 10))
        self._again_at = now + pause
        return pause

    def pause(self, until: float) -> None:
        """Submit nothing more before then."""
        self._again_at = max(self._again_at, until)

    # --- what to do

    @property
    def hopeless(self) -> bool:
        """Whether workers are refused one after the other, so that others like them will be, too."""
        return self.refusals >= _PATIENCE and not any(job.joined for job in self.jobs.values())

    def due(self, now: float) -> bool:
        """Return whether there is something to do."""
        return self.plan(now) != NextJobs()

    def plan(self, now: float) -> NextJobs:
        """Return what to do now."""
        surplus = len(self.jobs) - self.wanted
        waiting = self._waiting()
        if surplus > 0:
            return NextJobs(surplus=tuple(waiting[-surplus:]), absent=self._absent(now))
        room = min(-surplus, self._allowed(now) - len(waiting)) if now >= self._again_at else 0
        return NextJobs(submit=max(0, room), absent=self._absent(now))

    def stuck(self, now: float, patience: float) -> bool:
        """Return whether jobs have waited longer than the patience, and none runs."""
        waiting = self._waiting()
        return len(waiting) == len(self.jobs) > 0 and all(now - self.jobs[job].asked > patience for job in waiting)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in which state; "joined" are those that run and whose workers have."""
        counts = dict.fromkeys(("queued", "running", "joined", "evicted", "held"), 0)
        for job in self.jobs.values():
            counts["joined" if job.joined else job.state] += 1
        return counts

    def _allowed(self, now: float) -> int:
        """Return how many may wait: as many as at first, where none of those that wait has moved for long."""
        return self.first if self._waiting() and now - self._moved > _STUCK_SECONDS else self._most_waiting

    def _waiting(self) -> list[str]:
        # A worker may have joined before the batch system says that its job runs.
        return [name for name, job in self.jobs.items() if job.state != "running" and not job.joined]

    def _absent(self, now: float) -> tuple[str, ...]:
        limit = now - self._join_timeout
        return tuple(
            name for name, job in self.jobs.items() if job.state == "running" and not job.joined and job.since < limit
        )


@runtime_checkable
class Surveying(Protocol):
    """A provider that can list its machines."""

    def machines(self, job: WorkerJob) -> list[Topology]:
        """Return the machines that a worker may be on, with who uses their GPUs.

        :raises ProviderError: if the batch system cannot be asked.
        """


def machines_of(provider: Provider, job: WorkerJob) -> tuple[dict[str, Any], str]:
    """Return the machines that a worker may be on, their graphs by name, and why there are none."""
    if not isinstance(provider, Surveying):
        return {}, "its batch system does not tell which machines it has: leave machine_gpus out"
    try:
        found = provider.machines(job)
    except ProviderError as error:
        return {}, str(error)
    return {each.name: to_graph(dataclasses.replace(each, groups=())) for each in found}, ""


@dataclasses.dataclass
class Places:
    """A tier's jobs that are pinned to machines; the caller holds the lock.

    :ivar wanted: number -> a job that is still to be submitted.
    :ivar jobs: number -> the job's id.
    :ivar asked: whether the machines are to be surveyed.

    >>> places = Places()
    >>> places.submitted(1, ["7.0"]), places.pin_of("7.0"), places.forgo(1), places.pin_of("7.0")
    ([], 1, ['7.0'], None)
    """

    wanted: dict[int, WorkerJob] = dataclasses.field(default_factory=dict)
    jobs: dict[int, str] = dataclasses.field(default_factory=dict)
    asked: bool = False
    _forgone: set[int] = dataclasses.field(default_factory=set)

    @property
    def due(self) -> bool:
        """Whether there is something to do."""
        return self.asked or bool(self.wanted)

    def submitted(self, pin: int, jobs: list[str]) -> list[str]:
        """Record the jobs of a pinned worker; return those that are not wanted any more."""
        if pin in self._forgone:
            return jobs
        self.jobs.update((pin, job) for job in jobs)
        return []

    def forgo(self, pin: int) -> list[str]:
        """Withdraw a pinned worker; return the jobs to remove."""
        self._forgone.add(pin)
        if self.wanted.pop(pin, None) is not None or pin not in self.jobs:
            return []
        return [self.jobs.pop(pin)]

    def pin_of(self, job: str) -> int | None:
        """Return the number of the worker that a job was submitted for, None if it is none of these."""
        return next((pin for pin, name in self.jobs.items() if name == job), None)


def shortfall(counts: Mapping[str, int], wanted: int, told: str, held: str = "") -> str:
    """Return why a tier has fewer workers than are wanted, "" where it has them.

    :param counts: how many jobs are in which state, as a tier's jobs count them.
    :param told: what went wrong last, or what the batch system has, "" if neither is known.
    :param held: why somebody put jobs on hold.

    >>> shortfall({"joined": 2}, 2, "the schedd does not answer"), shortfall({"queued": 2}, 2, "")
    ('', '2 jobs wait for machines')
    >>> shortfall({"held": 1, "queued": 1}, 2, "", "via condor_hold (by user root)")
    '1 job is put on hold until it is released: via condor_hold (by user root); 1 job waits for a machine'
    """
    if counts.get("joined", 0) >= wanted:
        return ""
    parts = []
    if many := counts.get("held", 0):
        on_hold = "is put on hold until it is" if many == 1 else "are put on hold until they are"
        parts.append(f"{counted(many, 'job')} {on_hold} released" + (f": {held}" if held else ""))
    if told:
        parts.append(told)
    elif many := counts.get("queued", 0):
        parts.append(f"{counted(many, 'job')} " + ("waits for a machine" if many == 1 else "wait for machines"))
    if many := counts.get("evicted", 0):
        again = "was evicted, and waits" if many == 1 else "were evicted, and wait"
        parts.append(f"{counted(many, 'job')} {again} to run again")
    if many := counts.get("running", 0):
        parts.append(f"{counted(many, 'worker')} {'starts' if many == 1 else 'start'}")
    return "; ".join(parts)


def survey_reason(survey: PoolSurvey) -> str:
    """Return what a batch system has, as a reason to wait; "" if that says nothing.

    >>> survey_reason(PoolSurvey(machines=4, free=0)), survey_reason(PoolSurvey(machines=1, free=1))
    ('all 4 machines that would do are busy', '1 machine would do, and 1 of them is free: its jobs are to start soon')
    """
    if not survey.may_submit:
        return f"no more jobs are taken: {'; '.join(survey.advice)}"
    if survey.machines is None:
        return ""
    if survey.machines == 0:
        return f"no machine will do: {'; '.join(survey.advice) or 'change the requirements of the tier'}"
    if survey.free == 0:
        return (
            "the one machine that would do is busy"
            if survey.machines == 1
            else (f"all {survey.machines:,} machines that would do are busy")
        )
    free = f"{survey.free:,} of them {'is' if survey.free == 1 else 'are'} free"
    return f"{counted(survey.machines, 'machine')} would do, and {free}: its jobs are to start soon"
