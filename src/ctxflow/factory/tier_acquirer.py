"""Hold the jobs of one tier at the number wanted, on a thread of its own.

How many jobs to submit at a time, and which to give up, is decided in tier_jobs.py.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ctxflow.factory.provider import (
    Excluding,
    JobChange,
    Provider,
    ProviderError,
    WorkerJob,
    explaining_line,
)
from ctxflow.factory.spending import SpendingMeter
from ctxflow.factory.tier_jobs import Places, TierJobs, machines_of, survey_reason
from ctxflow.host.machine_errors import advice, none_left
from ctxflow.wording import counted

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_OFTEN = 0.2
_STUCK_SECONDS = 10.0  # How long jobs may wait before the batch system is asked whether any machine will do.
_SURVEY_SECONDS = 300.0
_REMOVE_SECONDS = 10.0  # After which a batch system that did not remove jobs is told again.
_REMIND_SECONDS = 300.0  # The same trouble is told again only after so long.


@dataclasses.dataclass
class AcquirerState:
    """What an acquirer shares with its tiers' threads; `condition` guards it and the tiers' fields.

    :ivar changed: called when `news` or `machines` has something.
    :ivar decided: called with a tier and a sentence for each decision, `troubled` for each trouble.
    :ivar took_over: whether a submitted job was there before, so that nothing was requested for it.
    :ivar machines: answers to surveys: tier, its machines' topologies by name, and why none.
    """

    changed: Callable[[], None]
    decided: Callable[[str, str], None]
    troubled: Callable[[str, str], None]
    took_over: Callable[[str], bool]
    condition: threading.Condition = dataclasses.field(default_factory=threading.Condition)  # Reentrant.
    look_until: float = 0.0
    stopped: bool = False
    news: list[tuple[str, JobChange]] = dataclasses.field(default_factory=list)
    machines: list[tuple[str, dict[str, Any], str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class TierAcquirer:
    """One tier of an acquirer: its provider, what one worker is, its jobs, and the thread that manages them.

    What the batch system refuses is told once, in a sentence, and tried again after a pause.
    """

    name: str
    shared: AcquirerState
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

    def run(self) -> None:
        """Manage the tier's jobs until the acquirer is stopped; the body of its thread."""
        while True:
            with self.shared.condition:
                if not (self.shared.stopped or self.look or self._due()):
                    often = time.monotonic() < self.shared.look_until
                    self.shared.condition.wait(_OFTEN if often else _LOOK_SECONDS)
                if self.shared.stopped:
                    return
                self.look = False
            try:
                self._hear()
                self._exclude()
                # First, so that GPUs that are given up go to no job of ours that waits.
                self._balance()
                self._remove()
                self._survey()
                self._submit_pinned()
                self._explain()
            except ProviderError as error:
                self.down = f"{error}{advice(error.__cause__ or error.__context__)}"
                self._failed(self.down)
            except Exception as error:
                self.down = f"{type(error).__name__}: {error}{advice(error)}"
                if not none_left(error):
                    logger.exception("the acquirer of workers met an error")
                self._failed(self.down)

    def _decided(self, sentence: str) -> None:
        self.shared.decided(self.name, sentence)

    def _due(self) -> bool:
        now = time.monotonic()
        return (
            self.jobs.due(now)
            or (bool(self.removing) and now >= self.remove_at)
            or (self.excluding and now >= self.exclude_at)
            or self.places.due
        )

    def _hear(self) -> None:
        news = []
        for change in self.provider.changes():
            now = time.monotonic()
            with self.shared.condition:
                before = self.jobs.changed(change, now)
                self.meter.heard(change, now)
            waited = now - before.asked if before is not None and change.state == "running" else None
            news.append((self.name, dataclasses.replace(change, waited=waited)))
            if before is None:  # It was removed, or is beside those that are self.
                continue
            if change.state == "evicted":
                self.totals["evictions"] += 1
                where = f" on {before.host}" if before.host else ""
                self._decided(f"job {change.job}{where} was evicted: {change.reason or 'no reason given'}")
            elif change.state == "held" and change.by_hand:  # To ask for another would defeat that.
                self.totals["holds"] += 1
                self.held_by = change.reason
                self._tell_trouble(
                    f"job {change.job} was put on hold, and stays so until it is released: {change.reason}"
                )
            elif change.state == "held":
                self.totals["holds"] += 1
                self.give_up([change.job])
                self._failed(f"job {change.job} was put on hold, and is given up: {change.reason}")
            elif change.state == "ended" and not before.joined and before.state != "evicted":
                words = explaining_line(self.provider.last_words(change.job))
                self.lost = f"workers end before they join ({change.reason}): {words}"
                self._failed(self.lost)
            elif change.state == "running":
                self.has, self.survey_at = "", 0.0
        if news:
            with self.shared.condition:
                self.shared.news += news
            self.shared.changed()

    def _failed(self, trouble: str) -> None:
        """Report a failure, unless it was reported lately, and pause."""
        self.totals["failures"] += 1
        now = time.monotonic()
        with self.shared.condition:
            pause = self.jobs.failed(now)
        if self._tell_trouble(trouble):
            self._decided(f"nothing more is asked for in the next {pause:.1f} s")

    def _tell_trouble(self, trouble: str) -> bool:
        """Report a failure unless it was reported lately; return whether it was reported now."""
        # Jobs' numbers differ where the trouble is the same.
        kind = "".join(" " if letter.isdigit() else letter for letter in trouble)
        now = time.monotonic()
        if now < self.told.get(kind, now):
            return False
        self.told[kind] = now + _REMIND_SECONDS
        self.shared.troubled(self.name, trouble)
        return True

    def give_up(self, jobs: list[str]) -> None:
        """Drop jobs from those that are held; the thread then removes them from the batch system."""
        with self.shared.condition:
            self.jobs.removed(jobs)
            self.removing += jobs

    def _remove(self) -> None:
        """Remove from the batch system what was given up; retry later where it cannot be reached."""
        now = time.monotonic()
        with self.shared.condition:
            jobs = list(self.removing) if now >= self.remove_at else []
            self.remove_at = now + _REMOVE_SECONDS if jobs else self.remove_at
        if jobs:
            self.provider.remove(jobs)
            self.totals["removed"] += len(jobs)
            with self.shared.condition:
                del self.removing[: len(jobs)]
                self.remove_at = 0.0

    def _exclude(self) -> None:
        """Keep the tier's jobs from hosts; those that cannot be changed are submitted again."""
        now = time.monotonic()
        with self.shared.condition:
            if not self.excluding or now < self.exclude_at:
                return
            hosts, jobs = self.job.excluded, list(self.jobs.jobs)
            self.exclude_at = now + _REMOVE_SECONDS  # If it fails.
        anew = self.provider.exclude(jobs, hosts) if isinstance(self.provider, Excluding) else None
        with self.shared.condition:
            self.excluding = self.job.excluded != hosts
            self.exclude_at = 0.0
        if anew is None:
            return
        self.give_up(anew)
        where = f"not on {', '.join(hosts)}" if hosts else "on all hosts again"
        self._decided(f"asks for workers {where}" + (f": {counted(len(anew), 'job')} anew" if anew else ""))

    def _balance(self) -> None:
        with self.shared.condition:
            plan = self.jobs.plan(time.monotonic())
            wanted, held_now = self.jobs.wanted, len(self.jobs.jobs)
            if held_now >= wanted:
                self.down = ""  # Nobody is to be asked for.
        for job in plan.absent:
            words = explaining_line(self.provider.last_words(job))
            self.give_up([job])
            self.lost = f"workers run and do not join: {words}"
            self._failed(f"the worker of job {job} runs and does not join, so it is given up: {words}")
        if plan.surplus:
            self.give_up(list(plan.surplus))
            self._decided(f"gave up {counted(len(plan.surplus), 'job')} that waited: {wanted} wanted, {held_now} held")
        if plan.submit:
            jobs = self.provider.submit(self.job, plan.submit)
            with self.shared.condition:
                self.jobs.submitted(jobs, time.monotonic())
                self.meter.asked(jobs, self.job.gpus)
                self.down = ""
                if len(jobs) < plan.submit:  # A factory's provider grants no more just now, or a queue takes none.
                    self.jobs.pause(time.monotonic() + _LOOK_SECONDS)
            asked = [job for job in jobs if not self.shared.took_over(job)]
            if asked:
                self.totals["submissions"] += 1
                self.totals["submitted"] += len(asked)
                held_now += len(jobs) - len(asked)
                self._decided(f"asked for {counted(len(asked), 'worker')}: {wanted} wanted, {held_now} held")

    def _survey(self) -> None:
        """Find out which machines there are, and who uses their GPUs."""
        with self.shared.condition:
            asked, self.places.asked = self.places.asked, False
        if asked:
            machines, reason = machines_of(self.provider, self.job)
            with self.shared.condition:
                self.shared.machines.append((self.name, machines, reason))
            self.shared.changed()

    def _submit_pinned(self) -> None:
        """Submit the pinned workers; a job that is refused is not tried again."""
        with self.shared.condition:
            wanted, self.places.wanted = self.places.wanted, {}
        for pin, job in wanted.items():
            jobs = self.provider.submit(job, 1)
            with self.shared.condition:
                self.removing += self.places.submitted(pin, jobs)
                self.meter.asked(jobs, job.gpus)
            self._decided(f"asked for a worker with {counted(job.gpus, 'GPU')} in a place of its own")

    def _explain(self) -> None:
        """Find out whether any machine will do, where jobs only wait."""
        now = time.monotonic()
        with self.shared.condition:
            stuck = self.jobs.stuck(now, _STUCK_SECONDS)
        if not stuck or now < self.survey_at:
            return
        self.survey_at = now + _SURVEY_SECONDS
        survey = self.provider.survey(self.job)
        with self.shared.condition:
            self.has = survey_reason(survey)
        if not survey.may_submit:
            self.shared.troubled(self.name, f"its jobs wait, and no more are taken: {'; '.join(survey.advice)}")
        elif survey.machines == 0:
            why = "; ".join(survey.advice) or "change the tier's requirements"
            self.shared.troubled(self.name, f"its jobs wait in vain, since no machine will do: {why}")
        elif survey.machines is not None:
            self._decided(f"its jobs wait: {counted(survey.machines, 'machine')} would do, {survey.free} of them free")
