"""Pools of machines: when each is available (Poisson evictions, drains, join curves, traces), and which hosts are bad.

An availability says when one machine can run a worker: see `ctxflow.executors.simulated.Availability`. What a worker
on a bad host does is in executors/simulated/faults.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxflow.errors import counted
from ctxflow.executors.simulated import Availability, Fault, SimulatedMachine

if TYPE_CHECKING:
    from ctxflow.simulator.workload_file import FaultEntry

NO_BUILD = "CUDA error: no kernel image is available for execution on the device"
HOLE = "CUDA error: uncorrectable ECC error encountered"
FLAKY = "CUDA error: an illegal memory access was encountered"


def during(begin: float, end: float = math.inf) -> Availability:
    """Make a machine available once, from a time to another: it joins late, or is drained."""

    def periods(generator: random.Random) -> Iterator[tuple[float, float]]:
        if end > begin:
            yield begin, end

    return periods


def evicted(mean_up: float, mean_down: float) -> Availability:
    """Make a machine available but for a Poisson process of evictions.

    :param mean_up: seconds for which it is available, on average.
    :param mean_down: seconds for which it is away, on average.
    """

    def periods(generator: random.Random) -> Iterator[tuple[float, float]]:
        time = 0.0
        while True:
            up = generator.expovariate(1 / mean_up)
            yield time, time + up
            time += up + (generator.expovariate(1 / mean_down) if mean_down else 0.0)

    return periods


def until(available: Availability, end: float) -> Availability:
    """Make a machine available as given, but never after a time."""

    def periods(generator: random.Random) -> Iterator[tuple[float, float]]:
        for begin, last in available(generator):
            if begin >= end:
                return
            yield begin, min(last, end)

    return periods


def intervals(given: Sequence[tuple[float, float]]) -> Availability:
    """Make a machine available at the given times."""

    def periods(generator: random.Random) -> Iterator[tuple[float, float]]:
        return iter(given)

    return periods


def machines(
    count: int, gpu_model: str, available: Availability, name: str = "", tier: str = "default"
) -> list[SimulatedMachine]:
    """Return machines of one kind.

    :param name: what their names begin with; by default the GPU model.
    """
    return [SimulatedMachine(f"{name or gpu_model}-{n}", gpu_model, tier, available=available) for n in range(count)]


def drained(order: Sequence[SimulatedMachine], start: float, every: float) -> list[SimulatedMachine]:
    """Return the machines, drained one by one; before that, each is available as it was.

    :param order: the first is drained first.
    :param start: when the first is drained.
    :param every: seconds between two.
    """
    return [
        dataclasses.replace(machine, available=until(machine.available, start + n * every))
        for n, machine in enumerate(order)
    ]


def joining(order: Sequence[SimulatedMachine], curve: Sequence[tuple[float, float]]) -> list[SimulatedMachine]:
    """Return the machines, as many available at a time as a curve says: the last to join is the first to leave.

    :param curve: (time, how many there are), linear between the points and level after the last.
    """
    return with_counts(order, _steps(curve, len(order)))


def _steps(curve: Sequence[tuple[float, float]], most: int) -> list[tuple[float, int]]:
    """Return when a piecewise linear curve passes a whole number."""
    steps = [(curve[0][0], min(most, round(curve[0][1])))]
    for (begin, low), (end, high) in itertools.pairwise(curve):
        now, goal = steps[-1][1], min(most, round(high))
        step = 1 if goal > now else -1
        for count in range(now + step, goal + step, step) if goal != now else ():
            share = (count - low) / (high - low) if high != low else 0.0
            steps.append((begin + min(1.0, max(0.0, share)) * (end - begin), count))
    return steps


def with_counts(order: Sequence[SimulatedMachine], steps: Iterable[tuple[float, int]]) -> list[SimulatedMachine]:
    """Return the machines, as many available at a time as a step function says: last to join, first to leave.

    :param steps: (time, how many there are from then on), in order of time.
    :raises ValueError: if there are fewer machines than it says.
    """
    periods: list[list[tuple[float, float]]] = [[] for _ in order]
    since: list[float] = []
    for time, count in steps:
        if count > len(order):
            raise ValueError(f"the steps need {counted(count, 'machine')}, but there are {len(order)}: give more")
        while len(since) > count:
            begun = since.pop()
            periods[len(since)].append((begun, time))
        since += [time] * (count - len(since))
    for number, begun in enumerate(since):
        periods[number].append((begun, math.inf))
    return [
        dataclasses.replace(machine, available=intervals(times)) for machine, times in zip(order, periods, strict=True)
    ]


def spot_steps(path: Path) -> list[tuple[float, int]]:
    """Read a SkyPilot spot trace: `{"metadata": {"gap_seconds"}, "data": [count, ...]}`.

    :returns: steps for `with_counts`; after the end of the trace nothing is there.
    :raises ValueError: if the file is no such trace.
    """
    try:
        trace: Mapping[str, Mapping[str, float]] = json.loads(path.read_text())
        gap = float(trace["metadata"]["gap_seconds"])
        counts = [int(count) for count in trace["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no spot trace ({error}): it has metadata.gap_seconds and data") from None
    return [(n * gap, count) for n, count in enumerate(counts)] + [(len(counts) * gap, 0)]


# --- bad hosts


def faults_of(entries: Sequence[FaultEntry], machines: Iterable[SimulatedMachine], seed: int) -> list[Fault]:
    """Draw the faults of a pool's hosts; a host has one of them at most.

    :raises ValueError: if there are fewer hosts than are to be bad.
    """
    hosts: dict[str, list[SimulatedMachine]] = {}
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


def fault_on(entry: FaultEntry, host: str, machines: Sequence[SimulatedMachine]) -> Iterator[Fault]:
    """Yield a host's fault; a flaky GPU is that of one of its machines."""
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
