"""Whether a call waits for a cheaper worker that is busy, or takes a free one that is dearer."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ctxflow.policies.helpers import forget, serving
from ctxflow.policies.protocols import View
from ctxflow.policies.torta.quantities import Floats, Outlook
from ctxflow.policies.views import AppView, WorkerView

PLENTY = 1 / 3  # With more than that of a pool's slots free nobody waits: its apps expect answers at once.
SPARE = 1 / 4  # Nor if more than that is free usually.
USUAL_SECONDS = 180.0  # Over how long it is seen how much is free usually; all of it, until then.
LONGEST = 2.0  # Times its own time that a call waits at most.


@dataclasses.dataclass(frozen=True)
class _Pool:
    """The workers that hold a context.

    :ivar contexts: what they hold, this one among it.
    :ivar costs: (S,) of a call in each of their slots, from the cheapest on.
    :ivar busy: how many of their slots have work usually.
    """

    contexts: Collection[str]
    costs: Floats
    busy: float

    def most(self, calls: float, hold: float) -> float:
        """Return what a call takes a worker for at most, rather than wait for one of the cheaper slots.

        With k of these and `busy` slots at work, more comes than these k get done: of q calls that wait, the last is
        needed, so that none of the k idles, with probability (k / busy)^(q - 1) at most (the gambler's ruin of a
        queue; Feller 1968, XIV.2). Only that often does its waiting keep a call from a dearer worker.

        :param calls: that wait, this one among them. :param hold: as of `Holding`.
        """
        first = np.arange(1, len(self.costs) + 1)
        needed = np.minimum(1.0, first / self.busy) ** max(0.0, calls - 1)
        with np.errstate(divide="ignore"):
            return float((self.costs + calls / (hold * first * needed)).min(initial=math.inf))


class Holding:
    """Says which workers are so dear that a call does better to wait for others, where power has a price.

    A call costs what its worker does, for as long as it takes on that worker's GPU, and waiting as much as `hold` says.
    Of a pool of n slots, one is done in the n-th part of a call's time. So a call takes no worker that costs more than
    the cheapest slots do with the wait for one of them, behind all that waits for the same pool; and few wait, as the
    cheapest have work all the time with a short queue as well (`_Pool.most`).

    Guarantees: nobody waits by more than `hold`, or twice, the time of its call. Nor does anybody wait where workers
    are paid by the hour, as one without work costs the same; for calls that overlap; while more than a third of the
    pool is free, or usually more than a quarter; nor where one of its workers could load a context that none of them
    holds, as it would, having no work.

    :param hold: how many times its own time a call may wait to save what the dearest tier costs.
    """

    def __init__(self, hold: float) -> None:
        self._hold = hold
        self._pools: dict[str, _Pool] = {}
        self._at = -math.inf
        self._free: dict[str, float] = {}  # Context -> the share of its pool's slots that is free usually.

    def look(self, view: View, outlook: Outlook) -> None:
        """Gather what workers hold and cost."""
        self._pools = {}
        powered = {region.name for region in view.regions.values() if region.power_price is not None}
        if not (self._hold and powered and outlook.prices):
            return
        pools: dict[str, list[WorkerView]] = defaultdict(list)
        for worker in serving(view.workers.values()):
            for context in worker.contexts:
                pools[context].append(worker)
        wanted = {app.context: app for app in view.apps.values() if app.arrived}
        kept, self._at = math.exp(-max(0.0, view.now - self._at) / USUAL_SECONDS), view.now
        forget(self._free, pools)
        for context, workers in pools.items():
            held = {each for worker in workers for each in worker.contexts}
            tiers = [view.tiers[name] for name in {worker.tier for worker in workers} & view.tiers.keys()]
            others = any(view.permits(wanted[c], tier) for c in wanted.keys() - held for tier in tiers)
            if not others and all(worker.region in powered for worker in workers):
                costs = [self._cost(outlook, worker) for worker in workers for _ in range(worker.slots)]
                now = sum(worker.free_slots for worker in workers) / len(costs)
                usual = now + kept * (self._free[context] - now) if context in self._free else 1.0
                self._free[context] = usual
                if usual < SPARE:
                    self._pools[context] = _Pool(held, np.sort(costs), len(costs) * (1 - usual))

    def affordable(
        self, app: AppView, free: Sequence[WorkerView], outlook: Outlook, queued: Mapping[str, float], waited: float
    ) -> Sequence[WorkerView]:
        """Return those of the free workers that hold an app's context that its calls take, rather than wait.

        :param queued: context -> seconds of work that wait. :param waited: seconds since the app was given a worker.
        """
        pool, seconds = self._pools.get(app.context), outlook.item_seconds(app)
        if pool is None or app.overlaps or not seconds or waited > min(self._hold, LONGEST) * seconds:
            return free
        if sum(worker.free_slots for worker in free) > PLENTY * len(pool.costs):
            return free
        calls = sum(queued.get(context, 0.0) for context in pool.contexts) / seconds
        most = pool.most(calls, self._hold)
        return [worker for worker in free if self._cost(outlook, worker) <= most]

    def _cost(self, outlook: Outlook, worker: WorkerView) -> float:
        """Return what a call costs on a worker, its time there included."""
        return (outlook.price(worker.tier) + 1 / self._hold) / outlook.speed(worker.gpu_model)
