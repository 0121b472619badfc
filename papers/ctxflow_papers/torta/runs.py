"""One run: a site's policies over the regions of a topology, on the simulated engine, and what is measured of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.torta.quantities import Floats, Ints
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Simulation, Workload
from ctxflow_papers.torta.demand import Tasks
from ctxflow_papers.torta.settings import GPUS, IDLE_WATTS, KINDS, SLOT, WORKING_WATTS
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
    return int(tier.rpartition("/")[2])


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
        return sum(self._seconds[n] * slower(gpu, self._kind[n], self._tflops[n]) for n in items)


def price_of(place: World, region: int, slots: int) -> float:
    """Return a region's dollars for a kWh, the mean over a run."""
    hours = (place.hour + np.arange(slots) * SLOT / 3600).astype(int) % 24
    return float(place.price[hours, region].mean())


@dataclasses.dataclass
class Measures:
    """What was measured of a run, from `begin` on.

    :ivar response, network, waiting, inference: (N,) seconds of each task that came then.
    :ivar power: dollars. :ivar overhead: hours of loads and starts. :ivar loads: of models. :ivar starts: of servers.
    :ivar balance: Eq. 11, the mean over slots. :ivar active: servers on average.
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

    def summary(self) -> dict[str, float]:
        """Return each measure's mean, and the response that 5 % of the tasks exceed."""
        means = {
            name: float(getattr(self, name).mean()) for name in ("response", "network", "waiting", "inference")
        }
        means["p95"] = float(np.quantile(self.response, 0.95))
        return means | {
            name: float(getattr(self, name)) for name in ("power", "overhead", "loads", "starts", "balance", "active")
        }


