#!/usr/bin/env python3
"""Which routing policy when: the live policies on the simulated engine, in cases that differ in what is scarce.

    benchmarks/routing_live.py [--json] [--quick] [--case NAME]

Backs the section "When to choose which" of docs/routing.md. Cases (a GPU holds one context in each; times of the
pervasive-context paper's workers where nothing else is said: a load is 15 s, an item 0.27 or 0.38 s):

- `bulk`: 60,000 items of three apps, 3 to 2 to 1, all there at the start, on 60 workers that are evicted;
- `stream`: two apps whose items come one by one, at half of what 20 workers can do;
- `busy`: the same at nine tenths;
- `many`: eight apps in bursts of 60 items on ten workers: every context wants its GPU;
- `surge`: one app's items come six times as fast for three minutes, another's as ever;
- `regions`: the stream on two regions of ten workers, of which the far one has cheaper power and loads in 60 s.

Figures, CASE_POLICY_WHAT: `loads` per context; `makespan_s`; `response_s`, the mean of an item from its arrival to its
answer; in `regions` also `far`, the share of items done where power is cheap. Besides, `pace_POLICY`: calls a second of
processor time on 1,000 workers, scheduler and simulator together, and `pace_POLICY_vs_affinity`, round by round.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import figure, progress, ratio, report, versions

from ctxflow.executors.simulated import Availability, SimulatedEngine, SimulatedMachine
from ctxflow.executors.simulated.market import always
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of

POLICIES = ("context-affinity", "least-loaded", "round-robin", "skylb", "sdib", "torta")
SECONDS = {"a10": 0.2727, "titan": 0.3846}
MEAN = sum(SECONDS.values()) / len(SECONDS)
REGIONS = [
    ev.RegionSpec("campus", {"far": 0.04}, {"far": 25e6}, power_price=0.3, home=True),
    ev.RegionSpec("far", {"campus": 0.04}, {"campus": 25e6}, power_price=0.1),
]
Arrivals = list[tuple[float, str, int]]


def poisson(app: str, per_second: float, begin: float, end: float, seed: int, burst: int = 1) -> Iterator[Any]:
    """Items of an app, some at a time."""
    chance, now = random.Random(f"{seed}/{app}/{begin}"), begin
    while (now := now + chance.expovariate(per_second / burst)) < end:
        yield now, app, burst


def case(name: str, seed: int) -> tuple[Arrivals, list[SimulatedMachine], int]:
    """What a case's items, machines and number of apps are."""
    if name == "bulk":
        arrivals = [(0.0, f"app{n}", count) for n, count in enumerate((30_000, 20_000, 10_000))]
        return arrivals, pool(60, pools.evicted(600.0, 60.0)), 3
    if name == "many":
        streams = [poisson(f"app{n}", 0.5 * 10 / MEAN / 8, 0, 1200, seed, 60) for n in range(8)]
        return sorted(item for stream in streams for item in stream), pool(10), 8
    if name == "surge":
        usual, surge = 3.0, 15.0
        streams = [poisson("app0", usual, 0, 900, seed), poisson("app0", surge, 300, 480, seed)]
        return sorted([*streams[0], *streams[1], *poisson("app1", usual, 0, 900, seed)]), pool(20), 2
    load = 0.9 if name == "busy" else 0.5
    streams = [poisson(f"app{n}", share * load * 20 / MEAN, 0, 900, seed) for n, share in enumerate((0.7, 0.3))]
    far = 10 if name == "regions" else 0
    return sorted([*streams[0], *streams[1]]), pool(20 - far) + pool(far, region="far"), 2


def pool(count: int, available: Availability = always, region: str = "campus") -> list[SimulatedMachine]:
    """Half of the workers of either GPU, each with room for one context."""
    return [
        SimulatedMachine(f"{region}{n}", ("a10", "titan")[n % 2], region, region, gpu_memory=10, available=available)
        for n in range(count)
    ]


