"""What TORTA is compared with: SkyLB and SDIB, as the routing policies `skylb` and `sdib`.

SkyLB (Xia et al., "SkyLB: A Locality-aware Cross-Region Load Balancer for LLM Inference"): home first, forward what
does not fit; where the longest prefix was seen, the least loaded replica (a worker here). SDIB (after MERL-LB by Yang
et al., whose two objectives TORTA's authors adapt): the least standard deviation of the servers' occupancy, and the
least idle time; here they are one sum, and each task goes to the server that makes it smallest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ctxflow.policies.helpers import FreeSlots, urgency
from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.torta.micro import NOWHERE
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, amounts
from ctxflow.policies.views import AppView, WorkerView


def spread(
    sizes: Floats,
    held: Floats,
    capacity: Floats,
    places: Ints,
    idle: Floats,
    idle_weight: float = 0.01,
    allowed: Bools | None = None,
) -> Ints:
    """Return (N,) the server of each task, in the order given; `NOWHERE` for those that find no place.

    Guarantees: no server gets more tasks than it has places, nor one that it is not allowed.

    :param sizes: (N,) what each task adds to a server's load.
    :param held: (S,) the servers' loads.
    :param capacity: (S,) the loads that they are made for; occupancy is load over capacity.
    :param places: (S,) tasks that each may still be given.
    :param idle: (S,) seconds since each had work.
    :param idle_weight: what a second of mean idle time counts beside a unit of standard deviation.
    :param allowed: (N, S), None for anywhere.

    >>> zero, two = np.zeros(2), np.full(2, 2.0)
    >>> spread(np.ones(3), zero, two, np.array([9, 9]), np.array([0.0, 5.0])).tolist()
    [1, 0, 0]
    """
    room = amounts(capacity)
    scale = np.divide(1.0, room, out=np.ones_like(room), where=room > 0)
    occupancy, resting = amounts(held) * scale, amounts(idle)
    left = np.where(room > 0, np.maximum(places, 0), 0)
    where = np.full(len(sizes), NOWHERE, dtype=np.int64)
    count = max(len(room), 1)
    for task, size in enumerate(amounts(sizes).tolist()):
        open_to = left > 0 if allowed is None else (left > 0) & allowed[task]
        if not open_to.any():
            continue
        more = size * scale
        mean = (occupancy.sum() + more) / count
        squares = ((occupancy**2).sum() + 2 * occupancy * more + more**2) / count
        deviation = np.sqrt(np.maximum(squares - mean**2, 0.0))
        badness = deviation + idle_weight * (resting.sum() - resting) / count
        best = int(np.where(open_to, badness, np.inf).argmin())
        where[task], left[best] = best, left[best] - 1
        occupancy[best] += more[best]
        resting[best] = 0.0
    return where


class SkyLB:
    """Home first, then the nearest region with room; in a region the least loaded worker.

    Workers that hold the context (SkyLB's prefix) come first, wherever they are: only where none of them is free is the
    context loaded on another.
    """

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first; first of all for workers that hold its context."""
        slots = FreeSlots(view)
        left = {app.id: app.backlog for app in sorted(ready, key=urgency)}
        for held, number in itertools.product((True, False), left):
            app = view.apps[number]
            nearest = functools.partial(_way_and_use, slots, _distances(view, app.region))
            for worker in slots.least_first(app, nearest, _keepers(slots, app) if held else None):
                if left[number] <= 0:
                    break
                left[number] -= slots.take(app, worker)
                yield Assignment(worker.id, number)


def _way_and_use(slots: FreeSlots, distance: Mapping[str, float], worker: WorkerView) -> tuple[float, float]:
    """Return how far away a worker is, and how many of its slots are in use."""
    return distance.get(worker.region, math.inf), slots.used[worker.id]


def _keepers(slots: FreeSlots, app: AppView) -> list[WorkerView]:
    """Return the free workers that hold an app's context, and are not drained for it."""
    able = slots.able(app, slots.view.free_holders(app.context))
    return [worker for worker in able if not slots.view.drains(app, worker)]


def _distances(view: View, origin: str) -> Mapping[str, float]:
    """Return region -> seconds from the one where items come from; empty where the site does not say it."""
    home = view.regions.get(origin) or next((region for region in view.regions.values() if region.home), None)
    return {} if home is None else {**home.latency, home.name: 0.0}


class Sdib:
    """Each call goes where the workers' occupancy is then the evenest, and who idled longest stays no longer idle.

    :param keep: whether free workers that hold the call's context come first; else it is loaded wherever it is evenest.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first."""
        workers = list(view.free.values())
        capacity = np.array([worker.slots for worker in workers], dtype=np.float64)
        places = np.array([worker.free_slots for worker in workers], dtype=np.int64)
        slots, column = FreeSlots(view), {worker.id: number for number, worker in enumerate(workers)}
        busy, idle = np.array(list(slots.used.values())), np.array([_idle_seconds(view, each) for each in workers])
        left = {app.id: app.backlog for app in sorted(ready, key=urgency)}
        for held, number in itertools.product((True, False) if self._keep else (False,), left):
            app = view.apps[number]
            able = _keepers(slots, app) if held else slots.able(app)
            while left[number] > 0 and able:
                allowed = np.zeros((1, len(workers)), dtype=bool)
                allowed[0, [column[worker.id] for worker in able]] = True
                where = int(spread(np.ones(1), busy, capacity, places, idle, allowed=allowed)[0])
                worker = workers[where]
                if view.can_run(app, worker):
                    left[number] -= slots.take(app, worker)
                    busy[where], places[where], idle[where] = slots.used[worker.id], slots.left[worker.id], 0.0
                    yield Assignment(worker.id, number)
                able = slots.rest(app, able, worker, () if held else None)


def _idle_seconds(view: View, worker: WorkerView) -> float:
    """Return for how many seconds a worker has run nothing."""
    if worker.running:
        return 0.0
    return view.now - max((held.last_used for held in worker.contexts.values()), default=worker.joined)
