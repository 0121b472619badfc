"""The simulated engine's resource manager: machines that come, go and are given to workers.

A machine is down, or idle, or matching (its worker is on its way), or held by a worker. What does not live here: what
workers do with commands (engine.py).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ctxflow.executors.simulated.machine_models import SimulatedMachine, Timers, together
from ctxflow.topology import from_graph, to_graph, used_by


@dataclasses.dataclass(slots=True, eq=False)
class MachineState:
    """A machine as it is now.

    :ivar turn: goes up whenever what was planned for it no longer holds.
    :ivar since: since when nobody has it.
    :ivar generator: of what its workers draw while it can be had this time: the same whatever is decided elsewhere.
    :ivar parts: the machines that it consists of, if it was made of several; `whole` leads back to it.
    :ivar pin: the number by which it was asked for, None for others.
    """

    machine: SimulatedMachine
    periods: Iterator[tuple[float, float]]
    generator: random.Random
    state: str = "down"
    turn: int = 0
    since: float = 0.0
    parts: tuple[MachineState, ...] = ()
    whole: MachineState | None = None
    pin: int | None = None


class Tenant(Protocol):
    """Who gets machines."""

    def joined(self, place: MachineState) -> None:
        """Hear that a worker starts on a machine."""

    def noticed(self, place: MachineState) -> None:
        """Hear that a held machine will be taken soon."""

    def taken(self, place: MachineState) -> None:
        """Hear that a held machine is taken, with its worker."""


@dataclasses.dataclass(slots=True)
class _Tier:
    asked: int = 0
    given: int = 0  # Machines that are held or matching.
    idle: dict[str, MachineState] = dataclasses.field(default_factory=dict)
    excluded: frozenset[str] = frozenset()  # Hosts.


class Market:
    """Gives a tier's machines, those idle longest first, to as many workers as were asked for.

    :param match: seconds from a machine's being free and asked for to its worker's joining.
    :param notice: seconds from an eviction's notice to the eviction; 0 for none.
    """

    def __init__(
        self,
        machines: Iterable[SimulatedMachine],
        match: Callable[[SimulatedMachine, random.Random], float],
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
        self._pins: dict[int, tuple[str, str, tuple[str, ...]]] = {}  # What is asked for and not given yet.
        self._places: list[MachineState] = []
        for machine in machines:
            # A generator of its own each: when it can be had depends on no decision.
            own = random.Random(f"{seed}/{machine.name}")
            self._places.append(MachineState(machine, iter(machine.available(own)), own))
            self._next_period(self._places[-1])

    def ask(self, tier: str, workers: int) -> None:
        """Let so many workers be there, if so many machines are; those there already are not taken."""
        wanted = self._tiers.setdefault(tier, _Tier())
        wanted.asked = workers
        self._match(wanted)

    def ask_at(self, pin: int, tier: str, host: str, devices: Sequence[str]) -> None:
        """Let one worker more be there: on these GPUs of a host, once nobody has them."""
        self._pins[pin] = tier, host, tuple(devices)
        self._match(self._tiers.setdefault(tier, _Tier()))

    def forgo(self, pin: int) -> None:
        """Forgo a worker that is not there yet."""
        self._pins.pop(pin, None)

    def exclude(self, tier: str, hosts: Iterable[str]) -> None:
        """Give no machine of these hosts to workers from now on, not even to those that are on their way there."""
        its = self._tiers.setdefault(tier, _Tier())
        its.excluded = frozenset(hosts)
        for place in self._places:
            machine = place.machine
            if machine.tier == tier and place.state == "matching" and _host(machine) in its.excluded:
                self.give_back(place)
        self._match(its)

    def survey(self, tier: str, name_of: Callable[[MachineState], str | None]) -> dict[str, Mapping[str, Any]]:
        """Return the hosts of a tier whose topology is known, with who uses their GPUs.

        :param name_of: the worker on a place, None if there is none.
        """
        graphs: dict[str, Mapping[str, Any]] = {}
        users: dict[str, dict[str, str]] = {}
        for place in self._places:
            machine = place.machine
            if machine.tier != tier or machine.topology is None:
                continue
            host = _host(machine)
            graphs[host] = machine.topology
            if place.state != "idle":
                who = name_of(place.whole or place) or "somebody else"
                users.setdefault(host, {}).update(dict.fromkeys(machine.devices, who))
        return {host: to_graph(used_by(from_graph(graph), users.get(host, {}))) for host, graph in graphs.items()}

    def give_back(self, place: MachineState) -> None:
        """Give back the machine of a worker that has left."""
        if place.parts:
            place.turn += 1
            for part in place.parts:
                part.whole = None
            for part in place.parts:
                if part.state != "down":
                    self._become_idle(part)
            return
        self._tier(place).given -= 1
        place.turn += 1
        self._become_idle(place)

    def take(self, place: MachineState, notice: float = 0.0) -> None:
        """Take a held machine, after notice or at once; it can be had again."""
        if notice:
            self._tenant.noticed(place)
            self._timers.at(self._timers.now + notice, self._take_if, place, place.turn)
        else:
            self._take_if(place, place.turn)

    def _take_if(self, place: MachineState, turn: int) -> None:
        if place.turn == turn:
            self._tenant.taken(place)
            self.give_back(place)

    def _tier(self, place: MachineState) -> _Tier:
        return self._tiers.setdefault(place.machine.tier, _Tier())

    def _next_period(self, place: MachineState) -> None:
        now = self._timers.now
        for begin, end in place.periods:
            if end > now:
                self._timers.at(max(begin, now), self._up, place, end)
                return

    def _up(self, place: MachineState, end: float) -> None:
        place.generator = random.Random(f"{self._seed}/{place.machine.name}/{self._timers.now}")
        if end < math.inf:
            self._timers.at(end, self._down, place)
            if self._notice:
                self._timers.at(max(self._timers.now, end - self._notice), self._announce, place)
        self._become_idle(place)

    def _announce(self, place: MachineState) -> None:
        holder = place.whole or place
        if holder.state == "held":
            self._tenant.noticed(holder)

    def _become_idle(self, place: MachineState) -> None:
        place.state, place.since = "idle", self._timers.now
        tier = self._tier(place)
        tier.idle[place.machine.name] = place
        self._match(tier)

    def _down(self, place: MachineState) -> None:
        tier, whole, before = self._tier(place), place.whole, place.state
        if whole is None and before == "held":
            self._tenant.taken(place)
        if before == "idle":
            del tier.idle[place.machine.name]
        elif whole is None:
            tier.given -= 1
        place.state = "down"
        place.turn += 1
        if whole is not None:
            if whole.state == "held":
                self._tenant.taken(whole)
            self.give_back(whole)
        self._match(tier)
        self._next_period(place)

    def _match(self, tier: _Tier) -> None:
        for pin in list(self._pins):
            self._match_pin(pin)
        while tier.given < tier.asked:
            place = next((each for each in tier.idle.values() if _host(each.machine) not in tier.excluded), None)
            if place is None:
                break
            del tier.idle[place.machine.name]
            place.state = "matching"
            tier.given += 1
            delay = self._match_seconds(place.machine, place.generator)
            self._timers.at(self._timers.now + delay, self._join, place, place.turn)

    def _match_pin(self, pin: int) -> None:
        """Give the GPUs that were asked for by this number, if nobody has them: to whole machines only."""
        tier, host, devices = self._pins[pin]
        idle = self._tiers.setdefault(tier, _Tier()).idle
        parts = [each for each in idle.values() if _host(each.machine) == host]
        parts = [each for each in parts if set(each.machine.devices) & set(devices)]
        if {device for each in parts for device in each.machine.devices} != set(devices):
            return
        del self._pins[pin]
        machine = together([part.machine for part in parts], devices)
        whole = MachineState(
            machine, iter(()), parts[0].generator, "matching", 0, self._timers.now, tuple(parts), pin=pin
        )
        for part in parts:
            del idle[part.machine.name]
            part.state, part.whole = "held", whole
            part.turn += 1
        delay = self._match_seconds(machine, whole.generator)
        self._timers.at(self._timers.now + delay, self._join, whole, whole.turn)

    def _join(self, place: MachineState, turn: int) -> None:
        if place.turn != turn:
            return
        tier = self._tier(place)
        if not place.parts and tier.given > tier.asked:
            self.give_back(place)
            return
        place.state = "held"
        self._tenant.joined(place)


def _host(machine: SimulatedMachine) -> str:
    return machine.host or machine.name


class Library:
    """A context's library process on a worker; calls on it take turns."""

    __slots__ = ("busy_until", "ready")

    def __init__(self) -> None:
        self.ready = False
        self.busy_until = 0.0


@dataclasses.dataclass(slots=True)
class Call:
    """A call on its way.

    :ivar salvaged: whether its app answers its items one by one.
    """

    context: str
    items: int
    begins: float
    seconds: float
    salvaged: bool

    def done(self, time: float) -> int:
        """Return how many items are done by then, if they take equally long."""
        share = (time - self.begins) / self.seconds if self.seconds else 1.0
        return max(0, min(self.items, math.floor(share * self.items + 1e-9)))


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker on its machine, with its contexts by id, since when each is brought, and its calls by attempt."""

    id: str
    place: MachineState
    joined: float
    libraries: dict[str, Library] = dataclasses.field(default_factory=dict)
    staging: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)
