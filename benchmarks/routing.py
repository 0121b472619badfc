#!/usr/bin/env python3
"""Routing's decisions: a macro decision for 32 regions, 10,000 tasks matched to 300 servers, how well, and over time.

    benchmarks/routing.py [--json] [--quick] [--seeds 10] [--regions-only]

Backs the table of docs/routing.md. A macro decision is a forecast from five slots, the costs, transport within the
capacities, and whole tasks from its shares (`macro_ms_32`); `lookahead_ms_32` has the linear program over four slots in
the place of transport, and `transport_ms_32` is transport alone. A matching is the scores (Eqs. 7 to 10, without
embeddings), the tasks by urgency and the greedy matching (`match_s_10k_300`); `match_improved_s_10k_300` has four
rounds of local search after it. Every round is of its own draw and in this thread. The seconds are of the processor, so
that other programs on the machine do not count. `greedy_of_optimum` and `improved_of_optimum` are the sums of fits that
the greedy matching and the local search reach, in per cent of the optimum (SciPy's assignment), where places are scarce
and load does not count: 600 tasks for 660 places on 60 servers.

For each topology of TORTA's experiments (docs/routing.md): `response_vs_best_baseline`, `power_...`, `overhead_...` and
`waiting_...` are TORTA's mean over the best baseline's at each of the loads 0.5, 0.7 and 0.9, averaged over loads, and
`balance_minus_best_baseline` the difference; the best is of round-robin, SkyLB and SDIB, by metric and load.
`lookahead_` before a name is the look-ahead's. Seeds are 0 to 9, none of which was seen in training or tuning. That
takes half an hour on one core; `--seeds 2` takes a third of it.
"""

from __future__ import annotations

import argparse
import time

import common
import numpy as np
from scipy.optimize import linear_sum_assignment

from ctxflow.policies.torta.micro import fit, improve, match
from ctxflow.policies.torta.quantities import Recent, Servers, Tasks, forecast
from ctxflow.policies.torta.transport import capped, costs, lookahead, whole
from ctxflow_papers.torta import experiments
from ctxflow_papers.torta.world import TOPOLOGIES

REGIONS, SLOTS, AHEAD = 32, 5, 4
TASKS, SERVERS, MODELS, KINDS = 10_000, 300, 20, 3


def macro(seed: int) -> dict[str, float]:
    """Milliseconds of one decision of each form."""
    chance = np.random.default_rng(seed)
    history = chance.poisson(chance.uniform(50, 300, REGIONS), (SLOTS, REGIONS))
    capacity = chance.uniform(100, 500, REGIONS)
    latency = chance.uniform(0, 0.02, (REGIONS, REGIONS))
    power, before = chance.uniform(0.05, 0.3, REGIONS), history[-1]
    begun = time.process_time()
    expected = forecast(history)
    cost = costs(power, latency)
    decided = time.process_time()
    shares = capped(expected[0], capacity, cost)
    carried = time.process_time()
    whole(shares, history[-1])
    ended = time.process_time()
    whole(lookahead(forecast(history, AHEAD), capacity, costs(power, latency), before, 0.05), history[-1])
    looked = time.process_time()
    return {
        "macro_ms_32": 1000 * (ended - begun),
        "transport_ms_32": 1000 * (carried - decided),
        "lookahead_ms_32": 1000 * (looked - ended),
    }


def drawn(seed: int, count: int, places_on: int, places: int) -> tuple[Tasks, Servers, Recent]:
    """Tasks and servers of one region, and what ran there lately."""
    chance = np.random.default_rng(seed)
    servers = Servers(
        chance.choice([65.0, 125.0, 330.0, 312.0, 990.0], places_on),
        chance.choice([16.0, 24.0, 32.0, 80.0], places_on),
        np.full(places_on, places + 4.0),
        chance.uniform(0, 10, places_on),
        chance.integers(0, 5, places_on).astype(float),
        np.full(places_on, places),
        chance.random((places_on, KINDS)) < 0.5,
    )
    tasks = Tasks(
        chance.uniform(10, 400, count),
        chance.uniform(4, 60, count),
        chance.integers(0, KINDS, count),
        chance.integers(0, MODELS, count),
        chance.uniform(0, 100, count),
        chance.uniform(0.2, 1.0, count),
    )
    ran = 1000 * places_on // SERVERS
    recent = Recent(chance.integers(0, places_on, ran), chance.integers(0, MODELS, ran), chance.uniform(0, 300, ran))
    return tasks, servers, recent


