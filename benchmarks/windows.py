#!/usr/bin/env python3
"""What policies make of workers whose calls overlap: two streams of items in flight, on the simulated engine.

    benchmarks/windows.py [--json] [--quick]

Backs the figures about items in flight in docs/routing.md, docs/scaling.md and docs/placement.md. An engine answers one
item of 50 tokens at a time in 0.83 s, and ten a second with many in flight (500 tokens a second at best, knee 8); items
vary as much as they are long; a window has 64; a context is built in 20 s, and a GPU holds one.

- routing: 6 items a second of each of two apps, for 450 s, on six workers;
- scaling and placement: 2, or 20, items a second of one app for 600 s, of which one worker, or two, are enough, where
  20 may be had.

Figures, CASE_POLICY_WHAT: `loads`; `response_s`, the mean of an item from its arrival to its answer; `worker_hours`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from common import figure, progress, report, versions

from ctxflow.executors.simulated import SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies.registry import names
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes

KIND = ("gpus", "NVIDIA A10")
PACE = SharedPace(best=500.0, knee=8.0, tokens=50.0, spread=1.0)
LOAD = 20.0


def run(
    policies: Mapping[str, Any], workers: int, apps: int, rate: float, seconds: float, seed: int
) -> dict[str, float]:
    """Run items of some apps, so many a second of each; its figures."""
    numbers = range(apps)
    times = MixedTimes(
        {f"app{n}": {KIND: GpuTimes({"": 1.0})} for n in numbers},
        {f"context{n}": {KIND: Drawn(LOAD)} for n in numbers},
        shared={f"app{n}": {KIND: PACE} for n in numbers},
    )
    machines = [SimulatedMachine(f"w{n}", KIND[1], KIND[0], available=pools.during(0.0)) for n in range(workers)]
    arrivals = [(k / rate, f"app{n}", 1) for n in numbers for k in range(round(rate * seconds))]
    contexts = [ev.ContextSpec(f"context{n}", f"context{n}", gpus=1) for n in numbers]
    specs = [ev.AppSpec(f"app{n}", f"app{n}", f"context{n}", batch=False, overlaps=True) for n in numbers]
    workload = Workload(contexts, specs, sorted(arrivals))
    came: dict[int, float] = {}
    took: list[float] = []
    joined: dict[str, float] = {}
    held = [0.0]

    def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        if isinstance(event, ev.ItemsSubmitted):
            came.update(dict.fromkeys(event.items, event.time))
        elif isinstance(event, ev.WorkerJoined):
            joined[event.worker.id] = event.time
        elif isinstance(event, ev.WorkerLost) and event.worker in joined:
            held[0] += event.time - joined.pop(event.worker)
        for command in commands:
            if isinstance(command, cmd.Deliver):
                took.extend(event.time - came.pop(item) for item in command.items)

    simulation = Simulation(
        SimulatedEngine(machines, times, seed=seed), Policies.chosen(policies), workload,
        [ev.TierSpec(KIND[0], 0, workers, gpus=1, price=1.0)], seed=seed, listener=listen,
    )  # fmt: skip
    outcome = simulation.run()
    assert outcome.done == workload.total
    hours = (held[0] + sum(outcome.seconds - since for since in joined.values())) / 3600
    loads = simulation.scheduler.state.counters.loads
    return {"loads": float(loads), "response_s": sum(took) / len(took), "worker_hours": hours}


def cases(quick: bool) -> list[tuple[str, dict[str, Any], int, int, float, float]]:
    """Return the name, policies, workers, apps, items a second of each and seconds of each run."""
    part = 0.2 if quick else 1.0
    found: list[tuple[str, dict[str, Any], int, int, float, float]] = []
    found += [(f"routing_{name}", {"routing": name}, 6, 2, 6.0, 450 * part) for name in names("routing")]
    chosen: dict[str, dict[str, Any]] = {f"scaling_{name}": {"scaling": name} for name in names("scaling")}
    chosen["scaling_activation_torta"] = {"scaling": "activation", "routing": "torta"}
    chosen["placement_agh"] = {"placement": {"policy": "agh", "period": 60.0, "clear": 300.0}}
    for name, policies in chosen.items():
        found += [(f"{name}_{rate:g}", policies, 20, 1, rate, 600 * part) for rate in (2.0, 20.0)]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Policies and items in flight, on the simulated engine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one seed, and a fifth of the time: to see that it runs")
    given = parser.parse_args()
    figures = {}
    for name, policies, workers, apps, rate, seconds in cases(given.quick):
        runs = [run(policies, workers, apps, rate, seconds, seed) for seed in range(1 if given.quick else 5)]
        for what in runs[0]:
            unit = {"loads": "loads", "response_s": "s"}.get(what, "h")
            figures[f"{name}_{what}"] = figure([each[what] for each in runs], unit, "lower")
        progress(f"{name}: { ({what: round(each, 2) for what, each in runs[0].items()}) }")
    report("windows", figures, versions(["numpy", "scipy"]), given.json)


if __name__ == "__main__":
    main()
