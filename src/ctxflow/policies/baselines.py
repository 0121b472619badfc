"""What TORTA is compared with: SkyLB and SDIB, as functions and as the routing policies `skylb` and `sdib`.

SkyLB (Xia et al., "SkyLB: A Locality-aware Cross-Region Load Balancer for LLM Inference"): home first, forward what
does not fit; in a region, where the longest prefix was seen. A replica (a server here) has at most ten requests at
once; a request with no known prefix, or whose replicas are full, goes to the least loaded one. SDIB (after MERL-LB by
Yang et al., whose two objectives TORTA's authors adapt): the least standard deviation of the servers' occupancy, and
the least idle time; here they are one sum, and each task goes to the server that makes it smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ctxflow.policies.helpers import FreeSlots, urgency
from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.torta.micro import NOWHERE
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, amounts, prices
from ctxflow.policies.views import AppView, WorkerView

AT_ONCE = 10  # Requests that a replica has at a time, at most.


def forward(demand: npt.ArrayLike, room: npt.ArrayLike, latency: npt.ArrayLike) -> Ints:
    """Return how many tasks of each region go where: home while there is room, then to the nearest region with room.

    Regions forward in their order; what is left then waits at home, or in the nearest region that has not vanished.

    :param demand: (R,) tasks that arrived.
    :param room: (R,) tasks that each region can take at once; less than nothing or NaN if it has vanished.
    :param latency: (R, R) from row to column.

    >>> forward([5, 0, 1], [2, 2, 9], [[0, 1, 2], [1, 0, 1], [2, 1, 0]]).tolist()
    [[2, 2, 1], [0, 0, 0], [0, 0, 1]]
    """
    wanted = np.floor(amounts(demand)).astype(np.int64)
    given = np.asarray(room, dtype=np.float64)
    free = np.floor(amounts(room)).astype(np.int64)
    alive = given >= 0 if (given >= 0).any() else np.ones(len(given), dtype=bool)
    near = prices(latency)
    flows = np.diag(np.minimum(wanted, free))
    free -= flows.diagonal()
    for origin in np.flatnonzero(wanted > flows.sum(axis=1)).tolist():
        order = np.argsort(near[origin], kind="stable")
        over = int(wanted[origin] - flows[origin].sum())
        taken = np.minimum(np.cumsum(free[order]), over)
        given_now = np.diff(taken, prepend=0)
        flows[origin, order] += given_now
        free[order] -= given_now
        home = origin if alive[origin] else int(np.where(alive, near[origin], np.inf).argmin())
        flows[origin, home] += over - int(taken[-1])
    return flows


class PrefixTree:
    """Which replicas have seen which prefixes.

    >>> tree = PrefixTree()
    >>> tree.insert(["be", "brief"], 3)
    >>> tree.longest(["be", "kind"], {3, 4}), tree.longest(["no"], {3, 4})
    ([3], [])
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], dict[int, None]] = {}

    def insert(self, prefix: Sequence[object], replica: int) -> None:
        """Note that a replica has it now, and all that it begins with."""
        for length in range(1, len(prefix) + 1):
            self._seen.setdefault(tuple(prefix[:length]), {})[replica] = None

    def longest(self, prefix: Sequence[object], among: set[int]) -> list[int]:
        """Return those of some replicas that have seen the longest part of its beginning; none if nobody saw any."""
        for length in range(len(prefix), 0, -1):
            found = [replica for replica in self._seen.get(tuple(prefix[:length]), ()) if replica in among]
            if found:
                return found
        return []


