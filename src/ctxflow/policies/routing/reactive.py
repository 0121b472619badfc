"""The paper's reactive baselines on a live view: the routing policies `skylb` and `sdib`.

What does not live here: how they choose (skylb.py, sdib.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.routing.matching import NOWHERE
from ctxflow.policies.routing.sdib import spread
from ctxflow.policies.routing.simple import urgency
from ctxflow.policies.routing.skylb import PrefixTree, replicas
from ctxflow.policies.views import AppView, WorkerView


class SkyLB:
    """Home first, then the nearest region with room; in a region, where the context was last, else the least loaded.

    A context is the prefix that SkyLB looks for. After Xia et al., "SkyLB: A Locality-aware Cross-Region Load Balancer
    for LLM Inference".
    """

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._numbers: dict[str, int] = {}

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first."""
        running = {worker.id: worker.slots - worker.free_slots for worker in view.free.values()}
        if len(self._numbers) > 2 * len(view.workers) + 64:  # Most of them are gone.
            self._tree, self._numbers = PrefixTree(), {}
        numbers = {self._numbers.setdefault(worker, len(self._numbers)): worker for worker in running}
        distance = _distances(view)
        for app in sorted(ready, key=urgency):
            left = app.backlog
            able = [w for w in view.free.values() if view.can_run(app, w)]
            while left > 0:
                open_to = [w for w in able if running[w.id] < w.slots]
                if not open_to:
                    break
                nearest = min(distance.get(worker.region, np.inf) for worker in open_to)
                there = [self._numbers[w.id] for w in open_to if distance.get(w.region, np.inf) == nearest]
                held = np.zeros(max(there) + 1)
                held[there] = [running[numbers[number]] for number in there]
                most = max(view.workers[numbers[number]].slots for number in there)
                chosen = int(replicas([[app.context]], self._tree, held.astype(np.int64), there, limit=most)[0])
                worker = view.workers[numbers[chosen]]
                running[worker.id] += 1
                left -= max(1, view.batch_size(app, worker))
                yield Assignment(worker.id, app.id)


def _distances(view: View) -> dict[str, float]:
    """Region -> seconds from the driver's, infinite where the site does not say."""
    home = next((region for region in view.regions.values() if region.home), None)
    if home is None:
        return {}
    return {name: 0.0 if name == home.name else home.latency.get(name, np.inf) for name in view.regions}


class Sdib:
    """Each call goes where the workers' occupancy is then the evenest, and who idled longest stays no longer idle.

    After Yang et al. (MERL-LB), as TORTA's authors adapt it.
    """

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Choose for each call in turn, the most urgent app's first."""
        workers = list(view.free.values())
        slots = np.array([worker.slots for worker in workers], dtype=np.float64)
        places = np.array([worker.free_slots for worker in workers], dtype=np.int64)
        held, idle = slots - places, np.array([_idle_seconds(view, worker) for worker in workers])
        for app in sorted(ready, key=urgency):
            left = app.backlog
            allowed = np.array([[view.can_run(app, worker) for worker in workers]])
            while left > 0:
                where = int(spread(np.ones(1), held, slots, places, idle, allowed=allowed)[0])
                if where == NOWHERE:
                    break
                held[where], places[where], idle[where] = held[where] + 1, places[where] - 1, 0.0
                left -= max(1, view.batch_size(app, workers[where]))
                yield Assignment(workers[where].id, app.id)


def _idle_seconds(view: View, worker: WorkerView) -> float:
    """Since when a worker has run nothing."""
    if worker.running:
        return 0.0
    return view.now - max((held.last_used for held in worker.contexts.values()), default=worker.joined)
