"""Workers wanted, divided among tiers; and the most of a number over some time.

What does not live here: how many workers are wanted (queue_proportional.py, closed_loop.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, TierView, WorkerView


def tiers_for(view: View, app: AppView) -> frozenset[str]:
    """The names of the tiers whose workers could run an app now."""
    return frozenset(name for name, tier in view.tiers.items() if view.permits(app, tier))


def serving(workers: Iterable[WorkerView], tiers: Collection[str] | None = None) -> list[WorkerView]:
    """The workers that stay and serve whoever needs them: those with a place of their own do not.

    :param tiers: only those of these, where given.
    """
    staying = (w for w in workers if w.noticed is None and not w.draining and w.pin is None)
    return [w for w in staying if tiers is None or w.tier in tiers]


def divided(view: View, wanted: Mapping[frozenset[str], float]) -> dict[str, int]:
    """What each tier is asked for: what is used of its workers, and all that nobody has given yet.

    The most restricted take joined workers first, from the cheapest tier that will do; where tiers overlap only in
    part, that may not be the best division. An opportunistic tier may never give its workers, so every tier that can
    help is asked for all that is lacking. Each tier stays between its minimum and its maximum.

    :param wanted: workers by the tiers that will do; shares of workers count.
    """
    left = dict(wanted)
    order = sorted(view.tiers.values(), key=lambda tier: math.inf if tier.price is None else tier.price)
    tiers = [_Tier(tier, view.workers.values()) for tier in order]
    groups = sorted(left, key=lambda group: (len(group), [tier.name in group for tier in tiers]))
    there_anyway = {tier.name: float(tier.by_hand + tier.kept) for tier in tiers}
    _serve(left, groups, tiers, there_anyway)
    spare = {tier.name: float(tier.connected - tier.kept) for tier in tiers}
    used = _serve(left, groups, tiers, spare)
    return {tier.name: tier.bounded(used[tier.name] + sum(left[g] for g in groups if tier.name in g)) for tier in tiers}


class _Tier:
    """A tier with the workers of it that stay.

    :ivar connected: those that were asked for.
    :ivar kept: as many of them as the minimum takes: they are there anyway, as are those started by hand.
    """

    def __init__(self, tier: TierView, workers: Iterable[WorkerView]) -> None:
        self.name = tier.name
        self._minimum, self._maximum = tier.minimum, tier.maximum
        staying = serving(workers, (tier.name,))
        self.connected = sum(worker.acquired for worker in staying)
        self.by_hand = len(staying) - self.connected
        self.kept = min(self.connected, tier.minimum)

    def bounded(self, workers: float) -> int:
        """What to ask for when so many are wanted beyond those that are there anyway."""
        # Sums of shares of workers may be a trifle above a whole number.
        return max(self._minimum, min(self._maximum, self.kept + math.ceil(workers - 1e-9)))


def _serve(
    wanted: dict[frozenset[str], float],
    groups: Sequence[frozenset[str]],
    tiers: Sequence[_Tier],
    free: dict[str, float],
) -> dict[str, float]:
    """Let groups in order take free workers of their tiers in order; lowers `wanted`, and gives what was taken."""
    used = dict.fromkeys(free, 0.0)
    for group in groups:
        for tier in tiers:
            if tier.name in group:
                taken = min(wanted[group], free[tier.name] - used[tier.name])
                wanted[group] -= taken
                used[tier.name] += taken
    return used


@dataclasses.dataclass
class Peak:
    """The most of a number over some time.

    :ivar steps: (since when, the most from then on), ever lower.
    """

    steps: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)

    def over(self, value: float, now: float, seconds: float) -> float:
        """Note the number, and give its most: a lower one counts when it was not exceeded for so many seconds.

        >>> peak = Peak()
        >>> [peak.over(value, now, 60) for value, now in ((9, 0), (2, 1), (3, 30), (0, 50), (0, 60), (0, 61), (0, 110))]
        [9, 9, 9, 9, 9, 3, 0]
        """
        since = now
        while self.steps and self.steps[-1][1] <= value:
            since = self.steps.pop()[0]
        self.steps.append((since, value))
        while len(self.steps) > 1 and self.steps[1][0] + seconds <= now:
            self.steps.popleft()
        return self.steps[0][1]
