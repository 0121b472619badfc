"""Which hosts of a simulated pool are bad, and what is wrong with them.

What does not live here: what a worker on such a host does (executors/simulated/faults.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

from ctxflow.executors.simulated import Fault, Machine
from ctxflow.simulator.workload_file import FaultEntry

NO_BUILD = "CUDA error: no kernel image is available for execution on the device"
HOLE = "CUDA error: uncorrectable ECC error encountered"
FLAKY = "CUDA error: an illegal memory access was encountered"


def faults_of(entries: Sequence[FaultEntry], machines: Iterable[Machine], seed: int) -> list[Fault]:
    """The faults of a pool's hosts; a host has one of them at most.

    :raises ValueError: if there are fewer hosts than are to be bad.
    """
    hosts: dict[str, list[Machine]] = {}
    for machine in machines:
        hosts.setdefault(machine.host or machine.name, []).append(machine)
    found: list[Fault] = []
    bad: set[str] = set()
    for number, entry in enumerate(entries):
        fitting = [name for name, those in hosts.items() if entry.tier in (None, those[0].tier)]
        count = entry.hosts or 1 if entry.share is None else max(1, round(entry.share * len(fitting)))
        left = [name for name in fitting if name not in bad]
        if count > len(left):
            raise ValueError(f"fault {number + 1} is to be on {count} hosts, and {len(left)} are left: name fewer")
        chosen = random.Random(f"{seed}/faults/{number}").sample(left, count)
        bad.update(chosen)
        for name in chosen:
            found += fault_on(entry, name, hosts[name])
    return found


def fault_on(entry: FaultEntry, host: str, machines: Sequence[Machine]) -> Iterator[Fault]:
    """A host's fault; that of a flaky GPU is one of its machines'."""
    end = math.inf if entry.end is None else entry.end
    if entry.kind == "slow":
        yield Fault(host, slower=entry.factor, begin=entry.begin, end=end)
    elif entry.kind == "no-builds":
        yield Fault(host, builds=1.0, begin=entry.begin, end=end, seconds=entry.seconds, message=NO_BUILD)
    elif entry.kind == "flaky-gpu":
        where = machines[0].name
        yield Fault(where, calls=entry.calls, begin=entry.begin, end=end, seconds=entry.seconds, message=FLAKY)
    else:
        yield Fault(host, calls=1.0, begin=entry.begin, end=end, seconds=entry.seconds, message=HOLE)
