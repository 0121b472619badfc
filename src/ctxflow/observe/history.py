"""What happened in a run: who was there, what was done when, and why something failed.

Failures that differ in numbers and paths alone have one cause. history_reader.py reads a history from an event log.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from ctxflow.observe.accounts import Accounts
from ctxflow.observe.load_times import LoadTimes, load_times_data
from ctxflow.observe.measures import Histogram, Timeline, percentiles

_PLANNED = ("tiers", "workers", "holders", "shares", "reasons", "margins")  # Earlier logs have no margins.
MOST = 500  # Causes that are kept apart.
_LONGEST = 300
_KEPT = 6_000  # Characters of a message, of a traceback's end and of output's.
# What a dead letter calls an error whose message is not the worker's.
_WRAPPED = {"CallCrashed", "CallTimeout", "WorkersLost", "RemoteError"}
_REPLACED = [
    (r"(?<![\w.])~?(?:/[\w.@%+~-]+){2,}/?|(?<![\w/])~?/[\w.@%+~-]+\.\w+", "PATH"),
    (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b0x[0-9a-fA-F]+\b", "ID"),
    (r"\b(?=[a-f]*\d)[0-9a-f]{12,}\b(?<!\d{12})", "ID"),
    (r"\d+(?:[.,:_]\d+)*(?:[eE][+-]?\d+)?", "N"),
    (r"\s+", " "),
]


@functools.cache
def _replaced() -> list[tuple[re.Pattern[str], str]]:
    """Compile what is replaced: at the first failure, since it takes longer than most of what a driver imports."""
    return [(re.compile(expression), name) for expression, name in _REPLACED]


def pattern(message: str) -> str:
    """Return a message without what differs from time to time: its numbers, ids and paths."""
    text = message[: 4 * _LONGEST]
    for expression, name in _replaced():
        text = expression.sub(name, text)
    return text.strip()[:_LONGEST]


@dataclasses.dataclass
class Cause:
    """Failures that have one cause.

    :ivar error: the name of the exception, or what kind of failure it was; `pattern`: its message without numbers.
    :ivar calls, contexts: how many failed; `items`: how many died of it; `rows`: of a batch job's dead letters.
    :ivar message, traceback, output, where: of the first that was seen; `place`: of the first dead letter's row.
    """

    error: str
    pattern: str
    message: str = ""
    traceback: str = ""
    output: str = ""
    where: str = ""
    place: str = ""
    calls: int = 0
    contexts: int = 0
    items: int = 0
    rows: int = 0

    @property
    def count(self) -> int:
        """What causes are ordered by: items lost for good, or else failures."""
        return max(self.rows, self.items) or self.calls + self.contexts


@dataclasses.dataclass
class Causes:
    """The causes of a run's failures. Beyond `MOST`, those of further causes are one together."""

    found: dict[tuple[str, str], Cause] = dataclasses.field(default_factory=dict)
    _by_pattern: dict[str, Cause] = dataclasses.field(default_factory=dict)

    def ordered(self) -> list[Cause]:
        """Return the causes, that of the most failures first."""
        return sorted(self.found.values(), key=lambda cause: -cause.count)

    def call(self, failure: dict[str, Any]) -> None:
        """Count a failed call."""
        self._of(failure).calls += 1

    def context(self, failure: dict[str, Any]) -> None:
        """Count a context that could not be built."""
        self._of(failure).contexts += 1

    def bury(self, failure: dict[str, Any], items: int) -> None:
        """Count items that died."""
        self._of(failure).items += items

    def dead_letters(self, lines: Iterable[bytes]) -> None:
        """Count the rows of a batch job's dead letters; lines that are none are passed over."""
        for text in lines:
            try:
                letter = json.loads(text)
                error, message = letter["error"]["code"], letter["error"]["message"]
            except (ValueError, KeyError, TypeError):
                continue
            known = None
            if error in _WRAPPED:
                name, separator, rest = message.partition(": ")
                if error == "RemoteError" and separator:
                    error, message = name, rest
                else:
                    known = self._by_pattern.get(pattern(message))
            cause = known or self._cause(str(error), str(message))
            cause.rows += 1
            if not cause.place:
                cause.place = str(letter.get("place") or "")
                cause.traceback = cause.traceback or str(letter.get("traceback") or "")[-_KEPT:]

    def _of(self, failure: dict[str, Any]) -> Cause:
        cause = self._cause(failure.get("error") or failure["kind"], failure.get("message") or "")
        if not cause.where:
            places = [f"worker {failure['worker']}" if failure.get("worker") else "", failure.get("host") or ""]
            cause.where = " on ".join(filter(None, places))
            cause.traceback = (failure.get("traceback") or "")[-_KEPT:]
            cause.output = (failure.get("output") or "")[-_KEPT:]
        return cause

    def _cause(self, error: str, message: str) -> Cause:
        key = (error, pattern(message))
        cause = self.found.get(key)
        if cause is None:
            if len(self.found) >= MOST:
                key, message = ("other causes", ""), "these are too many to keep apart"
            cause = self.found.setdefault(key, Cause(*key, message=message[:_KEPT]))
            self._by_pattern.setdefault(key[1], cause)
        return cause


