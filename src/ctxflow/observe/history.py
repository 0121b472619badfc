"""The history of a run, read from its event log in one pass and little memory: who was there, what was done when.

What does not live here: what the workers' time went into (accounts.py), why things failed (causes.py), transfers
between workers (transfers.py), and how it is shown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ctxflow.observe.accounts import Accounts, AccountsReader
from ctxflow.observe.causes import Causes
from ctxflow.observe.measures import Histogram, Seen, Timeline


@dataclasses.dataclass
class Items:
    """How many items came to what. `run_again`: how often one ran that had run before."""

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
class Tier:
    """What one tier gave. Times in seconds.

    :ivar lost: workers that went, for whatever reason.
    :ivar evicted: those of them that were taken back; their times from joining until then are in `lifetimes`.
    :ivar returned: those that ctxflow gave back.
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
        """Workers came or went."""
        since, before = self.counts[-1]
        self.worker_seconds += before * (time - since)
        self.counts.append((time, before + change))

    @property
    def unexplained(self) -> int:
        """Workers that were lost without anybody knowing why."""
        return self.lost - self.evicted - self.returned

    @property
    def eviction_rate(self) -> float | None:
        """Evictions for each hour that a worker was connected; None if none ever was."""
        return 3600 * self.evicted / self.worker_seconds if self.worker_seconds else None

    def survival(self) -> list[tuple[float, float]]:
        """(age, share of workers evicted by that age), for each age at which one was: Kaplan and Meier's estimate.

        Workers that were not evicted count for as long as they were there; left out, as in a plain distribution of
        lifetimes, they would make a tier look the worse the longer it lets workers live.

        >>> Tier(lifetimes=[1.0, 2.0], stays=[1.5, 9.0]).survival()
        [(1.0, 0.25), (2.0, 0.625)]
        """
        ends = sorted([(age, 0) for age in self.lifetimes] + [(age, 1) for age in self.stays])
        points, left = [], 1.0
        for n, (age, stayed) in enumerate(ends):
            if not stayed:
                left *= 1 - 1 / (len(ends) - n)
                points.append((age, 1 - left))
        return points


@dataclasses.dataclass
class App:
    """The calls of one app: their durations, and those divided by their items. Failed calls are in neither.

    :ivar spec: how it was declared; that of a context likewise.
    """

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: int = 0
    items: int = 0
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    call_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    item_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class ContextLoads:
    """How often a context was built, how long that took, and how often it failed."""

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    staged: int = 0
    failed: int = 0
    load_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class History:
    """What happened in a run. Times in seconds on the run's clock.

    :ivar duration: the time of the last event.
    :ivar losses: (time, whether it was an eviction) of each worker that was lost and had not been given back.
    :ivar apps: by id, as are `contexts`; `tiers` by name.
    :ivar accounts: what the workers' time went into; `causes`: why calls, contexts and items failed.
    :ivar chunks: that sessions got.
    :ivar plans: (since when, the `Place` command) of each placement that held, in order.
    """

    duration: float = 0.0
    events: int = 0
    items: Items = dataclasses.field(default_factory=Items)
    chunks: int = 0
    workers: Tier = dataclasses.field(default_factory=Tier)
    tiers: dict[str, Tier] = dataclasses.field(default_factory=dict)
    apps: dict[str, App] = dataclasses.field(default_factory=dict)
    contexts: dict[str, ContextLoads] = dataclasses.field(default_factory=dict)
    losses: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    notices: int = 0
    hosts: set[str] = dataclasses.field(default_factory=set)
    accounts: Accounts = dataclasses.field(default_factory=Accounts)
    causes: Causes = dataclasses.field(default_factory=Causes)
    plans: list[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=list)

    @property
    def mean_workers(self) -> float:
        """Workers connected, averaged over the run."""
        return self.workers.worker_seconds / self.duration if self.duration else float(self.workers.counts[-1][1])

    @property
    def peak_workers(self) -> int:
        """The most workers connected at a time."""
        return max(count for _, count in self.workers.counts)


