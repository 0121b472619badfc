"""One run: a site's policies over the regions of a topology, on the simulated engine, and what is measured of it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctxflow.executors.simulated import Availability, SimulatedEngine, SimulatedMachine
from ctxflow.executors.simulated.market import always
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.torta.quantities import Floats
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Simulation, Workload
from ctxflow.simulator.simulation import tiers_of
from ctxflow_papers.torta.demand import Tasks
from ctxflow_papers.torta.settings import GPUS, IDLE_WATTS, KINDS, PAYLOAD, SLOT, WORKING_WATTS
from ctxflow_papers.torta.world import (
    FOOTPRINTS,
    KIND_OF_MODEL,
    MODELS,
    World,
    slower,
    start_seconds,
    switch_seconds,
)

GB = 10**9
TICK = 5.0
"""Seconds between two ticks, on which workers are asked for."""


class Confined:
    """The plan that has each model on the GPUs that suit its type of task, as a site says it by `require_gpus`."""

    def plan(self, view: View) -> Plan:
        """Return it."""
        suited = [{name for name in view.tiers if GPUS[_gpu(name)].suits == kind} for kind in range(len(KINDS))]
        return Plan({f"model{n}": frozenset(suited[kind]) for n, kind in enumerate(KIND_OF_MODEL)})


def _gpu(tier: str) -> int:
    return int(tier.partition("/")[2])


def _region(tier: str) -> int:
    return int(tier.partition("/")[0])


class ServerTimes:
    """How long servers take: starts, switches, a task's way, and its processing."""

    def __init__(self, place: World, tasks: Tasks) -> None:
        self._place, self._tasks = place, tasks
        self._starts, self._switches = start_seconds(), switch_seconds()
        self._seconds, self._kind, self._tflops = tasks.seconds.tolist(), tasks.kind.tolist(), tasks.tflops.tolist()

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the seconds of a start."""
        return float(self._starts[_gpu(machine.tier)])

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the seconds of a switch."""
        return float(self._switches[_gpu(machine.tier), int(context[5:])])

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return nothing: the way depends on the app."""
        return 0.0

    def way(self, app: str, machine: SimulatedMachine) -> float:
        """Return the seconds between the region where a task comes from and its server's."""
        return self._place.way(int(app.partition("/")[0]), int(machine.region))

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Return the seconds of processing."""
        gpu = _gpu(machine.tier)
        return float(sum(self._seconds[n] * slower(gpu, self._kind[n], self._tflops[n]) for n in items))


def price_of(place: World, region: int, slots: int) -> float:
    """Return a region's dollars for a kWh, the mean over a run."""
    hours = (place.hour + np.arange(slots) * SLOT / 3600).astype(int) % 24
    return float(place.price[hours, region].mean())


def rates_of(place: World, prices: Sequence[float]) -> Floats:
    """Return (S,) dollars for a second of each server's board at full power, at its region's price."""
    return np.asarray(np.array(prices)[place.region] / 3.6e6 * np.array([GPUS[gpu].watts for gpu in place.gpu]))


@dataclasses.dataclass
class Measures:
    """What was measured of a run, from a time on until the last task is answered.

    :ivar response, network, waiting, inference: (N,) seconds of each task that came then; waiting includes loads.
    :ivar power: dollars. :ivar overhead: hours of loads and starts. :ivar loads: of models. :ivar starts: of servers.
    :ivar balance: Eq. 11, the mean over slots. :ivar active: servers on average. :ivar seconds: that it lasted.
    """

    response: Floats
    network: Floats
    waiting: Floats
    inference: Floats
    power: float
    overhead: float
    loads: int
    starts: int
    balance: float
    active: float
    seconds: float

    def summary(self) -> dict[str, float]:
        """Return each measure, the tasks' as a mean."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: float(np.mean(value)) for name, value in values.items()}


class Meter:
    """Reads a run's events: where servers' time goes, and what becomes of each task."""

    def __init__(self, place: World, tasks: Tasks, begin: float, prices: Sequence[float]) -> None:
        self._place, self._tasks, self._begin = place, tasks, begin
        count, servers = len(tasks.time), len(place.gpu)
        self._given, self._done, self._seconds = np.zeros(count), np.zeros(count), np.zeros(count)
        self._attempts: dict[int, Sequence[int]] = {}
        self._since: dict[str, tuple[int, float]] = {}  # Worker -> its server, and when it joined.
        self._busy: dict[int, Floats] = {}  # Slot -> (S,) seconds.
        self._there: dict[int, Floats] = {}
        self._starting = np.zeros(servers)
        self._rates = rates_of(place, prices)
        self._overhead, self._loads, self._starts = 0.0, 0, 0

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Read one event, and what it led to."""
        if isinstance(event, ev.BatchFinished):
            self._add(self._busy, self._since[event.worker][0], event.time - event.seconds, event.time)
            for item in self._attempts.pop(event.attempt):
                self._done[item], self._seconds[item] = event.time, event.seconds
        elif isinstance(event, ev.ContextReady):
            self._add(self._busy, self._since[event.worker][0], event.time - event.seconds, event.time)
            if event.time >= self._begin:
                self._overhead += event.seconds
                self._loads += 1
        elif isinstance(event, ev.WorkerJoined):
            self._joined(event.time, event.worker.id)
        elif isinstance(event, ev.WorkerLost):
            self._add(self._there, *self._since.pop(event.worker), event.time)
        for command in commands:
            if type(command) is cmd.Run:
                self._attempts[command.attempt] = command.items
                self._given[list(command.items)] = event.time

    def _joined(self, now: float, worker: str) -> None:
        server = int(worker.partition("-")[0])
        self._since[worker] = server, now
        if now >= self._begin:
            seconds = float(start_seconds()[self._place.gpu[server]])
            self._starting[server] += min(seconds, now - self._begin)
            self._overhead += seconds
            self._starts += 1

    def _add(self, table: dict[int, Floats], server: int, begin: float, end: float) -> None:
        """Add an interval to the slots that it is in."""
        begin = max(begin, self._begin)
        while begin < end:
            slot = int(begin / SLOT)
            until = min(end, (slot + 1) * SLOT)
            table.setdefault(slot, np.zeros(len(self._starting)))[server] += until - begin
            begin = until if until > begin else end

    def measures(self, end: float) -> Measures:
        """Return what was measured of a run that ended then."""
        for server, joined in self._since.values():
            self._add(self._there, server, joined, end)
        nothing = np.zeros(len(self._starting))
        rows = [(self._busy.get(slot, nothing), there) for slot, there in sorted(self._there.items())]
        busy, there = sum((row[0] for row in rows), nothing), sum((row[1] for row in rows), nothing)
        working = busy + self._starting
        dollars = self._rates @ (WORKING_WATTS * working + IDLE_WATTS * np.maximum(there - busy, 0.0))
        mine = self._tasks.time >= self._begin
        response = (self._done - self._tasks.time)[mine]
        waiting, inference = (self._given - self._tasks.time)[mine], self._seconds[mine]
        whole = [balance(used, held > 0) for used, held in rows[:-1]]
        return Measures(
            response, response - waiting - inference, waiting, inference, float(dollars), self._overhead / 3600,
            self._loads, self._starts, float(np.mean(whole)) if whole else 1.0,
            float(there.sum() / max(end - self._begin, 1e-9)), end - self._begin,
        )  # fmt: skip