class Meter:
    """Reads a run's events."""

    def __init__(self, place: World, tasks: Tasks, begin: float, slots: int) -> None:
        self._place, self._tasks, self._begin, self._end = place, tasks, begin, slots * SLOT
        self._prices = [price_of(place, region, slots) for region in range(place.regions)]
        count = len(tasks.time)
        self._run, self._done, self._seconds = np.full(count, np.nan), np.full(count, np.nan), np.zeros(count)
        self._attempts: dict[int, Sequence[int]] = {}
        self._since: dict[str, tuple[int, float, float]] = {}  # Worker -> server, joined, asked for.
        self._servers = {f"{n}": n for n in range(len(place.gpu))}
        self._slots = slots
        self._busy = np.zeros((slots, len(place.gpu)))
        self._present = np.zeros((slots, len(place.gpu)))
        self._starting = np.zeros(len(place.gpu))
        self._overhead, self._loads, self._starts = 0.0, 0, 0

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Read one event, and what it led to."""
        kind = type(event)
        if kind is ev.BatchFinished:
            now, seconds = event.time, event.seconds  # type: ignore[attr-defined]
            self._spread(self._busy, event.worker, now - seconds, now)  # type: ignore[attr-defined]
            for item in self._attempts.pop(event.attempt):  # type: ignore[attr-defined]
                self._done[item], self._seconds[item] = now, seconds
        elif kind is ev.ContextReady:
            now, seconds = event.time, event.seconds  # type: ignore[attr-defined]
            self._spread(self._busy, event.worker, now - seconds, now)  # type: ignore[attr-defined]
            if now >= self._begin:
                self._overhead += seconds
                self._loads += 1
        elif kind is ev.WorkerJoined:
            self._joined(event.time, event.worker.id)  # type: ignore[attr-defined]
        elif kind is ev.WorkerLost:
            self._left(event.time, event.worker)  # type: ignore[attr-defined]
        for command in commands:
            if type(command) is cmd.Run:
                self._attempts[command.attempt] = command.items
                for item in command.items:
                    self._run[item] = event.time

    def _joined(self, now: float, worker: str) -> None:
        server = int(worker.partition("-")[0])
        self._since[worker] = server, now, start_seconds()[self._place.gpu[server]]
        started = self._since[worker][2]
        if now >= self._begin:
            self._starting[server] += min(started, now - self._begin) if now < self._end else 0.0
            self._overhead += started
            self._starts += 1

    def _left(self, now: float, worker: str) -> None:
        _, joined, _ = self._since[worker]
        self._spread(self._present, worker, joined, now)
        del self._since[worker]

    def _spread(self, table: Floats, worker: str, begin: float, end: float) -> None:
        """Add an interval to the slots that it is in."""
        server = self._since[worker][0]
        first, last = int(begin / SLOT), min(int(end / SLOT), self._slots - 1)
        for slot in range(first, last + 1):
            table[slot, server] += max(0.0, min(end, (slot + 1) * SLOT) - max(begin, slot * SLOT))

    def measures(self) -> Measures:
        """Return what was measured, after the run."""
        for worker in list(self._since):
            self._left(max(self._end, self._since[worker][1]), worker)
        from_slot = int(self._begin / SLOT)
        busy, present = self._busy[from_slot:], self._present[from_slot:]
        watts = np.array([GPUS[gpu].watts for gpu in self._place.gpu])
        price = np.array(self._prices)[self._place.region] / 3.6e6
        working = busy.sum(axis=0) + self._starting
        idle = np.maximum(present.sum(axis=0) - busy.sum(axis=0), 0.0)
        dollars = (price * watts * (WORKING_WATTS * working + IDLE_WATTS * idle)).sum()
        mine = (self._tasks.time >= self._begin) & ~np.isnan(self._done)
        response = (self._done - self._tasks.time)[mine]
        waiting, inference = (self._run - self._tasks.time)[mine], self._seconds[mine]
        return Measures(
            response, response - waiting - inference, waiting, inference, float(dollars), self._overhead / 3600,
            self._loads, self._starts, float(np.mean([balance(b, p > 0) for b, p in zip(busy, present, strict=True)])),
            float(present.sum() / (SLOT * len(present))),
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
) -> Measures:
    """Run policies, as a site file names them, over a topology.

    :param begin: the time from which on is measured: before it all servers are started, and models loaded.
    :param confined: whether models are loaded on the GPUs that suit them alone.
    """
    slots = len(tasks.starts) - 1
    counts: dict[str, int] = {}
    machines = []
    for server, (region, gpu) in enumerate(zip(place.region.tolist(), place.gpu.tolist(), strict=True)):
        tier = f"{region}/{gpu}"
        counts[tier] = counts.get(tier, 0) + 1
        machines.append(
            SimulatedMachine(f"{server}", GPUS[gpu].name, tier, str(region), gpu_memory=int(GPUS[gpu].memory * GB))
        )
    prices = [price_of(place, region, slots) for region in range(place.regions)]
    tiers = [
        ev.TierSpec(
            name, 0, count, 1, GPUS[_gpu(name)].watts / 1000 * prices[int(name.partition("/")[0])],
            float(start_seconds()[_gpu(name)]), int(GPUS[_gpu(name)].memory * GB),
        )
        for name, count in counts.items()
    ]  # fmt: skip
    regions = [
        ev.RegionSpec(
            str(number),
            {str(other): float(place.latency[number, other]) for other in range(place.regions)},
            {str(other): 1e6 / place.transfer for other in range(place.regions)},
            prices[number],
            [name for name in counts if name.partition("/")[0] == str(number)],
        )
        for number in range(place.regions)
    ]
    contexts = [ev.ContextSpec(f"model{n}", f"model{n}", gpus=1, gpu_memory=int(FOOTPRINTS[n] * GB)) for n in range(MODELS)]
    names = [[f"{region}/{model}" for model in range(MODELS)] for region in range(place.regions)]
    apps = [
        ev.AppSpec(names[region][model], names[region][model], f"model{model}", batch_size=1, region=str(region))
        for region in range(place.regions)
        for model in range(MODELS)
    ]
    arrivals = [
        (time, names[origin][model], 1)
        for time, origin, model in zip(tasks.time.tolist(), tasks.origin.tolist(), tasks.model.tolist(), strict=True)
    ]
    chosen: dict[str, Any] = {"batching": {"policy": "fixed", "size": 1}, **policies}
    if confined:
        chosen["placement"] = Confined()
    meter = Meter(place, tasks, begin, slots)
    simulation = Simulation(
        SimulatedEngine(machines, ServerTimes(place, tasks), seed=seed), Policies.chosen(chosen),
        Workload(contexts, apps, arrivals), tiers, seed=seed, tick=TICK, listener=meter, regions=regions,
    )  # fmt: skip
    simulation.run(until=slots * SLOT + 900.0)
    return meter.measures()
