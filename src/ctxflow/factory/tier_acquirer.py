"""Hold the jobs of one tier at the number wanted.

`TierJobs` decides how many jobs to submit and which to give up: pure, no I/O, no clock. `TierAcquirer` does so, on a
thread of its own, since batch systems take their time, or hang.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ctxflow.causes import ShortfallCause
from ctxflow.errors import counted
from ctxflow.factory.condor_machines import Places, located_by
from ctxflow.factory.limits import SpendingMeter
from ctxflow.factory.provider import Excluding, JobChange, JobState, Provider, ProviderError, WorkerJob, explaining_line
from ctxflow.host.linux import advice, none_left

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_OFTEN = 0.2
_SURVEY_SECONDS = 300.0
_REMIND_SECONDS = 300.0  # The same failure is reported again only after so long.
_STILL_SECONDS = 300.0  # A queue in which nothing began for so long does not move.
_LONGEST_PAUSE = 60.0
_REMOVED_PAUSE = 600.0  # Once another user has removed jobs for the second time, and twice as long each time.
_LONGEST_REMOVED = 6 * 3600.0
_ONE_ACT = 10.0  # Seconds in which jobs that another user removes count as one removal.
_PATIENCE = 5  # Workers in a row that may be refused.


Connection = Literal["none", "connected", "joined"]
"""What the driver sees of a job's worker: that it answers, and that it takes calls."""


class JobStanding(NamedTuple):
    """What a job is to its tier.

    :ivar state: as which it is counted. :ivar waits: whether it is pending, and may be withdrawn.
    :ivar awaited: whether its worker is to join in time, or the job is given up.
    """

    state: str
    waits: bool
    awaited: bool


def reconciled(state: JobState, connection: Connection) -> JobStanding | None:
    """Return what a job is by the batch system's word and by what the driver sees; None if there is no such job.

    What the driver sees counts first: a batch system may lose sight of a worker that works on, or report a start late.

    >>> reconciled("evicted", "joined"), reconciled("ended", "none")
    (JobStanding(state='joined', waits=False, awaited=False), None)
    """
    if connection != "none":
        return JobStanding("joined" if connection == "joined" else "running", waits=False, awaited=False)
    if state == "ended":
        return None
    return JobStanding(state, waits=state != "running", awaited=state == "running")


@dataclasses.dataclass
class TrackedJob:
    """A job, as its batch system reports it.

    :ivar asked: when it was submitted or queued again. :ivar since: when its state changed, or its worker left, last.
    :ivar proven: whether a worker of its present start has joined, though that may be gone.
    :ivar host: the machine that it had last.
    """

    asked: float
    since: float
    state: JobState = "queued"
    proven: bool = False
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class NextJobs:
    """What to do about a tier's jobs now."""

    submit: int = 0
    surplus: tuple[str, ...] = ()  # Pending jobs that are not wanted any more.
    absent: tuple[str, ...] = ()  # Running jobs whose workers should have joined by now.


