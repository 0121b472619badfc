"""Share a tier's workers among runs, and hold a run's provider to its share.

`shares` and the functions after it are pure; `GrantedProvider` gives one run no more of a tier than it was granted, and
first what an earlier factory left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ctxflow.factory.provider import (
    Excluding,
    FoundJob,
    JobChange,
    JobState,
    KeepsOutput,
    PoolSurvey,
    Provider,
    WorkerJob,
)


def shares(wants: Mapping[str, int], maximum: int) -> dict[str, int]:
    """Return each run's share: equal parts, but none more than it wants; what one leaves goes to the others.

    No run that gets less than it wants has fewer than another, but for the one worker that cannot be halved; that goes
    to the first.

    >>> shares({"a": 2, "b": 20, "c": 20}, 11)
    {'a': 2, 'b': 5, 'c': 4}
    """
    given = dict.fromkeys(wants, 0)
    left = min(maximum, sum(wants.values()))
    while left > 0:
        hungry = [run for run, want in wants.items() if given[run] < want]
        each = max(1, left // len(hungry))
        for run in hungry[:left]:
            more = min(each, wants[run] - given[run])
            given[run] += more
            left -= more
    return given


def grants(wants: Mapping[str, int], held: Mapping[str, int], maximum: int) -> dict[str, int]:
    """Return how many jobs each run may hold now: its share, as soon as there is room for it.

    Nobody is granted a job beyond the maximum while others still hold more than their share.

    :param held: how many jobs each has, also those of runs that want nothing any more.

    >>> grants({"old": 8, "new": 8}, {"old": 7, "new": 0}, 8)
    {'old': 4, 'new': 1}
    """
    share = shares(wants, maximum)
    lacking = {run: max(0, share[run] - held.get(run, 0)) for run in wants}
    room = max(0, maximum - sum(held.values()))
    more = shares(lacking, room)
    return {run: min(share[run], held.get(run, 0) + more[run]) for run in wants}


def bounds(
    wants: Mapping[str, int], held: Mapping[str, int], leaving: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """Return the maximum that each run is given: the tier's, unless there are too many workers.

    That is so after the maximum was lowered: then a run that has more than its share has the others leave, when they
    have done what they run.

    :param leaving: what runs that are over still hold.

    >>> bounds({"a": 8, "b": 1}, {"a": 7, "b": 1}, {}, 4), bounds({"a": 8, "b": 1}, {"a": 3, "b": 1}, {}, 4)
    ({'a': 3, 'b': 4}, {'a': 4, 'b': 4})
    """
    share = shares(wants, maximum)
    too_many = sum(held.values()) + sum(leaving.values()) > maximum
    return {run: share[run] if too_many and held.get(run, 0) > share[run] else maximum for run in wants}


def to_give(
    wants: Mapping[str, int], held: Mapping[str, int], running: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """Return how many running workers each run must give up, so that others get their share.

    None, where nobody lacks any: after the maximum was lowered, workers leave as `bounds` says, when they have done
    what they run. None of a run that wants no more than its share either: it releases what it does not need by itself.

    :param running: how many of the jobs held run; the others are taken back without this.

    >>> to_give({"old": 8, "new": 8}, {"old": 8, "new": 0}, {"old": 8, "new": 0}, 8)
    {'old': 4, 'new': 0}
    """
    share = shares(wants, maximum)
    lacking = sum(max(0, share[run] - held.get(run, 0)) for run in wants)
    waiting = {run: min(held.get(run, 0) - running.get(run, 0), held.get(run, 0) - share[run]) for run in wants}
    free = maximum - sum(held.values()) + sum(max(0, count) for count in waiting.values())
    surplus = {run: max(0, running.get(run, 0) - share[run]) if want > share[run] else 0 for run, want in wants.items()}
    return shares(surplus, max(0, lacking - free)) if lacking else dict.fromkeys(wants, 0)


_FIND_SECONDS = 15.0  # Of jobs that were taken over, the batch system must be asked.


class GrantedProvider:
    """A tier's provider, limited to what one run was granted.

    A factory that was killed leaves jobs behind. Those that run are taken over by the next: they are what `submit`
    returns first, and whether they still run is asked of the batch system now and then. Those that wait are discarded,
    and asked for anew, as the site says now.

    :param provider: the provider that is limited.
    :param run: the run's id.
    :param joined: jobs whose workers have joined the run, as it reports: not every provider can find its jobs.
    :param lock: one for all that share the tier's maximum; guards `allowed` and the count of `held`.
    :param found: called once, with how many jobs of an earlier factory were taken over, and how many discarded.
    :ivar allowed: how many jobs there may be; `submit` gives no more.
    :ivar settled: whether it is known what an earlier factory left.
    """

    def __init__(
        self,
        provider: Provider,
        run: str,
        joined: Sequence[str],
        lock: threading.Lock,
        found: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queries = 0
        self.allowed = 0
        self.settled = False
        self._provider = provider
        self._run = run
        self._word = list(joined)
        self._lock = lock
        self._found = found
        self._clock = clock
        self._jobs: set[str] = set()  # Those that the batch system has, and was not told to end.
        self._asking = 0  # How many more are being asked for.
        # Jobs taken over -> their state, None if the queue has no such job.
        self._taken: dict[str, JobState | None] = {}
        self._offered: list[str] = []  # Those of them that `submit` has still to return.
        self._news: list[JobChange] = []
        self._old_news: set[str] = set()  # Jobs taken over that are only now said to run.
        self._find_at = 0.0

    def is_old_news(self, change: JobChange) -> bool:
        """Return whether an earlier factory reported a change to the run; to be asked once."""
        if change.state != "running" or change.job not in self._old_news:
            return False
        self._old_news.remove(change.job)
        return True

    def took_over(self, job: str) -> bool:
        """Return whether a job was submitted by an earlier factory."""
        return job in self._taken

    def held(self) -> int:
        """Return how many jobs there are, or will be; to be called with the lock."""
        return len(self._jobs) + self._asking

    def start(self, directory: str) -> None:
        """Start the provider."""
        self._provider.start(directory)

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs, or return those that were taken over.

        :raises ProviderError: as the provider does.
        """
        if not self.settled:
            return []
        given, self._offered = self._offered[:count], self._offered[count:]
        self._news += [JobChange(each, "running") for each in given]
        self._old_news.update(given)
        with self._lock:
            more = max(0, min(count - len(given), self.allowed - self.held()))
            self._asking = more
        fresh: list[str] = []
        try:
            fresh = self._provider.submit(job, more) if more else []
        finally:
            with self._lock:
                self._asking = 0
                self._jobs.update(fresh)
        return given + fresh

    def remove(self, jobs: Sequence[str]) -> None:
        """End jobs."""
        with self._lock:
            self._jobs.difference_update(jobs)
        taken = [job for job in jobs if job in self._taken]
        self._provider.discard([job for job in taken if self._taken[job] is not None])
        for job in taken:
            self._lose(job, "it was removed")
        self._provider.remove([job for job in jobs if job not in taken])

    def exclude(self, jobs: Sequence[str], hosts: Sequence[str]) -> list[str] | None:
        """Keep jobs from hosts; those that were taken over run as they are.

        :raises ProviderError: as the provider does.
        """
        ours = [job for job in jobs if job not in self._taken]
        return self._provider.exclude(ours, hosts) if isinstance(self._provider, Excluding) else None

    def changes(self) -> list[JobChange]:
        """Return what happened since the last call."""
        if (self._taken or not self.settled) and self._clock() >= self._find_at:
            self._find_at = self._clock() + _FIND_SECONDS
            self._find()
        changes = self._provider.changes()
        ended = [change.job for change in changes if change.state == "ended"]
        with self._lock:
            self._jobs.difference_update(ended)
        changes, self._news = self._news + changes, []
        self.queries = self._provider.queries
        return changes

    def last_words(self, job: str) -> str:
        """Return the last lines that a job wrote."""
        return self._provider.last_words(job)

    def output(self, job: str) -> str:
        """Return the path of what a job writes, "" if there is none here."""
        return self._provider.output(job) if isinstance(self._provider, KeepsOutput) else ""

    def survey(self, job: WorkerJob) -> PoolSurvey:
        """Return what the batch system has for such a job now."""
        return self._provider.survey(job)

    def find(self) -> list[FoundJob]:
        """Return all worker jobs of this user."""
        return self._provider.find()

    def discard(self, jobs: Sequence[str]) -> None:
        """End jobs that `find` found."""
        self._provider.discard(jobs)

    def stop(self) -> None:
        """End all jobs, also those that were taken over.

        :raises ProviderError: if that cannot be; `held` then still counts them.
        """
        try:
            self._provider.discard([job for job, state in self._taken.items() if state is not None])
        finally:
            self._provider.stop()
        with self._lock:
            self._jobs.clear()

    def _find(self) -> None:
        """Find what an earlier factory left, or what has become of it."""
        if self.settled and not any(self._taken.values()):
            return
        found = {each.job: each for each in self._provider.find() if each.run == self._run}
        if self.settled:
            self._compare(found)
            return
        waiting = [job for job, each in found.items() if each.state != "running" and job not in self._word]
        self._provider.discard(waiting)
        self._taken = {**dict.fromkeys(self._word), **{job: "running" for job in found if job not in waiting}}
        self._offered = list(self._taken)
        with self._lock:
            self._jobs.update(self._taken)
        self.settled = True
        self._found(len(self._taken), len(waiting))

    def _compare(self, found: dict[str, FoundJob]) -> None:
        for job, state in list(self._taken.items()):
            if state is not None and job not in found:
                self._lose(job, "it left the queue")
            elif state == "running" and found[job].state != "running":
                self._taken[job] = "evicted"
                self._news.append(JobChange(job, "evicted", "it left its machine"))
            elif state == "evicted" and found[job].state == "running":
                self._taken[job] = "running"
                self._news.append(JobChange(job, "running", host=found[job].host))

    def _lose(self, job: str, reason: str) -> None:
        """Record the end of a job that was taken over."""
        self._taken.pop(job)
        if job in self._offered:
            self._offered.remove(job)
        with self._lock:
            self._jobs.discard(job)
        self._news.append(JobChange(job, "ended", reason))
