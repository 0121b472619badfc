"""Workers beyond a plan that scaling may hold, where what waits is then answered sooner for the same dollars.

A plan is for the fewest dollars with which what waits is answered when it is due, which takes few workers for long. On
tiers that are as good, more of them for a shorter time cost as much but for their loads. A scaling policy that releases
idle workers may then hold them; with one that does not they would idle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.live_work import ContextWork, Offer

Counts = Mapping[tuple[str, str], int]
"""(context, tier) -> workers."""


@dataclasses.dataclass
class _Queue:
    """What waits for a context, and how much of it is done a second.

    :ivar tiers: those that may have more workers for it: the context was measured there, and an item costs hardly more
        than where it is cheapest. :ivar dollars: what is left for loading the context on them.
    """

    task: ContextWork
    tiers: Sequence[str]
    dollars: float
    pace: float

    @property
    def seconds(self) -> float:
        """Return how long what waits now takes: what keeps coming and is answered as it comes hardly counts."""
        return self.task.queued / self.pace if self.pace else math.inf


def hastened(
    tasks: Sequence[ContextWork], offers: Sequence[Offer], counts: Counts, loaded: Counts, seconds: float, gain: float
) -> dict[tuple[str, str], int]:
    """Return a plan's workers with as many more as answer what waits sooner for hardly more dollars.

    The context that would be longest at its queue gets a worker more, where an item costs least, until all queues are
    done within `seconds`. Each is on a tier on which an item costs up to the share `gain` more than on the best, and
    all loads for a context up to that share of what its queue costs.

    :param offers: the tiers whose workers may be added.
    :param loaded: the workers that hold a context already; others are paid for while they load.

    >>> task = ContextWork("c", 100.0, 400.0, queued=400.0, measured={"a"})
    >>> task.work.update({"a": 8000.0})
    >>> hastened([task], [Offer("a", 9, 1.0)], {("c", "a"): 3}, {}, 300.0, 0.05)
    {('c', 'a'): 7}
    """
    found, prices = dict(counts), {offer.name: offer.price / 3600 for offer in offers}
    spare = {offer.name: offer.workers - sum(n for (_, t), n in counts.items() if t == offer.name) for offer in offers}
    queues = [_queue(task, offers, counts, gain) for task in tasks if task.queued]
    while queues:
        queue = max(queues, key=lambda each: each.seconds)
        if queue.seconds <= seconds:
            break
        for tier in queue.tiers:
            pair = queue.task.context, tier
            held = found.get(pair, 0)
            load = queue.task.load_seconds * prices[tier] if held >= loaded.get(pair, 0) else 0.0
            if spare[tier] > 0 and load <= queue.dollars:
                queue.dollars -= load
                queue.pace += 1 / queue.task.item_seconds(tier)
                spare[tier] -= 1
                found[pair] = held + 1
                break
        else:
            queues.remove(queue)
    return found


def _queue(task: ContextWork, offers: Sequence[Offer], counts: Counts, gain: float) -> _Queue:
    able = [
        offer
        for offer in offers
        if offer.workers
        and offer.name in task.work
        and (task.max_delay is None or task.delay(offer.name) <= task.max_delay)
    ]
    costs = {offer.name: offer.price / 3600 * task.item_seconds(offer.name) for offer in able}
    least = min(costs.values(), default=0.0)
    tiers = [tier for tier in sorted(costs, key=costs.__getitem__) if costs[tier] <= (1 + gain) * least]
    held = {tier: n for (context, tier), n in counts.items() if context == task.context and tier in task.work}
    pace = sum(workers / task.item_seconds(tier) for tier, workers in held.items())
    return _Queue(task, [tier for tier in tiers if tier in task.measured], gain * least * task.queued, pace)