def run(routing: str, name: str, seed: int) -> dict[str, float]:
    """One run; its figures."""
    arrivals, machines, count = case(name, seed)
    apps, contexts = [f"app{n}" for n in range(count)], [f"context{n}" for n in range(count)]
    kinds = {(machine.tier, machine.gpu_model) for machine in machines}
    times = MixedTimes(
        {app: {kind: GpuTimes({"": SECONDS[str(kind[1])]}, 0.3, Drawn(0.05)) for kind in kinds} for app in apps},
        {context: {kind: Drawn(60.0 if kind[0] == "far" else 15.0, 2.0) for kind in kinds} for context in contexts},
    )
    engine = SimulatedEngine(machines, times, seed=seed)
    specs = [ev.ContextSpec(context, context, gpus=1) for context in contexts]
    workload = Workload(specs, [ev.AppSpec(a, a, c) for a, c in zip(apps, contexts, strict=True)], arrivals)
    came: dict[int, float] = {}
    took: list[float] = []
    where = dict.fromkeys(("campus", "far"), 0)
    placed: dict[int, str] = {}

    def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        if isinstance(event, ev.ItemsSubmitted):
            came.update(dict.fromkeys(event.items, event.time))
        for command in commands:
            if isinstance(command, cmd.Run):
                placed[command.attempt] = simulation.scheduler.view.workers[command.worker].region
            elif isinstance(command, cmd.Deliver):
                took.extend(event.time - came.pop(item) for item in command.items)
                where[placed[command.attempt]] += len(command.items)

    regions = REGIONS if name == "regions" else []
    policies = Policies.chosen({"routing": routing, "batching": {"policy": "fixed", "size": 50}})
    simulation = Simulation(engine, policies, workload, tiers_of(machines), seed=seed, listener=listen, regions=regions)
    outcome = simulation.run()
    assert outcome.done == workload.total
    loads = simulation.scheduler.state.counters.loads
    found = {"loads": loads / count, "makespan_s": outcome.seconds, "response_s": sum(took) / len(took)}
    return found | ({"far": where["far"] / len(took)} if regions else {})


def pace(routing: str, calls: int) -> float:
    """Calls a second of processor time on 1,000 workers with two contexts."""
    machines = pools.machines(1000, "a10", pools.during(0.0))
    times = GpuTimes({"a10": 0.3}, 0.5, dispatched=Drawn(0.02), loading=Drawn(15.0, 5.0, 5.0))
    specs = [ev.ContextSpec(name, name, gpus=1) for name in ("c0", "c1")]
    apps = [ev.AppSpec(f"app{n}", f"app{n}", f"c{n}", batch_size=1) for n in range(2)]
    workload = Workload(specs, apps, [(0.0, app.id, calls // 2) for app in apps])
    simulation = Simulation(
        SimulatedEngine(machines, times), Policies.chosen({"routing": routing}), workload, tiers_of(machines)
    )
    begun = time.process_time()
    outcome = simulation.run()
    return outcome.batches / (time.process_time() - begun)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The live routing policies on the simulated engine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one seed, and few calls: to see that it runs")
    parser.add_argument("--case", action="append", help="only this case (again for more), or pace")
    given = parser.parse_args()
    figures = {}
    for name in ("bulk", "stream", "busy", "many", "surge", "regions"):
        if given.case and name not in given.case:
            continue
        for routing in POLICIES:
            runs = [run(routing, name, seed) for seed in range(1 if given.quick else 5)]
            for what in runs[0]:
                unit = "s" if what.endswith("_s") else "loads" if what == "loads" else "share"
                better = "higher" if what == "far" else "lower"
                figures[f"{name}_{routing}_{what}"] = figure([each[what] for each in runs], unit, better)
            progress(f"{name}, {routing}: { ({what: round(each, 2) for what, each in runs[0].items()}) }")
    if not given.case or "pace" in given.case:
        rounds = 1 if given.quick else 5
        paces: dict[str, list[float]] = {routing: [] for routing in ("context-affinity", "torta")}
        for number in range(rounds):
            for routing, found in paces.items():
                found.append(pace(routing, 10_000 if given.quick else 100_000))
                progress(f"pace, round {number + 1} of {rounds}, {routing}: {found[-1]:,.0f} calls/s")
        for routing, found in paces.items():
            figures[f"pace_{routing}"] = figure(found, "calls/s")
        figures["pace_torta_vs_affinity"] = ratio(paces["torta"], paces["context-affinity"])
    report("routing_live", figures, versions(["numpy", "scipy", "POT"]), given.json)


if __name__ == "__main__":
    main()
