#!/usr/bin/env python3
"""Sessions of unlike weight, and rises faster than a boot: what weighing and reserving gain, and what they cost.

    benchmarks/session_margins.py --json       20 fleets of each size, 5 seeds of each trace (a few minutes)
    benchmarks/session_margins.py --quick      3 fleets and 1 seed: to see that it runs

Backs the figures of docs/scaling.md. `unlike_N_by_weight` is the longest chunk that rebalancing leaves on N GPUs with
6 sessions a GPU of weights from 0.4 to 5, placed at random on three quarters of them, in % above what nobody can beat
(the loads divided evenly, or the heaviest session alone); `_by_number` is that of counting all alike; `_ms` the time of
one call.

Rises are crowds that come within seconds on top of sessions that come and go at random: `over_NAME` is by how much less
(%) chunks exceed the target with the reserve and the look at the last seconds, in session-seconds, `cost_NAME` how many
% more GPU-seconds that takes, `cost_same_NAME` how many more a lower share of GPUs' capacity takes that exceeds the
target as little (the closest of several; none if the lowest does not). `cost_T1` to `cost_T3` are the same for the
paper's traces, `worst_T1` to `worst_T3` their longest chunk in % of what it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from unittest import mock

import common
import numpy as np

from ctxflow.policies.turboserve import autoscaling
from ctxflow.policies.turboserve.autoscaling import Parameters, constant
from ctxflow.policies.turboserve.rebalancing import PowerCurve, rebalance
from ctxflow.policies.turboserve.session_weights import longest_chunk, rebalance_by_weight
from ctxflow.policies.turboserve.weighed_fleet import SessionWeights
from ctxflow.simulator.session_serving import Cluster, Served, SessionTrace, serve
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.experiments import cluster
from ctxflow_papers.turboserve.traces import generate

EACH = 6
LINEAR = PowerCurve(0.1, 1.0)
BOOT = 30.0
WHERE = Cluster(48, 2, 12, PowerCurve(0.0, 0.1336), BOOT)
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclasses.dataclass(frozen=True)
class Crowds:
    """Crowds of about so many sessions within so many seconds, some time apart; `life`: how long one is active."""

    size: int = 40
    width: float = 10.0
    apart: tuple[float, float] = (480.0, 900.0)
    life: float = 180.0
    first: float = 300.0


CROWDS = {
    "crowds_10_s": Crowds(),
    "crowds_30_s": Crowds(width=30.0),
    "rises_90_s": Crowds(size=100, width=90.0, life=300.0),
    "crowds_often": Crowds(apart=(200.0, 300.0), life=90.0),
    "one_crowd": Crowds(apart=(4000.0, 4001.0), first=900.0),
    "no_crowd": Crowds(size=0),
}


def crowded(wanted: Crowds, seed: int, seconds: float = 3600.0, usual: int = 40, stay: float = 240.0) -> SessionTrace:
    """An hour of sessions that come and go at random, and crowds."""
    chance = np.random.default_rng([seed, 77])
    lives = [(0.0, chance.exponential(stay)) for _ in range(usual)]
    begins = np.cumsum(chance.exponential(stay / usual, int(2 * usual * seconds / stay)))
    lives += [(begin, begin + chance.exponential(stay)) for begin in begins if begin < seconds]
    start = wanted.first + chance.uniform(0.0, 200.0)
    while start < seconds:
        for begin in start + wanted.width * chance.random(int(wanted.size * chance.uniform(0.7, 1.3))):
            lives.append((begin, begin + chance.exponential(wanted.life)))
        start += chance.uniform(*wanted.apart)
    edges = [(begin, n, True) for n, (begin, _) in enumerate(lives) if begin < seconds]
    edges += [(end, n, False) for n, (begin, end) in enumerate(lives) if begin < seconds and end < seconds]
    events = sorted(edges, key=lambda each: (each[0], each[2]))
    return SessionTrace("crowds", seconds, 1, events, [1e9] * len(lives), [len(lives)], [0])


def served(trace: SessionTrace, where: Cluster, share: float = 0.8, margins: bool = True) -> Served:
    """What a share of GPUs' capacity comes to, with the margins for rises or as before."""
    scaling = where.closed_loop(constant(Parameters(share)))
    target = where.curve(where.capacity)
    if margins:
        return serve(trace, where, scaling, target=target)
    with mock.patch.object(autoscaling, "BY_CHANCE", float("inf")):
        return serve(trace, where, {**scaling, "reserve": 0.0}, target=target)


