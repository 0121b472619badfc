"""The history of a run, read from its event log in one pass and little memory: who was there, what was done when.

What does not live here: transfers between workers (transfers.py), and how it is shown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

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
    """What one tier gave. `counts`: (seconds, workers connected from then on); `loss_times` in seconds."""

    joined: int = 0
    lost: int = 0
    evicted: int = 0
    items_done: int = 0
    worker_seconds: float = 0.0
    counts: list[tuple[float, int]] = dataclasses.field(default_factory=lambda: [(0.0, 0)])
    done: Timeline = dataclasses.field(default_factory=Timeline)

    def connected(self, time: float, change: int) -> None:
        """Workers came or went."""
        since, before = self.counts[-1]
        self.worker_seconds += before * (time - since)
        self.counts.append((time, before + change))


@dataclasses.dataclass
class App:
    """The calls of one app: their durations, and those divided by their items. Failed calls are in neither."""

    name: str
    calls: int = 0
    items: int = 0
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    call_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    item_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class ContextLoads:
    """How often a context was built, how long that took, and how often it failed."""

    name: str
    staged: int = 0
    failed: int = 0
    load_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class History:
    """What happened in a run. Times in seconds on the run's clock.

    :ivar duration: the time of the last event.
    :ivar losses: (time, whether it was an eviction) of each worker that was lost.
    :ivar apps: by id, as are `contexts`; `tiers` by name.
    """

    duration: float = 0.0
    events: int = 0
    items: Items = dataclasses.field(default_factory=Items)
    workers: Tier = dataclasses.field(default_factory=Tier)
    tiers: dict[str, Tier] = dataclasses.field(default_factory=dict)
    apps: dict[str, App] = dataclasses.field(default_factory=dict)
    contexts: dict[str, ContextLoads] = dataclasses.field(default_factory=dict)
    losses: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    notices: int = 0
    hosts: set[str] = dataclasses.field(default_factory=set)

    @property
    def mean_workers(self) -> float:
        """Workers connected, averaged over the run."""
        since, now = self.workers.counts[-1]
        held = self.workers.worker_seconds + now * (self.duration - since)
        return held / self.duration if self.duration else float(now)

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
            reader.take(record["event"], record["commands"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if last and not text.endswith("\n"):
                break
            raise ValueError(
                f"line {number} is no line of an event log ({error}): is this the run's events.jsonl?"
            ) from None
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
        self._tier_of: dict[str, Tier] = {}
        self._running: dict[str, dict[int, tuple[str, int]]] = {}  # Worker -> attempt -> its app, and how many items.
        self._ran, self._closed = Seen(), Seen()
        self._takes = {
            "WorkerJoined": self._joined,
            "WorkerLost": self._lost,
            "EvictionNotice": self._noticed,
            "ItemsSubmitted": self._submitted,
            "ItemsCancelled": self._cancelled,
            "BatchFinished": self._finished,
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
        for command in commands:
            kind = command["is"]
            if kind == "Run":
                self._run(command)
            elif kind == "Deliver":
                self._deliver(time, event, command)
            elif kind == "Bury":
                history.items.dead += self._close(command["items"])
        history.events += 1
        history.duration = max(history.duration, time)

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
        tier = self._tier_of[worker["id"]] = history.tiers.setdefault(worker["tier"], Tier())
        history.hosts.add(worker["host"])
        for group in (history.workers, tier):
            group.joined += 1
            group.connected(event["time"], 1)

    def _lost(self, event: dict[str, Any]) -> None:
        self._running.pop(event["worker"], None)
        tier = self._tier_of.get(event["worker"])
        if tier is None:
            return
        self.history.losses.append((event["time"], event["evicted"]))
        for group in (self.history.workers, tier):
            group.lost += 1
            group.evicted += event["evicted"]
            group.connected(event["time"], -1)

    def _noticed(self, event: dict[str, Any]) -> None:
        self.history.notices += 1

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
        app, items = self._app_of(attempt[0]), attempt[1]
        app.calls += 1
        app.items += items
        app.call_seconds.add(event["seconds"])
        app.item_seconds.add(event["seconds"] / max(items, 1))

    def _failed(self, event: dict[str, Any]) -> None:
        attempt = self._running.get(event["worker"], {}).pop(event["attempt"], None)
        if attempt is not None:
            failed = self._app_of(attempt[0]).failed
            kind = event["failure"]["kind"]
            failed[kind] = failed.get(kind, 0) + 1

    # --- declarations and contexts

    def _app(self, event: dict[str, Any]) -> None:
        self._app_of(event["app"]["id"]).name = event["app"]["name"]

    def _context(self, event: dict[str, Any]) -> None:
        if event["context"]["id"]:  # The empty one stands for calls that need none.
            self._loads_of(event["context"]["id"]).name = event["context"]["name"]

    def _loads_of(self, context: str) -> ContextLoads:
        return self.history.contexts.setdefault(context, ContextLoads(context or "(no context)"))

    def _staged(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).staged += 1

    def _ready(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).load_seconds.add(event["seconds"])

    def _context_failed(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).failed += 1
