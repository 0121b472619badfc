"""A workload, the loop that feeds it to a scheduler on a simulated engine, the outcome, and its lower bound in time."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ctxflow.errors import counted
from ctxflow.executors.simulated import Account, SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

if TYPE_CHECKING:
    from ctxflow.simulator.workload_file import AppEntry, WorkloadFile

_STUCK_SECONDS = 600.0  # A policy may hold work back for a while although nothing else goes on.
_ALLOCATIONS = 50_000  # The garbage collector's first threshold during a run; Python's default is 700.
Listener = Callable[[ev.Event, Sequence[cmd.Command]], None]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The items to run, and when they arrive.

    :ivar arrivals: (time, app id, items), in order of time.

    >>> Workload.of(150_000, files=True).total
    150000
    """

    contexts: Sequence[ev.ContextSpec]
    apps: Sequence[ev.AppSpec]
    arrivals: Sequence[tuple[float, str, int]]

    @classmethod
    def of(cls, items: int, files: bool = False, level: str = ev.PERVASIVE, gpus: int = 1) -> Workload:
        """Return the workload of one app's items, all there at the start; `files`: whether any must be staged."""
        context = ev.ContextSpec("context", "context", files=files, gpus=gpus, level=level)
        return cls([context], [ev.AppSpec("app", "app", "context")], [(0.0, "app", items)])

    @property
    def total(self) -> int:
        """The number of all items."""
        return sum(count for _, _, count in self.arrivals)


def arrivals_of(workload: WorkloadFile, seed: int) -> list[tuple[float, str, int]]:
    """Return (time, app, items) of all arrivals, in order of time."""
    return sorted(arrival for app in workload.apps for arrival in _arrivals(app, seed))


def _arrivals(app: AppEntry, seed: int) -> Iterator[tuple[float, str, int]]:
    if app.arrivals is not None:
        yield from ((time, app.name, count) for time, count in app.arrivals)
    elif app.per_second is None:
        yield app.begin, app.name, app.items
    else:
        generator, time = random.Random(f"{seed}/arrivals/{app.name}"), app.begin
        for _ in range(app.items):
            yield time, app.name, 1
            time += generator.expovariate(app.per_second)