def rises(seeds: int) -> dict[str, common.Figure]:
    """What crowds exceed the target by, and what sparing it costs."""
    figures = {}
    for name, wanted in CROWDS.items():
        common.progress(f"margins: {name}")
        rows = [_beside(crowded(wanted, seed)) for seed in range(seeds)]
        if wanted.size:
            figures[f"over_{name}"] = common.figure([row[0] for row in rows], "%")
        figures[f"cost_{name}"] = common.figure([row[1] for row in rows], "%", "lower")
        same = [row[2] for row in rows if row[2] is not None]
        if same and wanted.size:
            figures[f"cost_same_{name}"] = common.figure(same, "%", "lower")
    return figures


def _beside(trace: SessionTrace) -> tuple[float, float, float | None]:
    before, after = served(trace, WHERE, margins=False), served(trace, WHERE)
    saved = 100 * (1 - after.over / before.over) if before.over else 0.0
    lower = (served(trace, WHERE, share, margins=False) for share in SHARES)
    same = next((each for each in lower if each.over <= after.over), None)
    cost = 100 * (after.gpu_seconds / before.gpu_seconds - 1)
    return saved, cost, None if same is None else 100 * (same.gpu_seconds / before.gpu_seconds - 1)


def ordinary(seeds: int, quick: bool) -> dict[str, common.Figure]:
    """What the margins cost where nothing rises faster than a boot."""
    figures = {}
    for wanted in printed.TRACES[: 1 if quick else 3]:
        common.progress(f"margins: {wanted.name}")
        costs, worst = [], []
        for seed in range(500, 500 + seeds):
            trace, where = generate(wanted, seed), cluster(wanted.name)
            before, after = served(trace, where, margins=False), served(trace, where)
            costs.append(100 * (after.gpu_seconds / before.gpu_seconds - 1))
            worst.append(100 * after.worst / before.worst)
        figures[f"cost_{wanted.name}"] = common.figure(costs, "%", "lower")
        figures[f"worst_{wanted.name}"] = common.figure(worst, "%", "lower")
    return figures


def unlike(gpus: int, cases: int) -> dict[str, common.Figure]:
    """How far from the bound rebalancing leaves sessions of unlike weight."""
    by_weight, by_number, taken = [], [], []
    for case in range(cases):
        chance = random.Random(f"{case} {gpus}")
        before: dict[object, list[object]] = {gpu: [] for gpu in range(gpus)}
        for session in range(EACH * gpus):
            before[chance.randrange(3 * gpus // 4)].append(session)
        loads: dict[object, float] = {
            session: chance.choice([0.5, 1.0, 2.0, 4.0]) * chance.uniform(0.8, 1.25) for session in range(EACH * gpus)
        }
        weights = SessionWeights(loads)
        bound = LINEAR(max(sum(loads.values()) / gpus, *loads.values()))
        begun = time.perf_counter()
        moves = rebalance_by_weight(before, LINEAR, weights=weights)
        taken.append(1000 * (time.perf_counter() - begun))
        for found, ratios in ((moves, by_weight), (rebalance(before, LINEAR), by_number)):
            after = {gpu: set(there) for gpu, there in before.items()}
            for move in found:
                after[move.source].remove(move.session)
                after[move.target].add(move.session)
            ratios.append(100 * (longest_chunk(after, LINEAR, weights=weights) / bound - 1))
    return {
        f"unlike_{gpus}_by_weight": common.figure(by_weight, "%", "lower"),
        f"unlike_{gpus}_by_number": common.figure(by_number, "%", "lower"),
        f"unlike_{gpus}_ms": common.figure(taken, "ms", "lower"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Sessions of unlike weight, and rises faster than a boot.")
    parser.add_argument("--cases", type=int, default=20, help="fleets of each size (20)")
    parser.add_argument("--seeds", type=int, default=5, help="of each trace (5)")
    parser.add_argument("--quick", action="store_true", help="3 fleets and 1 seed: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.cases < 1 or given.seeds < 1:
        parser.error("give 1 case and 1 seed or more")
    cases, seeds = (3, 1) if given.quick else (given.cases, given.seeds)
    figures = rises(seeds) | ordinary(seeds, given.quick)
    for gpus in (16,) if given.quick else (4, 16, 64):
        common.progress(f"margins: {gpus} GPUs")
        figures |= unlike(gpus, cases)
    common.report("session_margins", figures, common.versions(("numpy",)), given.json)


if __name__ == "__main__":
    main()
