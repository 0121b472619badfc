"""Where the time of context loads went, from the event log: from the first command to the context's being ready."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.observe.measures import Histogram, percent, seconds

PARTS = {
    "files": "waiting for files",
    "sending": "sending messages",
    "process": "starting its process",
    "imports": "imports",
    "weights": "weights",
    "compile": "compiling",
    "warm-up": "warming up",
    "build": "the rest of its function",
}
"""The parts that every load may have, in the order in which they are shown, and what went on then.

Contexts name others. Files are brought between the commands to stage and to load. What the library process does not
tell of the time from then on went into messages, and into waiting for the end of what ran on the worker before.
"""
_MOST = 8  # Parts of a table.
_NOTHING = 1e-5  # Seconds: what a histogram does not tell from 0.


@dataclasses.dataclass
class LoadTimes:
    """The loads whose library processes told their parts. Times in seconds.

    :ivar loads: how long they took; `parts`, what went into each part, in each of these loads.
    :ivar started: how many processes were started in which way ("spawned").
    """

    loads: Histogram = dataclasses.field(default_factory=Histogram)
    parts: dict[str, Histogram] = dataclasses.field(default_factory=dict)
    started: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, parts: Mapping[str, float], started: str = "") -> None:
        """Count a load."""
        for part in parts:
            if part not in self.parts:
                self.parts[part] = Histogram()
                for _ in range(self.loads.count):
                    self.parts[part].add(0.0)
        for part, times in self.parts.items():
            times.add(parts.get(part, 0.0))
        self.loads.add(sum(parts.values()))
        if started:
            self.started[started] += 1

    def shares(self) -> dict[str, float]:
        """Return each part's share of the time of all loads, in the order in which they are shown."""
        sums = {part: times.total for part, times in self.parts.items()}
        known = [part for part in PARTS if sums.get(part)]
        others = sorted((part for part in sums if part not in PARTS and sums[part]), key=lambda part: -sums[part])
        # What a context names comes before the rest of its function.
        ordered = [*(part for part in known if part != "build"), *others, *(part for part in known if part == "build")]
        return {part: sums[part] / self.loads.total for part in ordered}


class LoadTimesReader:
    """Follow the loads of a log, event by event."""

    def __init__(self) -> None:
        self._begun: dict[str, dict[str, tuple[float, float]]] = {}  # Worker -> context -> when: the first, the load.

    def take(self, event: dict[str, Any], commands: Sequence[dict[str, Any]]) -> dict[str, float] | None:
        """Take an event, with its commands; return the parts of the load that it ends, None where nobody told any."""
        kind, now = event["is"], event["time"]
        found = None
        if kind in ("ContextReady", "ContextFailed", "ContextUnloaded"):
            begun = self._begun.get(event["worker"], {}).pop(event["context"], None)
            if kind == "ContextReady" and begun is not None and event.get("parts"):
                found = _whole(begun, now, event["parts"])
        elif kind == "WorkerLost":
            self._begun.pop(event["worker"], None)
        for command in commands:
            if command["is"] in ("Stage", "Load"):
                on_worker = self._begun.setdefault(command["worker"], {})
                first = on_worker.get(command["context"], (now, now))[0] if command["is"] == "Load" else now
                on_worker[command["context"]] = (first, now)
            elif command["is"] == "Unload":
                self._begun.get(command["worker"], {}).pop(command["context"], None)
        return found


def _whole(begun: tuple[float, float], now: float, told: Mapping[str, float]) -> dict[str, float]:
    """Return a load's parts with those that only the driver knows."""
    first, load = begun
    on_way = max(0.0, now - load - sum(told.values()))
    return {**told, "files": told.get("files", 0.0) + load - first, "sending": told.get("sending", 0.0) + on_way}


def load_times_data(times: LoadTimes) -> dict[str, Any] | None:
    """Return them as data for JSON, None of no load: the median of all loads, and of each part's seconds in them."""
    if not times.loads.count:
        return None
    return {
        "loads": times.loads.count,
        "seconds": times.loads.total,
        "median": times.loads.percentile(50),
        "started": dict(times.started),
        "parts": {
            part: {"seconds": times.parts[part].total, "share": share, "median": _median(times.parts[part])}
            for part, share in times.shares().items()
        },
    }


def _median(times: Histogram) -> float:
    median = times.percentile(50)
    return median if median > _NOTHING else 0.0


def load_rows(times: LoadTimes) -> list[tuple[str, str, str, float]]:
    """Return (part, what went on, the median of its seconds, share) for each part of loads."""
    return [
        (part, PARTS.get(part, part), seconds(_median(times.parts[part])), share)
        for part, share in times.shares().items()
    ]


def load_table(named: Mapping[str, LoadTimes], every: LoadTimes) -> tuple[list[str], list[list[str]]] | None:
    """Return what a table says of the loads of each context, by name, and of all; None of no load.

    >>> times = LoadTimes()
    >>> times.add({"imports": 3.0, "weights": 1.0})
    >>> load_table({"encoder": times}, times)
    (['Parts of loads', 'loads', 'median', 'imports', 'weights'], [['encoder', '1', '4.00 s', '75 %', '25 %']])
    """
    all_shares = every.shares()
    if not every.loads.count:
        return None
    largest = sorted(all_shares, key=lambda part: -all_shares[part])[:_MOST]
    shown = [part for part in all_shares if part in largest]
    others = len(all_shares) > len(shown)
    rows = []
    known = {name: times for name, times in named.items() if times.loads.count}
    for name, times in [*known.items(), *([("all", every)] if len(known) > 1 else [])]:
        shares = times.shares()
        cells = [percent(shares.get(part, 0.0)) for part in shown]
        if others:
            cells.append(percent(sum(share for part, share in shares.items() if part not in shown)))
        rows.append([name, f"{times.loads.count:,}", seconds(times.loads.percentile(50)), *cells])
    if set(every.started) - {"spawned"}:
        told = ", ".join(f"{count:,} {how}" for how, count in sorted(every.started.items()))
        rows.append([f"  processes: {told}"])
    return ["Parts of loads", "loads", "median", *shown, *(["others"] * others)], rows


def mostly(times: LoadTimes) -> str:
    """Return what most of the time of loads went into, as the end of a sentence; "" where it is no part above all.

    >>> times = LoadTimes()
    >>> times.add({"imports": 3.0, "weights": 1.0})
    >>> mostly(times)
    ', 75 % of it imports'
    """
    shares = times.shares()
    part = max(shares, key=lambda part: shares[part], default="")
    return f", {percent(shares[part])} of it {PARTS.get(part, part)}" if part and shares[part] >= 0.5 else ""