def read_history(lines: Iterable[str]) -> History:
    r"""The history that an event log tells.

    Takes time in proportion to the log, and memory for a byte an item and some for every worker there was. The log
    of a run that is going on, or was killed, may end in the middle of a line.

    :param lines: the lines of events.jsonl, with their ends.
    :raises ValueError: for a line that is no line of an event log, saying which.

    >>> joined = '{"event":{"is":"WorkerJoined","time":1.5,"worker":{"id":"w","host":"h","tier":"a10"}},"commands":[]}'
    >>> history = read_history([joined + "\n", '{"event":{"is":"Tick","time":3.0}'])
    >>> history.duration, history.workers.counts, list(history.tiers)
    (1.5, [(0.0, 0), (1.5, 1)], ['a10'])
    """
    reader = _Reader()
    for number, (text, last) in enumerate(_with_last(lines), 1):
        try:
            record = json.loads(text)
            if number > 1 or "run" not in record:  # The first line says how the run decides.
                reader.take(record["event"], record["commands"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if last and not text.endswith("\n"):
                break
            raise ValueError(
                f"line {number} is no line of an event log ({error}): is this the run's events.jsonl?"
            ) from None
    reader.end()
    return reader.history


def _with_last(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    held: str | None = None
    for text in lines:
        if held is not None:
            yield held, False
        held = text
    if held is not None:
        yield held, True


class _Reader:
    """Takes one event after another into a history."""

    def __init__(self) -> None:
        self.history = History()
        self._tier_of: dict[str, Tier] = {}  # By worker; also of those that are gone, whose answers may come late.
        self._joined_at: dict[str, float] = {}
        self._noticed_ones: set[str] = set()
        self._released: set[str] = set()
        self._running: dict[str, dict[int, tuple[str, int]]] = {}  # Worker -> attempt -> its app, and how many items.
        self._answered: dict[int, int] = {}  # Attempt -> how many items it has answered one by one.
        self._ran, self._closed = Seen(), Seen()
        self._accounts = AccountsReader(self.history.accounts)
        self._takes = {
            "WorkerJoined": self._joined,
            "WorkerLost": self._lost,
            "EvictionNotice": self._noticed,
            "TierOffered": self._offered,
            "JobStarted": self._job_started,
            "JobEvicted": self._job_evicted,
            "JobHeld": self._job_held,
            "ItemsSubmitted": self._submitted,
            "ItemsCancelled": self._cancelled,
            "BatchFinished": self._finished,
            "ItemsFinished": self._answered_some,
            "BatchEnded": self._ended,
            "BatchFailed": self._failed,
            "AppDeclared": self._app,
            "ContextDeclared": self._context,
            "ContextStaged": self._staged,
            "ContextReady": self._ready,
            "ContextFailed": self._context_failed,
        }

    def take(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        """One event with what it led to."""
        history = self.history
        time: float = event["time"]
        take = self._takes.get(event["is"])
        if take is not None:
            take(event)
        self._accounts.take(event, commands)
        for command in commands:
            kind = command["is"]
            if kind == "Run":
                self._run(command)
            elif kind == "Deliver":
                self._deliver(time, event, command)
            elif kind == "DeliverChunk":
                history.chunks += 1
                for tier in (history.workers, self._tier_of[event["worker"]]):
                    tier.chunks.add(time, 1)
            elif kind == "Release":
                self._released.add(command["worker"])
            elif kind == "Bury":
                buried = self._close(command["items"])
                history.items.dead += buried
                history.causes.bury(command["failure"], buried)
            elif kind == "Place":
                history.plans.append((time, command))
        history.events += 1
        history.duration = max(history.duration, time)

    def end(self) -> None:
        """The log has ended: those who are connected were so until then."""
        end = self.history.duration
        self._accounts.end(end)
        for worker, joined in self._joined_at.items():
            for group in (self.history.workers, self._tier_of[worker]):
                group.stays.append(end - joined)
        for group in (self.history.workers, *self.history.tiers.values()):
            since, now = group.counts[-1]
            group.worker_seconds += now * (end - since)

    def _close(self, ranges: list[list[int]]) -> int:
        count = 0
        for first, end in ranges:
            count += self._closed.add(first, end)
        return count

    # --- commands

    def _run(self, command: dict[str, Any]) -> None:
        count = new = 0
        for first, end in command["items"]:
            count += end - first
            new += self._ran.add(first, end)
        self.history.items.run_again += count - new
        self._running.setdefault(command["worker"], {})[command["attempt"]] = (command["app"], count)

    def _deliver(self, time: float, event: dict[str, Any], command: dict[str, Any]) -> None:
        count = self._close(command["items"])
        self.history.items.done += count
        for tier in (self.history.workers, self._tier_of.get(event.get("worker", ""))):
            if tier is not None:
                tier.items_done += count
                tier.done.add(time, count)

    # --- workers

    def _joined(self, event: dict[str, Any]) -> None:
        worker = event["worker"]
        history = self.history
        tier = self._tier_of[worker["id"]] = self._tier(worker["tier"])
        self._joined_at[worker["id"]] = event["time"]
        history.hosts.add(worker["host"])
        for group in (history.workers, tier):
            group.joined += 1
            group.connected(event["time"], 1)

    def _lost(self, event: dict[str, Any]) -> None:
        worker, time = event["worker"], event["time"]
        self._running.pop(worker, None)
        joined = self._joined_at.pop(worker, None)
        if joined is None:
            return
        # As the scheduler counts: what was given back was not taken, whatever became of it then.
        returned = worker in self._released
        evicted = not returned and (event["evicted"] or worker in self._noticed_ones)
        if not returned:
            self.history.losses.append((time, evicted))
        for group in (self.history.workers, self._tier_of[worker]):
            group.lost += 1
            group.evicted += evicted
            group.returned += returned
            group.connected(time, -1)
            (group.lifetimes if evicted else group.stays).append(time - joined)

    def _noticed(self, event: dict[str, Any]) -> None:
        self.history.notices += 1
        self._noticed_ones.add(event["worker"])

    # --- tiers and their jobs

    def _tier(self, name: str) -> Tier:
        known = self.history.tiers.get(name)
        if known is None:
            known = self.history.tiers[name] = Tier()
        return known

    def _offered(self, event: dict[str, Any]) -> None:
        self._tier(event["tier"]["name"])

    def _job_started(self, event: dict[str, Any]) -> None:
        for group in (self.history.workers, self._tier(event["tier"])):
            group.jobs_started += 1
            if event["waited"] is not None:
                group.waits.add(event["waited"])

    def _job_evicted(self, event: dict[str, Any]) -> None:
        for group in (self.history.workers, self._tier(event["tier"])):
            group.jobs_evicted += 1

    def _job_held(self, event: dict[str, Any]) -> None:
        reason = event["reason"]
        for group in (self.history.workers, self._tier(event["tier"])):
            group.held[reason] = group.held.get(reason, 0) + 1

    # --- items and calls

    def _submitted(self, event: dict[str, Any]) -> None:
        self.history.items.submitted += sum(end - first for first, end in event["items"])

    def _cancelled(self, event: dict[str, Any]) -> None:
        self.history.items.cancelled += self._close(event["items"])

    def _app_of(self, app: str) -> App:
        known = self.history.apps.get(app)
        if known is None:  # Not with setdefault, which would make an app, with its histograms, for every call.
            known = self.history.apps[app] = App(app)
        return known

    def _finished(self, event: dict[str, Any]) -> None:
        attempt = self._running.get(event["worker"], {}).pop(event["attempt"], None)
        if attempt is None:
            return
        self._call(self._app_of(attempt[0]), attempt[1], event["seconds"])

    @staticmethod
    def _call(app: App, items: int, seconds: float) -> None:
        app.calls += 1
        app.items += items
        app.call_seconds.add(seconds)
        app.item_seconds.add(seconds / max(items, 1))

    def _answered_some(self, event: dict[str, Any]) -> None:
        self._answered[event["attempt"]] = event["first"] + event["count"]

    def _ended(self, event: dict[str, Any]) -> None:
        """A call that answered its items one by one, and may have ended before the last."""
        attempt = self._running.get(event["worker"], {}).pop(event["attempt"], None)
        items = self._answered.pop(event["attempt"], 0)
        if attempt is not None and items:
            self._call(self._app_of(attempt[0]), items, event["seconds"])

    def _failed(self, event: dict[str, Any]) -> None:
        attempt = self._running.get(event["worker"], {}).pop(event["attempt"], None)
        if attempt is not None:
            self.history.causes.call(event["failure"])
            failed = self._app_of(attempt[0]).failed
            kind = event["failure"]["kind"]
            failed[kind] = failed.get(kind, 0) + 1

    # --- declarations and contexts

    def _app(self, event: dict[str, Any]) -> None:
        app = self._app_of(event["app"]["id"])
        app.name, app.spec = event["app"]["name"], event["app"]

    def _context(self, event: dict[str, Any]) -> None:
        if event["context"]["id"]:  # The empty one stands for calls that need none.
            loads = self._loads_of(event["context"]["id"])
            loads.name, loads.spec = event["context"]["name"], event["context"]

    def _loads_of(self, context: str) -> ContextLoads:
        return self.history.contexts.setdefault(context, ContextLoads(context or "(no context)"))

    def _staged(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).staged += 1

    def _ready(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).load_seconds.add(event["seconds"])

    def _context_failed(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).failed += 1
        self.history.causes.context(event["failure"])
