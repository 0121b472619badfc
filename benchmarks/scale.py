#!/usr/bin/env python3
"""How large a run the scheduler and the simulated engine bear: a million items, up to 10,000 workers, on one core.

    benchmarks/scale.py [--json] [--quick]

Backs the figures of docs/simulator.md. Workers are evicted every two minutes on average, and come back. Each run is
in a process of its own, so that its memory is its own; --quick does a tenth of the items. Figures:

- `million_batch100_s`, `million_batch1_s`, `million_opportunistic_s`: wall time of 1,000,000 items over 1,000 workers
  with batches of 100 items, of 1, and of the policy `opportunistic`; and `..._gb`, the most memory that the process
  had;
- `event_us_W_workers`: CPU time of an event with 1,000 items a worker, at 100 and at 1,000 workers;
- `event_cost_workers`: the latter divided by the former; `event_cost_items`: an event's CPU time with ten times the
  items on 1,000 workers, divided by that without; both with batches of 100;
- `event_us_10000_workers`, `ten_thousand_cpu_s`: CPU time of an event, and of all, with 1,000,000 items over 10,000
  workers, batches of 100; `event_cost_10000_workers`: the former divided by an event's CPU time with as many items a
  worker on 100 workers, in rounds that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from common import figure, progress, ratio, report, versions

from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.scheduler import Policies
from ctxflow.simulator import Drawn, GpuTimes, Origin, Part, Simulation, TreeStaging, Workload, pools
from ctxflow.simulator.simulation import tiers_of

BATCHINGS: dict[str, Any] = {
    "batch100": {"policy": "fixed", "size": 100},
    "batch1": {"policy": "fixed", "size": 1},
    "opportunistic": "opportunistic",
}


def run(items: int, workers: int, batching: str, seed: int) -> dict[str, float]:
    """One run in this process: wall and CPU seconds, events, GB."""
    available = pools.evicted(120.0, 20.0)
    machines = [m for model in ("a10", "titan") for m in pools.machines(workers // 2, model, available)]
    times = GpuTimes(
        {"a10": 0.2727, "titan": 0.3846},
        item_spread=0.5,
        dispatched=Drawn(0.02),
        loading=Drawn(15.0, 5.0, 5.0),
        matching=Drawn(10.0, 5.0, 1.0),
    )
    staging = TreeStaging({"context": [Part("model", 3.7e9, "fs", unpacking=5.0)]}, {"fs": Origin(10.5e9, 1.25e9)})
    engine = SimulatedEngine(machines, times, staging, seed)
    policies = Policies.chosen({"batching": BATCHINGS[batching]})
    simulation = Simulation(engine, policies, Workload.of(items, files=True), tiers_of(machines), seed=seed)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    outcome = simulation.run()
    wall, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    assert outcome.done == items
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"wall": wall, "cpu": cpu, "events": outcome.events, "gb": memory, "evicted": outcome.account.evicted}


def apart(items: int, workers: int, batching: str, seed: int) -> dict[str, float]:
    """One run in a process of its own, on one core."""
    words = [sys.executable, __file__, "--one", str(items), str(workers), batching, str(seed)]
    core = min(os.sched_getaffinity(0))
    ended = subprocess.run(
        words, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    found: dict[str, float] = json.loads(ended.stdout)
    progress(f"{items:,} items, {workers:,} workers, {batching}: {found}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A million items over a thousand workers in the simulator.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of the items: to see that it runs")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        items, workers, batching, seed = given.one
        print(json.dumps(run(int(items), int(workers), batching, int(seed))))
        return
    million = 100_000 if given.quick else 1_000_000
    figures = {}
    for batching in BATCHINGS:
        found = apart(million, 1000, batching, 0)
        figures[f"million_{batching}_s"] = figure([found["wall"]], "s", "lower")
        figures[f"million_{batching}_gb"] = figure([found["gb"]], "GB", "lower")
    cells: dict[str, list[float]] = {"few": [], "many": [], "more items": [], "few short": [], "most": []}
    whole: list[float] = []
    for seed in range(1 if given.quick else 5):
        for name, items, workers in (
            ("few", million // 10, 100),
            ("many", million, 1000),
            ("more items", 10 * million, 1000),
            ("few short", million // 100, 100),
            ("most", million, 10_000),
        ):
            if name != "more items" or seed < 2:
                found = apart(items, workers, "batch100", seed)
                cells[name].append(1e6 * found["cpu"] / found["events"])
                if name == "most":
                    whole.append(found["cpu"])
    figures["event_us_100_workers"] = figure(cells["few"], "us", "lower")
    figures["event_us_1000_workers"] = figure(cells["many"], "us", "lower")
    figures["event_us_10000_workers"] = figure(cells["most"], "us", "lower")
    figures["ten_thousand_cpu_s"] = figure(whole, "s", "lower")
    more = cells["more items"]
    for name, cost in (
        ("workers", ratio(cells["many"], cells["few"])),
        ("10000_workers", ratio(cells["most"], cells["few short"])),
        ("items", ratio(more, cells["many"][: len(more)])),
    ):
        figures[f"event_cost_{name}"] = dataclasses.replace(cost, better="lower")
    report("scale", figures, versions(["numpy"]), given.json)


if __name__ == "__main__":
    main()
