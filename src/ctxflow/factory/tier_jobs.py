"""One tier's worker jobs, and what to do about them: how many to ask for now, which to give up. Pure: no I/O, no clock.

What does not live here: asking and removing (acquirer.py), and how many workers to want (policies).
"""

from __future__ import annotations

import dataclasses

from ctxflow.factory.provider import JobChange, JobState

_STUCK_SECONDS = 300.0  # A queue in which nothing began for so long does not move.
_LONGEST_PAUSE = 60.0
_PATIENCE = 5  # Workers in a row that may be refused.


@dataclasses.dataclass
class Job:
    """One job.

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
class Plan:
    """What to do now.

    :ivar submit: how many jobs to ask for.
    :ivar surplus: jobs that wait and are not wanted any more.
    :ivar absent: jobs that run, and whose workers should have joined by now.
    """

    submit: int = 0
    surplus: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


class TierJobs:
    """The jobs of a tier, and the pace at which more are asked for.

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
        self.jobs: dict[str, Job] = {}
        self.refusals = 0  # In a row.
        self.first = self._most_waiting = waiting
        self._join_timeout = join_timeout
        self._moved = 0.0  # When a job last began, or the first of those that wait was asked for.
        self._failures = 0  # In a row.
        self._again_at = float("-inf")

    # --- what happens

    def submitted(self, jobs: list[str], now: float) -> None:
        """Jobs were taken by the batch system."""
        if not self._waiting():
            self._moved = now
        self.jobs.update((job, Job(asked=now, since=now)) for job in jobs)

    def changed(self, change: JobChange, now: float) -> Job | None:
        """Take note of news; gives the job as it was before, None if it is none of ours."""
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
        """The worker of a job has joined."""
        if job in self.jobs:
            self.jobs[job].joined = True
        self._failures = self.refusals = 0
        self._again_at = float("-inf")

    def removed(self, jobs: list[str]) -> None:
        """Jobs were given up."""
        for job in jobs:
            self.jobs.pop(job, None)

    def failed(self, now: float, refused: bool = False) -> float:
        """Something went wrong; gives the seconds until more is asked for."""
        self._failures += 1
        self.refusals += refused
        pause = min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(self._failures, 10))
        self._again_at = now + pause
        return pause

    def pause(self, until: float) -> None:
        """Ask for nothing more before then."""
        self._again_at = max(self._again_at, until)

    # --- what to do

    @property
    def hopeless(self) -> bool:
        """Whether workers are refused one after the other: others like them will be, too."""
        return self.refusals >= _PATIENCE and not any(job.joined for job in self.jobs.values())

    def due(self, now: float) -> bool:
        """Whether there is something to do."""
        return self.plan(now) != Plan()

    def plan(self, now: float) -> Plan:
        """What to do now."""
        surplus = len(self.jobs) - self.wanted
        waiting = self._waiting()
        if surplus > 0:
            return Plan(surplus=tuple(waiting[-surplus:]), absent=self._absent(now))
        room = min(-surplus, self._allowed(now) - len(waiting)) if now >= self._again_at else 0
        return Plan(submit=max(0, room), absent=self._absent(now))

    def stuck(self, now: float, patience: float) -> bool:
        """Whether jobs have waited so long, and none runs."""
        waiting = self._waiting()
        return len(waiting) == len(self.jobs) > 0 and all(now - self.jobs[job].asked > patience for job in waiting)

    def counts(self) -> dict[str, int]:
        """How many jobs are in which state; "joined" are those that run and whose workers have."""
        counts = dict.fromkeys(("queued", "running", "joined", "evicted", "held"), 0)
        for job in self.jobs.values():
            counts["joined" if job.joined else job.state] += 1
        return counts

    def _allowed(self, now: float) -> int:
        """How many may wait: no more than at first, where none of those that wait has moved for long."""
        return self.first if self._waiting() and now - self._moved > _STUCK_SECONDS else self._most_waiting

    def _waiting(self) -> list[str]:
        # A worker may have joined before the batch system says that its job runs.
        return [name for name, job in self.jobs.items() if job.state != "running" and not job.joined]

    def _absent(self, now: float) -> tuple[str, ...]:
        limit = now - self._join_timeout
        return tuple(
            name for name, job in self.jobs.items() if job.state == "running" and not job.joined and job.since < limit
        )
