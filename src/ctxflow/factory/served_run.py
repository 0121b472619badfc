"""Serve one live run of a factory: pass what it wants to its acquirers, within what it was granted, and back news."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ctxflow.causes import ShortfallCause, lasting
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.exchange import RunFiles, Wishes
from ctxflow.factory.limits import Spent, total
from ctxflow.factory.provider import Excluding, FoundJob, JobChange, JobState, KeepsOutput, Provider, WorkerJob
from ctxflow.factory.run_files import PublishedRun, worker_job
from ctxflow.factory.tier_providers import provider_of, source_of
from ctxflow.sites.site_model import Tier

Say = Callable[[str, str, str], None]
"""Records a decision: the tier and the run that it is about, "" where it is none, and a sentence."""


class _ServedTier:
    """One tier of a served run."""

    def __init__(self, tier: Tier, granted: GrantedProvider, acquirer: Acquirer) -> None:
        self.tier = tier
        self.granted = granted
        self.acquirer = acquirer
        self.running: dict[str, None] = {}  # Jobs that run, the oldest first.
        self.joined: dict[str, int] = {}  # `Wishes.joined`, as passed on last.
        self.causes: list[ShortfallCause] = []  # Why the run lacks workers, as reported to it last.
        self.maximum: int | None = None  # As reported to the run last.
        self.offered = tier  # As the site said last, which holds for this run only if its provider is the same.
        self.renewing = False  # Until the jobs that wait as the tier was before are gone.


class ServedRun:
    """A run, and an acquirer for each tier that the factory serves.

    :param wishes: what it wants at first.
    :param lock: guards how much of a tier its runs hold together.
    :param changed: called, on any thread, when there is news to pass on.
    :param behind: for how many seconds nothing has counted what jobs use that are taken over now.
    """

    def __init__(
        self,
        run: PublishedRun,
        wishes: Wishes,
        files: RunFiles,
        lock: threading.Lock,
        say: Say,
        changed: Callable[[], None],
        behind: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.run = run
        self.wishes = wishes
        self._files = files
        self._lock = lock
        self._say = say
        self._changed, self._behind = changed, behind
        self._tiers: dict[str, _ServedTier] = {}
        self._gone: set[tuple[str, str]] = set()
        self._looks = wishes.looks
        self._failure: str | None = None

    def offers(self) -> list[str]:
        """Return the tiers that the run has workers of, or may have."""
        return [name for name in self.run.commands if name in self._tiers]

    def lend(self, tier: Tier, join_timeout: float) -> None:
        """Have workers of a tier, as the site says now."""
        lent = self._tiers.get(tier.name)
        job = worker_job(tier, self.run.lead)
        if lent is None:
            self._tiers[tier.name] = self._begin(tier, join_timeout)
            return
        if source_of(lent.tier) != source_of(tier):
            if lent.offered != tier:
                text = "its provider has changed, which holds for runs that start from now on"
                self._say(tier.name, self.run.id, text)
        elif lent.tier != tier:
            lent.acquirer.change(tier.name, job, tier.waiting)
            if worker_job(lent.tier, self.run.lead) != job:
                lent.renewing = True
                self._say(tier.name, self.run.id, "jobs that wait are asked for anew, as the site says now")
            lent.tier = tier
        lent.offered = tier

    def _begin(self, tier: Tier, join_timeout: float) -> _ServedTier:
        name = tier.name

        def settled(taken: int, discarded: int) -> None:
            if taken or discarded:
                sentence = f"took over {taken} running jobs of an earlier factory, and gave up {discarded} that wait"
                self._say(name, self.run.id, sentence)
            self._changed()

        joined = list(self.wishes.joined.get(name, {}))
        provider = provider_of(tier, self.run.id)
        granted = GrantedProvider(provider, self.run.id, joined, self._lock, settled, self._behind)
        acquirer = Acquirer(
            {name: (granted, worker_job(tier, self.run.lead))},
            # Where the run itself would keep them: a worker's last words are always found there.
            os.path.join(self.run.directory, "taskvine", "jobs"),
            self._changed,
            decided=lambda tier, sentence: self._say(tier, self.run.id, sentence),
            waiting={name: tier.waiting},
            join_timeout=join_timeout,
            took_over=granted.took_over,
            prices={name: tier.price},
        )
        acquirer.exclude(name, self.wishes.excluded.get(name, ()))
        begun = _ServedTier(tier, granted, acquirer)
        self._connect(name, begun)
        acquirer.start()
        return begun

    def wanted(self, tier: str) -> int:
        """Return how many workers of a tier the run wants."""
        return self.wishes.wanted.get(tier, 0)

    def lacking(self) -> list[tuple[str, str, int]]:
        """Return the tiers of which it has fewer workers than it wants, with the reason and how many."""
        lacks = {name: self.wanted(name) - lent.acquirer.counts()[name]["joined"] for name, lent in self._tiers.items()}
        return [
            (name, reason, lacks[name])
            for name in lacks
            if lacks[name] > 0 and (reason := lasting(self._tiers[name].causes, name))
        ]

    def held(self, tier: str) -> int:
        """Return how many jobs of a tier it has or will have; to be called with the lock."""
        return self._tiers[tier].granted.held()

    def running(self, tier: str) -> int:
        """Return how many of those run."""
        return len(self._tiers[tier].running)

    def allow(self, tier: str, count: int) -> None:
        """Grant it this many jobs; to be called with the lock, and followed by `hold`."""
        self._tiers[tier].granted.allowed = count

    def bound(self, tier: str, maximum: int) -> None:
        """Report to the run how many workers it may have; the others are drained."""
        lent = self._tiers[tier]
        if lent.maximum != maximum:
            lent.maximum = maximum
            self._files.bound(tier, maximum)

    def tell_limits(self, limits: list[dict[str, Any]]) -> None:
        """Report to the run what is used of limits that other runs count towards."""
        self._files.tell_limits(limits)

    def spent(self) -> Spent:
        """Return what its jobs have used so far."""
        return total(lent.acquirer.spent() for lent in list(self._tiers.values()))

    def hold(self, tier: str) -> None:
        """Hold as many jobs as are granted."""
        lent = self._tiers[tier]
        if lent.renewing:
            counts = lent.acquirer.counts()[tier]
            lent.renewing = any(counts[state] for state in ("queued", "evicted", "held"))
        # Until it is known what there is, nothing is asked for.
        lent.acquirer.hold(tier, 0 if lent.renewing or not lent.granted.settled else lent.granted.allowed)

    def reclaim(self, tier: str, count: int) -> None:
        """Take running workers from the run: first those that have not joined, then the youngest."""
        lent = self._tiers[tier]
        youngest = list(lent.running)[::-1]
        for job in sorted(youngest, key=lambda job: lent.joined.get(job, 0) > 0)[:count]:
            # Reported as what it is to the run, an eviction.
            self._files.tell(tier, JobChange(job, "evicted", "another run gets its share"))
            lent.running.pop(job)
            lent.acquirer.remove(tier, job)

    def poll(self) -> None:
        """Pass on what the run wants, and what its acquirers report."""
        self._files.retry()
        wishes = self._files.read()
        if wishes is not None:
            self.wishes = wishes
            self._apply_wishes()
        for tier, lent in self._tiers.items():
            for _, change in lent.acquirer.take():
                self._record(lent, change)
                if not lent.granted.is_old_news(change):
                    self._files.tell(tier, change)
            causes = lent.acquirer.causes()
            if not causes and lent.granted.allowed < self.wanted(tier):
                share = f"the factory lends {lent.granted.allowed} of {self.wanted(tier)}"
                causes = [ShortfallCause("factory", share, "that is this run's share", tier)]
            if causes != lent.causes:
                lent.causes = causes
                self._files.explain(tier, causes)
            failure = lent.acquirer.failure
            if failure is not None and failure != self._failure:
                self._failure = failure
                self._files.fail(failure)

    def _apply_wishes(self) -> None:
        wishes = self.wishes
        for tier, lent in self._tiers.items():
            self._connect(tier, lent)
        gone = {(tier, job) for tier, jobs in wishes.removed.items() for job in jobs if tier in self._tiers}
        refused = {(tier, job) for tier, jobs in wishes.refused.items() for job in jobs if tier in self._tiers}
        for tier, job in sorted(gone - self._gone):
            self._tiers[tier].running.pop(job, None)
            self._tiers[tier].acquirer.remove(tier, job)
        for tier, job in sorted(refused - self._gone):
            self._tiers[tier].running.pop(job, None)
            self._tiers[tier].acquirer.refused(tier, job, wishes.refused[tier][job])
        self._gone = gone | refused
        for tier, lent in self._tiers.items():
            lent.acquirer.exclude(tier, wishes.excluded.get(tier, ()))
        if wishes.looks != self._looks:
            self._looks = wishes.looks
            for lent in self._tiers.values():
                lent.acquirer.look()

    def _connect(self, tier: str, lent: _ServedTier) -> None:
        """Pass on which workers are connected to the run, and have joined it."""
        before, lent.joined = lent.joined, dict(self.wishes.joined.get(tier, {}))
        changed = {job: number for job, number in lent.joined.items() if before.get(job) != number}
        for job in before.keys() - lent.joined.keys() | {job for job in changed if before.get(job)}:
            lent.acquirer.disconnected(tier, job)
        for job, number in changed.items():
            lent.acquirer.connected(tier, job)
            if number:
                lent.acquirer.joined(tier, job)

    @staticmethod
    def _record(lent: _ServedTier, change: JobChange) -> None:
        if change.state == "running":
            lent.running[change.job] = None
        else:
            lent.running.pop(change.job, None)

    def counts(self) -> dict[str, Counter[str]]:
        """Return the counts of each tier's acquirer; "wanted" is the run's wish, "granted" what it may have."""
        return {
            tier: Counter(
                {**lent.acquirer.counts()[tier], "wanted": self.wanted(tier), "granted": lent.granted.allowed}
            )
            for tier, lent in list(self._tiers.items())
        }

    def report_end(self) -> None:
        """Report to a run that goes on that its workers are evicted."""
        for tier, lent in self._tiers.items():
            for job in lent.running:
                self._files.tell(tier, JobChange(job, "evicted", "the factory ends"))

    def end(self) -> None:
        """End all jobs of the run; takes as long as the batch systems do."""
        threads = [threading.Thread(target=lent.acquirer.stop) for lent in self._tiers.values()]
        for lent in self._tiers.values():
            lent.acquirer.hold_none()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


_FIND_SECONDS = 15.0  # Of jobs that were taken over, the batch system must be asked.


class GrantedProvider:
    """A tier's provider, limited to what one run was granted.

    A factory that was killed leaves jobs behind. Running ones are taken over by the next: `submit` returns them first,
    and the batch system is queried now and then whether they still run. Pending ones are discarded and requested anew.

    :param joined: jobs whose workers have joined the run, as it reports: not every provider can find its jobs.
    :param lock: one for all that share the tier's maximum; guards `allowed` and the count of `held`.
    :param found: called once, with how many jobs of an earlier factory were taken over, and how many discarded.
    :param behind: see `ServedRun`.
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
        behind: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queries = 0
        self.allowed = 0
        self.settled = False
        self._provider = provider
        self._run = run
        self._joined = list(joined)
        self._lock = lock
        self._found, self._behind = found, behind
        self._clock = clock
        self._jobs: set[str] = set()  # Those that the batch system has, and that are not being removed.
        self._asking = 0  # How many more are being asked for.
        # Jobs taken over -> their state, None if the queue has no such job.
        self._taken: dict[str, JobState | None] = {}
        self._offered: list[str] = []  # Those of them that `submit` has still to return.
        self._news: list[JobChange] = []
        self._old_news: set[str] = set()  # Jobs taken over that are only now reported as running.
        self._find_at = 0.0
        # These are the provider's own.
        self.start, self.survey, self.last_words = provider.start, provider.survey, provider.last_words
        self.find, self.discard = provider.find, provider.discard

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

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs, or return those that were taken over."""
        if not self.settled:
            return []
        given, self._offered = self._offered[:count], self._offered[count:]
        self._news += [JobChange(each, "running", ran=self._behind()) for each in given]
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
        """Keep jobs from hosts; those that were taken over run as they are."""
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

    def output(self, job: str) -> str:
        """Return the path of what a job writes, "" if there is none here."""
        return self._provider.output(job) if isinstance(self._provider, KeepsOutput) else ""

    def stop(self) -> None:
        """End all jobs, also those that were taken over; if that fails, `held` still counts them."""
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
        waiting = [job for job, each in found.items() if each.state != "running" and job not in self._joined]
        self._provider.discard(waiting)
        self._taken = {**dict.fromkeys(self._joined), **{job: "running" for job in found if job not in waiting}}
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
