"""Workers in proportion to what is outstanding: the scaling policy `queue-proportional`.

How it counts, and where that is simpler than the truth:

- *Calls.* An app's queue is divided by the size of the batch that the worker connected longest would get now; its
  running batches are a call each. What a short queue is shared out into therefore counts as calls.
- *Speed.* All workers count alike, whatever their GPU: `calls_per_worker` is the only knob.
- *Who may run what.* Calls of apps that the same tiers may run are counted together. The most restricted take
  joined workers first, from the cheapest tier that will do; where tiers overlap only in part, that may not be the
  best division.
- *Prices* order the tiers, and are not weighed against waiting: a tier without a price comes after those with one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ctxflow.policies.protocols import AppView, TierView, View, WorkerView


class QueueProportional:
    """One worker for every so many calls that are queued or running, asked for everywhere at once.

    An opportunistic tier may never give its workers, so every tier that can run the calls is asked for all that is
    not connected yet, and takes its place as soon as it gives: what comes first counts, and the other tiers are
    asked for so many fewer. When less is wanted than is connected, the cheapest tiers are kept. Each tier stays
    between its minimum and its maximum. A worker that holds work is never given back (the scheduler sees to it).

    Guarantees, for given workers: a longer queue never lowers what any tier is asked for, as far as batches do not
    shrink with it; without anything outstanding each tier is asked for its minimum once `linger` seconds are over.

    :param calls_per_worker: calls, queued or running, for which one worker is held.
    :param linger: seconds for which fewer workers must be wanted before any is given back, so that a pause between
        two bursts does not cost the contexts that the workers hold.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there for which the
        batching policy could say.
    :raises ValueError: for a number that makes no sense.
    """

    def __init__(self, calls_per_worker: float = 4, linger: float = 60.0, batch_size: int = 100) -> None:
        if not (math.isfinite(calls_per_worker) and calls_per_worker > 0):
            raise ValueError("calls_per_worker is how many calls a worker is held for: give more than 0")
        if not linger >= 0:
            raise ValueError("linger is a number of seconds: give 0 or more")
        if batch_size < 1:
            raise ValueError("batch_size is the number of items in a call: give 1 or more")
        self._calls_per_worker = calls_per_worker
        self._linger = linger
        self._batch_size = batch_size
        self._peaks: dict[frozenset[str], _Peak] = {}

    def target(self, view: View) -> Mapping[str, int]:
        """What each tier is asked for: what is used of its workers, and all that nobody has given yet."""
        order = sorted(view.tiers.values(), key=lambda tier: math.inf if tier.price is None else tier.price)
        tiers = [_Tier(tier, view.workers.values()) for tier in order]
        wanted = {group: calls / self._calls_per_worker for group, calls in self._lingering(view).items()}
        groups = sorted(wanted, key=lambda group: (len(group), [tier.name in group for tier in tiers]))
        there_anyway = {tier.name: float(tier.by_hand + tier.kept) for tier in tiers}
        _serve(wanted, groups, tiers, there_anyway)
        spare = {tier.name: float(tier.connected - tier.kept) for tier in tiers}
        used = _serve(wanted, groups, tiers, spare)
        return {
            tier.name: tier.bounded(used[tier.name] + sum(wanted[g] for g in groups if tier.name in g))
            for tier in tiers
        }

    def _lingering(self, view: View) -> dict[frozenset[str], float]:
        """Calls by the tiers that may run them, at their most over the last `linger` seconds."""
        now: dict[frozenset[str], float] = {}
        for app, calls in self._outstanding(view).items():
            group = frozenset(name for name, tier in view.tiers.items() if view.permits(view.apps[app], tier))
            now[group] = now.get(group, 0) + calls
        # What other tiers may run since there is another plan is counted there.
        self._peaks = {group: self._peaks.get(group) or _Peak() for group in now}
        return {group: self._peaks[group].over(calls, view.now, self._linger) for group, calls in now.items()}

    def _outstanding(self, view: View) -> dict[str, int]:
        """Calls of each app."""
        first = next(iter(view.workers.values()), None)
        calls = {app.id: self._queued(view, app, first) for app in view.apps.values()}
        for attempt in view.attempts.values():
            calls[attempt.app] += 1
        return calls

    def _queued(self, view: View, app: AppView, worker: WorkerView | None) -> int:
        if not app.backlog:
            return 0
        size = app.batch_size or self._batch_size
        if worker is not None:
            size = view.batch_size(app, worker) or app.backlog  # 0: it waits to become one batch.
        return math.ceil(app.backlog / size)


class _Tier:
    """A tier with the workers of it that stay.

    :ivar connected: those that were asked for.
    :ivar kept: as many of them as the minimum takes: they are there anyway, as are those started by hand.
    """

    def __init__(self, tier: TierView, workers: Iterable[WorkerView]) -> None:
        self.name = tier.name
        self._minimum, self._maximum = tier.minimum, tier.maximum
        staying = [w for w in workers if w.tier == tier.name and w.noticed is None and not w.draining]
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
class _Peak:
    """The most of a number over some time.

    :ivar steps: (since when, the most from then on), ever lower.
    """

    steps: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)

    def over(self, value: float, now: float, seconds: float) -> float:
        """Note the number, and give its most: a lower one counts when it was not exceeded for so many seconds.

        >>> peak = _Peak()
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
