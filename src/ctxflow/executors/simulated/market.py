"""Machines that come, go and are given to whoever asks: the resource manager of the simulated engine.

A machine is down, or idle, or matching (its worker is on its way), or held by a worker. What does not live here: what
workers do.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ctxflow.executors.simulated.machines import Machine
from ctxflow.executors.simulated.models import Timers


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """A machine as it is now.

    :ivar turn: goes up whenever what was planned for it no longer holds.
    :ivar since: since when nobody has it.
    :ivar generator: of what its workers draw while it can be had this time: the same whatever is decided elsewhere.
    """

    machine: Machine
    periods: Iterator[tuple[float, float]]
    generator: random.Random
    state: str = "down"
    turn: int = 0
    since: float = 0.0


class Tenant(Protocol):
    """Who gets machines."""

    def joined(self, place: Place) -> None:
        """A worker starts on a machine."""

    def noticed(self, place: Place) -> None:
        """A held machine will be taken soon."""

    def taken(self, place: Place) -> None:
        """A held machine is taken, with its worker."""


@dataclasses.dataclass(slots=True)
class _Tier:
    asked: int = 0
    given: int = 0  # Machines that are held or matching.
    idle: dict[str, Place] = dataclasses.field(default_factory=dict)


class Market:
    """Gives a tier's machines, those idle longest first, to as many workers as were asked for.

    :param match: seconds from a machine's being free and asked for to its worker's joining.
    :param notice: seconds from an eviction's notice to the eviction; 0 for none.
    """

    def __init__(
        self,
        machines: Iterable[Machine],
        match: Callable[[Machine, random.Random], float],
        timers: Timers,
        tenant: Tenant,
        seed: int,
        notice: float,
    ) -> None:
        self._match_seconds = match
        self._timers = timers
        self._tenant = tenant
        self._seed = seed
        self._notice = notice
        self._tiers: dict[str, _Tier] = {}
        for machine in machines:
            # A generator of its own each: when it can be had depends on no decision.
            own = random.Random(f"{seed}/{machine.name}")
            self._next_period(Place(machine, iter(machine.available(own)), own))

    def ask(self, tier: str, workers: int) -> None:
        """Let so many workers be there, if so many machines are; those there already are not taken."""
        wanted = self._tiers.setdefault(tier, _Tier())
        wanted.asked = workers
        self._match(wanted)

    def give_back(self, place: Place) -> None:
        """A worker has left its machine, which can be had again."""
        self._tier(place).given -= 1
        place.turn += 1
        self._become_idle(place)

    def take(self, place: Place, notice: float = 0.0) -> None:
        """Take a held machine, after notice or at once; it can be had again."""
        if notice:
            self._tenant.noticed(place)
            self._timers.at(self._timers.now + notice, self._take_if, place, place.turn)
        else:
            self._take_if(place, place.turn)

    def _take_if(self, place: Place, turn: int) -> None:
        if place.turn == turn:
            self._tenant.taken(place)
            self.give_back(place)

    def _tier(self, place: Place) -> _Tier:
        return self._tiers.setdefault(place.machine.tier, _Tier())

    def _next_period(self, place: Place) -> None:
        now = self._timers.now
        for begin, end in place.periods:
            if end > now:
                self._timers.at(max(begin, now), self._up, place, end)
                return

    def _up(self, place: Place, end: float) -> None:
        place.generator = random.Random(f"{self._seed}/{place.machine.name}/{self._timers.now}")
        if end < math.inf:
            self._timers.at(end, self._down, place)
            if self._notice:
                self._timers.at(max(self._timers.now, end - self._notice), self._announce, place)
        self._become_idle(place)

    def _announce(self, place: Place) -> None:
        if place.state == "held":
            self._tenant.noticed(place)

    def _become_idle(self, place: Place) -> None:
        place.state, place.since = "idle", self._timers.now
        tier = self._tier(place)
        tier.idle[place.machine.name] = place
        self._match(tier)

    def _down(self, place: Place) -> None:
        tier = self._tier(place)
        if place.state == "held":
            self._tenant.taken(place)
        if place.state == "idle":
            del tier.idle[place.machine.name]
        else:
            tier.given -= 1
        place.state = "down"
        place.turn += 1
        self._match(tier)
        self._next_period(place)

    def _match(self, tier: _Tier) -> None:
        while tier.idle and tier.given < tier.asked:
            place = tier.idle.pop(next(iter(tier.idle)))
            place.state = "matching"
            tier.given += 1
            delay = self._match_seconds(place.machine, place.generator)
            self._timers.at(self._timers.now + delay, self._join, place, place.turn)

    def _join(self, place: Place, turn: int) -> None:
        if place.turn != turn:
            return
        tier = self._tier(place)
        if tier.given > tier.asked:
            self.give_back(place)
            return
        place.state = "held"
        self._tenant.joined(place)