@dataclasses.dataclass(frozen=True)
class SimulationOutcome:
    """The outcome of a simulated run. Times in seconds on its clock.

    :ivar seconds: until the last item was settled, or until the simulation was ended.
    :ivar started: when the first call was sent.
    :ivar wasted_items: items whose answers came second: what duplicates cost.
    :ivar presence: (time, machine, +1 or -1) for every worker that joined or went.
    :ivar times, answered: when answers came, and how many there were in all by then.
    """

    seconds: float
    started: float
    items: int
    done: int
    dead: int
    batches: int
    duplicates: int
    wasted_items: int
    events: int
    account: Account
    presence: Sequence[tuple[float, SimulatedMachine, int]]
    times: Sequence[float]
    answered: Sequence[int]

    def fluid(self, item_seconds: Callable[[SimulatedMachine], float]) -> float:
        """Return the time before which no scheduler could have been done with these workers: `fluid_seconds`."""
        return fluid_seconds(self.presence, item_seconds, self.done)


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """Collect garbage less often: a run creates few cycles, and each full collection visits all its objects."""
    before = gc.get_threshold()
    gc.set_threshold(max(_ALLOCATIONS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """A scheduler, an engine in virtual time, and a workload; `run` runs it.

    As a live run does it, the scheduler gets a `Tick` every so often, and whenever it asks to be woken.

    :param policies: who decides; objects are used by one simulation only, since they may learn.
    :param tiers: what is offered; see `tiers_of`.
    :param seed: of what policies draw; the engine has its own.
    :param start_when: the share of the requested workers that must be connected before the first call.
    :param tick: seconds between ticks.
    :param listener: called with every event and the commands that it led to.
    :param others: what happens besides at given times, such as that a session is opened or closed; ascending. The run
        goes on until the last of them.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        policies: Policies,
        workload: Workload,
        tiers: Iterable[ev.TierSpec],
        limits: Limits | None = None,
        seed: int = 0,
        start_when: float = 0.0,
        tick: float = 1.0,
        listener: Listener | None = None,
        regions: Iterable[ev.RegionSpec] = (),
        others: Iterable[ev.Event] = (),
    ) -> None:
        self.scheduler = Scheduler(policies, limits, seed, start_when)
        self.engine = engine
        self._workload, self._tiers, self._regions = workload, list(tiers), list(regions)
        self._tick, self._listener = tick, listener
        self._arrivals = list(workload.arrivals)
        self._others = collections.deque(others)
        self._left = workload.total
        self._next_item = self._events = self._wasted = 0
        self._started, self._last = math.inf, 0.0
        self._sizes: dict[int, int] = {}
        self._times = array.array("d")
        self._answered = array.array("q")

    @_fewer_collections()
    def run(self, until: float = math.inf) -> SimulationOutcome:
        """Run it until every item is settled, or until a time; without one a RuntimeError if nothing can happen."""
        self._declare()
        self._arrivals.reverse()
        engine, scheduler = self.engine, self.scheduler
        next_tick, moved = self._tick, 0.0
        while (self._left or self._others) and engine.now < until:
            wake = scheduler.next_wake
            due = min(next_tick, until, math.inf if wake is None else wake)
            if self._arrivals:
                due = min(due, self._arrivals[-1][0])
            if self._others:
                due = min(due, self._others[0].time)
            for event in engine.poll(max(0.0, due - engine.now)):
                self._feed(event)
            now = engine.now
            while self._arrivals and self._arrivals[-1][0] <= now:
                self._arrive(*self._arrivals.pop())
            while self._others and self._others[0].time <= now:
                self._feed(self._others.popleft())
            if now >= next_tick or (wake is not None and now >= wake):
                stuck = engine.idle and not self._arrivals and not self._others and wake is None
                next_tick = now + self._tick
                self._feed(ev.Tick(now))
                if not (stuck and self._left and engine.idle and scheduler.next_wake is None):
                    moved = now
                elif now > moved + _STUCK_SECONDS:
                    if until == math.inf:
                        left = f"{counted(self._left, 'item')} left at {now:,.0f} s"
                        raise RuntimeError(f"{left}, and nothing will happen any more")
                    engine.poll(until - now)
        engine.stop()
        return self._outcome()

    def _declare(self) -> None:
        declared: list[ev.Event] = [ev.RegionOffered(0.0, region) for region in self._regions]
        declared += [ev.TierOffered(0.0, tier) for tier in self._tiers]
        declared += [ev.ContextDeclared(0.0, context) for context in self._workload.contexts]
        declared += [ev.AppDeclared(0.0, app) for app in self._workload.apps]
        for event in declared:
            self._feed(event)

    def _arrive(self, time: float, app: str, count: int) -> None:
        items = range(self._next_item, self._next_item + count)
        self._next_item = items.stop
        self._feed(ev.ItemsSubmitted(time, app, items))

    def _feed(self, event: ev.Event) -> None:
        """Feed the scheduler an event, and have its commands executed."""
        commands = self.scheduler.handle(event)
        self._events += 1
        if self._listener is not None:
            self._listener(event, commands)
        if type(event) is ev.BatchFinished:
            self._wasted += self._sizes.pop(event.attempt, 0)
        elif type(event) is ev.ItemsFinished:
            self._wasted += event.count
        elif type(event) is ev.BatchFailed:
            self._sizes.pop(event.attempt, None)
        if not commands:
            return
        for command in commands:
            kind = type(command)
            if kind is cmd.Run:
                self._sizes[command.attempt] = len(command.items)  # type: ignore[attr-defined]
                self._started = min(self._started, event.time)
            elif kind is cmd.Deliver:
                count = len(command.items)  # type: ignore[attr-defined]
                self._left -= count
                self._wasted -= count
                self._last = self.engine.now
                self._times.append(self._last)
                self._answered.append(count)
            elif kind is cmd.Bury:
                self._left -= len(command.items)  # type: ignore[attr-defined]
                self._last = self.engine.now
        self.engine.execute(commands)

    def _outcome(self) -> SimulationOutcome:
        counters = self.scheduler.state.counters
        return SimulationOutcome(
            seconds=self.engine.now if self._left or not self._workload.total else self._last,
            started=self._started,
            items=self._workload.total,
            done=counters.done,
            dead=counters.dead,
            batches=counters.batches,
            duplicates=counters.duplicates,
            wasted_items=self._wasted,
            events=self._events,
            account=self.engine.account,
            presence=self.engine.presence,
            times=self._times,
            answered=array.array("q", itertools.accumulate(self._answered)),
        )


def tiers_of(machines: Iterable[SimulatedMachine]) -> list[ev.TierSpec]:
    """Return a tier for each that the machines name, with as many workers as it has machines."""
    found: dict[str, list[SimulatedMachine]] = {}
    for machine in machines:
        found.setdefault(machine.tier, []).append(machine)
    return [ev.TierSpec(name, 0, len(those), gpus=min(m.gpus for m in those)) for name, those in found.items()]


def fluid_seconds(
    presence: Iterable[tuple[float, SimulatedMachine, int]],
    item_seconds: Callable[[SimulatedMachine], float],
    items: float,
) -> float:
    """Return the fluid bound: when items would be done if each worker worked all its time and work were divisible.

    Nothing is counted for staging, loading, dispatch, what evictions destroy, and the tail.

    :param presence: (time, machine, +1 or -1) for every worker that joined or went, in order of time.
    :param item_seconds: of an item on a machine.
    :returns: seconds on the run's clock; infinity if the workers could not do it.

    >>> machines = [SimulatedMachine(f"m{n}", "A10" if n < 10 else "TITAN X") for n in range(20)]
    >>> seconds = {"A10": 0.2727, "TITAN X": 0.3846}
    >>> round(fluid_seconds([(0.0, m, 1) for m in machines], lambda m: seconds[m.gpu_model], 150_000))
    2393
    """
    rate = done = last = 0.0
    for time, machine, change in presence:
        if rate > 0 and done + rate * (time - last) >= items:
            break
        done += rate * (time - last)
        last = time
        rate += change / item_seconds(machine)
    # What is left of a rate that was added and subtracted is no rate.
    return last + max(0.0, items - done) / rate if rate > 1e-9 else math.inf


def mixed_fluid_seconds(
    presence: Iterable[tuple[float, SimulatedMachine, int]],
    item_seconds: Callable[[str, SimulatedMachine], float],
    items: Mapping[str, int],
) -> float:
    """Return the fluid bound for several apps, each of which may be faster on other workers.

    A second of a worker is priced by how many items of the apps' mix it does. Whatever is run where, an item costs at
    least the price of its seconds where those are cheapest; so the sum of these is work that must be done. (By the
    duality of linear programs, any prices give a bound; these give the best one for one app, and for several
    whose speeds are in the same proportion on all workers.)

    :param item_seconds: of an app's item on a machine.
    :param items: of each app.

    >>> presence = [(0.0, SimulatedMachine("m"), 1)]
    >>> mixed_fluid_seconds(presence, lambda app, m: 0.5 if app == "a" else 2.0, {"a": 10, "b": 10})
    25.0
    """
    presence = list(presence)
    kinds: dict[tuple[float, ...], SimulatedMachine] = {}
    for _, machine, _ in presence:
        kinds.setdefault(tuple(item_seconds(app, machine) for app in items), machine)
    if not kinds or not any(items.values()):
        return 0.0 if not any(items.values()) else math.inf

    def mix(machine: SimulatedMachine) -> float:
        return sum(count * item_seconds(app, machine) for app, count in items.items()) / sum(items.values())

    prices = {speeds: 1 / mix(machine) for speeds, machine in kinds.items()}
    work = sum(count * min(prices[speeds] * speeds[n] for speeds in kinds) for n, count in enumerate(items.values()))
    return fluid_seconds(presence, mix, work)
