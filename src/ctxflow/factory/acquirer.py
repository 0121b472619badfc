"""Holds as many worker jobs of each tier as are wanted, on a thread for each: batch systems take their time, or hang.

What does not live here: how many workers to want (policies), how many to ask for at a time (tier_jobs.py), and the
batch systems (local.py, condor.py, ...).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.factory.explaining import explaining_line
from ctxflow.factory.places import Places, machines_of
from ctxflow.factory.provider import Excluding, JobChange, KeepsOutput, Provider, ProviderError, WorkerJob
from ctxflow.factory.shortfall import shortfall, survey_reason
from ctxflow.factory.spending import SpendingMeter, Spent, total
from ctxflow.factory.tier_jobs import TierJobs
from ctxflow.host.descriptors import advice, none_left
from ctxflow.wording import counted

logger = logging.getLogger("ctxflow")
_HOST = re.compile(r"[\w.-]+", re.ASCII)
_LOOK_SECONDS = 1.0
_OFTEN, _OFTEN_SECONDS = 0.2, 4.0
_STUCK_SECONDS = 10.0  # How long jobs may wait before the batch system is asked whether any machine will do.
_SURVEY_SECONDS = 300.0
_REMOVE_SECONDS = 10.0  # After which a batch system that did not remove jobs is told again.
_END_SECONDS = 60.0
_REMIND_SECONDS = 300.0  # The same trouble is told again only after so long.


@dataclasses.dataclass
class _Held:
    """One tier: who lends its workers, what one of them is, and the jobs there are."""

    provider: Provider
    job: WorkerJob
    jobs: TierJobs
    meter: SpendingMeter
    removing: list[str] = dataclasses.field(default_factory=list)  # Given up, and still to be removed.
    remove_at: float = 0.0
    survey_at: float = 0.0
    # Why workers are lacking: the batch system cannot be used, they end before they join, or what it has for them.
    down: str = ""
    lost: str = ""
    has: str = ""
    held_by: str = ""  # What is said of jobs that somebody put on hold.
    told: dict[str, float] = dataclasses.field(default_factory=dict)  # Trouble -> when it was told.
    places: Places = dataclasses.field(default_factory=Places)
    totals: Counter[str] = dataclasses.field(default_factory=Counter)
    excluding: bool = False  # Whether jobs that there are have still to be kept from hosts.
    exclude_at: float = 0.0
    look: bool = False  # Whether the batch system is to be asked at once.
    thread: threading.Thread | None = None


class Acquirer:
    """The worker jobs of a run.

    What goes wrong is told once, in a sentence, and tried again after a pause: a batch system that is down, a
    requirement that no machine meets, or jobs that end before their workers join, never end a run.

    :param tiers: tier -> who lends its workers, and what one of them is.
    :param directory: where providers keep their files.
    :param changed: called, on a tier's thread, when `take` or `failure` has something.
    :param decided: called, on a tier's thread, with the tier and a sentence for each decision and each trouble; by
        default they are logged.
    :param waiting: tier -> how many jobs may wait in the queue at first.
    :param join_timeout: seconds that a job may run before its worker has joined.
    :param prices: tier -> what an hour of its workers costs.
    :param took_over: whether a job that `submit` gave was there before, so that nobody was asked for it.
    :ivar end_seconds: how long a batch system may take at the end.
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
        took_over: Callable[[str], bool] = lambda job: False,
        prices: Mapping[str, float | None] | None = None,
    ) -> None:
        first, costs = waiting or {}, prices or {}
        self._tiers = {
            name: _Held(
                provider,
                job,
                TierJobs(first.get(name, 20), join_timeout),
                SpendingMeter(job.gpus, costs.get(name)),
            )
            for name, (provider, job) in tiers.items()
        }
        self._directory = directory
        self._changed = changed
        self._took_over = took_over
        self._decided = decided or (lambda tier, sentence: logger.info("tier %s: %s", tier, sentence))
        self._troubled = decided or (lambda tier, sentence: logger.warning("tier %s: %s", tier, sentence))
        self._condition = threading.Condition()  # Reentrant. Guards what other threads touch.
        self._look_until = 0.0
        self._stopped = False
        self._news: list[tuple[str, JobChange]] = []
        self._machines: list[tuple[str, dict[str, Any], str]] = []
        self.end_seconds = _END_SECONDS
        self.failure: str | None = None

    def start(self) -> None:
        """Start the providers.

        :raises ProviderError: if one cannot be used here.
        """
        for name, held in self._tiers.items():
            directory = os.path.join(self._directory, name)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            held.provider.start(directory)
        for name, held in self._tiers.items():
            held.thread = threading.Thread(target=self._run, args=(name, held), name="ctxflow-acquirer", daemon=True)
            held.thread.start()

    def hold(self, tier: str, count: int) -> None:
        """Hold so many jobs of a tier from now on. Fewer: those that wait are taken back, those that run go
        by `remove`, one by one, as their workers are released."""
        with self._condition:
            self._tiers[tier].jobs.wanted = count
            self._notify()

    def change(self, tier: str, job: WorkerJob, waiting: int) -> None:
        """Ask for other workers from now on; those that are there stay as they are."""
        with self._condition:
            held = self._tiers[tier]
            held.job = dataclasses.replace(job, excluded=held.job.excluded)
            held.jobs.first = waiting

    def exclude(self, tier: str, hosts: Sequence[str]) -> None:
        """Ask for no worker of a tier on these hosts from now on, and for none of those that wait; on all others again.

        Workers that are there stay.
        """
        with self._condition:
            # Workers tell their hosts' names: what is none must not get into a batch system's words.
            excluded = tuple(sorted(host for host in hosts if _HOST.fullmatch(host)))
            held = self._tiers[tier]
            if excluded != held.job.excluded:
                held.job = dataclasses.replace(held.job, excluded=excluded)
                held.excluding, held.exclude_at = True, 0.0
                self._notify()

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
                self._tiers[tier].down = self._tiers[tier].lost = self._tiers[tier].has = ""
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
            for held in self._tiers.values():
                held.look = True
            self._look_until = time.monotonic() + _OFTEN_SECONDS
            self._notify()

    def take(self) -> list[tuple[str, JobChange]]:
        """What happened to jobs since the last call, each with its tier."""
        with self._condition:
            news, self._news = self._news, []
        return news

    def output(self, tier: str, job: str) -> str:
        """The path of what a job writes, "" if there is none here."""
        provider = self._tiers[tier].provider if tier in self._tiers else None
        return provider.output(job) if isinstance(provider, KeepsOutput) else ""

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

    def spent(self) -> Spent:
        """What the jobs have used so far."""
        now = time.monotonic()
        with self._condition:
            return total(held.meter.spent(now) for held in self._tiers.values())

    def maxima(self) -> dict[str, int]:
        """Nobody bounds the tiers but their site."""
        return {}

    def limits_beyond(self) -> list[dict[str, Any]]:
        """Nor counts others' workers (see `FactoryClient`)."""
        return []

    def reasons(self) -> dict[str, str]:
        """Tier -> why it has fewer workers than are wanted, "" if it has them."""
        with self._condition:
            return {
                name: shortfall(held.jobs.counts(), held.jobs.wanted, held.down or held.lost or held.has, held.held_by)
                for name, held in self._tiers.items()
            }

    def stop(self) -> None:
        """End all jobs; a batch system that does not answer is waited for for a minute."""
        with self._condition:
            self._stopped = True
            self._notify()
        ending = {
            name: threading.Thread(target=self._end, args=(held,), name="ctxflow-acquirer-end", daemon=True)
            for name, held in self._tiers.items()
        }
        for thread in ending.values():
            thread.start()
        deadline = time.monotonic() + self.end_seconds
        for thread in ending.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := [f"tier {name}" for name, thread in ending.items() if thread.is_alive()]:
            logger.warning(
                "the batch system of %s has not answered for %.0f s: see with its own commands whether jobs are left",
                " and ".join(left),
                self.end_seconds,
            )

    @staticmethod
    def _end(held: _Held) -> None:
        if held.thread is not None:
            held.thread.join()
        try:
            held.provider.stop()
        except ProviderError as error:
            logger.warning("%s", error)
        except Exception as error:
            what = "the jobs of a tier could not be ended"
            if none_left(error):
                logger.warning("%s (%s)%s, and see whether jobs are left", what, error, advice(error))
            else:
                logger.exception(what)

    def _notify(self) -> None:
        self._condition.notify_all()

    # --- on a tier's thread

    def _run(self, name: str, held: _Held) -> None:
        while True:
            with self._condition:
                if not (self._stopped or held.look or self._due(held)):
                    often = time.monotonic() < self._look_until
                    self._condition.wait(_OFTEN if often else _LOOK_SECONDS)
                if self._stopped:
                    return
                held.look = False
            try:
                self._hear(name, held)
                self._exclude(name, held)
                # First, so that GPUs that are given up go to no job of ours that waits.
                self._balance(name, held)
                self._remove(held)
                self._survey(name, held)
                self._submit_pinned(name, held)
                self._explain(name, held)
            except ProviderError as error:
                held.down = f"{error}{advice(error.__cause__ or error.__context__)}"
                self._failed(name, held, held.down)
            except Exception as error:
                held.down = f"{type(error).__name__}: {error}{advice(error)}"
                if not none_left(error):
                    logger.exception("the acquirer of workers met an error")
                self._failed(name, held, held.down)

    @staticmethod
    def _due(held: _Held) -> bool:
        now = time.monotonic()
        return (
            held.jobs.due(now)
            or (bool(held.removing) and now >= held.remove_at)
            or (held.excluding and now >= held.exclude_at)
            or held.places.due
        )

    def _hear(self, name: str, held: _Held) -> None:
        news = []
        for change in held.provider.changes():
            now = time.monotonic()
            with self._condition:
                before = held.jobs.changed(change, now)
                held.meter.heard(change, now)
            waited = now - before.asked if before is not None and change.state == "running" else None
            news.append((name, dataclasses.replace(change, waited=waited)))
            if before is None:  # It was removed, or is beside those that are held.
                continue
            if change.state == "evicted":
                held.totals["evictions"] += 1
                where = f" on {before.host}" if before.host else ""
                self._decided(name, f"job {change.job}{where} was evicted: {change.reason or 'no reason given'}")
            elif change.state == "held" and change.by_hand:  # To ask for another would defeat that.
                held.totals["holds"] += 1
                held.held_by = change.reason
                self._tell_trouble(
                    name, held, f"job {change.job} was put on hold, and stays so until it is released: {change.reason}"
                )
            elif change.state == "held":
                held.totals["holds"] += 1
                self._give_up(held, [change.job])
                self._failed(name, held, f"job {change.job} was put on hold, and is given up: {change.reason}")
            elif change.state == "ended" and not before.joined and before.state != "evicted":
                words = explaining_line(held.provider.last_words(change.job))
                held.lost = f"workers end before they join ({change.reason}): {words}"
                self._failed(name, held, held.lost)
            elif change.state == "running":
                held.has, held.survey_at = "", 0.0
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
        if self._tell_trouble(name, held, trouble):
            self._decided(name, f"nothing more is asked for in the next {pause:.1f} s")

    def _tell_trouble(self, name: str, held: _Held, trouble: str) -> bool:
        """Tell of it, unless it was told a while ago; whether it was now."""
        # Jobs' numbers differ where the trouble is the same.
        kind = "".join(" " if letter.isdigit() else letter for letter in trouble)
        now = time.monotonic()
        if now < held.told.get(kind, now):
            return False
        held.told[kind] = now + _REMIND_SECONDS
        self._troubled(name, trouble)
        return True

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

    def _exclude(self, name: str, held: _Held) -> None:
        """Keep the jobs that there are from hosts; those that cannot be changed are asked for anew."""
        now = time.monotonic()
        with self._condition:
            if not held.excluding or now < held.exclude_at:
                return
            hosts, jobs = held.job.excluded, list(held.jobs.jobs)
            held.exclude_at = now + _REMOVE_SECONDS  # If it fails.
        anew = held.provider.exclude(jobs, hosts) if isinstance(held.provider, Excluding) else None
        with self._condition:
            held.excluding = held.job.excluded != hosts
            held.exclude_at = 0.0
        if anew is None:
            return
        self._give_up(held, anew)
        where = f"not on {', '.join(hosts)}" if hosts else "on all hosts again"
        self._decided(name, f"asks for workers {where}" + (f": {counted(len(anew), 'job')} anew" if anew else ""))

    def _balance(self, name: str, held: _Held) -> None:
        with self._condition:
            plan = held.jobs.plan(time.monotonic())
            wanted, held_now = held.jobs.wanted, len(held.jobs.jobs)
            if held_now >= wanted:
                held.down = ""  # Nobody is to be asked for.
        for job in plan.absent:
            words = explaining_line(held.provider.last_words(job))
            self._give_up(held, [job])
            held.lost = f"workers run and do not join: {words}"
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
                held.meter.asked(jobs, held.job.gpus)
                held.down = ""
                if len(jobs) < plan.submit:  # A factory's provider grants no more just now, or a queue takes none.
                    held.jobs.pause(time.monotonic() + _LOOK_SECONDS)
            asked = [job for job in jobs if not self._took_over(job)]
            if asked:
                held.totals["submissions"] += 1
                held.totals["submitted"] += len(asked)
                held_now += len(jobs) - len(asked)
                self._decided(name, f"asked for {counted(len(asked), 'worker')}: {wanted} wanted, {held_now} held")

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
                held.meter.asked(jobs, job.gpus)
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
        with self._condition:
            held.has = survey_reason(survey)
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
