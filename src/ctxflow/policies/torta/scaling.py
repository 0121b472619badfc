"""How many workers are active: TORTA's Eq. 6, gradual switching, and the scaling policy `activation` of a live run.

In the policy, tasks are items, and a worker's capacity is what it does in a slot at its measured speed. Unlike in the
paper, a region without work needs no worker, running items count as queued, and regions share the work by transport.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ctxflow.policies.helpers import (
    SESSIONS,
    active,
    divided,
    outstanding,
    serving,
    sessions_of_worker,
    slot_items,
    tiers_for,
)
from ctxflow.policies.protocols import View
from ctxflow.policies.torta.macro import by_transport, region_costs
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, Outlook, amounts
from ctxflow.policies.views import AppView, TierView, WorkerView

SAFETY = 1.0
"""Eq. 6's sigma, standard deviations of the predicted demand; the paper prints no value."""


def target(
    queue: npt.ArrayLike,
    predicted: npt.ArrayLike,
    capacity: npt.ArrayLike,
    servers: npt.ArrayLike,
    safety: float = SAFETY,
) -> Ints:
    """Compute Eq. 6: min(S_r, ceil((Q + F + sigma * sqrt(F)) / C_avg)) servers of each region.

    Guarantees: (R,) at most all of a region's servers, and at least one of them where there are any (1 <= N_active).
    A region whose servers' capacity is zero or unknown has all of them active while there is work. A prediction that
    is not a number counts as none.

    :param queue: (R,) tasks that wait. :param predicted: (R,) tasks that are expected in the next slot.
    :param capacity: (R,) tasks that a server does in a slot, on average.
    :param servers: (R,) S_r, how many there are.

    >>> target([4, 0, 0], [16, 0, float("nan")], [5, 5, 5], [9, 9, 0]).tolist()
    [5, 1, 0]
    """
    expected, there = amounts(predicted), amounts(servers)
    work = amounts(queue) + expected + amounts(safety) * np.sqrt(expected)
    each = amounts(capacity)
    unknown = np.where(work > 0, np.inf, 0.0)
    needed = np.divide(work, each, out=unknown, where=each > 0)
    return np.asarray(np.minimum(np.maximum(np.ceil(needed - 1e-9), 1), there), dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Switches:
    """The servers of a region to start and to stop, the first ones first."""

    activate: Ints
    deactivate: Ints


def switches(
    wanted: int,
    active: Bools,
    warm_up: Floats,
    suitability: Floats,
    utilisation: Floats,
    idle: Floats,
    step: int | None = None,
    patience: float = 1.0,
) -> Switches:
    """Return which servers to start or to stop, gradually, so that a region comes nearer to its target.

    Started are those with the fewest seconds of warm-up for their suitability. Stopped are those without work that
    have been idle longest, and for at least `patience` times their own warm-up (our reading of "to minimize wasted
    warm-up investments").

    Guarantees: never both at once; never more than `step`, nor beyond the target.

    :param wanted: servers that should be active, of `target`.
    :param active: (S,) those that are, or are warming up. :param warm_up: (S,) seconds from a start to being ready.
    :param suitability: (S,) how well each fits what is coming, such as the mean of Eq. 8 over the tasks.
    :param utilisation: (S,) share of each that is at work. :param idle: (S,) seconds since each had work.
    :param step: servers that may change in a slot, None for any number.

    >>> on = np.array([True, False, False])
    >>> nothing = np.zeros(3)
    >>> switches(2, on, np.array([30.0, 60.0, 20.0]), np.ones(3), nothing, nothing).activate.tolist()
    [2]
    >>> switches(0, on, np.full(3, 30.0), np.ones(3), nothing, np.array([29.0, 0, 0])).deactivate.tolist()
    []
    """
    none = np.zeros(0, dtype=np.int64)
    change = int(wanted) - int(active.sum())
    most = abs(change) if step is None else min(abs(change), max(step, 0))
    if change >= 0:
        off = np.flatnonzero(~active)
        seconds = amounts(warm_up[off]) / np.maximum(amounts(suitability[off]), 1e-9)
        return Switches(off[np.argsort(seconds, kind="stable")][:most], none)
    rested = active & (amounts(utilisation) <= 0) & (amounts(idle) >= patience * amounts(warm_up))
    free = np.flatnonzero(rested)
    return Switches(none, free[np.argsort(-amounts(idle[free]), kind="stable")][:most])


def for_buffer(waiting: int, limit: int, capacity: float, share: float = 0.8) -> int:
    """Return how many servers more a buffer asks for: none until it is nearly full, then enough for all that waits.

    :param waiting: tasks without a server. :param limit: tasks that the buffer is made for.
    :param capacity: tasks that a server does in a slot; one server is requested if that is unknown.
    :param share: the share of the limit from which on it asks.

    >>> for_buffer(7, 10, 4.0), for_buffer(8, 10, 4.0)
    (0, 2)
    """
    if waiting <= 0 or waiting < share * limit:
        return 0
    each = float(amounts(capacity))
    return int(np.ceil(waiting / each)) if each > 0 else 1


class Activation:
    """As many workers of each region as Eq. 6 says: for what is queued, what is forecast, and its deviation.

    More are requested at once, from the tiers as `queue-proportional` divides them; with several regions, where power
    and the network are cheapest. Fewer are held only as workers have idled for as long as they took to warm up: to
    boot, and to load. While no item was measured, each call has a worker. When more items wait than the buffer is
    made for, as many more as they would fill are requested. Active sessions get workers besides, by what a worker was
    measured to serve.

    :param slot_seconds: the slot in which the work is to be done.
    :param safety: Eq. 6's sigma, standard deviations of the forecast.
    :param buffer: items that may wait; from four fifths of it on it asks for workers.
    :param boot_seconds: what a worker takes from its request to joining, for tiers of which the site does not
        say it.
    :param patience: for how many warm-ups a worker idles before it is released.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there to size one for.
    :raises ValueError: for a number that makes no sense.
    """

    releases_idle = True

    def __init__(
        self,
        slot_seconds: float = 45.0,
        safety: float = SAFETY,
        buffer: int = 1000,
        boot_seconds: float = 30.0,
        patience: float = 1.0,
        batch_size: int = 100,
    ) -> None:
        if not (math.isfinite(slot_seconds) and slot_seconds > 0):
            raise ValueError("slot_seconds is the time in which the work is to be done: give more than 0")
        for name, count in (("buffer", buffer), ("batch_size", batch_size)):
            if count < 1:
                raise ValueError(f"{name} is a number of items: give 1 or more")
        for name, value in (("safety", safety), ("boot_seconds", boot_seconds), ("patience", patience)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} cannot be {value:g}: give 0 or more")
        self._slot_seconds, self._safety, self._buffer = slot_seconds, safety, buffer
        self._boot_seconds, self._patience = boot_seconds, patience
        self._batch_size = batch_size
        self._outlook = Outlook()

    def target(self, view: View) -> Mapping[str, int]:
        """Return the workers to hold of each tier."""
        self._outlook.look(view)
        works: dict[frozenset[str], _Work] = {}
        forecast = view.forecast or {}
        calls, sessions = outstanding(view, self._batch_size), active(view)
        running = dict.fromkeys(view.apps, 0)
        for attempt in view.attempts.values():
            running[attempt.app] += len(attempt.items)
        for app in view.apps.values():
            group = tiers_for(view, app)
            expected = float(amounts(forecast.get(app.id, 0.0))) * self._slot_seconds
            work = works.setdefault(group, _Work())
            items = slot_items(view, app, self._batch_size) if app.overlaps else 1.0
            work.add(app, running[app.id], expected, calls[app.id], expected / items, self._outlook)
            if app.id in sessions:
                work.carriers += len(sessions[app.id]) / sessions_of_worker(view, app, SESSIONS)
        wanted: dict[frozenset[str], float] = {}
        for group, work in works.items():
            for tiers, share in self._shares(view, group, work):
                wanted[tiers] = wanted.get(tiers, 0.0) + self._workers(view, tiers, work, share)
        return divided(view, wanted)

    def _shares(self, view: View, group: frozenset[str], work: _Work) -> list[tuple[frozenset[str], float]]:
        """Return the tiers that may do some work, by regions, with each region's share of it."""
        regions = list(view.regions.values())
        parts = [group.intersection(region.tiers) for region in regions]
        home = next((number for number, region in enumerate(regions) if region.home), 0)
        if regions:
            parts[home] |= group.difference(*parts)  # Tiers of no region are in the driver's.
        if sum(bool(part) for part in parts) < 2:
            return [(group, 1.0)]
        most = np.array([_most(view.tiers[name] for name in part) for part in parts], dtype=np.float64)
        demand = np.zeros((1, len(regions)))
        demand[0, home] = work.tasks * work.item_seconds if work.item_seconds else np.inf
        if not math.isfinite(demand[0, home]) or demand[0, home] >= most.sum() * self._slot_seconds:
            shares = most / most.sum() if most.any() else np.ones(len(parts)) / len(parts)
        else:
            shares = by_transport(demand, most * self._slot_seconds, region_costs(regions), None)[home]
        return [(part, float(share)) for part, share in zip(parts, shares, strict=True) if part]

    def _workers(self, view: View, tiers: frozenset[str], work: _Work, share: float) -> int:
        """Return how many workers of some tiers to hold for a share of the work."""
        capacity = self._slot_seconds / work.item_seconds if work.item_seconds else 0.0
        most = _most(view.tiers[name] for name in tiers)
        number = 0
        if work.tasks * share > 0:
            number = int(target([work.queued * share], [work.expected * share], [capacity], [most], self._safety)[0])
            number += for_buffer(int(work.waiting * share), max(1, int(self._buffer * share)), capacity)
            # As long as no speed is known, what is expected comes in full windows.
            number = min(number, math.ceil((work.calls + (work.expected if capacity else work.new_calls)) * share))
        number = min(most, number + math.ceil(work.carriers * share))
        staying = serving(view.workers.values(), tiers)
        return max(number, len(staying) - self._rested(view, staying, number))

    def _rested(self, view: View, workers: Sequence[WorkerView], wanted: int) -> int:
        """Return how many workers beyond those that are wanted may go now."""
        if len(workers) <= wanted:
            return 0
        warm_up = np.array([self._warm_up(view, worker) for worker in workers])
        busy = np.array([worker.slots_used / worker.slots for worker in workers])
        idle = np.array([_idle_seconds(view, worker) for worker in workers])
        suit = np.ones(len(workers))
        return len(switches(wanted, suit > 0, warm_up, suit, busy, idle, patience=self._patience).deactivate)

    def _warm_up(self, view: View, worker: WorkerView) -> float:
        tier = view.tiers.get(worker.tier)
        boot = None if tier is None else tier.boot_seconds
        loads = [self._outlook.load_seconds(context, worker.region) or 0.0 for context in worker.contexts]
        return (self._boot_seconds if boot is None else boot) + max(loads, default=0.0)


@dataclasses.dataclass
class _Work:
    """What some tiers may do: items queued (waiting or running), waiting and expected in a slot, and their seconds.

    :ivar calls: that items make that are queued; more workers than calls would be idle. :ivar new_calls: that those
        make that are expected, of apps with items in flight in full windows.
    :ivar carriers: workers for the active sessions.
    """

    queued: float = 0.0
    waiting: float = 0.0
    expected: float = 0.0
    seconds: float = 0.0
    calls: float = 0.0
    new_calls: float = 0.0
    carriers: float = 0.0
    known: bool = True

    def add(self, app: AppView, running: int, expected: float, calls: int, new: float, outlook: Outlook) -> None:
        """Add the work of an app, that makes so many calls, and new ones."""
        tasks = app.backlog + running + expected
        if tasks <= 0:
            return
        self.queued += app.backlog + running
        self.waiting += app.backlog
        self.expected += expected
        self.calls += calls
        self.new_calls += new
        seconds = outlook.item_seconds(app.id)
        self.known = self.known and seconds is not None
        self.seconds += tasks * (seconds or 0.0)

    @property
    def tasks(self) -> float:
        """Return how many tasks there are in all."""
        return self.queued + self.expected

    @property
    def item_seconds(self) -> float | None:
        """Return the mean seconds of an item, None where one is unknown."""
        return self.seconds / self.tasks if self.known and self.tasks and self.seconds else None


def _most(tiers: Iterable[TierView]) -> int:
    return sum(tier.maximum for tier in tiers)


def _idle_seconds(view: View, worker: WorkerView) -> float:
    """Return the seconds since a worker had work."""
    used = max((held.last_used for held in worker.contexts.values()), default=worker.joined)
    return view.now - max(used, worker.joined)