def matching(seed: int) -> dict[str, float]:
    """Seconds of one matching without and with local search."""
    tasks, servers, recent = drawn(seed, TASKS, SERVERS, 36)
    begun = time.process_time()
    score = fit(tasks, servers, recent, 300.0)
    where = match(score, tasks, servers)
    matched = time.process_time()
    improve(score, where, tasks, servers, rounds=4)
    ended = time.process_time()
    return {"match_s_10k_300": matched - begun, "match_improved_s_10k_300": ended - begun}


def quality(seed: int) -> dict[str, float]:
    """How near the matchings come to the optimum."""
    tasks, servers, recent = drawn(seed, 600, 60, 11)
    score = fit(tasks, servers, recent, 300.0)
    columns = np.repeat(np.arange(60), 11)
    rows, chosen = linear_sum_assignment(score[:, columns], maximize=True)
    optimum = score[rows, columns[chosen]].sum()
    where = match(score, tasks, servers, load_weight=0.0)
    better = improve(score, where, tasks, servers, load_weight=0.0, rounds=100)
    reached = {"greedy_of_optimum": where, "improved_of_optimum": better}
    return {name: 100 * float(score[np.arange(600), each].sum() / optimum) for name, each in reached.items()}


def regions(seeds: int, slots: int, topologies: tuple[str, ...]) -> dict[str, list[float]]:
    """TORTA and the look-ahead beside the best baselines; a number for each seed."""
    networks = experiments.trained()
    chosen = {
        name: method
        for name, method in experiments.methods(networks).items()
        if name in (*experiments.BASELINES, "torta", "lookahead")
    }
    samples: dict[str, list[float]] = {}
    for topology in topologies:
        found = {}
        for name, method in chosen.items():
            common.progress(f"routing: {topology}, {name}, {seeds} seeds")
            found[name] = experiments.compared(topology, method, range(seeds), slots=slots)
        for name, prefix in (("torta", ""), ("lookahead", "lookahead_")):
            for metric in ("response", "power", "overhead", "waiting"):
                ratios = experiments.over_best(found, metric, name)
                samples[f"{topology}_{prefix}{metric}_vs_best_baseline"] = ratios.tolist()
            gained = experiments.above_best(found, name)
            samples[f"{topology}_{prefix}balance_minus_best_baseline"] = gained.tolist()
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Routing's decisions: macro for 32 regions, 10,000 tasks matched.")
    parser.add_argument("--rounds", type=int, default=10, help="how often all is measured (10)")
    parser.add_argument("--seeds", type=int, default=10, help="of the runs over time (10)")
    parser.add_argument("--regions-only", action="store_true", help="the runs over time alone")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 1 short run: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1 or given.seeds < 1:
        parser.error("give 1 round and 1 seed or more")
    rounds = 0 if given.regions_only else 2 if given.quick else given.rounds
    samples: dict[str, list[float]] = {}
    macro(0)  # The solvers are imported.
    for number in range(rounds):
        common.progress(f"routing: round {number + 1} of {rounds}")
        for name, value in {**macro(number), **matching(number), **quality(number)}.items():
            samples.setdefault(name, []).append(value)
    figures = {
        name: common.figure(values, "%")
        if name.endswith("optimum")
        else common.figure(values, "ms" if "_ms_" in name else "s", "lower")
        for name, values in samples.items()
    }
    runs = regions(1, 10, TOPOLOGIES[:1]) if given.quick else regions(given.seeds, 480, TOPOLOGIES)
    for name, values in runs.items():
        above = "minus" in name
        figures[name] = common.figure(values, "of 1" if above else "of the best's", "higher" if above else "lower")
    common.report("routing", figures, common.versions(("numpy", "scipy", "POT")), given.json)


if __name__ == "__main__":
    main()
