"""Games of preemption: urgent work that needs several GPUs of one machine, on a cluster that is full of other work."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.league.games import GameOutcome, Steps, worker_seconds
from ctxflow.league.lower_bounds import Clock, shortest_first
from ctxflow.league.public_workloads import flash, poisson
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Simulation, Workload, pools
from ctxflow.topology import Gpu, NumaNode, Topology, to_graph

END = 1800.0
GPUS = 8
"""Of a machine: two sockets, a GPU in each of eight NUMA nodes, as FlexTopo's servers have them."""
ITEM = 3.0
MATCH, MODEL_LOAD, WAY = 2.0, 5.0, 0.05
ACROSS = 1.25
"""How many times longer calls take on GPUs of both sockets (chosen)."""
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class UrgentApp:
    """An app whose context needs several GPUs, and when how many of its items come."""

    name: str
    gpus: int
    priority: int
    affinity: str
    bursts: Sequence[tuple[float, int]]


@dataclasses.dataclass(frozen=True)
class PlaceDraw:
    """What a seed draws: machines, the times at which each GPU can be had, and the urgent apps."""

    machines: int
    gpus: Mapping[tuple[int, int], Sequence[Interval]]
    urgent: Sequence[UrgentApp]


def _apps(chance: random.Random, times: Sequence[float], affinity: str) -> list[UrgentApp]:
    """Deal bursts out to apps in turn: two thirds of them want two GPUs, the others four."""
    bursts: list[list[tuple[float, int]]] = [[] for _ in range(20)]
    for time in sorted(times):
        bursts[chance.randrange(len(bursts))].append((time, chance.randint(16, 48)))
    return [
        UrgentApp(
            f"{'quad' if n % 3 == 0 else 'pair'}-{n}", 4 if n % 3 == 0 else 2, 10 if n % 3 == 0 else 5, affinity, b
        )
        for n, b in enumerate(bursts)
        if b
    ]


def _ours(machines: int) -> dict[tuple[int, int], Sequence[Interval]]:
    return {(host, gpu): [(0.0, END)] for host in range(machines) for gpu in range(GPUS)}


def steady_urgent(seed: int) -> PlaceDraw:
    """Draw bursts at random times that want two or four GPUs of one socket, on five machines."""
    chance = random.Random(f"steady-urgent/{seed}")
    times = list(poisson(chance, chance.uniform(0.04, 0.07), 60.0, END - 300.0))
    return PlaceDraw(5, _ours(5), _apps(chance, times, "guaranteed"))


def flash_urgent(seed: int) -> PlaceDraw:
    """Draw bursts that come some times as often for some minutes, and want GPUs as close together as there are."""
    chance = random.Random(f"flash-urgent/{seed}")
    begin, lasts = chance.uniform(300.0, 700.0), chance.uniform(180.0, 300.0)
    times = flash(chance, 0.015, chance.uniform(5.0, 9.0), begin, lasts, END - 300.0)
    return PlaceDraw(5, _ours(5), _apps(chance, [time for time in times if time > 60.0], "best-effort"))


def campus_urgent(seed: int) -> PlaceDraw:
    """Draw bursts on seven machines of whose GPUs others take every fourth or so now and then, as on a campus."""
    chance = random.Random(f"campus-urgent/{seed}")
    gpus: dict[tuple[int, int], Sequence[Interval]] = {}
    for place in _ours(7):
        periods, time = [], -chance.uniform(0.0, 600.0)
        while time < END:
            until = time + chance.expovariate(1 / 900.0)
            if until > 0:
                periods.append((max(0.0, time), min(END, until)))
            time = until + chance.expovariate(1 / 300.0)
        gpus[place] = periods
    times = list(poisson(chance, chance.uniform(0.03, 0.05), 60.0, END - 300.0))
    return PlaceDraw(7, gpus, _apps(chance, times, "guaranteed"))


class PlaceTimes:
    """Times of all apps: an item takes as long on any GPUs, but longer on those of two sockets."""

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the seconds until a worker has joined."""
        return MATCH

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the seconds of loading a context."""
        return MODEL_LOAD

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Return the seconds of a call's way."""
        return WAY

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Return the seconds of a batch."""
        sockets = {2 * int(device.rpartition("-")[2]) // GPUS for device in machine.devices}
        return len(items) * ITEM * (ACROSS if len(sockets) > 1 else 1.0)


class Bursts:
    """A listener that notes when bursts come and when the last of their items is answered, and counts answers."""

    def __init__(self) -> None:
        self.answered: dict[str, int] = {}
        self.took: dict[str, list[float]] = {}
        self._open: dict[str, list[tuple[float, set[int]]]] = {}
        self._apps: dict[int, str] = {}

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """See an event."""
        if type(event) is ev.ItemsSubmitted:
            self._open.setdefault(event.app, []).append((event.time, set(event.items)))
            self._apps.update(dict.fromkeys(event.items, event.app))
        for command in commands:
            if type(command) is cmd.Deliver:
                self._answer(command.items, event.time)

    def _answer(self, items: Sequence[int], time: float) -> None:
        app = self._apps[items[0]]
        self.answered[app] = self.answered.get(app, 0) + len(items)
        for come, left in self._open[app]:
            if left and left.intersection(items):
                left.difference_update(items)
                if not left:
                    self.took.setdefault(app, []).append(time - come)

    def waited(self, app: str, end: float) -> float:
        """Return the seconds that an app's bursts waited for their last answer, or until the end."""
        return sum(self.took.get(app, ())) + sum(end - come for come, left in self._open.get(app, ()) if left)

    def unserved(self, app: str) -> int:
        """Return how many bursts were not answered to the last item."""
        return sum(bool(left) for _, left in self._open.get(app, ()))


