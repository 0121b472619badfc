"""How fast workers are and what a call costs beside its items, learned from finished batches.

What does not live here: what is done with it (policies).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxflow.scheduler.state import App, Attempt, Worker

REMEMBERED_ITEMS = 100
"""How many items before a batch count beside its own in a worker's speed: fewer would follow the luck of a few
items."""


@dataclasses.dataclass(slots=True)
class Pace:
    """One worker's speed on one app.

    :ivar item_seconds: a moving average over its items, without what their calls cost beside their items.
    :ivar items: answered so far.
    :ivar last: items and seconds of the last batch.
    """

    item_seconds: float
    items: int
    last: tuple[int, float]


@dataclasses.dataclass(slots=True)
class CallCost:
    """Seconds of an app's calls that do not grow with their items, over all workers.

    Two parts. The way to the worker and back is what a call took less what the worker says that it took. What the call
    itself does once is read off two batches that one worker ran one after the other, one at least half as large again
    as the other: n items in T seconds and n' in T' lie on a line whose height at 0 is (T' n - T n') / (n - n'). These
    heights are averaged, each weighted by the inverse of its variance where items vary independently. (Sizes that
    differ less are no experiment: a batch is smaller because the one before was slow, which would read as a negative
    cost.)

    Before it is known it is taken to be small: one more height counts, of 0, with the variance of one item. What a
    wrong cost costs grows in proportion to the true one, so that the best single number is the mean of what it may be.
    And before there are three pairs it is all that a call takes: a batch that is too long for its call's cost loses
    little and tells much, while batches of one item would never tell that most of their time is cost.
    """

    way: float | None = None
    whole: float = 0.0
    pairs: int = 0
    weight: float = 0.0
    total: float = 0.0

    def add(self, way: float, whole: float) -> None:
        """A call's time beside what its worker says that it took, and that: moving averages."""
        way = max(0.0, way)
        share = 1.0 if self.way is None else 0.05
        self.way = share * way + (1 - share) * (self.way or 0.0)
        self.whole = share * whole + (1 - share) * self.whole

    def add_pair(self, first: tuple[int, float], second: tuple[int, float], usual: float = 0.0) -> None:
        """Two batches, (items, seconds), that one worker ran one after the other; without effect if they are alike.

        :param usual: the worker's seconds of an item: two short items that happen to be alike prove nothing.
        """
        (n, seconds), (before, seconds_before) = second, first
        item_seconds = max(usual, (seconds + seconds_before) / (n + before))
        if 2 * max(n, before) < 3 * min(n, before) or not item_seconds:
            return
        across = n - before
        height = (seconds_before * n - seconds * before) / across
        if not self.pairs:
            self.weight = item_seconds**-2
        weight = across**2 / (n * before * (n + before) * item_seconds**2)
        self.pairs += 1
        self.weight += weight
        self.total += weight * height

    @property
    def inside(self) -> float:
        """What a call itself does once, as far as it is known."""
        return max(0.0, self.total / self.weight) if self.pairs >= 3 else 0.0

    @property
    def error(self) -> float:
        """The standard error of what a call does once, in seconds; 0 while all that a call takes is counted."""
        return self.weight**-0.5 if self.pairs >= 3 else 0.0

    @property
    def seconds(self) -> float | None:
        """The cost of a call, None before there was one.

        >>> cost = CallCost()
        >>> cost.add(way=0.25, whole=2.5)
        >>> cost.seconds
        2.75
        >>> for n in (3, 9, 27) * 100: cost.add_pair((1, 2.0 + 0.5), (n, 2.0 + 0.5 * n))
        >>> round(cost.seconds, 1)
        2.2
        """
        if self.way is None:
            return None
        return self.way + (self.whole if self.pairs < 3 else self.inside)


def learn(app: App, worker: Worker, attempt: Attempt, count: int, seconds: float, now: float) -> None:
    """Learn from a batch that answered so many items in so many seconds, as its worker says, and has just come back."""
    cost = app.call_cost
    # Calls of one worker may wait for each other: that is no cost.
    cost.add(now - attempt.started - seconds if worker.slots == 1 else 0.0, seconds)
    # At least a tenth is the items': the cost is that of all workers, and this one may be far faster.
    item_seconds = max(seconds - cost.inside, 0.1 * seconds) / count
    known = worker.paces.get(app.id)
    if known is None:
        worker.paces[app.id] = Pace(item_seconds, count, (count, seconds))
        app.measured_on.add(worker.id)
        return
    share = count / (count + min(known.items, REMEMBERED_ITEMS))
    known.item_seconds += share * (item_seconds - known.item_seconds)
    known.items += count
    cost.add_pair(known.last, (count, seconds), known.item_seconds)
    known.last = (count, seconds)