class TierJobs:
    """The jobs of a tier, and the pace at which more are submitted.

    Whenever all requested jobs have begun, twice as many may be pending from then on; when none has begun for five
    minutes, as many as at first (`waiting`). So a pool that gives much is filled in a few rounds, and one that gives
    nothing is not flooded. Each failure pauses submission, twice as long as the one before, until a worker joins.

    Batch states and connections are kept apart, and combined by `reconciled` alone.

    :param join_timeout: seconds that a job may run while no worker of it is connected.

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
        self._connections: dict[str, Connection] = {}  # Of all jobs whose workers are connected, submitted or not yet.
        self.refusals = 0  # In a row.
        self.first = self._most_waiting = waiting
        self._join_timeout = join_timeout
        self._moved = 0.0  # When a job last began, or the first of those that wait was asked for.
        self._failures = Counter[str]()  # In a row, by host; "" where that is not known.
        self._again_at = float("-inf")
        self._removals = 0  # How often another user removed jobs; when that was last, and until when that is heeded.
        self._removed_at = self._heeded = float("-inf")

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
        began = change.state == "running"
        job.asked = job.asked if began or job.state == "queued" else now
        job.state, job.since = change.state, now
        if began:
            job.host, job.proven = change.host, self._connection(change.job) == "joined"
            self._moved, self._most_waiting = now, allowed
            if not self._waiting():
                self._most_waiting = min(2 * allowed, max(self.first, self.wanted))
        self._drop_ended(change.job)
        return before

    def connected(self, job: str) -> None:
        """Record that a worker of a job is connected and answers."""
        self._connections.setdefault(job, "connected")

    def joined(self, job: str) -> None:
        """Record that the worker of a job has joined."""
        self._connections[job] = "joined"
        if job in self.jobs:
            self.jobs[job].proven = True
        self._failures.clear()
        self.refusals = 0
        self._again_at = float("-inf")

    def disconnected(self, job: str, now: float) -> None:
        """Record that no worker of a job is connected any more; its job may start another."""
        self._connections.pop(job, None)
        if job in self.jobs:
            self.jobs[job].since = now
            self._drop_ended(job)

    def removed(self, jobs: list[str]) -> None:
        """Forget jobs that were given up."""
        for job in jobs:
            self.jobs.pop(job, None)

    def failed(self, now: float, refused: bool = False, host: str | None = None) -> float:
        """Record a failure, of a job on a host if that is known; return the seconds until more is submitted."""
        self._failures[host or ""] += 1
        self.refusals += refused
        pause = min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(self._failures.total(), 10))
        self._again_at = now + pause
        return pause

    def removed_by_others(self, now: float) -> float:
        """Record that another user removed a job; return the seconds until more is submitted, 0 the first time."""
        if now > self._removed_at + _ONE_ACT:
            self._removals = 1 + (self._removals if now < self._heeded + _LONGEST_REMOVED else 0)
            pause = min(_LONGEST_REMOVED, _REMOVED_PAUSE * 2.0 ** (self._removals - 2)) if self._removals > 1 else 0.0
            self._heeded = now + pause
        self._removed_at = now
        return max(0.0, self._heeded - now)

    def lacks_removed(self, now: float) -> bool:
        """Return whether workers are lacking since somebody else removed jobs: lately, or the pause for it goes on."""
        return now < max(self._heeded, self._removed_at + _REMOVED_PAUSE)

    def pause_left(self, now: float) -> float:
        """Return the seconds for which nothing is submitted, since something failed or another user removes jobs."""
        return max(0.0, self._again_at - now, self._heeded - now)

    def excluded(self, hosts: Sequence[str]) -> None:
        """Record that no more is asked for on these hosts: a pause that failures there alone have led to is over."""
        before = self._failures.total()
        for host in hosts:
            self._failures.pop(host, None)
        if before and not self._failures:
            self._again_at = float("-inf")

    def pause(self, until: float) -> None:
        """Submit nothing more before then."""
        self._again_at = max(self._again_at, until)

    @property
    def hopeless(self) -> bool:
        """Whether workers are refused one after the other, so that others like them will be, too."""
        return self.refusals >= _PATIENCE and "joined" not in self._connections.values()

    def due(self, now: float) -> bool:
        """Return whether there is something to do."""
        return self.plan(now) != NextJobs()

    def plan(self, now: float) -> NextJobs:
        """Return what to do now."""
        surplus = len(self.jobs) - self.wanted
        waiting = self._waiting()
        if surplus > 0:
            return NextJobs(surplus=tuple(waiting[-surplus:]), absent=self._absent(now))
        room = 0 if self.pause_left(now) else min(-surplus, self._allowed(now) - len(waiting))
        return NextJobs(submit=max(0, room), absent=self._absent(now))

    def stuck(self, now: float, patience: float) -> bool:
        """Return whether jobs have waited longer than the patience, and none runs."""
        waiting = self._waiting()
        return len(waiting) == len(self.jobs) > 0 and all(now - self.jobs[job].asked > patience for job in waiting)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in which state; "joined" are those whose workers have."""
        counts = dict.fromkeys(("queued", "running", "joined", "evicted", "held"), 0)
        for name in self.jobs:
            counts[self._standing(name).state] += 1
        return counts

    def _connection(self, job: str) -> Connection:
        return self._connections.get(job, "none")

    def _standing(self, job: str) -> JobStanding:
        found = reconciled(self.jobs[job].state, self._connection(job))
        assert found is not None, "an ended job is dropped when its worker is gone"
        return found

    def _drop_ended(self, job: str) -> None:
        if reconciled(self.jobs[job].state, self._connection(job)) is None:
            del self.jobs[job]

    def _allowed(self, now: float) -> int:
        """Return how many may wait: as many as at first, where none of those that wait has moved for long."""
        return self.first if self._waiting() and now - self._moved > _STILL_SECONDS else self._most_waiting

    def _waiting(self) -> list[str]:
        return [name for name in self.jobs if self._standing(name).waits]

    def _absent(self, now: float) -> tuple[str, ...]:
        late = now - self._join_timeout
        return tuple(name for name, job in self.jobs.items() if job.since < late and self._standing(name).awaited)


