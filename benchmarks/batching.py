#!/usr/bin/env python3
"""How good the batches of the policy `opportunistic` are, in the simulator: nothing is left to tune.

    benchmarks/batching.py [--json] [--quick] [--spot FOLDER]

Backs the figures of docs/batching.md. They are:

- `opportunistic_vs_fluid`: the makespan on the pervasive-context paper's pool of 20 GPUs (half A10, half TITAN X,
  150,000 inferences), all staging, unpacking and loading counted, divided by the pool's fluid bound of 2,393 s. The
  paper's best is 1.21. Files come from the paper's shared filesystem straight to each worker.
- `opportunistic_vs_fluid_tree`: the same where they go from worker to worker, as in the paper; and `fixed100_...` of
  both, with the paper's batches of 100.
- `worst_vs_best_fixed`: over 30 random pools, the worst of the makespan divided by that of the best of seven fixed
  batch sizes, where each pool has that of its own. Pools differ in workers, GPU models, item times and their spread,
  cost of a call, load times, and evictions from none to one a worker every two minutes. Each is the mean of four draws
  of all that is random; a policy and its rivals meet the same evictions and loads. A fixed batch that takes four times
  as long is given up. `held_out_...` is the same over other pools, on which nothing was chosen.
- `spot_NODESx_ZONE_...`, for each trace in the folder (left out without one; spot_traces.py): useful inferences a
  second of `opportunistic`, divided by those of fixed batches of 1,000 and of 100 (`vs_fixed1000`, `vs_fixed100`), over
  the whole trace with a queue that never ends; `bound_vs_...`: the same of workers that do nothing but inferences from
  the moment that they hold the context until they are taken, which no batching beats; `vs_bound`: ours divided by
  that; `job_vs_...`: of the paper's job of 150,000 inferences, begun at 40 times spread evenly over the trace, all
  inferences divided by all seconds until the jobs' ends; `evictions_per_hour`: nodes taken, all together.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from pathlib import Path

import spot_traces
from common import Figure, figure, progress, report, versions

from ctxflow.executors.simulated import Availability, SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.simulator import Drawn, GpuTimes, Origin, Part, Simulation, SimulationOutcome, TreeStaging, Workload, pools
from ctxflow.simulator.simulation import tiers_of
from ctxflow_papers.pervasive_context.experiments import play as play_paper
from ctxflow_papers.pervasive_context.settings import DIRECT, POOL_FLUID_SECONDS, Settings, pool_of_20

SPOT = Path(__file__).resolve().parents[2] / "shared" / "data" / "spot"
HELD_OUT = 1000
"""The number of the first pool on which nothing was chosen."""

SIZES = (1, 10, 30, 100, 300, 1000, 3000)


@dataclasses.dataclass(frozen=True)
class Pool:
    """One random pool with its workload."""

    machines: list[SimulatedMachine]
    times: GpuTimes
    staging: dict[str, float]
    items: int


def random_pool(number: int) -> Pool:
    """The pool of that number: always the same."""
    drawn = random.Random(f"pool {number}")
    item = 10 ** drawn.uniform(-1.3, 0.3)
    models = {f"gpu{n}": item * drawn.uniform(1, 4) for n in range(drawn.randint(1, 4))}
    # From calm to an eviction every two minutes.
    up = drawn.choice([None, 7200.0, 1800.0, 600.0, 240.0, 120.0])
    available: Availability = pools.during(0.0) if up is None else pools.evicted(up, drawn.uniform(5, 120))
    machines = [machine for model in models for machine in pools.machines(drawn.randint(2, 16), model, available)]
    speed = sum(1 / models[machine.gpu_model or ""] for machine in machines)
    load = 10 ** drawn.uniform(0, 1.8)
    times = GpuTimes(
        models,
        item_spread=drawn.uniform(0, 1),
        call_overhead=Drawn(10 ** drawn.uniform(-2, 0.3)),
        dispatched=Drawn(10 ** drawn.uniform(-2.5, -0.5)),
        loading=Drawn(load, load * drawn.uniform(0, 1), load / 2),
        matching=Drawn(drawn.uniform(1, 30)),
    )
    items = int(min(100_000, max(500, speed * drawn.uniform(300, 3000))))
    return Pool(machines, times, {"size": 10 ** drawn.uniform(8, 10), "unpacking": drawn.uniform(0, 10)}, items)


def play(pool: Pool, batching: object, seed: int, until: float) -> SimulationOutcome:
    """One run on a pool."""
    policies = Policies.chosen({"batching": batching})
    files = {"context": [Part("model", pool.staging["size"], "shared", unpacking=pool.staging["unpacking"])]}
    staging = TreeStaging(files, {"shared": Origin(10.5e9, 1.25e9)})
    engine = SimulatedEngine(pool.machines, pool.times, staging, seed)
    return Simulation(engine, policies, Workload.of(pool.items, files=True), tiers_of(pool.machines)).run(until)


def against_fixed(number: int, seeds: int) -> float:
    """The makespan on a pool, divided by that of the best fixed batch."""
    pool = random_pool(number)
    runs = [play(pool, "opportunistic", seed, 1e7) for seed in range(seeds)]
    ours = statistics.fmean(run.seconds for run in runs)
    fixed = {}
    for size in SIZES:
        rivals = [play(pool, {"policy": "fixed", "size": size}, seed, 4 * ours) for seed in range(seeds)]
        fixed[size] = statistics.fmean(run.seconds for run in rivals)
    best = min(fixed, key=lambda size: fixed[size])
    evicted = sum(run.account.evicted for run in runs)
    progress(
        f"pool {number}: {len(pool.machines)} workers, {pool.items} items, {evicted / seeds:.0f} evictions: "
        f"{ours:,.0f} s, fixed {best}: {fixed[best]:,.0f} s, ratio {ours / fixed[best]:.3f}"
    )
    return ours / fixed[best]


def on_pool_of_20(draws: int) -> dict[str, Figure]:
    """Against the fluid bound of the paper's pool, from which nobody is taken."""
    paper = {
        "opportunistic_vs_fluid": Settings("direct", batching="opportunistic", machines=pool_of_20, kept=DIRECT),
        "fixed100_vs_fluid": Settings("direct", machines=pool_of_20, kept=DIRECT),
        "opportunistic_vs_fluid_tree": Settings("tree", batching="opportunistic", machines=pool_of_20),
        "fixed100_vs_fluid_tree": Settings("tree", machines=pool_of_20),
    }
    figures = {}
    for name, settings in paper.items():
        progress(name)
        makespans = [play_paper(settings, seed).seconds for seed in range(draws)]
        figures[name] = figure([seconds / POOL_FLUID_SECONDS for seconds in makespans], "times", "lower")
    return figures


