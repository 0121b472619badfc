"""Machines of the simulated engine: models of when and how they work, what may be wrong, and who has them.

The market is the resource manager: a machine is down, or idle, or matching (its worker is on its way), or held by a
worker. Particular pools, times and bad hosts are in ctxflow.simulator.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ctxflow.scheduler import events as ev
from ctxflow.topology import from_graph, to_graph, used_by

Availability = Callable[[random.Random], Iterable[tuple[float, float]]]
"""Gives the times at which a machine can be had: (from, until) in seconds, in order, without overlap."""


def always(generator: random.Random) -> Iterator[tuple[float, float]]:
    """Yield the availability of a machine that nobody takes away."""
    yield 0.0, math.inf


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedMachine:
    """Room for one worker, which a resource manager lends while nobody else wants it. Sizes in bytes.

    :ivar name: of the place; it differs from all others.
    :ivar host: the machine that it is a part of, where several share one disk and network link; "" for its name.
    :ivar available: when it can be had; drawn from the machine's own generator, whatever is decided.
    :ivar devices: the ids of its GPUs.
    :ivar topology: its host's, as `ctxflow.topology.to_graph` writes it; workers can then be asked for on GPUs of one's
        choice there, across several machines of one host.
    """

    name: str
    gpu_model: str | None = None
    tier: str = "default"
    region: str = "default"
    host: str = ""
    gpus: int = 1
    slots: int = 1
    memory: int | None = None
    gpu_memory: int | None = None
    available: Availability = always
    devices: tuple[str, ...] = ()
    topology: Mapping[str, Any] | None = None

    @property
    def host_name(self) -> str:
        """The name of its host."""
        return self.host or self.name

    def spec(self, worker: str, pin: int | None = None) -> ev.WorkerSpec:
        """Return what a worker on it says of itself."""
        return ev.WorkerSpec(
            worker,
            host=self.host_name,
            tier=self.tier,
            region=self.region,
            slots=self.slots,
            gpus=self.gpus,
            gpu_model=self.gpu_model,
            memory=self.memory,
            gpu_memory=self.gpu_memory,
            topology=self.topology,
            devices=self.devices,
            pin=pin,
        )


def together(machines: Sequence[SimulatedMachine], devices: Sequence[str]) -> SimulatedMachine:
    """Return several machines of one host as one, with their GPUs in an order of one's choice."""
    first = machines[0]
    memory = [machine.memory for machine in machines if machine.memory is not None]
    return dataclasses.replace(
        first,
        name="+".join(machine.name for machine in machines),
        host=first.host_name,
        gpus=sum(machine.gpus for machine in machines),
        memory=sum(memory) if memory else None,
        devices=tuple(devices),
    )


class Times(Protocol):
    """How long things take, in seconds; each draws from the engine's seeded generator, or not at all."""

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the time from asking for a worker, or the machine's coming free, until the worker has joined."""

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the time that building a context takes whose files are there."""

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the time of a call's way to its worker and its answer's way back, in which the worker does nothing."""

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Return the time that running a batch takes."""

    # With a method `way(app, machine)`, a call's way takes so many seconds more, by where its app's items come from.
    # With a method `park(context)`, contexts can be parked: it returns None, or the time to park one, the time to wake
    # it, and the bytes of the host's memory that it holds meanwhile.


class Timers(Protocol):
    """The virtual clock."""

    now: float

    def at(self, time: float, action: Callable[..., None], *values: Any) -> None:
        """Have something done at a time, after all that is due before."""


class Staging(Protocol):
    """Where files come from. Worker ids are never used twice."""

    def attach(self, timers: Timers) -> None:
        """Use this clock from now on."""

    def fetch(self, worker: str, machine: SimulatedMachine, context: str, done: Callable[[], None]) -> None:
        """Bring a context's files to a worker, at once if they are there; `done` is not called if they are removed."""

    def remove(self, worker: str, context: str) -> None:
        """Take a context's files off a worker, or stop bringing them."""

    def lost(self, worker: str) -> None:
        """Forget a worker, which is gone with all its files, and with what it was sending."""