@dataclasses.dataclass
class Items:
    """How many items ended how. `run_again`: how often one ran that had run before."""

    submitted: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    run_again: int = 0

    @property
    def open(self) -> int:
        """Items without an answer when the log ends."""
        return self.submitted - self.done - self.dead - self.cancelled


@dataclasses.dataclass
class TierHistory:
    """What one tier contributed. Times in seconds.

    :ivar lost: workers that went; `evicted`, those of them that were taken back, after `lifetimes`; `returned`, those
        that ctxflow gave back.
    :ivar stays: how long those were there that were not evicted, the ones that were there to the end included.
    :ivar counts: (time, workers connected from then on).
    :ivar jobs_started: jobs that began to run; where it is known, they had waited as long as in `waits`.
    :ivar held: how often a job was held, by the reason.
    :ivar done: items, over time; `chunks` of sessions.
    """

    joined: int = 0
    lost: int = 0
    evicted: int = 0
    returned: int = 0
    items_done: int = 0
    lifetimes: list[float] = dataclasses.field(default_factory=list)
    stays: list[float] = dataclasses.field(default_factory=list)
    jobs_started: int = 0
    jobs_evicted: int = 0
    waits: Histogram = dataclasses.field(default_factory=Histogram)
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    worker_seconds: float = 0.0
    counts: list[tuple[float, int]] = dataclasses.field(default_factory=lambda: [(0.0, 0)])
    done: Timeline = dataclasses.field(default_factory=Timeline)
    chunks: Timeline = dataclasses.field(default_factory=Timeline)

    def connected(self, time: float, change: int) -> None:
        """Record that workers came or went."""
        since, before = self.counts[-1]
        self.worker_seconds += before * (time - since)
        self.counts.append((time, before + change))

    @property
    def unexplained(self) -> int:
        """Workers that were lost for no known reason."""
        return self.lost - self.evicted - self.returned

    @property
    def eviction_rate(self) -> float | None:
        """Evictions for each hour that a worker was connected; None if none ever was."""
        return 3600 * self.evicted / self.worker_seconds if self.worker_seconds else None

    def survival(self) -> list[tuple[float, float]]:
        """Return (age, share of workers evicted by that age) where one was: Kaplan and Meier's estimate.

        Workers that were not evicted count for as long as they were there.
        """
        ends = sorted([(age, 0) for age in self.lifetimes] + [(age, 1) for age in self.stays])
        points, left = [], 1.0
        for n, (age, stayed) in enumerate(ends):
            if not stayed:
                left *= 1 - 1 / (len(ends) - n)
                points.append((age, 1 - left))
        return points


@dataclasses.dataclass
class AppHistory:
    """The calls of one app: their durations, and those divided by their items. Failed calls are in neither."""

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)  # How it was declared.
    calls: int = 0
    items: int = 0
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    call_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    item_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class ContextLoads:
    """How often a context was built, or woken where it was parked, how long that took, where the time of builds went.

    :ivar failed: how often a build failed.
    """

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    staged: int = 0
    failed: int = 0
    load_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    times: LoadTimes = dataclasses.field(default_factory=LoadTimes)
    wake_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class HostFigures:
    """What was done on a host, and what went wrong there.

    :ivar calls: that ended well; `failed`, those that did not; `contexts_failed`, contexts that could not be built.
    :ivar lost: workers that were lost, without those that were evicted or given back; `quarantines`, how often it, or a
        worker of it, got no work for a while; `jobs_failed`, jobs that ended there before their workers joined.
    """

    joined: int = 0
    calls: int = 0
    failed: int = 0
    contexts_failed: int = 0
    lost: int = 0
    evicted: int = 0
    quarantines: int = 0
    jobs_failed: int = 0

    @property
    def trouble(self) -> int:
        """How often something went wrong there."""
        return self.failed + self.contexts_failed + self.lost + self.quarantines + self.jobs_failed


