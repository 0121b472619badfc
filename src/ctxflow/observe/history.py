"""The history of a run: who was there, what was done when.

What does not live here: reading it from an event log (history_reader.py), what the workers' time went into
(accounts.py), why things failed (causes.py), transfers between workers (transfers.py), and how it is shown.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ctxflow.observe.accounts import Accounts
from ctxflow.observe.causes import Causes
from ctxflow.observe.measures import Histogram, Timeline


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
class HostFigures:
    """What was done on a host, and what went wrong there.

    :ivar calls: that ended well; `failed`, those that did not; `contexts_failed`, contexts that could not be built.
    :ivar lost: workers that were lost, without those that were evicted or given back; `quarantines`, how often it, or a
        worker of it, got no work for a while.
    """

    joined: int = 0
    calls: int = 0
    failed: int = 0
    contexts_failed: int = 0
    lost: int = 0
    evicted: int = 0
    quarantines: int = 0


@dataclasses.dataclass
class History:
    """What happened in a run. Times in seconds on the run's clock.

    :ivar duration: the time of the last event.
    :ivar losses: (time, whether it was an eviction) of each worker that was lost and had not been given back.
    :ivar apps: by id, as are `contexts`; `tiers` by name.
    :ivar accounts: what the workers' time went into; `causes`: why calls, contexts and items failed.
    :ivar chunks: that sessions got.
    :ivar simulated: whether it was a run in virtual time, without workers.
    :ivar plans: (since when, the `Place` command) of each placement that held, in order.
    :ivar quarantines: (since when, the `Quarantine` command) of each bad host or worker, in order.
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
    by_host: dict[str, HostFigures] = dataclasses.field(default_factory=dict)
    accounts: Accounts = dataclasses.field(default_factory=Accounts)
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
