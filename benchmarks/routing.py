#!/usr/bin/env python3
"""Routing's decisions: a macro decision for 32 regions, 10,000 tasks matched to 300 servers, how well, and over time.

    benchmarks/routing.py [--json] [--quick] [--regions] [--seeds 10] [--topologies random-1,random-2]

Backs the table of docs/routing.md. A macro decision is a forecast from five slots, the costs, transport within the
capacities, and whole tasks from its shares (`macro_ms_32`); `lookahead_ms_32` has the linear program over four slots in
the place of transport, and `transport_ms_32` is transport alone. A matching is the scores (Eqs. 7 to 10, without
embeddings), the tasks by urgency and the greedy matching (`match_s_10k_300`); `match_improved_s_10k_300` has four
rounds of local search after it. Every round is of its own draw and in this thread. The seconds are of the processor, so
that other programs on the machine do not count. `greedy_of_optimum` and `improved_of_optimum` are the sums of fits that
the greedy matching and the local search reach, in per cent of the optimum (SciPy's assignment), where places are scarce
and load does not count: 600 tasks for 660 places on 60 servers.

With `--regions`, the figures of TORTA's experiments (docs/routing.md), TOPOLOGY_LOAD_WHAT: `torta` (sized) and
`torta_unsized` beside the best of round-robin, SkyLB and SDIB (`vs_best`), beside the best of SkyLB and SDIB sized by
the same policy (`vs_sized`), by metric and seed, and beside bounds that no policy can be below (`vs_bound`; of power,
`vs_active_bound` is of those with all servers active). Seeds are 0 to 9, none of which settings were chosen on: half an
hour of one core. `--topologies` are others than the paper's: random Gabriel graphs. `--seeds 3` is what
`ctxflow reproduce torta` does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import common
import numpy as np
from scipy.optimize import linear_sum_assignment

from ctxflow.policies.torta.micro import fit, improve, match
from ctxflow.policies.torta.quantities import Recent, Servers, Tasks, forecast
from ctxflow.policies.torta.transport import capped, costs, lookahead, whole
from ctxflow.simulator.experiments import Figure
from ctxflow_papers.torta.experiments import RESIZED, UNSIZED, compared
from ctxflow_papers.torta.reproduction import OURS, ratios
from ctxflow_papers.torta.settings import LOADS
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


def regions(seeds: int, topologies: Sequence[str]) -> dict[str, Figure]:
    """TORTA beside the best baselines, medians of seeds."""
    found: dict[str, Figure] = {}
    methods = (*UNSIZED, *RESIZED, *OURS)
    for topology in topologies:
        for load in LOADS:
            common.progress(f"routing: {topology} at {load}, {seeds} seeds")
            found |= ratios(topology, load, compared(topology, load, range(seeds), methods=methods))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Routing's decisions: macro for 32 regions, 10,000 tasks matched.")
    parser.add_argument("--rounds", type=int, default=10, help="how often all is measured (10)")
    parser.add_argument("--regions", action="store_true", help="the runs of TORTA's experiments instead")
    parser.add_argument("--seeds", type=int, default=10, help="of these runs (10)")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), help="of these runs (the paper's)")
    parser.add_argument("--quick", action="store_true", help="2 rounds: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1 or given.seeds < 1:
        parser.error("give 1 round and 1 seed or more")
    if given.regions:
        common.report(
            "routing-regions",
            regions(given.seeds, given.topologies.split(",")),
            common.versions(("numpy",)),
            given.json,
        )
        return
    rounds = 2 if given.quick else given.rounds
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
    common.report("routing", figures, common.versions(("numpy", "scipy", "POT")), given.json)


if __name__ == "__main__":
    main()
