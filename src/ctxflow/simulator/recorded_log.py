"""One pass over a run's event log, which gathers what parameters are fitted to, and some of the estimators."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ctxflow.scheduler.events import PERVASIVE
from ctxflow.simulator.fitted_pace import FlightLog, Floats, OverlappedCall


@dataclasses.dataclass
class Sums:
    """Sums over the calls of one app on one worker, for a least-squares line."""

    calls: int = 0
    items: float = 0.0
    seconds: float = 0.0
    inverse: float = 0.0  # Of 1 / n; the next two of T / n and T * T / n.
    each: float = 0.0
    square: float = 0.0

    def add(self, items: int, seconds: float) -> None:
        """Count one call."""
        self.calls += 1
        self.items += items
        self.seconds += seconds
        self.inverse += 1 / items
        self.each += seconds / items
        self.square += seconds * seconds / items

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the calls of both."""
        return Sums(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def residual(self, call: float, item: float) -> float:
        """Return the weighted sum of squares around a line: of (T - call - item n)^2 / n."""
        found = self.square + call**2 * self.inverse + item**2 * self.items
        return max(0.0, found - 2 * call * self.each - 2 * item * self.seconds + 2 * call * item * self.calls)


@dataclasses.dataclass
class RecordedCall:
    """A batch in flight: `alone` if nothing else ran on its worker when it began; `answered` so many, one by one."""

    app: str
    items: int
    started: float
    alone: bool
    answered: int = 0
    flying: Floats | None = None  # Its seconds by how many were in flight, once it has ended, where calls overlap.


@dataclasses.dataclass
class RecordedWorker:
    """One worker. `running`: its calls by attempt; `begun`: ("Load" or "Stage", context) -> since when."""

    spec: dict[str, Any]
    joined: float
    gone: float | None = None
    released: bool = False
    noticed: float | None = None
    running: dict[int, RecordedCall] = dataclasses.field(default_factory=dict)
    begun: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The worker's kind: its GPU model, or else its tier."""
        return str(self.spec.get("gpu_model") or self.spec["tier"])


@dataclasses.dataclass
class RecordedApp:
    """One app: `open` items are submitted and not settled; arrivals as [time, items]."""

    spec: dict[str, Any]
    open: int = 0
    running: int = 0
    arrivals: list[list[Any]] = dataclasses.field(default_factory=list)


def read_events(lines: Iterable[str], take: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
    """Pass on each event of a log with its commands; of a first line that tells how the run decides, nothing.

    :param lines: of events.jsonl; a torn last line is left out.
    :raises ValueError: for a line that is none.
    """
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
            if number > 1 or "event" in record:
                take(record["event"], record["commands"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not text.endswith("\n"):
                break
            raise ValueError(f"line {number} is no line of an event log ({error})") from None


class Recording:
    """What one pass over the events gathers, in its attributes.

    :ivar calls: (app, worker) -> its calls, but for those in `firsts`: (app, worker, items, seconds) of each that was
        the first on a context that is kept.
    :ivar salvaged: apps that answered items one by one.
    :ivar loads: (context, kind) -> seconds from the command to the context's being ready; `stages` likewise.
    :ivar imports: (context, kind) -> seconds that imports and the start of its process took, of loads that tell it and
        whose processes were not forked.
    :ivar memory: (context, "memory" or "gpu_memory") -> the most that was measured.
    :ivar ways: seconds of calls beyond what their workers say, of those that ran alone.
    :ivar waits: seconds that jobs waited.
    :ivar settled: when the last item was.
    :ivar overlapped: app -> its calls that were answered, of an app whose calls overlap; `tokens`: theirs.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], Sums] = {}
        self.firsts: list[tuple[str, str, int, float]] = []
        self.salvaged: set[str] = set()
        self._unused: set[tuple[str, str]] = set()  # Worker and context that was built, and has run nothing yet.
        self.workers: dict[str, RecordedWorker] = {}
        self.apps: dict[str, RecordedApp] = {}
        self.contexts: dict[str, dict[str, Any]] = {}
        self.tiers: dict[str, dict[str, Any]] = {}
        self._firsts: list[int] = []  # The first item of each span of one app's, and beside it whose it is.
        self._owners: list[str] = []
        self.loads: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self.stages: dict[str, list[float]] = collections.defaultdict(list)
        self.imports: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self.memory: dict[tuple[str, str], int] = {}
        self.ways: list[float] = []
        self.waits: list[float] = []
        self.settled = 0.0
        self.overlapped: dict[str, list[OverlappedCall]] = {}
        self.tokens = 0
        self._flights = FlightLog()
        self._now = 0.0
        self.counts: collections.Counter[str] = collections.Counter()

    def take(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        """Take one event with the commands that it led to."""
        self._now = event["time"]
        take = getattr(self, f"_on_{event['is']}", None)
        if take is not None:
            take(event)
        for command in commands:
            self._command(event, command)

    def _command(self, event: dict[str, Any], command: dict[str, Any]) -> None:
        kind, time = command["is"], event["time"]
        if kind == "Run":
            worker, app = self.workers[command["worker"]], self.apps[command["app"]]
            count = _count(command["items"])
            worker.running[command["attempt"]] = RecordedCall(command["app"], count, time, not worker.running)
            app.running += count
            if app.spec.get("overlaps"):
                self._flights.begin(command["worker"], command["context"], command["attempt"], time)
        elif kind in ("Load", "Stage"):
            self.workers[command["worker"]].begun[kind, command["context"]] = time
        elif kind == "Release":
            self.workers[command["worker"]].released = True
        elif kind == "Abandon":
            self._end(command["worker"], command["attempt"])
        elif kind in ("Deliver", "Bury"):
            self.counts["done" if kind == "Deliver" else "dead"] += self._close(command["items"])
            self.settled = time

    def _close(self, ranges: list[list[int]]) -> int:
        """Count items as settled; an item's app is the one whose submission it was in."""
        for first, end in ranges:
            self.apps[self._owner(first)].open -= end - first
        return _count(ranges)

    def _owner(self, item: int) -> str:
        return self._owners[bisect.bisect_right(self._firsts, item) - 1]

    def _end(self, worker: str, attempt: int) -> RecordedCall | None:
        """Count an attempt as ended, however it did."""
        found = self.workers[worker].running.pop(attempt, None) if worker in self.workers else None
        if found is not None:
            self.apps[found.app].running -= found.items - found.answered
            found.flying = self._flights.end(worker, attempt, self._now)
        return found

    def _on_TierOffered(self, event: dict[str, Any]) -> None:
        self.tiers[event["tier"]["name"]] = event["tier"]

    def _on_ContextDeclared(self, event: dict[str, Any]) -> None:
        self.contexts[event["context"]["id"]] = event["context"]

    def _on_AppDeclared(self, event: dict[str, Any]) -> None:
        self.apps.setdefault(event["app"]["id"], RecordedApp(event["app"]))  # It may have been forgotten in between.

    def _on_ItemsSubmitted(self, event: dict[str, Any]) -> None:
        app, count = self.apps[event["app"]], _count(event["items"])
        # While others of it wait, when an item came made no difference: a map submits as results come in.
        if app.arrivals and app.open > app.running:
            app.arrivals[-1][1] += count
        else:
            app.arrivals.append([event["time"], count])
        app.open += count
        if event["items"] and (not self._owners or self._owners[-1] != event["app"]):
            self._firsts.append(event["items"][0][0])
            self._owners.append(event["app"])

    def _on_ItemsCancelled(self, event: dict[str, Any]) -> None:
        self.counts["cancelled"] += self._close(event["items"])
        for first, end in event["items"]:
            self.forget(self._owner(first), end - first)

    def forget(self, app: str, count: int) -> None:
        """Leave out items that were never answered, the latest first."""
        arrivals = self.apps[app].arrivals
        while count and arrivals:
            gone = min(count, arrivals[-1][1])
            arrivals[-1][1] -= gone
            count -= gone
            if not arrivals[-1][1]:
                arrivals.pop()

    def _on_WorkerJoined(self, event: dict[str, Any]) -> None:
        self.workers[event["worker"]["id"]] = RecordedWorker(event["worker"], event["time"])

    def _on_EvictionNotice(self, event: dict[str, Any]) -> None:
        if event["worker"] in self.workers:
            self.workers[event["worker"]].noticed = event["time"]

    def _on_WorkerLost(self, event: dict[str, Any]) -> None:
        worker = self.workers.get(event["worker"])
        if worker is None or worker.gone is not None:
            return
        worker.gone = event["time"]
        self.counts["evicted"] += not worker.released
        for attempt in list(worker.running):
            found = self._end(event["worker"], attempt)
            self.counts["lost"] += found.items - found.answered if found is not None else 0

    def _on_JobStarted(self, event: dict[str, Any]) -> None:
        if event["waited"] is not None:
            self.waits.append(event["waited"])

    def _on_ContextStaged(self, event: dict[str, Any]) -> None:
        begun = self._since("Stage", event)
        if begun is not None:
            self.stages[event["context"]].append(event["time"] - begun)

    def _on_ContextReady(self, event: dict[str, Any]) -> None:
        begun = self._since("Load", event)
        if begun is None:
            return
        self.counts["loads"] += 1
        context = event["context"]
        if self.contexts[context].get("level", PERVASIVE) == PERVASIVE:
            self._unused.add((event["worker"], context))
        kind, parts = self.workers[event["worker"]].kind, event.get("parts")
        self.loads[context, kind].append(event["time"] - begun)
        if parts and event.get("started") != "forked":
            self.imports[context, kind].append(parts.get("imports", 0.0) + parts.get("process", 0.0))
        for key in ("memory", "gpu_memory"):
            if event[key] is not None:
                self.memory[context, key] = max(self.memory.get((context, key), 0), event[key])

    def _since(self, step: str, event: dict[str, Any]) -> float | None:
        worker = self.workers.get(event["worker"])
        return worker.begun.pop((step, event["context"]), None) if worker is not None else None

    def _on_BatchFinished(self, event: dict[str, Any]) -> None:
        call = self._end(event["worker"], event["attempt"])
        if call is not None:
            self._called(event, call, call.items)

    def _on_ItemsFinished(self, event: dict[str, Any]) -> None:
        worker = self.workers.get(event["worker"])
        call = worker.running.get(event["attempt"]) if worker is not None else None
        if call is not None:
            more = max(0, event["first"] + event["count"] - call.answered)
            call.answered += more
            self.apps[call.app].running -= more
            self.salvaged.add(call.app)

    def _on_BatchEnded(self, event: dict[str, Any]) -> None:
        call = self._end(event["worker"], event["attempt"])
        if call is not None and call.answered:
            self._called(event, call, call.answered)

    def _called(self, event: dict[str, Any], call: RecordedCall, count: int) -> None:
        """Count a call that returned so many results."""
        self.counts["batches"] += 1
        if call.flying is not None:
            counted = event.get("tokens")
            self.tokens += counted or 0
            point = OverlappedCall(self.workers[event["worker"]].kind, float(max(1, counted or 1)), call.flying)
            self.overlapped.setdefault(call.app, []).append(point)
            self.calls.setdefault((call.app, event["worker"]), Sums()).add(count, event["seconds"])
            return
        key = (event["worker"], self.apps[call.app].spec["context"])
        if key in self._unused:
            self._unused.discard(key)
            self.firsts.append((call.app, event["worker"], count, event["seconds"]))
        else:
            self.calls.setdefault((call.app, event["worker"]), Sums()).add(count, event["seconds"])
        if call.alone:
            self.ways.append(max(0.0, event["time"] - call.started - event["seconds"]))

    def _on_BatchFailed(self, event: dict[str, Any]) -> None:
        self.counts["failed"] += self._end(event["worker"], event["attempt"]) is not None


def _count(ranges: Iterable[list[int]]) -> int:
    return sum(end - first for first, end in ranges)


@dataclasses.dataclass(frozen=True)
class Stay:
    """One worker of a recorded run. Sizes in bytes.

    :ivar until: when it was taken; infinity if it never was.
    :ivar pace: how many times longer its items took than those of its kind.
    """

    worker: str
    host: str
    joined: float
    until: float
    gpu_model: str | None = None
    gpus: int = 0
    memory: int | None = None
    gpu_memory: int | None = None
    pace: float = 1.0


@dataclasses.dataclass(frozen=True)
class RecordedPlace:
    """Room for one worker at a time in a recorded run: a tier had as many as it had workers at most."""

    tier: str
    stays: tuple[Stay, ...]


def places_of(workers: Mapping[str, RecordedWorker], paces: Mapping[str, float]) -> list[RecordedPlace]:
    """Assign workers to as few places as there were workers at a time, to one on their own host if it is free."""
    stays: list[tuple[str, list[Stay], float]] = []
    for name, worker in sorted(workers.items(), key=lambda pair: pair[1].joined):
        spec, gone = worker.spec, math.inf if worker.gone is None else worker.gone
        stay = Stay(
            name, spec["host"], worker.joined, math.inf if worker.released else gone, spec["gpu_model"], spec["gpus"],
            spec["memory"], spec["gpu_memory"], paces[name],
        )  # fmt: skip
        free = [n for n, (tier, _, until) in enumerate(stays) if tier == spec["tier"] and until <= worker.joined]
        here = [n for n in free if stays[n][1][-1].host == spec["host"]] or free
        if here:
            place = max(here, key=lambda n: stays[n][2])
            stays[place] = (spec["tier"], [*stays[place][1], stay], gone)
        else:
            stays.append((spec["tier"], [stay], gone))
    return [RecordedPlace(tier, tuple(those)) for tier, those, _ in stays]


def call_cost(kinds: Iterable[Sums]) -> float:
    """Return the seconds of a call beside its items: the weighted mean of the lines' intercepts, a line for each kind.

    0 where all calls of a kind had as many items: nobody can tell then.

    >>> sums = Sums()
    >>> for n in (1, 5, 20): sums.add(n, 0.5 + 2.0 * n)
    >>> round(call_cost([sums]), 6)
    0.5
    """
    total = weight = 0.0
    for sums in kinds:
        across = sums.inverse * sums.items - sums.calls**2
        if across <= 1e-6 * sums.calls**2:
            continue
        height = (sums.items * sums.each - sums.calls * sums.seconds) / across
        precision = across / sums.items / (sums.seconds / sums.items) ** 2
        total += precision * height
        weight += precision
    return max(0.0, total / weight) if weight else 0.0


def shrunk(seen: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return paces from (estimate, variance), shrunk towards 1 by the share of their scatter that is noise.

    >>> shrunk({"a": (1.5, 0.0), "b": (0.5, 0.0)})
    {'a': 1.5, 'b': 0.5}
    >>> shrunk({"a": (1.05, 0.01), "b": (0.95, 0.01)})
    {'a': 1.0, 'b': 1.0}
    """
    if len(seen) < 2:
        return dict.fromkeys(seen, 1.0)
    weights = {name: 1 / max(variance, 1e-8) for name, (_, variance) in seen.items()}
    total = sum(weights.values())
    mean = sum(weights[name] * pace for name, (pace, _) in seen.items()) / total
    scatter = sum(weights[name] * (pace - mean) ** 2 for name, (pace, _) in seen.items())
    between = max(0.0, scatter - (len(seen) - 1)) / (total - sum(w * w for w in weights.values()) / total)
    paces = {}
    for name, (pace, variance) in seen.items():
        share = between / (between + variance) if between else 0.0
        paces[name] = max(0.05, 1.0 + share * (pace - 1.0))
    return paces
