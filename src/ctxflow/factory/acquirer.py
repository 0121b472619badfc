"""Holds as many worker jobs of each tier as are wanted, on a thread of its own: batch systems take their time.

What does not live here: how many workers to want (policies), how many to ask for at a time (tier_jobs.py), and the
batch systems (local.py, condor.py, ...).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.factory.places import Places, machines_of
from ctxflow.factory.provider import JobChange, Provider, ProviderError, WorkerJob
from ctxflow.factory.tier_jobs import TierJobs
from ctxflow.wording import counted

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_OFTEN, _OFTEN_SECONDS = 0.2, 4.0
_STUCK_SECONDS = 10.0  # How long jobs may wait before the batch system is asked whether any machine will do.
_SURVEY_SECONDS = 300.0
_REMOVE_SECONDS = 10.0  # After which a batch system that did not remove jobs is told again.
_REMIND_SECONDS = 300.0  # The same trouble is told again only after so long.


@dataclasses.dataclass
class _Held:
    """One tier: who lends its workers, what one of them is, and the jobs there are."""

    provider: Provider
    job: WorkerJob
    jobs: TierJobs
    removing: list[str] = dataclasses.field(default_factory=list)  # Given up, and still to be removed.
    remove_at: float = 0.0
    survey_at: float = 0.0
    told: dict[str, float] = dataclasses.field(default_factory=dict)  # Trouble -> when it was told.
    places: Places = dataclasses.field(default_factory=Places)
    totals: Counter[str] = dataclasses.field(default_factory=Counter)


class Acquirer:
    """The worker jobs of a run.

    What goes wrong is told once, in a sentence, and tried again after a pause: a batch system that is down, a
    requirement that no machine meets, or jobs that end before their workers join, never end a run.

    :param tiers: tier -> who lends its workers, and what one of them is.
    :param directory: where providers keep their files.
    :param changed: called, on this thread, when `take` or `failure` has something.
    :param decided: called, on this thread, with a tier and a sentence for each decision and each trouble; by default
        they are logged.
    :param waiting: tier -> how many jobs may wait in the queue at first.
    :param join_timeout: seconds that a job may run before its worker has joined.
    :ivar failure: why no worker can ever be used, once that is clear.
    """

    def __init__(
        self,
        tiers: Mapping[str, tuple[Provider, WorkerJob]],
        directory: str,
        changed: Callable[[], None],
        decided: Callable[[str, str], None] | None = None,
        waiting: Mapping[str, int] | None = None,
        join_timeout: float = 300.0,
    ) -> None:
        first = waiting or {}
        self._tiers = {
            name: _Held(provider, job, TierJobs(first.get(name, 20), join_timeout))
            for name, (provider, job) in tiers.items()
        }
        self._directory = directory
        self._changed = changed
        self._decided = decided or (lambda tier, sentence: logger.info("tier %s: %s", tier, sentence))
        self._troubled = decided or (lambda tier, sentence: logger.warning("tier %s: %s", tier, sentence))
        self._condition = threading.Condition()  # Reentrant. Guards what other threads touch.
        self._look = False
        self._look_until = 0.0
        self._stopped = False
        self._news: list[tuple[str, JobChange]] = []
        self._machines: list[tuple[str, dict[str, Any], str]] = []
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
            self._tiers[tier].jobs.wanted = count
            self._notify()

    def change(self, tier: str, job: WorkerJob, waiting: int) -> None:
        """Ask for other workers from now on; those that are there stay as they are."""
        with self._condition:
            self._tiers[tier].job = job
            self._tiers[tier].jobs.first = waiting

    def hold_none(self) -> None:
        """Ask for nothing more: the end is near."""
        with self._condition:
            for held in self._tiers.values():
                held.jobs.wanted = 0
            self._notify()

    def remove(self, tier: str, job: str) -> None:
        """End a job."""
        with self._condition:
            if tier in self._tiers:
                self._give_up(self._tiers[tier], [job])
                self._notify()

    def joined(self, tier: str, job: str) -> None:
        """The worker of a job has joined."""
        with self._condition:
            if tier in self._tiers:
                self._tiers[tier].jobs.joined(job)
                self._tiers[tier].told.clear()  # Whatever the trouble was, it is over.
                self._tiers[tier].survey_at = 0.0

    def pin(self, tier: str, pin: int, job: WorkerJob) -> None:
        """Have one worker beside those that are held, in a place of one's choice.

        :param pin: its number.
        """
        with self._condition:
            self._tiers[tier].places.wanted[pin] = job
            self._notify()

    def forgo(self, tier: str, pin: int) -> None:
        """That worker is not wanted any more."""
        with self._condition:
            held = self._tiers[tier]
            held.removing += held.places.forgo(pin)
            self._notify()

    def pin_of(self, tier: str, job: str) -> int | None:
        """The number of the worker that a job was submitted for, None if it is one like others."""
        with self._condition:
            return self._tiers[tier].places.pin_of(job)

    def survey(self, tier: str) -> None:
        """Find out which machines a tier's workers may be on; `surveyed` has them later, after a call of `changed`."""
        with self._condition:
            self._tiers[tier].places.asked = True
            self._notify()

    def surveyed(self) -> list[tuple[str, dict[str, Any], str]]:
        """The answers to `survey` since the last call: the tier, its machines' topologies by name, and why none."""
        with self._condition:
            found, self._machines = self._machines, []
        return found

    def refused(self, tier: str, job: str, reason: str) -> None:
        """The worker of a job joined, and cannot be used: no better than one that never joins."""
        with self._condition:
            if tier in self._tiers:
                jobs = self._tiers[tier].jobs
                self._give_up(self._tiers[tier], [job])
                jobs.failed(time.monotonic(), refused=True)
                if jobs.hopeless:
                    self.failure = f"no worker of tier {tier} can be used: {reason}"
                self._notify()

    def look(self) -> None:
        """Ask the batch systems for news at once, and often for a moment: a worker is gone, and nobody knows why."""
        with self._condition:
            self._look = True
            self._look_until = time.monotonic() + _OFTEN_SECONDS
            self._notify()

    def take(self) -> list[tuple[str, JobChange]]:
        """What happened to jobs since the last call, each with its tier."""
        with self._condition:
            news, self._news = self._news, []
        return news

    def provider(self, tier: str) -> Provider:
        """Who lends a tier's workers."""
        return self._tiers[tier].provider

    def counts(self) -> dict[str, dict[str, int]]:
        """Tier -> how many jobs are queued, running (and not joined), joined, evicted and held now, how many are
        wanted, and totals: submissions, submitted, removed, evictions, holds, failures, queries."""
        with self._condition:
            return {
                name: {
                    **held.jobs.counts(),
                    "wanted": held.jobs.wanted,
                    **{total: held.totals[total] for total in _TOTALS},
                    "queries": held.provider.queries,
                }
                for name, held in self._tiers.items()
            }

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
                if not (self._stopped or self._look or self._due()):
                    often = time.monotonic() < self._look_until
                    self._condition.wait(_OFTEN if often else _LOOK_SECONDS)
                if self._stopped:
                    return
                self._look = False
            for name, held in self._tiers.items():
                try:
                    self._hear(name, held)
                    # First, so that GPUs that are given up go to no job of ours that waits.
                    self._balance(name, held)
                    self._remove(held)
                    self._survey(name, held)
                    self._submit_pinned(name, held)
                    self._explain(name, held)
                except ProviderError as error:
                    self._failed(name, held, str(error))
                except Exception as error:
                    logger.exception("the acquirer of workers met an error")
                    self._failed(name, held, f"{type(error).__name__}: {error}")

    def _due(self) -> bool:
        now = time.monotonic()
        return any(
            held.jobs.due(now) or (held.removing and now >= held.remove_at) or held.places.due
            for held in self._tiers.values()
        )

    def _hear(self, name: str, held: _Held) -> None:
        news = []
        for change in held.provider.changes():
            now = time.monotonic()
            with self._condition:
                before = held.jobs.changed(change, now)
            waited = now - before.asked if before is not None and change.state == "running" else None
            news.append((name, dataclasses.replace(change, waited=waited)))
            if before is None:  # It was removed, or is beside those that are held.
                continue
            if change.state == "evicted":
                held.totals["evictions"] += 1
                self._decided(name, f"job {change.job} was evicted: {change.reason or 'no reason given'}")
            elif change.state == "held":
                held.totals["holds"] += 1
                self._give_up(held, [change.job])
                self._failed(name, held, f"job {change.job} was put on hold, and is given up: {change.reason}")
            elif change.state == "ended" and not before.joined and before.state != "evicted":
                words = _last_line(held.provider, change.job)
                self._failed(name, held, f"workers end before they join ({change.reason}): {words}")
        if news:
            with self._condition:
                self._news += news
            self._changed()

    def _failed(self, name: str, held: _Held, trouble: str) -> None:
        """Tell of a trouble, unless it was told a while ago, and pause."""
        held.totals["failures"] += 1
        now = time.monotonic()
        with self._condition:
            pause = held.jobs.failed(now)
        # Jobs' numbers differ where the trouble is the same.
        kind = "".join(" " if letter.isdigit() else letter for letter in trouble)
        if now >= held.told.get(kind, now):
            held.told[kind] = now + _REMIND_SECONDS
            self._troubled(name, trouble)
            self._decided(name, f"nothing more is asked for in the next {pause:.1f} s")

    def _give_up(self, held: _Held, jobs: list[str]) -> None:
        with self._condition:
            held.jobs.removed(jobs)
            held.removing += jobs

    def _remove(self, held: _Held) -> None:
        """Have the batch system remove what was given up; where it cannot be reached, it is told again later."""
        now = time.monotonic()
        with self._condition:
            jobs = list(held.removing) if now >= held.remove_at else []
            held.remove_at = now + _REMOVE_SECONDS if jobs else held.remove_at
        if jobs:
            held.provider.remove(jobs)
            held.totals["removed"] += len(jobs)
            with self._condition:
                del held.removing[: len(jobs)]
                held.remove_at = 0.0

    def _balance(self, name: str, held: _Held) -> None:
        with self._condition:
            plan = held.jobs.plan(time.monotonic())
            wanted, held_now = held.jobs.wanted, len(held.jobs.jobs)
        for job in plan.absent:
            words = _last_line(held.provider, job)
            self._give_up(held, [job])
            self._failed(name, held, f"the worker of job {job} runs and does not join, so it is given up: {words}")
        if plan.surplus:
            self._give_up(held, list(plan.surplus))
            self._decided(
                name, f"gave up {counted(len(plan.surplus), 'job')} that waited: {wanted} wanted, {held_now} held"
            )
        if plan.submit:
            jobs = held.provider.submit(held.job, plan.submit)
            with self._condition:
                held.jobs.submitted(jobs, time.monotonic())
                if len(jobs) < plan.submit:  # A factory's provider grants no more just now.
                    held.jobs.pause(time.monotonic() + _LOOK_SECONDS)
            if jobs:
                held.totals["submissions"] += 1
                held.totals["submitted"] += len(jobs)
                self._decided(name, f"asked for {counted(len(jobs), 'worker')}: {wanted} wanted, {held_now} held")

    def _survey(self, name: str, held: _Held) -> None:
        """Find out which machines there are, and who uses their GPUs."""
        with self._condition:
            asked, held.places.asked = held.places.asked, False
        if asked:
            machines, reason = machines_of(held.provider, held.job)
            with self._condition:
                self._machines.append((name, machines, reason))
            self._changed()

    def _submit_pinned(self, name: str, held: _Held) -> None:
        """Ask for the workers in places of one's choice; a job that is not taken is not tried again."""
        with self._condition:
            wanted, held.places.wanted = held.places.wanted, {}
        for pin, job in wanted.items():
            jobs = held.provider.submit(job, 1)
            with self._condition:
                held.removing += held.places.submitted(pin, jobs)
            self._decided(name, f"asked for a worker with {counted(job.gpus, 'GPU')} in a place of its own")

    def _explain(self, name: str, held: _Held) -> None:
        """Where jobs only wait, find out whether any machine will do."""
        now = time.monotonic()
        with self._condition:
            stuck = held.jobs.stuck(now, _STUCK_SECONDS)
        if not stuck or now < held.survey_at:
            return
        held.survey_at = now + _SURVEY_SECONDS
        survey = held.provider.survey(held.job)
        if not survey.may_submit:
            self._troubled(name, f"its jobs wait, and no more are taken: {'; '.join(survey.advice)}")
        elif survey.machines == 0:
            why = "; ".join(survey.advice) or "change the tier's requirements"
            self._troubled(name, f"its jobs wait in vain, since no machine will do: {why}")
        elif survey.machines is not None:
            self._decided(
                name, f"its jobs wait: {counted(survey.machines, 'machine')} would do, {survey.free} of them free"
            )


_TOTALS = ("submissions", "submitted", "removed", "evictions", "holds", "failures")


def _last_line(provider: Provider, job: str) -> str:
    words = provider.last_words(job).splitlines()
    return words[-1] if words else "no output"
