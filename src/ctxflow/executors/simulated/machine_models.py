"""The models of simulated machines: which may be lent and when, how long things take there, and what may be wrong.

What does not live here: who holds a machine now (market.py), and particular pools, times and bad hosts
(ctxflow.simulator).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ctxflow.scheduler import events as ev

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

    def spec(self, worker: str, pin: int | None = None) -> ev.WorkerSpec:
        """Return what a worker on it says of itself."""
        return ev.WorkerSpec(
            worker,
            host=self.host or self.name,
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
        host=first.host or first.name,
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
    """Something that is wrong with a host while it lasts, or with one machine of a host that has several.

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

    def failure(self, worker: str, host: str) -> ev.Failure:
        """Return what a worker tells of it."""
        return ev.Failure("exception", "RuntimeError", self.message, worker=worker, host=host, machine=self.machine)


POISON = Fault("", calls=1.0, message="this item cannot be done", machine=False)
"""What an item does that raises wherever it runs."""


class Faults:
    """All that is wrong with the hosts of an engine."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._by_place: dict[str, list[Fault]] = {}
        for fault in faults:
            self._by_place.setdefault(fault.where, []).append(fault)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._by_place)

    def of_call(self, machine: SimulatedMachine, time: float, generator: random.Random) -> Fault | None:
        """Return what makes a call raise, if anything does."""
        return _struck([(fault, fault.calls) for fault in self._at(machine, time)], generator)

    def of_build(self, machine: SimulatedMachine, time: float, generator: random.Random) -> Fault | None:
        """Return what makes the build of a context fail, if anything does."""
        return _struck([(fault, fault.builds) for fault in self._at(machine, time)], generator)

    def slower(self, machine: SimulatedMachine, time: float) -> float:
        """Return how many times longer calls take."""
        return math.prod(fault.slower for fault in self._at(machine, time))

    def _at(self, machine: SimulatedMachine, time: float) -> list[Fault]:
        places = {machine.name, machine.host}
        return [fault for place in sorted(places) for fault in self._by_place.get(place, ()) if fault.at(machine, time)]


def _struck(faults: list[tuple[Fault, float]], generator: random.Random) -> Fault | None:
    """Return the first fault that happens; nothing is drawn where it is certain, or nothing is wrong."""
    for fault, share in faults:
        if share >= 1 or (share > 0 and generator.random() < share):
            return fault
    return None
