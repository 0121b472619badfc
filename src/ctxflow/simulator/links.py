"""A link whose bandwidth its transfers share evenly: a filesystem, an internet line, a host's network card.

What does not live here: who sends what to whom (staging.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from ctxflow.executors.simulated import Timers


class Transfer:
    """Bytes on their way over a link."""

    __slots__ = ("done", "ends", "running", "size")

    def __init__(self, size: float, ends: float, done: Callable[[], None]) -> None:
        self.size = size
        self.ends = ends
        self.done = done
        self.running = True


class FairLink:
    """Processor sharing: n transfers get 1/n of the bandwidth each, and none more than its own end can take.

    All transfers get the same rate, so the bytes that one which was there all the time would have got are a clock for
    all of them: each ends when that clock has advanced by its size. Joining and leaving cost O(log n), not O(n).

    :param bandwidth: bytes a second.
    :param per_transfer: the most that one transfer gets, in bytes a second.
    """

    def __init__(self, timers: Timers, bandwidth: float, per_transfer: float = math.inf) -> None:
        self.moved = 0.0
        self._timers = timers
        self._bandwidth = bandwidth
        self._per_transfer = per_transfer
        self._served = 0.0
        self._looked = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Transfer]] = []
        self._order = itertools.count()
        self._plan = 0

    @property
    def rate(self) -> float:
        """Bytes a second that each transfer gets now."""
        return min(self._per_transfer, self._bandwidth / max(1, self._count))

    def send(self, size: float, done: Callable[[], None]) -> Transfer:
        """Begin a transfer of so many bytes; `done` is called at its end."""
        self._advance()
        transfer = Transfer(size, self._served + size, done)
        heapq.heappush(self._heap, (transfer.ends, next(self._order), transfer))
        self._count += 1
        self._plan_next()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer early; what it moved counts. Without effect on one that has ended."""
        if not transfer.running:
            return
        self._advance()
        transfer.running = False
        self.moved += transfer.size - (transfer.ends - self._served)
        self._count -= 1
        self._plan_next()

    def _advance(self) -> None:
        now = self._timers.now
        self._served += (now - self._looked) * self.rate
        self._looked = now

    def _plan_next(self) -> None:
        """Look again when the next transfer ends; an earlier plan no longer holds."""
        self._plan += 1
        while self._heap and not self._heap[0][2].running:
            heapq.heappop(self._heap)
        if self._heap:
            wait = max(0.0, self._heap[0][0] - self._served) / self.rate
            self._timers.at(self._timers.now + wait, self._end_next, self._plan)

    def _end_next(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ends, _, transfer = heapq.heappop(self._heap)
        self._served = max(self._served, ends)
        transfer.running = False
        self._count -= 1
        self.moved += transfer.size
        self._plan_next()
        transfer.done()