def replicas(
    prefixes: Sequence[Sequence[object]],
    tree: PrefixTree,
    running: Ints | Floats,
    allowed: Sequence[int],
    limit: float = AT_ONCE,
) -> Ints:
    """Return the replica of each request: the least loaded of those that know its prefix best, else of all.

    :param prefixes: what each request begins with, in steps, such as its model and its user.
    :param tree: what has been seen; these requests are added to it, and nothing is ever forgotten.
    :param running: (S,) requests that each replica has, or how full it is.
    :param allowed: the replicas that are there.
    :param limit: requests that a replica has at once.
    :returns: (N,) `NOWHERE` for those that wait because all are full.

    >>> replicas([["a"], ["b"], ["a"]], PrefixTree(), np.array([0, 0]), [0, 1]).tolist()
    [0, 1, 0]
    """
    held = running.tolist()
    open_to = {replica for replica in allowed if held[replica] < limit}
    where = np.full(len(prefixes), NOWHERE, dtype=np.int64)
    for number, prefix in enumerate(prefixes):
        if not open_to:
            break
        known = tree.longest(prefix, open_to)
        chosen = min(known or open_to, key=lambda replica: (held[replica], replica))
        where[number] = chosen
        held[chosen] += 1
        tree.insert(prefix, chosen)
        if held[chosen] >= limit:
            open_to.discard(chosen)
    return where


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
    """Home first, then the nearest region with room; in a region, where the context (SkyLB's prefix) was last."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._numbers: dict[str, int] = {}

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first."""
        slots = FreeSlots(view)
        if len(self._numbers) > 2 * len(view.workers) + 64:  # Most of them are gone.
            self._tree, self._numbers = PrefixTree(), {}
        numbers = {self._numbers.setdefault(worker, len(self._numbers)): worker for worker in slots.left}
        distance = _distances(view)
        for app in sorted(ready, key=urgency):
            left, able = app.backlog, slots.able(app)
            while left > 0 and able:
                nearest = min(distance.get(worker.region, np.inf) for worker in able)
                there = [self._numbers[w.id] for w in able if distance.get(w.region, np.inf) == nearest]
                held = np.zeros(max(there) + 1)
                held[there] = [slots.used[numbers[number]] for number in there]
                # Whether they are full is in their free slots.
                chosen = int(replicas([[app.context]], self._tree, held, there, limit=np.inf)[0])
                worker = view.workers[numbers[chosen]]
                if view.can_run(app, worker):
                    left -= slots.take(app, worker)
                    yield Assignment(worker.id, app.id)
                able = slots.rest(app, able, worker)


def _distances(view: View) -> dict[str, float]:
    """Return region -> seconds from the driver's, infinite where the site does not say."""
    home = next((region for region in view.regions.values() if region.home), None)
    if home is None:
        return {}
    return {name: 0.0 if name == home.name else home.latency.get(name, np.inf) for name in view.regions}


class Sdib:
    """Each call goes where the workers' occupancy is then the evenest, and who idled longest stays no longer idle."""

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first."""
        workers = list(view.free.values())
        capacity = np.array([worker.slots for worker in workers], dtype=np.float64)
        places = np.array([worker.free_slots for worker in workers], dtype=np.int64)
        slots, number = FreeSlots(view), {worker.id: number for number, worker in enumerate(workers)}
        held, idle = np.array(list(slots.used.values())), np.array([_idle_seconds(view, each) for each in workers])
        for app in sorted(ready, key=urgency):
            left, able = app.backlog, slots.able(app)
            while left > 0 and able:
                allowed = np.zeros((1, len(workers)), dtype=bool)
                allowed[0, [number[worker.id] for worker in able]] = True
                where = int(spread(np.ones(1), held, capacity, places, idle, allowed=allowed)[0])
                worker = workers[where]
                if view.can_run(app, worker):
                    left -= slots.take(app, worker)
                    held[where], places[where], idle[where] = slots.used[worker.id], slots.left[worker.id], 0.0
                    yield Assignment(worker.id, app.id)
                able = slots.rest(app, able, worker)


def _idle_seconds(view: View, worker: WorkerView) -> float:
    """Return for how many seconds a worker has run nothing."""
    if worker.running:
        return 0.0
    return view.now - max((held.last_used for held in worker.contexts.values()), default=worker.joined)
