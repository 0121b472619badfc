"""What a run's event log says of items in flight: how often each was given, and what each loss found in flight."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass
class Loss:
    """A worker that was lost, or a context: its engine's death, or its library process's.

    :ivar time: when the run heard of it, on the run's clock.
    :ivar broken: the items that were in flight -> when they were given to it.
    :ivar noticed: when the run heard of its eviction before; None if it did not.
    :ivar at_notice: how many items were in flight then.
    """

    worker: str
    time: float
    of_worker: bool
    evicted: bool = False
    broken: dict[int, float] = dataclasses.field(default_factory=dict)
    noticed: float | None = None
    at_notice: int = 0


@dataclasses.dataclass
class InFlight:
    """What a log says.

    :ivar given: item -> how often it was given to a worker.
    :ivar took: item -> the seconds of the attempt that finished it.
    :ivar losses: in their order.
    :ivar idle: the workers that have nothing in flight at the log's end.
    """

    given: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    took: dict[int, float] = dataclasses.field(default_factory=dict)
    losses: list[Loss] = dataclasses.field(default_factory=list)
    idle: set[str] = dataclasses.field(default_factory=set)

    @property
    def again(self) -> int:
        """How often items were given to a worker beyond their first time."""
        return sum(self.given.values()) - len(self.given)

    @property
    def broken(self) -> int:
        """How many items the losses found in flight, all together."""
        return sum(len(loss.broken) for loss in self.losses)

    def told(self) -> dict[str, object]:
        """Return the figures."""
        noticed = [loss for loss in self.losses if loss.noticed is not None]
        return {
            "rows": len(self.given),
            "workers lost": sum(loss.of_worker for loss in self.losses),
            "contexts lost": sum(not loss.of_worker for loss in self.losses),
            "in flight at the losses": self.broken,
            "most at one": max((len(loss.broken) for loss in self.losses), default=0),
            "ran again": self.again,
            "notices": len(noticed),
            "in flight at the notices": sum(loss.at_notice for loss in noticed),
            "of these broken": sum(len(loss.broken) for loss in noticed),
        }


def read_log(log: Path) -> InFlight:
    """Read a log, also of a run that goes on or was killed."""
    found = InFlight()
    open_: dict[str, dict[int, tuple[int, float]]] = collections.defaultdict(dict)  # Worker -> attempt -> item, since.
    notices: dict[str, tuple[float, int]] = {}
    for text in log.read_text().splitlines()[1:]:
        try:
            line = json.loads(text)
        except ValueError:  # The last of a run that was killed.
            break
        event, worker = line["event"], str(line["event"].get("worker"))
        kind, time = event["is"], event["time"]
        if event.get("lost_context") and event["attempt"] in open_[worker]:
            # All that is in flight there counts as lost from the first on; what was answered and comes later is late.
            found.losses.append(Loss(worker, time, of_worker=False, broken=dict(open_[worker].values())))
            open_[worker].clear()
        elif kind in ("BatchFinished", "BatchFailed"):
            given = open_[worker].pop(event["attempt"], None)
            if given is not None and kind == "BatchFinished":
                found.took[given[0]] = time - given[1]
        elif kind == "EvictionNotice":
            notices[worker] = time, len(open_[worker])
        elif kind == "WorkerJoined":
            open_[event["worker"]["id"]] = {}
        elif kind == "WorkerLost":
            noticed, count = notices.get(worker, (None, 0))
            broken = dict(open_.pop(worker, {}).values())
            found.losses.append(Loss(worker, time, True, event["evicted"], broken, noticed, count))
        for command in line["commands"]:
            if command["is"] == "Run":
                for first, end in command["items"]:
                    found.given.update(range(first, end))
                    open_[command["worker"]][command["attempt"]] = first, time
    found.idle = {worker for worker, items in open_.items() if not items}
    return found


def needlessly_broken(found: InFlight, kind: Callable[[int], int], grace: float) -> list[tuple[str, int, float]]:
    """Return the items that evictions with notice broke although they could have ended in the grace.

    An item needs half as much again as the median of those of its kind took in this run.

    :param kind: returns an item's kind; those of kind 0 are taken to be quick.
    :returns: the worker, the item, and how long before its notice it was given to the worker.
    """
    alike: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
    for item, took in found.took.items():
        alike[kind(item)].append(took)
    usual = {each: statistics.median(took) for each, took in alike.items()} | {0: 0.0}
    return [
        (loss.worker, item, loss.noticed - since)
        for loss in found.losses
        if loss.noticed is not None
        for item, since in loss.broken.items()
        if since + 1.5 * usual[kind(item)] < loss.noticed + grace
    ]
