"""What may be wrong with simulated hosts: calls that raise, calls that take longer, contexts that cannot be built.

What does not live here: which hosts of a pool are bad (ctxflow.simulator), and what a worker does then (engine.py).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable

from ctxflow.executors.simulated.machines import Machine
from ctxflow.scheduler import events as ev


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

    >>> Fault("n1", calls=1.0, begin=60.0).at(Machine("n1-0", host="n1"), 30.0)
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

    def at(self, machine: Machine, time: float) -> bool:
        """Whether a machine has it at a time."""
        return self.where in (machine.name, machine.host) and self.begin <= time < self.end

    def failure(self, worker: str, host: str) -> ev.Failure:
        """What a worker tells of it."""
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

    def of_call(self, machine: Machine, time: float, generator: random.Random) -> Fault | None:
        """What makes a call raise, if anything does."""
        return _struck([(fault, fault.calls) for fault in self._at(machine, time)], generator)

    def of_build(self, machine: Machine, time: float, generator: random.Random) -> Fault | None:
        """What makes the build of a context fail, if anything does."""
        return _struck([(fault, fault.builds) for fault in self._at(machine, time)], generator)

    def slower(self, machine: Machine, time: float) -> float:
        """How many times longer calls take."""
        return math.prod(fault.slower for fault in self._at(machine, time))

    def _at(self, machine: Machine, time: float) -> list[Fault]:
        places = {machine.name, machine.host}
        return [fault for place in sorted(places) for fault in self._by_place.get(place, ()) if fault.at(machine, time)]


def _struck(faults: list[tuple[Fault, float]], generator: random.Random) -> Fault | None:
    """The first fault that happens; nothing is drawn where it is certain, or nothing is wrong."""
    for fault, share in faults:
        if share >= 1 or (share > 0 and generator.random() < share):
            return fault
    return None
