"""The timers of a virtual clock, in order of time and, of one time, in the order in which they were set."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

_PER_SECOND = 4  # Buckets.
_FARTHEST = 1e15  # Seconds, in the bucket of which all later ones are.
_Timer = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class TimerQueue:
    """A calendar queue: a heap of the timers that are due next, and unsorted buckets of those after them.

    So what a timer costs does not grow with how many are set, each far from the others in memory.

    >>> timers, out = TimerQueue(), []
    >>> for time in (3.0, 1.5, 3.0, 0.0):
    ...     timers.set(time, out.append, time)
    >>> timers.due(2.0)[0], timers.due(2.0)[0], timers.due(2.0), bool(timers)
    (0.0, 1.5, None, True)
    """

    def __init__(self) -> None:
        self._next: list[_Timer] = []  # Those of buckets up to `_reached`.
        self._later: dict[int, list[_Timer]] = {}
        self._buckets: list[int] = []  # A heap of these.
        self._reached = -1
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._next or self._later)

    def set(self, time: float, action: Callable[..., None], *values: Any) -> None:
        """Set a timer."""
        timer = (time, next(self._order), action, values)
        bucket = int(min(time, _FARTHEST) * _PER_SECOND)
        if bucket <= self._reached:
            heapq.heappush(self._next, timer)
            return
        others = self._later.get(bucket)
        if others is None:
            self._later[bucket] = [timer]
            heapq.heappush(self._buckets, bucket)
        else:
            others.append(timer)

    def due(self, until: float) -> _Timer | None:
        """Take the next timer, if it is due by then."""
        if not self._next:
            if not self._buckets:
                return None
            self._reached = heapq.heappop(self._buckets)
            self._next = self._later.pop(self._reached)
            heapq.heapify(self._next)
        return heapq.heappop(self._next) if self._next[0][0] <= until else None

    def clear(self) -> None:
        """Forget all."""
        self._next, self._later, self._buckets = [], {}, []