class NoStaging:
    """Files that are everywhere already."""

    def attach(self, timers: Timers) -> None:
        """Need no clock."""

    def fetch(self, worker: str, machine: SimulatedMachine, context: str, done: Callable[[], None]) -> None:
        """Be done."""
        done()

    def remove(self, worker: str, context: str) -> None:
        """Keep nothing."""

    def lost(self, worker: str) -> None:
        """Keep nothing."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with a host for some time, or with one machine of a host that has several.

    :ivar where: the host's name, or the machine's.
    :ivar calls: the share of calls that raise.
    :ivar builds: the share of builds of contexts that fail.
    :ivar slower: how many times longer calls take.
    :ivar seconds: after which calls raise and builds fail.
    :ivar message: what they raise, a RuntimeError.
    :ivar machine: whether that looks like the machine's fault.

    >>> Fault("n1", calls=1.0, begin=60.0).at(SimulatedMachine("n1-0", host="n1"), 30.0)
    False
    """

    where: str
    calls: float = 0.0
    builds: float = 0.0
    slower: float = 1.0
    begin: float = 0.0
    end: float = math.inf
    seconds: float = 0.0
    message: str = "CUDA error: uncorrectable ECC error encountered"
    machine: bool = True

    def at(self, machine: SimulatedMachine, time: float) -> bool:
        """Return whether a machine has it at a time."""
        return self.where in (machine.name, machine.host) and self.begin <= time < self.end

    def failure(self, worker: str, machine: SimulatedMachine) -> ev.Failure:
        """Return what a worker on a machine reports of it."""
        host = machine.host_name
        return ev.Failure("exception", "RuntimeError", self.message, worker=worker, host=host, machine=self.machine)


POISON = Fault("", calls=1.0, message="this item cannot be done", machine=False)
"""The fault of an item that raises wherever it runs."""


class Faults:
    """The faults of an engine's hosts; `any`: whether there are some."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._by_place: dict[str, list[Fault]] = {}
        for fault in faults:
            self._by_place.setdefault(fault.where, []).append(fault)
        self.any = bool(self._by_place)

    def of_call(self, machine: SimulatedMachine, time: float, generator: random.Random) -> Fault | None:
        """Return what makes a call raise, if anything does."""
        return _struck([(fault, fault.calls) for fault in self._at(machine, time)], generator)

    def of_build(self, machine: SimulatedMachine, time: float, generator: random.Random) -> Fault | None:
        """Return what makes the build of a context fail, if anything does."""
        return _struck([(fault, fault.builds) for fault in self._at(machine, time)], generator)

    def slower(self, machine: SimulatedMachine, time: float) -> float:
        """Return how many times longer calls take."""
        return math.prod(fault.slower for fault in self._at(machine, time)) if self.any else 1.0

    def _at(self, machine: SimulatedMachine, time: float) -> list[Fault]:
        places = {machine.name, machine.host}
        return [fault for place in sorted(places) for fault in self._by_place.get(place, ()) if fault.at(machine, time)]


def _struck(faults: list[tuple[Fault, float]], generator: random.Random) -> Fault | None:
    """Return the first fault that happens; nothing is drawn for one that is certain or impossible."""
    for fault, share in faults:
        if share >= 1 or (share > 0 and generator.random() < share):
            return fault
    return None


@dataclasses.dataclass(slots=True, eq=False)
class MachineState:
    """A machine as it is now.

    :ivar turn: goes up whenever what was planned for it no longer holds.
    :ivar since: since when it is idle.
    :ivar generator: of what its workers draw in this period of availability, whatever is decided elsewhere.
    :ivar parts: the machines that it consists of, if it was made of several; `whole` leads back to it.
    :ivar pin: the number by which it was requested, None for others.
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
        """Note that a worker starts on a machine."""

    def noticed(self, place: MachineState) -> None:
        """Note that a held machine will be evicted soon."""

    def taken(self, place: MachineState) -> None:
        """Note that a held machine is evicted, with its worker."""


@dataclasses.dataclass(slots=True)
class _Tier:
    asked: int = 0
    given: int = 0  # Machines that are held or matching.
    idle: dict[str, MachineState] = dataclasses.field(default_factory=dict)
    excluded: frozenset[str] = frozenset()  # Hosts.