def balance(busy: Floats, active: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """Return Eq. 11: 1 / (1 + the coefficient of variation of the active servers' utilisation); 1 if all rest.

    >>> round(balance(np.array([9.0, 9.0, 0.0]), np.array([True, True, False])), 3)
    1.0
    """
    used = busy[active]
    mean = float(used.mean()) if len(used) else 0.0
    return 1.0 / (1.0 + float(used.std()) / mean) if mean > 0 else 1.0


def served(
    place: World,
    tasks: Tasks,
    policies: Mapping[str, Any],
    begin: float,
    seed: int = 0,
    confined: bool = True,
    failure: tuple[int, float, float] | None = None,
) -> Measures:
    """Run policies, as a site file names them, over a topology, until all tasks are answered.

    :param begin: the time from which on is measured: before it servers are started, and models loaded.
    :param confined: whether models are loaded on the GPUs that suit their type of task alone.
    :param failure: a region whose servers are gone, from when, until when.
    """
    prices = [price_of(place, region, len(tasks.starts) - 1) for region in range(place.regions)]
    machines = [
        SimulatedMachine(
            str(server), GPUS[gpu].name, f"{region}/{gpu}", str(region), gpu_memory=int(GPUS[gpu].memory * GB),
            available=always if failure is None or failure[0] != region else _but(*failure[1:]),
        )
        for server, (region, gpu) in enumerate(zip(place.region.tolist(), place.gpu.tolist(), strict=True))
    ]  # fmt: skip
    tiers = [
        ev.TierSpec(
            tier.name, 0, tier.maximum, 1, GPUS[_gpu(tier.name)].watts / 1000 * prices[_region(tier.name)],
            float(start_seconds()[_gpu(tier.name)]), int(GPUS[_gpu(tier.name)].memory * GB),
        )
        for tier in tiers_of(machines)
    ]  # fmt: skip
    contexts = [
        ev.ContextSpec(f"model{n}", f"model{n}", gpus=1, gpu_memory=int(FOOTPRINTS[n] * GB)) for n in range(MODELS)
    ]
    apps = [
        ev.AppSpec(f"{region}/{model}", f"{region}/{model}", f"model{model}", batch_size=1, region=str(region))
        for region in range(place.regions)
        for model in range(MODELS)
    ]
    arrivals = [
        (time, apps[origin * MODELS + model].id, 1)
        for time, origin, model in zip(tasks.time.tolist(), tasks.origin.tolist(), tasks.model.tolist(), strict=True)
    ]
    placement = {"placement": Confined()} if confined else {}
    chosen = Policies.chosen({"batching": {"policy": "fixed", "size": 1}, **placement, **policies})
    meter = Meter(place, tasks, begin, prices)
    engine = SimulatedEngine(machines, ServerTimes(place, tasks), seed=seed)
    simulation = Simulation(
        engine, chosen, Workload(contexts, apps, arrivals), tiers, seed=seed, tick=TICK, listener=meter,
        regions=_regions(place, prices, [tier.name for tier in tiers]),
    )  # fmt: skip
    return meter.measures(simulation.run().seconds)


def _regions(place: World, prices: Sequence[float], tiers: Sequence[str]) -> list[ev.RegionSpec]:
    names = [str(region) for region in range(place.regions)]
    return [
        ev.RegionSpec(
            names[number],
            dict(zip(names, place.latency[number].tolist(), strict=True)),
            dict.fromkeys(names, PAYLOAD / place.transfer),
            prices[number],
            [tier for tier in tiers if _region(tier) == number],
        )
        for number in range(place.regions)
    ]


def _but(begin: float, end: float) -> Availability:
    """Return the availability of a machine that is gone for some time."""
    return lambda generator: [(0.0, begin), (end, math.inf)]
