"""Holds as many worker jobs of each tier as are wanted, on a thread of its own: batch systems take their time.

What does not live here: how many workers to want (policies), and the batch systems (local.py, condor.py).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from ctxflow.factory.provider import JobChange, Provider, ProviderError, WorkerJob

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_PATIENCE = 5  # Jobs in a row that may end before their worker joined, or submissions that may fail.
_LONGEST_PAUSE = 60.0


@dataclasses.dataclass
class _Held:
    """One tier's jobs."""

    provider: Provider
    job: WorkerJob
    wanted: int = 0
    jobs: dict[str, str] = dataclasses.field(default_factory=dict)  # Job -> its state.
    joined: set[str] = dataclasses.field(default_factory=set)  # Jobs whose present worker has joined.
    failures: int = 0  # In a row.
    again_at: float = 0.0


class Acquirer:
    """The worker jobs of a run.

    :param tiers: tier -> who lends its workers, and what one of them is.
    :param directory: where providers keep their files.
    :param changed: called, on this thread, when `take` or `failure` has something.
    """

    def __init__(
        self, tiers: Mapping[str, tuple[Provider, WorkerJob]], directory: str, changed: Callable[[], None]
    ) -> None:
        self._tiers = {name: _Held(provider, job) for name, (provider, job) in tiers.items()}
        self._directory = directory
        self._changed = changed
        self._condition = threading.Condition()
        self._look = False
        self._stopped = False
        self._removals: list[tuple[str, str]] = []
        self._news: list[tuple[str, JobChange]] = []
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="ctxflow-acquirer", daemon=True)

    def start(self) -> None:
        """Start the providers.

        :raises ProviderError: if one cannot be used here.
        """
        for name, held in self._tiers.items():
            directory = os.path.join(self._directory, name)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            held.provider.start(directory)
        self._thread.start()

    def hold(self, tier: str, count: int) -> None:
        """Hold so many jobs of a tier from now on. Fewer: those that wait are taken back, those that run go
        by `remove`, one by one, as their workers are released."""
        with self._condition:
            self._tiers[tier].wanted = count
            self._notify()

    def hold_none(self) -> None:
        """Ask for nothing more: the end is near."""
        with self._condition:
            for held in self._tiers.values():
                held.wanted = 0
            self._notify()

    def remove(self, tier: str, job: str) -> None:
        """End a job."""
        with self._condition:
            self._removals.append((tier, job))
            self._notify()

    def joined(self, tier: str, job: str) -> None:
        """The worker of a job has joined."""
        with self._condition:
            if tier in self._tiers:
                self._tiers[tier].joined.add(job)
                self._tiers[tier].failures = 0

    def refused(self, tier: str, job: str, reason: str) -> None:
        """The worker of a job joined, and cannot be used: no better than one that never joins."""
        with self._condition:
            if tier in self._tiers:
                self._removals.append((tier, job))
                self._failed(self._tiers[tier], reason)
                self._notify()

    def look(self) -> None:
        """Ask the batch systems for news at once."""
        with self._condition:
            self._look = True
            self._notify()

    def take(self) -> list[tuple[str, JobChange]]:
        """What happened to jobs since the last call, each with its tier."""
        with self._condition:
            news, self._news = self._news, []
        return news

    def provider(self, tier: str) -> Provider:
        """Who lends a tier's workers."""
        return self._tiers[tier].provider

    def stop(self) -> None:
        """End all jobs."""
        with self._condition:
            self._stopped = True
            self._notify()
        if self._thread.ident:
            self._thread.join()
        for held in self._tiers.values():
            try:
                held.provider.stop()
            except ProviderError as error:
                logger.warning("%s", error)

    def _notify(self) -> None:
        self._condition.notify_all()

    # --- on the thread

    def _run(self) -> None:
        while True:
            with self._condition:
                if not (self._stopped or self._look or self._removals or self._lacks()):
                    self._condition.wait(_LOOK_SECONDS)
                if self._stopped:
                    return
                self._look = False
                removals, self._removals = self._removals, []
            for name, held in self._tiers.items():
                try:
                    self._hear(name, held)
                    self._remove(held, [job for tier, job in removals if tier == name])
                    self._balance(held)
                except ProviderError as error:
                    self._failed(held, str(error))
                except Exception:
                    logger.exception("the acquirer of workers met an error")
                    held.again_at = time.monotonic() + _LONGEST_PAUSE

    def _lacks(self) -> bool:
        now = time.monotonic()
        return any(held.wanted > len(held.jobs) and held.again_at <= now for held in self._tiers.values())

    def _hear(self, name: str, held: _Held) -> None:
        changes = held.provider.changes()
        for change in changes:
            if change.state == "ended":
                self._ended(held, change)
            elif change.job in held.jobs:
                held.jobs[change.job] = change.state
                if change.state != "running":
                    held.joined.discard(change.job)
        if changes:
            with self._condition:
                self._news += [(name, change) for change in changes]
            self._changed()

    def _ended(self, held: _Held, change: JobChange) -> None:
        if held.jobs.pop(change.job, None) is None:  # It was removed.
            return
        if change.job in held.joined:
            held.joined.discard(change.job)
            return
        words = held.provider.last_words(change.job).splitlines()
        self._failed(held, f"workers end before they join ({change.reason}): {words[-1] if words else 'no output'}")

    def _failed(self, held: _Held, reason: str) -> None:
        held.failures += 1
        logger.warning("tier %s: %s", held.job.tier, reason)
        held.again_at = time.monotonic() + min(_LONGEST_PAUSE, 0.5 * 2**held.failures)
        if held.failures >= _PATIENCE and not any(each.joined for each in self._tiers.values()):
            self.failure = f"no worker of tier {held.job.tier} can be had: {reason}"
            self._changed()

    def _remove(self, held: _Held, jobs: list[str]) -> None:
        for job in jobs:
            held.jobs.pop(job, None)
            held.joined.discard(job)
        if jobs:
            held.provider.remove(jobs)

    def _balance(self, held: _Held) -> None:
        surplus = len(held.jobs) - held.wanted
        if surplus > 0:
            waiting = [job for job, state in held.jobs.items() if state != "running"]
            self._remove(held, waiting[-surplus:])
        elif surplus < 0 and held.again_at <= time.monotonic():
            for job in held.provider.submit(held.job, -surplus):
                held.jobs[job] = "queued"