class Market:
    """Gives a tier's machines, those idle longest first, to as many workers as are requested.

    :param match: seconds from a machine's being free and requested to its worker's joining.
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
        self._match_seconds, self._timers, self._tenant = match, timers, tenant
        self._seed, self._notice = seed, notice
        self._tiers: collections.defaultdict[str, _Tier] = collections.defaultdict(_Tier)
        self._pins: dict[int, tuple[str, str, tuple[str, ...]]] = {}  # What is requested and not given yet.
        self._places: list[MachineState] = []
        for machine in machines:
            # A generator of its own each: when it can be had depends on no decision.
            own = random.Random(f"{seed}/{machine.name}")
            self._places.append(MachineState(machine, iter(machine.available(own)), own))
            self._next_period(self._places[-1])

    def ask(self, tier: str, workers: int) -> None:
        """Request so many workers of a tier; those that are beyond it are not taken."""
        self._tiers[tier].asked = workers
        self._match(self._tiers[tier])

    def ask_at(self, pin: int, tier: str, host: str, devices: Sequence[str]) -> None:
        """Request one worker more: on these GPUs of a host, once nobody has them."""
        self._pins[pin] = tier, host, tuple(devices)
        self._match(self._tiers[tier])

    def forgo(self, pin: int) -> None:
        """Cancel the request by this number, if it is pending."""
        self._pins.pop(pin, None)

    def exclude(self, tier: str, hosts: Iterable[str]) -> None:
        """Give no machine of these hosts to workers from now on, not even to those that are matching."""
        its = self._tiers[tier]
        its.excluded = frozenset(hosts)
        for place in self._places:
            machine = place.machine
            if machine.tier == tier and place.state == "matching" and machine.host_name in its.excluded:
                self.give_back(place)
        self._match(its)

    def survey(self, tier: str, workers: Mapping[MachineState, str]) -> dict[str, Mapping[str, Any]]:
        """Return the hosts of a tier whose topology is known, with the users of their GPUs; `workers`: by machine."""
        graphs: dict[str, Mapping[str, Any]] = {}
        users: dict[str, dict[str, str]] = {}
        for place in self._places:
            machine = place.machine
            if machine.tier != tier or machine.topology is None:
                continue
            host = machine.host_name
            graphs[host] = machine.topology
            if place.state != "idle":
                who = workers.get(place.whole or place, "somebody else")
                users.setdefault(host, {}).update(dict.fromkeys(machine.devices, who))
        return {host: to_graph(used_by(from_graph(graph), users.get(host, {}))) for host, graph in graphs.items()}

    def give_back(self, place: MachineState) -> None:
        """Give back the machine of a worker that has left."""
        place.turn += 1
        if not place.parts:
            self._tiers[place.machine.tier].given -= 1
            self._become_idle(place)
        for part in place.parts:
            part.whole = None
        for part in place.parts:
            if part.state != "down":
                self._become_idle(part)

    def take(self, place: MachineState, notice: float = 0.0) -> None:
        """Evict a held machine, after notice or at once; it can be had again."""
        if notice:
            self._tenant.noticed(place)
            self._timers.at(self._timers.now + notice, self._take_if, place, place.turn)
        else:
            self._take_if(place, place.turn)

    def _take_if(self, place: MachineState, turn: int) -> None:
        if place.turn == turn:
            self._tenant.taken(place)
            self.give_back(place)

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
        tier = self._tiers[place.machine.tier]
        tier.idle[place.machine.name] = place
        self._match(tier)

    def _down(self, place: MachineState) -> None:
        tier, whole, before = self._tiers[place.machine.tier], place.whole, place.state
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
            place = next((each for each in tier.idle.values() if each.machine.host_name not in tier.excluded), None)
            if place is None:
                break
            del tier.idle[place.machine.name]
            place.state = "matching"
            tier.given += 1
            delay = self._match_seconds(place.machine, place.generator)
            self._timers.at(self._timers.now + delay, self._join, place, place.turn)

    def _match_pin(self, pin: int) -> None:
        """Give the GPUs that were requested by this number, if nobody has them and they are whole machines."""
        tier, host, devices = self._pins[pin]
        idle = self._tiers[tier].idle
        parts = [each for each in idle.values() if each.machine.host_name == host]
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
        tier = self._tiers[place.machine.tier]
        if not place.parts and tier.given > tier.asked:
            self.give_back(place)
            return
        place.state = "held"
        self._tenant.joined(place)