def _has_failed(change: JobChange, before: TrackedJob) -> bool:
    """Return whether a job ends, or is held by the batch system itself, without a worker that ever joined."""
    if before.proven or before.state == "evicted" or change.by_hand:
        return False
    return change.state in ("ended", "held")


def _on(host: str | None) -> str:
    return f" on {host}" if host else ""


@dataclasses.dataclass(frozen=True)
class AcquirerPatience:
    """How long an acquirer waits for batch systems, in seconds.

    :ivar stuck: for jobs to begin, before it asks whether any machine will do.
    :ivar remove: for jobs to be removed, before it asks again.
    :ivar end: for what is being asked, at the acquirer's end.
    """

    stuck: float = 10.0
    remove: float = 10.0
    end: float = 60.0


@dataclasses.dataclass
class AcquirerState:
    """What an acquirer shares with its tiers' threads; `condition` guards it and the tiers' fields."""

    changed: Callable[[], None]
    decided: Callable[[str, str], None]  # Called with a tier and a sentence for each decision; the next, each failure.
    troubled: Callable[[str, str], None]
    took_over: Callable[[str], bool]
    patience: AcquirerPatience
    condition: threading.Condition = dataclasses.field(default_factory=threading.Condition)  # Reentrant.
    look_until: float = 0.0
    stopped: bool = False
    news: list[tuple[str, JobChange]] = dataclasses.field(default_factory=list)
    # Answers to surveys: tier, its machines' topologies by name, and why none.
    machines: list[tuple[str, dict[str, Any], str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class TierAcquirer:
    """One tier of an acquirer: its provider, what one worker is, its jobs, and the thread that manages them."""

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
    held_by: str = ""  # Why jobs were put on hold by hand.
    removed_by: str = ""  # Why somebody else removed jobs last.
    unasked: bool = False  # Whether jobs could not be submitted when that was tried last: `down` stays then.
    reported: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # Failure -> until when it is not reported again.
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
                self._poll()
                self._exclude()
                # First, so that GPUs that are given up go to no job of ours that waits.
                self._balance()
                self._remove()
                self._survey()
                self._submit_pinned()
                self._explain()
                if not self.unasked:
                    self.down = ""
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

    def _poll(self) -> None:
        news = []
        for change in self.provider.changes():
            now = time.monotonic()
            with self.shared.condition:
                before = self.jobs.changed(change, now)
                self.meter.changed(change, now)
            waited = now - before.asked if before is not None and change.state == "running" else None
            host = change.host or (before.host if before is not None else None)
            failed = before is not None and _has_failed(change, before)
            news.append((self.name, dataclasses.replace(change, waited=waited, host=host, failed=failed)))
            if before is None:  # It was removed, or is pinned.
                continue
            if change.state == "evicted":
                self.totals["evictions"] += 1
                where = f" on {before.host}" if before.host else ""
                self._decided(f"job {change.job}{where} was evicted: {change.reason or 'no reason given'}")
            elif change.state == "held":
                self.totals["holds"] += 1
                hold = f"job {change.job} was put on hold, and"
                if change.by_hand:  # To ask for another would defeat that.
                    self.held_by = change.reason
                    self._report(f"{hold} stays so until it is released: {change.reason}")
                else:
                    self.give_up([change.job])
                    self.lost = f"jobs are put on hold{_on(host)}, and given up: {change.reason}"
                    self._failed(f"{hold} is given up: {change.reason}", host)
            elif change.state == "ended" and change.by_hand:
                self._removed(change)
            elif failed:
                words = explaining_line(self.provider.last_words(change.job))
                self.lost = f"workers end before they join{_on(host)} ({change.reason}): {words}"
                self._failed(self.lost, host)
            elif change.state == "running":
                self.has, self.survey_at = "", 0.0
        if news:
            with self.shared.condition:
                self.shared.news += news
            self.shared.changed()

    def _removed(self, change: JobChange) -> None:
        """Report a job that another user removed; from the second time on that is heeded for a while."""
        self.removed_by = change.reason
        with self.shared.condition:
            pause = self.jobs.removed_by_others(time.monotonic())
        then = f"again: nothing more is asked for in the next {pause:.0f} s" if pause else "and another is asked for"
        self._report(f"job {change.job} was removed by another user, {then}: {change.reason}")

    def causes(self, now: float, wall: float) -> list[ShortfallCause]:
        """Return why there are fewer workers than are wanted, none if there are not; to be called with the lock.

        :param now: by the monotonic clock; `wall`: the same in seconds since 1970.
        """
        counts = self.jobs.counts()
        if counts["joined"] >= self.jobs.wanted:
            return []
        left, removed = self.jobs.pause_left(now), self.jobs.lacks_removed(now)
        whys = {"hold": self.held_by, "removed": self.removed_by}
        return [
            ShortfallCause(
                kind, text, whys.get(kind, ""), self.name, until=round(wall + left) if kind == "back-off" else None
            )
            for kind, text in shortfall(counts, self.down, self.lost, self.has, removed, left > 0)
        ]

    def _failed(self, trouble: str, host: str | None = None) -> None:
        """Report a failure, unless it was reported lately, and pause."""
        self.totals["failures"] += 1
        now = time.monotonic()
        with self.shared.condition:
            pause = self.jobs.failed(now, host=host)
        if self._report(trouble):
            self._decided(f"nothing more is asked for in the next {pause:.1f} s")

    def _report(self, trouble: str) -> bool:
        """Report a failure unless it was reported lately; return whether it was reported now."""
        # Jobs' numbers differ where the trouble is the same.
        kind = "".join(" " if letter.isdigit() else letter for letter in trouble)
        now = time.monotonic()
        if now < self.reported.get(kind, now):
            return False
        self.reported[kind] = now + _REMIND_SECONDS
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
            self.remove_at = now + self.shared.patience.remove if jobs else self.remove_at
        if not jobs:
            return
        try:
            self.provider.remove(jobs)
        except ProviderError as error:  # That jobs stay is no reason why workers are lacking.
            self.totals["failures"] += 1
            self._report(f"{error}{advice(error.__cause__ or error.__context__)}; it is tried again")
            return
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
            self.exclude_at = now + self.shared.patience.remove  # If it fails.
        anew = self.provider.exclude(jobs, hosts) if isinstance(self.provider, Excluding) else None
        with self.shared.condition:
            self.excluding = self.job.excluded != hosts
            self.exclude_at = 0.0
        if anew is None:
            return
        with self.shared.condition:
            self.jobs.excluded(hosts)
        self.give_up(anew)
        where = f"not on {', '.join(hosts)}" if hosts else "on all hosts again"
        self._decided(f"asks for workers {where}" + (f": {counted(len(anew), 'job')} anew" if anew else ""))

    def _balance(self) -> None:
        with self.shared.condition:
            plan = self.jobs.plan(time.monotonic())
            wanted, held_now = self.jobs.wanted, len(self.jobs.jobs)
            if held_now >= wanted:
                self.unasked = False  # Nobody is to be asked for.
        for job in plan.absent:
            words = explaining_line(self.provider.last_words(job))
            with self.shared.condition:
                known = self.jobs.jobs.get(job)
                host = known.host if known is not None else None
                self.shared.news.append((self.name, JobChange(job, "ended", words, host, failed=True)))
            self.give_up([job])
            self.lost = f"workers run and do not join{_on(host)}: {words}"
            self._failed(f"the worker of job {job}{_on(host)} runs and does not join, so it is given up: {words}", host)
            self.shared.changed()
        if plan.surplus:
            self.give_up(list(plan.surplus))
            self._decided(f"gave up {counted(len(plan.surplus), 'job')} that waited: {wanted} wanted, {held_now} held")
        if plan.submit:
            self.unasked = True
            jobs = self.provider.submit(self.job, plan.submit)
            with self.shared.condition:
                self.jobs.submitted(jobs, time.monotonic())
                self.meter.submitted(jobs, self.job.gpus)
                self.unasked = False
                if len(jobs) < plan.submit:  # A factory's provider grants no more just now, or a queue takes none.
                    self.jobs.pause(time.monotonic() + _LOOK_SECONDS)
            asked = [job for job in jobs if not self.shared.took_over(job)]
            if asked:
                self.totals["submissions"] += 1
                self.totals["submitted"] += len(asked)
                held_now += len(jobs) - len(asked)
                self._decided(f"asked for {counted(len(asked), 'worker')}: {wanted} wanted, {held_now} held")

    def _survey(self) -> None:
        """Survey which machines there are, and who uses their GPUs."""
        with self.shared.condition:
            asked, self.places.asked = self.places.asked, False
        if asked:
            machines, reason = located_by(self.provider, self.job)
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
                self.meter.submitted(jobs, job.gpus)
            self._decided(f"asked for a worker with {counted(job.gpus, 'GPU')} in a place of its own")

    def _explain(self) -> None:
        """Survey whether any machine will do, where all jobs are pending."""
        now = time.monotonic()
        with self.shared.condition:
            stuck = self.jobs.stuck(now, self.shared.patience.stuck)
        if not stuck or now < self.survey_at:
            return
        self.survey_at = now + _SURVEY_SECONDS
        survey = self.provider.survey(self.job)
        with self.shared.condition:
            self.has = survey.reason()
        if not survey.may_submit:
            self.shared.troubled(self.name, f"its jobs wait, and no more are taken: {'; '.join(survey.advice)}")
        elif survey.machines == 0:
            why = "; ".join(survey.advice) or "change the tier's requirements"
            self.shared.troubled(self.name, f"its jobs wait in vain, since no machine will do: {why}")
        elif survey.machines is not None:
            self._decided(f"its jobs wait: {counted(survey.machines, 'machine')} would do, {survey.free} of them free")


def shortfall(
    counts: Mapping[str, int], down: str = "", lost: str = "", has: str = "", removed: bool = False, pause: bool = False
) -> list[tuple[str, str]]:
    """Return why a tier has fewer workers than are wanted: kinds of causes, and what is so.

    :param counts: how many jobs are in which state.
    :param down: why the batch system cannot be used; `lost`: why workers never join; `has`: what it has for them.
    :param removed: whether another user removed jobs; `pause`: whether nothing is submitted for a while.

    >>> shortfall({"queued": 2})
    [('queue', '2 jobs wait for machines')]
    >>> [kind for kind, _ in shortfall({"held": 1, "queued": 1, "running": 3}, has="all 4 machines are busy")]
    ['hold', 'queue', 'starting']
    >>> shortfall({"held": 2}, has="4 machines would do, and 4 of them are free: its jobs are to start soon")
    [('hold', '2 jobs are put on hold until they are released')]
    """
    parts = []
    if many := counts.get("held", 0):
        until = "is put on hold until it is" if many == 1 else "are put on hold until they are"
        parts.append(("hold", f"{counted(many, 'job')} {until} released"))
    if removed:
        parts.append(("removed", "jobs were removed by another user"))
    if down or lost:
        parts.append(("down", down) if down else ("lost", lost))
    many = counts.get("queued", 0)
    if has and (many or counts.get("evicted", 0)):
        parts.append(("queue", has))
    elif many:
        parts.append(("queue", f"{counted(many, 'job')} {'waits for a machine' if many == 1 else 'wait for machines'}"))
    if many := counts.get("evicted", 0):
        again = "was evicted, and waits" if many == 1 else "were evicted, and wait"
        parts.append(("evicted", f"{counted(many, 'job')} {again} to run again"))
    if many := counts.get("running", 0):
        parts.append(("starting", f"{counted(many, 'worker')} {'starts' if many == 1 else 'start'}"))
    if pause:
        parts.append(("back-off", "nothing more is asked for"))
    return parts
