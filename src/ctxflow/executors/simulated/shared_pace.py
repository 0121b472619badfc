"""Simulated engines that divide their time among what is in flight: how fast they are, and what each item gets of it.

An engine with n items in flight does rate(n) tokens a second, of which each item gets as many. When one ends or
comes, all others go on at another pace: so nothing is computed but a clock of tokens that each item has got.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable
from typing import Protocol

from ctxflow.executors.simulated.market import SimulatedMachine, Timers


@dataclasses.dataclass(frozen=True)
class SharedPace:
    """How many tokens a second an engine does with so many items in flight, and how many tokens items have.

    :ivar best: tokens a second that it does at most.
    :ivar knee: items in flight at which a straight line from nothing would reach the most.
    :ivar bend: how sharply it bends there: 1 slowly, 30 at once.
    :ivar room: items in flight that its memory suffices for; None for any number.
    :ivar beyond: the share of its pace that is left with more.
    :ivar tokens: of an item, the mean, and `spread`: their deviation as a share of it; log-normal.

    >>> pace = SharedPace(best=1000.0, knee=8, bend=1)
    >>> [round(pace.rate(n)) for n in (1, 8, 64)]
    [111, 500, 889]
    """

    best: float
    knee: float = 16.0
    bend: float = 1.5
    room: int | None = None
    beyond: float = 0.6
    tokens: float = 1.0
    spread: float = 0.0

    def rate(self, flying: int) -> float:
        """Return tokens a second with so many items in flight, 1 or more."""
        x = flying / self.knee
        rate = float(self.best * x / (1 + x**self.bend) ** (1 / self.bend))
        return rate * self.beyond if self.room is not None and flying > self.room else rate

    def draw(self, seed: int, app: str, item: int) -> float:
        """Return the tokens of an item: the same wherever and whenever it runs."""
        if not self.spread:
            return self.tokens
        variance = math.log1p(self.spread**2)
        chance = random.Random(f"{seed}/{app}/{item}")
        return self.tokens * chance.lognormvariate(-variance / 2, math.sqrt(variance))


class SharingTimes(Protocol):
    """What `Times` may have besides: apps whose calls overlap, and share an engine."""

    def pace(self, app: str, machine: SimulatedMachine) -> SharedPace | None:
        """Return how an engine on a machine runs an app's items together; None if its calls take turns."""


@dataclasses.dataclass(slots=True)
class _Entry:
    """A call in flight: its tokens, when it began, and where the clocks stood then."""

    tokens: float
    begun: float
    tokens_clock: float
    share_clock: float


class InFlight:
    """The calls that are in flight in one engine.

    :param timers: the virtual clock.
    :param ended: called with a call that has ended, its seconds in flight, its tokens, and its share of the engine's
        seconds.
    :param slower: how many times longer everything takes now.
    """

    def __init__(
        self, timers: Timers, ended: Callable[[int, float, float, float], None], slower: Callable[[], float]
    ) -> None:
        self._timers, self._ended, self._slower = timers, ended, slower
        self._entries: dict[int, _Entry] = {}
        self._heap: list[tuple[float, int]] = []  # Where the clock of tokens stands when a call ends.
        self._tokens_clock = self._share_clock = self._at = 0.0
        self._turn = 0  # Goes up whenever the time of the next end is no longer what it was.
        self._pace: SharedPace | None = None

    def begin(self, call: int, tokens: float, pace: SharedPace) -> None:
        """Take a call in; the pace of what came last holds for all."""
        self._go_on()
        self._pace = pace
        self._entries[call] = _Entry(tokens, self._timers.now, self._tokens_clock, self._share_clock)
        heapq.heappush(self._heap, (self._tokens_clock + tokens, call))
        self._plan()

    def drop(self, call: int) -> float:
        """Take a call out before it ends, and return its share of the engine's seconds; 0 if it is not in flight."""
        self._go_on()
        entry = self._entries.pop(call, None)
        if entry is None:
            return 0.0
        self._plan()
        return self._share_clock - entry.share_clock

    def _go_on(self) -> None:
        """Move the clocks to the present."""
        passed, self._at = self._timers.now - self._at, self._timers.now
        flying = len(self._entries)
        if flying and passed > 0 and self._pace is not None:
            self._tokens_clock += passed * self._pace.rate(flying) / flying / self._slower()
            self._share_clock += passed / flying

    def _plan(self) -> None:
        """Have the next call end when it does, as it looks now."""
        while self._heap and self._heap[0][1] not in self._entries:
            heapq.heappop(self._heap)
        self._turn += 1
        if self._heap and self._pace is not None:
            flying = len(self._entries)
            each = self._pace.rate(flying) / flying / self._slower()
            left = max(0.0, self._heap[0][0] - self._tokens_clock) / each
            self._timers.at(self._timers.now + left, self._end, self._turn)

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._go_on()
        _, call = heapq.heappop(self._heap)
        entry = self._entries.pop(call)
        self._plan()
        share = self._share_clock - entry.share_clock
        self._ended(call, self._timers.now - entry.begun, entry.tokens, share)