@dataclasses.dataclass(frozen=True)
class PlaceArena:
    """A full cluster and urgent apps for which a preemption policy makes room."""

    drawn: PlaceDraw
    seed: int

    def play(self, choice: Any, steps: int) -> GameOutcome:
        """Let a policy decide."""
        bursts, apps = Bursts(), self.drawn.urgent
        machines = _machines(self.drawn)
        contexts = [ev.ContextSpec("low", "low", gpus=1)]
        contexts += [ev.ContextSpec(app.name, app.name, gpus=app.gpus, affinity=app.affinity) for app in apps]
        specs = [ev.AppSpec("low", "low", context="low", batch_size=8)]
        specs += [ev.AppSpec(a.name, a.name, context=a.name, priority=a.priority, batch_size=4) for a in apps]
        arrivals = [(0.0, "low", round(self._capacity() / ITEM * 1.2))]
        arrivals += sorted((time, app.name, count) for app in apps for time, count in app.bursts)
        simulation = Simulation(
            SimulatedEngine(machines, PlaceTimes(), seed=self.seed),
            Policies.chosen({"preemption": choice, "batching": {"policy": "fixed", "size": 8}}),
            Workload(contexts, specs, arrivals),
            [ev.TierSpec("default", 0, len(machines), gpus=1, machine_gpus=GPUS)],
            seed=self.seed,
            listener=Steps(steps, [bursts]),
        )
        outcome = simulation.run(END)
        useful = ITEM * sum(count * self._gpus().get(app, 1) for app, count in bursts.answered.items())
        waits = {app.name: bursts.waited(app.name, END) for app in apps}
        waited = sum(app.gpus * waits[app.name] for app in apps)
        score = (self._capacity() - useful + waited) / 3600
        count = sum(len(app.bursts) for app in apps)
        beside = {
            "burst_mean_s": sum(waits.values()) / count if count else 0.0,
            "unserved": float(sum(bursts.unserved(app.name) for app in apps)),
            "lost_hours": outcome.account.lost_seconds / 3600,
            "useful_share": useful / self._capacity(),
            "worker_hours": sum(worker_seconds(outcome.presence, END).values()) / 3600,
        }
        return GameOutcome(score, self.bound(), beside)

    def bound(self) -> float:
        """Return the least GPU-hours.

        Every GPU has a worker that joins and loads; and a context has one worker at a time, which does its bursts one
        after the other: their waits are least if the shortest is done first.
        """
        begun = sum(
            min(MATCH + MODEL_LOAD + WAY, sum(end - begin for begin, end in times))
            for times in self.drawn.gpus.values()
        )
        alone = Clock([(0.0, 1 / ITEM)])
        waits = 0.0
        for app in self.drawn.urgent:
            seconds, _ = shortest_first([(time, float(count), 1) for time, count in app.bursts], alone)
            waits += app.gpus * min(seconds + WAY * len(app.bursts), sum(END - time for time, _ in app.bursts))
        return (begun + waits) / 3600

    def _gpus(self) -> dict[str, int]:
        return {app.name: app.gpus for app in self.drawn.urgent}

    def _capacity(self) -> float:
        """Return the seconds that all GPUs can be had."""
        return sum(end - begin for times in self.drawn.gpus.values() for begin, end in times)


def _machines(drawn: PlaceDraw) -> list[SimulatedMachine]:
    graphs = {}
    for host in range(drawn.machines):
        cards = tuple(Gpu(number, f"GPU-m{host}-{number}", numa=number) for number in range(GPUS))
        nodes = tuple(NumaNode(number, number * 2 // GPUS) for number in range(GPUS))
        graphs[host] = to_graph(Topology(f"m{host}", (0, 1), nodes, gpus=cards))
    return [
        SimulatedMachine(
            f"m{host}-{gpu}",
            host=f"m{host}",
            devices=(f"GPU-m{host}-{gpu}",),
            topology=graphs[host],
            available=pools.intervals(times),
        )
        for (host, gpu), times in drawn.gpus.items()
    ]


PLACE_DRAWS: tuple[Callable[[int], PlaceDraw], ...] = (steady_urgent, flash_urgent, campus_urgent)


def place_arena(draw: Callable[[int], PlaceDraw], seed: int) -> PlaceArena:
    """Return the game of a seed."""
    return PlaceArena(draw(seed), seed)