def on_random_pools(first: int, count: int, draws: int, prefix: str = "") -> dict[str, Figure]:
    """Against the best fixed batch of each pool."""
    ratios = [against_fixed(number, draws) for number in range(first, first + count)]
    median = figure(ratios, "times", "lower")
    return {
        f"{prefix}worst_vs_best_fixed": dataclasses.replace(median, value=round(max(ratios), 4)),
        f"{prefix}median_vs_best_fixed": median,
    }


def on_spot_traces(folder: Path, quick: bool) -> dict[str, Figure]:
    """On recorded markets, if there are any."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        progress(f"{folder} has no spot traces: left out (give --spot FOLDER)")
    figures = {}
    for path in paths[:1] if quick else paths:
        trace = spot_traces.Trace.read(path)
        for name, value in spot_traces.compare(trace, 4 if quick else 40, progress).items():
            figures[f"spot_{trace.name}_{name}"] = figure([value], "an hour" if name.endswith("hour") else "times")
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The policy opportunistic against the fluid bound and fixed batches.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="few pools: to see that it runs")
    parser.add_argument("--spot", type=Path, default=SPOT, help="the folder of spot traces")
    given = parser.parse_args()
    count, draws = (4, 1) if given.quick else (30, 4)
    figures = on_pool_of_20(1 if given.quick else 5)
    figures |= on_random_pools(0, count, draws) | on_random_pools(HELD_OUT, 2 * count, draws, "held_out_")
    figures |= on_spot_traces(given.spot, given.quick)
    report("batching", figures, versions(["numpy"]), given.json)


if __name__ == "__main__":
    main()