@dataclasses.dataclass
class History:
    """What happened in a run. Times in seconds on the run's clock.

    :ivar duration: the time of the last event.
    :ivar losses: (time, whether it was an eviction) of each worker that was lost and had not been given back.
    :ivar apps: by id, as are `contexts`; `tiers` by name.
    :ivar accounts: what the workers' time went into; `load_times`: what that of loads did; `causes`: why calls,
        contexts and items failed.
    :ivar chunks: that sessions got.
    :ivar simulated: whether it was a run in virtual time, without workers.
    :ivar plans, quarantines: (since when, the command) of each placement, and of each bad host or worker, in order.
    """

    duration: float = 0.0
    events: int = 0
    items: Items = dataclasses.field(default_factory=Items)
    chunks: int = 0
    workers: TierHistory = dataclasses.field(default_factory=TierHistory)
    tiers: dict[str, TierHistory] = dataclasses.field(default_factory=dict)
    apps: dict[str, AppHistory] = dataclasses.field(default_factory=dict)
    contexts: dict[str, ContextLoads] = dataclasses.field(default_factory=dict)
    losses: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    notices: int = 0
    hosts: set[str] = dataclasses.field(default_factory=set)
    by_host: dict[str, HostFigures] = dataclasses.field(default_factory=dict)
    accounts: Accounts = dataclasses.field(default_factory=Accounts)
    load_times: LoadTimes = dataclasses.field(default_factory=LoadTimes)
    causes: Causes = dataclasses.field(default_factory=Causes)
    plans: list[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=list)
    quarantines: list[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=list)
    simulated: bool = False

    @property
    def mean_workers(self) -> float:
        """Workers connected, averaged over the run."""
        return self.workers.worker_seconds / self.duration if self.duration else float(self.workers.counts[-1][1])

    @property
    def peak_workers(self) -> int:
        """The most workers connected at a time."""
        return max(count for _, count in self.workers.counts)


def history_data(history: History) -> dict[str, Any]:
    """Return a history as data for JSON."""
    return {
        "duration": history.duration,
        "events": history.events,
        "items": {**dataclasses.asdict(history.items), "open": history.items.open},
        "workers": {"mean": history.mean_workers, "peak": history.peak_workers, "notices": history.notices,
                    **_tier_data(history.workers)},
        "hosts": sorted(history.hosts),
        "by_host": {name: dataclasses.asdict(host) for name, host in sorted(history.by_host.items())},
        "tiers": {name: _tier_data(tier) for name, tier in history.tiers.items()},
        "plans": [
            {"since": time, **{key: plan.get(key, ()) for key in _PLANNED}}
            for time, plan in history.plans
        ],
        "quarantines": [
            {"since": time, **{key: each[key] for key in ("host", "worker", "devices", "cause", "until")}}
            for time, each in history.quarantines
        ],
        "losses": [{"time": time, "evicted": evicted} for time, evicted in history.losses],
        "apps": {
            id: {
                "name": app.name, "calls": app.calls, "items": app.items, "failed": app.failed,
                "call_seconds": app.call_seconds.summary(), "item_seconds": app.item_seconds.summary(),
            }
            for id, app in history.apps.items()
        },
        "contexts": {
            id: {
                "name": context.name, "staged": context.staged, "failed": context.failed,
                "load_seconds": context.load_seconds.summary(), "load_parts": load_times_data(context.times),
                "wake_seconds": context.wake_seconds.summary(),
            }
            for id, context in history.contexts.items()
        },
    }  # fmt: skip


def _tier_data(tier: TierHistory) -> dict[str, Any]:
    lifetimes = {"count": len(tier.lifetimes), **(percentiles(tier.lifetimes) if tier.lifetimes else {})}
    return {
        "joined": tier.joined, "lost": tier.lost, "evicted": tier.evicted, "unexplained": tier.unexplained,
        "returned": tier.returned, "items_done": tier.items_done, "worker_seconds": tier.worker_seconds,
        "evictions_per_worker_hour": tier.eviction_rate, "lifetimes": lifetimes, "survival": tier.survival(),
        "jobs_started": tier.jobs_started, "jobs_evicted": tier.jobs_evicted, "queue_seconds": tier.waits.summary(),
        "held": tier.held, "workers": tier.counts, "completed": tier.done.cumulated(),
    }  # fmt: skip
