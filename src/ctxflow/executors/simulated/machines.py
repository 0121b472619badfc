"""Machines that a resource manager may lend, and when.

What does not live here: who holds one now (market.py), and particular pools (ctxflow.simulator).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.scheduler import events as ev

Availability = Callable[[random.Random], Iterable[tuple[float, float]]]
"""Gives the times at which a machine can be had: (from, until) in seconds, in order, without overlap."""


def always(generator: random.Random) -> Iterator[tuple[float, float]]:
    """The availability of a machine that nobody takes away."""
    yield 0.0, math.inf


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
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
        """What a worker on it says of itself."""
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


def together(machines: Sequence[Machine], devices: Sequence[str]) -> Machine:
    """Several machines of one host as one, with their GPUs in an order of one's choice."""
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
