"""Serve one live run of a factory: pass what it wants to its acquirers, and their news to it.

Which runs there are: service.py; how they share: sharing.py; the files between: run_files.py.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.provider import JobChange
from ctxflow.factory.run_files import PublishedRun, RunFiles, Wishes
from ctxflow.factory.sharing import GrantedProvider
from ctxflow.factory.spending import Spent, total
from ctxflow.factory.tier_providers import provider_of, source_of, worker_job
from ctxflow.sites.site_model import Tier

Say = Callable[[str, str, str], None]
"""Records a decision: the tier and the run that it is about, "" where it is none, and a sentence."""


class _ServedTier:
    """One tier of a served run."""

    def __init__(self, tier: Tier, granted: GrantedProvider, acquirer: Acquirer) -> None:
        self.tier = tier
        self.granted = granted
        self.acquirer = acquirer
        self.running: dict[str, bool] = {}  # Jobs that run, the oldest first -> whether their workers joined.
        self.reason = ""  # As the run was told last why it lacks workers.
        self.maximum: int | None = None  # As the run was told last.
        self.renewing = False  # Until the jobs that wait as the tier was before are gone.


class ServedRun:
    """A run, and an acquirer for each tier that the factory serves.

    :param run: the run, from its connection file.
    :param wishes: what it wants at first.
    :param lock: guards how much of a tier its runs hold together.
    :param changed: called, on any thread, when there is news to pass on.
    """

    def __init__(
        self,
        run: PublishedRun,
        wishes: Wishes,
        files: RunFiles,
        lock: threading.Lock,
        say: Say,
        changed: Callable[[], None],
    ) -> None:
        self.run = run
        self.wishes = wishes
        self._files = files
        self._lock = lock
        self._say = say
        self._changed = changed
        self._tiers: dict[str, _ServedTier] = {}
        self._joins: dict[tuple[str, str], int] = {}  # Those that were passed on.
        self._past: dict[tuple[str, str], int | None] = {}  # Those of workers that are gone.
        self._gone: set[tuple[str, str]] = set()
        self._looks = wishes.looks
        self._failure: str | None = None

    # --- tiers

    def offers(self) -> list[str]:
        """Return the tiers that the run has workers of, or may have."""
        return [name for name in self.run.commands if name in self._tiers]

    def lend(self, tier: Tier, join_timeout: float) -> None:
        """Have workers of a tier, as the site says now.

        :raises ProviderError: if its provider cannot be used here.
        """
        lent = self._tiers.get(tier.name)
        job = worker_job(tier, self.run.lead)
        if lent is None:
            self._tiers[tier.name] = self._begin(tier, join_timeout)
            return
        if lent.tier == tier:
            return
        before, lent.tier = lent.tier, tier
        if source_of(before) != source_of(tier):
            self._say(tier.name, self.run.id, "its provider has changed, which holds for runs that start from now on")
            lent.tier = before
        elif worker_job(before, self.run.lead) != job:
            lent.acquirer.change(tier.name, job, tier.waiting)
            lent.renewing = True
            self._say(tier.name, self.run.id, "jobs that wait are asked for anew, as the site says now")
        else:
            lent.acquirer.change(tier.name, job, tier.waiting)

    def _begin(self, tier: Tier, join_timeout: float) -> _ServedTier:
        name = tier.name

        def settled(taken: int, discarded: int) -> None:
            if taken or discarded:
                sentence = f"took over {taken} running jobs of an earlier factory, and gave up {discarded} that wait"
                self._say(name, self.run.id, sentence)
            self._changed()

        joined = list(self.wishes.joined.get(name, {}))
        provider = provider_of(tier, self.run.id)
        granted = GrantedProvider(provider, self.run.id, joined, self._lock, settled)
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
        acquirer.start()
        return _ServedTier(tier, granted, acquirer)

    def wanted(self, tier: str) -> int:
        """Return how many workers of a tier the run wants."""
        return self.wishes.wanted.get(tier, 0)

    def lacking(self) -> list[tuple[str, str, int]]:
        """Return the tiers of which it has fewer workers than it wants, with the reason and how many."""
        lacks = [
            (name, lent, self.wanted(name) - lent.acquirer.counts()[name]["joined"])
            for name, lent in self._tiers.items()
        ]
        return [(name, lent.reason, count) for name, lent, count in lacks if lent.reason and count > 0]

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
        """Tell the run how many workers it may have; others leave when they have done what they run."""
        lent = self._tiers[tier]
        if lent.maximum != maximum:
            lent.maximum = maximum
            self._files.bound(tier, maximum)

    def tell_limits(self, limits: list[dict[str, Any]]) -> None:
        """Tell the run what is used of limits that other runs count towards."""
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

    def give(self, tier: str, count: int) -> None:
        """Take running workers from the run: first those that have not joined, then the youngest."""
        lent = self._tiers[tier]
        youngest = list(lent.running)[::-1]
        for job in sorted(youngest, key=lent.running.__getitem__)[:count]:
            # Told as what it is to the run: nobody in it is to blame.
            self._files.tell(tier, JobChange(job, "evicted", "another run gets its share"))
            lent.running.pop(job)
            lent.acquirer.remove(tier, job)

    # --- between the run and its acquirers

    def hear(self) -> None:
        """Pass on what the run wants, and what its acquirers report."""
        self._files.retry()
        wishes = self._files.read()
        if wishes is not None:
            self.wishes = wishes
            self._obey()
        for tier, lent in self._tiers.items():
            for _, change in lent.acquirer.take():
                self._note(tier, lent, change)
                if not lent.granted.is_old_news(change):
                    self._files.tell(tier, change)
            reason = lent.acquirer.reasons()[tier]
            if not reason and lent.granted.allowed < self.wanted(tier):
                reason = f"the factory lends {lent.granted.allowed} of {self.wanted(tier)}: that is this run's share"
            if reason != lent.reason:
                lent.reason = reason
                self._files.explain(tier, reason)
            failure = lent.acquirer.failure
            if failure is not None and failure != self._failure:
                self._failure = failure
                self._files.fail(failure)

    def _obey(self) -> None:
        wishes = self.wishes
        for tier, joins in wishes.joined.items():
            for job, number in joins.items():
                if tier in self._tiers and self._joins.get((tier, job)) != number:
                    self._joins[tier, job] = number
                    self._join(tier, job)
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

    def _join(self, tier: str, job: str) -> None:
        lent = self._tiers[tier]
        lent.acquirer.joined(tier, job)
        if job in lent.running:
            lent.running[job] = True

    def _note(self, tier: str, lent: _ServedTier, change: JobChange) -> None:
        key, number = (tier, change.job), self.wishes.joined.get(tier, {}).get(change.job)
        if change.state == "running":
            lent.running[change.job] = False
            # It joined before the batch system told that it runs, or before this factory began.
            if number is not None and number != self._past.get(key):
                self._join(tier, change.job)
        else:
            lent.running.pop(change.job, None)
            self._past[key] = number
            if change.state == "ended":
                self._joins.pop(key, None)
                self._past.pop(key, None)

    # --- for others

    def counts(self) -> dict[str, Counter[str]]:
        """Return the counts of each tier's acquirer; "wanted" is the run's wish, "granted" what it may have."""
        found = {}
        for tier, lent in list(self._tiers.items()):
            counts = Counter(lent.acquirer.counts()[tier])
            counts["wanted"], counts["granted"] = self.wanted(tier), lent.granted.allowed
            found[tier] = counts
        return found

    def take_leave(self) -> None:
        """Tell a run that goes on that its workers are taken from it, through no fault of theirs."""
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
