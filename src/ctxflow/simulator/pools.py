"""Pools of machines: when each is available, which hosts are bad, and how long things take there, with their spread.

An availability says when one machine can run a worker: see `ctxflow.executors.simulated.Availability`.
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
from ctxflow.executors.simulated import Availability, Fault, SharedPace, SimulatedMachine
from ctxflow.files import text_of

if TYPE_CHECKING:
    from ctxflow.simulator.workload_file import FaultEntry

NO_BUILD = "CUDA error: no kernel image is available for execution on the device"
HOLE = "CUDA error: uncorrectable ECC error encountered"
FLAKY = "CUDA error: an illegal memory access was encountered"


def during(begin: float, end: float = math.inf) -> Availability:
    """Make a machine available once, from a time to another: it joins late, or is drained."""
    return intervals([(begin, end)] if end > begin else [])


def evicted(mean_up: float, mean_down: float) -> Availability:
    """Make a machine available but for a Poisson process of evictions; mean seconds of being available, and away."""

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
    return lambda generator: iter(given)


def machines(
    count: int, gpu_model: str, available: Availability, name: str = "", tier: str = "default"
) -> list[SimulatedMachine]:
    """Return machines of one kind; `name`: what their names begin with, by default the GPU model."""
    return [SimulatedMachine(f"{name or gpu_model}-{n}", gpu_model, tier, available=available) for n in range(count)]


def drained(order: Sequence[SimulatedMachine], start: float, every: float) -> list[SimulatedMachine]:
    """Return the machines, drained one by one in order from `start` on, `every` so many seconds."""
    return [
        dataclasses.replace(machine, available=until(machine.available, start + n * every))
        for n, machine in enumerate(order)
    ]


def joining(order: Sequence[SimulatedMachine], curve: Sequence[tuple[float, float]]) -> list[SimulatedMachine]:
    """Return the machines, as many available at a time as a curve says: last to join, first to leave.

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
        trace: Mapping[str, Mapping[str, float]] = json.loads(text_of(path))
        gap = float(trace["metadata"]["gap_seconds"])
        counts = [int(count) for count in trace["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no spot trace ({error}): it has metadata.gap_seconds and data") from None
    return [(n * gap, count) for n, count in enumerate(counts)] + [(len(counts) * gap, 0)]


def faults_of(entries: Sequence[FaultEntry], machines: Iterable[SimulatedMachine], seed: int) -> list[Fault]:
    """Draw the faults of a pool's hosts, one for a host at most; a ValueError if there are too few hosts."""
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


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Seconds that vary: log-normal above a least, with a given mean and standard deviation.

    Waits, loads and transfers are never below some time and now and then far above it, which this has and a normal
    distribution has not.

    :param mean: seconds.
    :param deviation: their standard deviation; 0 for a constant.
    :param least: what it never takes less than.
    :param most: what it never takes more than; where that cuts much off, mean and deviation are smaller than given.
    :raises ValueError: unless 0 <= least <= mean <= most, and deviation >= 0.

    >>> Drawn(15.0).draw(random.Random(1))
    15.0
    >>> draws = [Drawn(15.0, 27.0, 5.0).draw(random.Random(n)) for n in range(2000)]
    >>> min(draws) > 5.0, 13 < sum(draws) / 2000 < 17
    (True, True)
    """

    mean: float = 0.0
    deviation: float = 0.0
    least: float = 0.0
    most: float = math.inf
    _mu: float = dataclasses.field(init=False, repr=False, compare=False, default=0.0)
    _sigma: float = dataclasses.field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        above = self.mean - self.least
        if self.least < 0 or above < 0 or self.mean > self.most or self.deviation < 0:
            raise ValueError("give 0 <= least <= mean <= most and deviation >= 0, in seconds")
        if above and self.deviation:
            # The moments of a log-normal: mean exp(mu + s^2/2), variance (exp(s^2) - 1) exp(2 mu + s^2).
            variance = math.log1p((self.deviation / above) ** 2)
            object.__setattr__(self, "_sigma", math.sqrt(variance))
            object.__setattr__(self, "_mu", math.log(above) - variance / 2)

    def draw(self, generator: random.Random) -> float:
        """Draw one."""
        if not self._sigma:
            return self.mean
        return min(self.most, self.least + generator.lognormvariate(self._mu, self._sigma))


@dataclasses.dataclass(frozen=True)
class GpuTimes:
    """Times of one app's items by GPU model.

    :ivar item_seconds: GPU model -> mean seconds of an item; "" for any other model.
    :ivar item_spread: standard deviation of an item's seconds, as a share of their mean.
    :ivar call_overhead: seconds of a call beside its items, in which the worker is busy with it.
    :ivar dispatched: seconds from sending a call until it begins.
    :ivar loading: seconds of building the context.
    :ivar matching: seconds from asking for a worker until it has joined.

    >>> times = GpuTimes({"A10": 0.25})
    >>> times.call("app", SimulatedMachine("m", "A10"), range(8), random.Random(0))
    2.0
    """

    item_seconds: Mapping[str, float]
    item_spread: float = 0.0
    call_overhead: Drawn = Drawn()
    dispatched: Drawn = Drawn()
    loading: Drawn = Drawn()
    matching: Drawn = Drawn()

    def item(self, machine: SimulatedMachine) -> float:
        """Return the mean seconds of an item on a machine; a ValueError for a GPU model without a figure."""
        seconds = self.item_seconds.get(machine.gpu_model or "", self.item_seconds.get(""))
        if seconds is None:
            raise ValueError(f"item_seconds has no figure for {machine.gpu_model!r}: add one, or one for any under ''")
        return seconds

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from requesting a worker until it has joined."""
        return self.matching.draw(generator)

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of loading a context."""
        return self.loading.draw(generator)

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from sending a call until it begins."""
        return self.dispatched.draw(generator)

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Draw the seconds of a batch: a sum of independent items, whose relative spread falls with their number."""
        mean, count = self.item(machine), len(items)
        seconds = mean * count
        if self.item_spread:
            # A gamma is the sum of gammas: never negative, and right for one item as for a thousand.
            shape = count / self.item_spread**2
            seconds = generator.gammavariate(shape, seconds / shape)
        return seconds + self.call_overhead.draw(generator)


Kind = tuple[str, str | None]
"""A tier and a GPU model: workers of one kind are alike."""


@dataclasses.dataclass(frozen=True)
class MixedTimes:
    """Times of several apps and contexts on workers of several kinds.

    :ivar items: app id -> kind -> mean seconds of an item, their spread, and what a call costs beside its items.
    :ivar loading: context id -> kind -> seconds of building it.
    :ivar matching: tier -> seconds from asking for a worker until it has joined; at once where it is not named.
    :ivar dispatched: seconds of a call's way to its worker and back.
    :ivar paces: machine name -> how many times longer its items take than those of its kind; 1 where it is not named.
    :ivar importing: context id -> kind -> the share of these seconds that imports and the start of the process take.
    :ivar shared: app id -> kind -> how an engine runs several of its items together, for apps of items.
    """

    items: Mapping[str, Mapping[Kind, GpuTimes]]
    loading: Mapping[str, Mapping[Kind, Drawn]] = dataclasses.field(default_factory=dict)
    matching: Mapping[str, Drawn] = dataclasses.field(default_factory=dict)
    dispatched: Drawn = Drawn()
    paces: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shared: Mapping[str, Mapping[Kind, SharedPace]] = dataclasses.field(default_factory=dict)
    importing: Mapping[str, Mapping[Kind, float]] = dataclasses.field(default_factory=dict)

    def pace(self, app: str, machine: SimulatedMachine) -> SharedPace | None:
        """Return how an engine on a machine runs an app's items together; None if its calls take turns."""
        kinds = self.shared.get(app)
        if kinds is None:
            return None
        usual, slower = kinds[machine.tier, machine.gpu_model], self.paces.get(machine.name, 1.0)
        return usual if slower == 1.0 else dataclasses.replace(usual, best=usual.best / slower)

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from requesting a worker until it has joined."""
        return self.matching[machine.tier].draw(generator) if machine.tier in self.matching else 0.0

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of loading a context."""
        kinds = self.loading.get(context)
        return 0.0 if kinds is None else kinds[machine.tier, machine.gpu_model].draw(generator)

    def imports(self, context: str, machine: SimulatedMachine) -> float:
        """Return the share of a load that is spared where its process is forked with all imports done."""
        return self.importing.get(context, {}).get((machine.tier, machine.gpu_model), 0.0)

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of a call's way to its worker and back."""
        return self.dispatched.draw(generator)

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Draw the seconds of a batch."""
        times = self.items[app][machine.tier, machine.gpu_model]
        return self.paces.get(machine.name, 1.0) * times.call(app, machine, items, generator)

    def item(self, app: str, machine: SimulatedMachine) -> float:
        """Return the mean seconds of an app's item on a machine."""
        return self.paces.get(machine.name, 1.0) * self.items[app][machine.tier, machine.gpu_model].item(machine)
