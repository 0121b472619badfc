#!/usr/bin/env python3
"""Routing's decisions: a macro decision for 32 regions, and 10,000 tasks matched to 300 servers.

    benchmarks/routing.py [--json] [--quick]

Backs the table of docs/routing.md. A macro decision is a forecast from five slots, the costs, transport within the
capacities, and whole tasks from its shares (`macro_ms_32`); `lookahead_ms_32` has the linear program over four slots in
the place of transport, and `transport_ms_32` is transport alone. A matching is the scores (Eqs. 7 to 10, without
embeddings), the tasks by urgency and the greedy matching (`match_s_10k_300`); `match_improved_s_10k_300` has four
rounds of local search after it. Every round is of its own draw and in this thread. The seconds are of the processor, so
that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import time

import common
import numpy as np

from ctxflow.policies.routing.forecast import forecast
from ctxflow.policies.routing.improving import improve
from ctxflow.policies.routing.lookahead import lookahead
from ctxflow.policies.routing.matching import match
from ctxflow.policies.routing.scores import fit
from ctxflow.policies.routing.servers import Recent, Servers, Tasks
from ctxflow.policies.routing.transport import capped, costs, whole

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


def matching(seed: int) -> dict[str, float]:
    """Seconds of one matching without and with local search."""
    chance = np.random.default_rng(seed)
    servers = Servers(
        chance.choice([65.0, 125.0, 330.0, 312.0, 990.0], SERVERS),
        chance.choice([16.0, 24.0, 32.0, 80.0], SERVERS),
        np.full(SERVERS, 40.0),
        chance.uniform(0, 10, SERVERS),
        chance.integers(0, 5, SERVERS).astype(float),
        np.full(SERVERS, 36),
        chance.random((SERVERS, KINDS)) < 0.5,
    )
    tasks = Tasks(
        chance.uniform(10, 400, TASKS),
        chance.uniform(4, 60, TASKS),
        chance.integers(0, KINDS, TASKS),
        chance.integers(0, MODELS, TASKS),
        chance.uniform(0, 100, TASKS),
        chance.uniform(0.2, 1.0, TASKS),
    )
    recent = Recent(chance.integers(0, SERVERS, 1000), chance.integers(0, MODELS, 1000), chance.uniform(0, 300, 1000))
    begun = time.process_time()
    score = fit(tasks, servers, recent, 300.0)
    where = match(score, tasks, servers)
    matched = time.process_time()
    improve(score, where, tasks, servers, rounds=4)
    ended = time.process_time()
    return {"match_s_10k_300": matched - begun, "match_improved_s_10k_300": ended - begun}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Routing's decisions: macro for 32 regions, 10,000 tasks matched.")
    parser.add_argument("--rounds", type=int, default=10, help="how often all is measured (10)")
    parser.add_argument("--quick", action="store_true", help="2 rounds: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("give 1 round or more")
    rounds = 2 if given.quick else given.rounds
    samples: dict[str, list[float]] = {}
    macro(0)  # The solvers are imported.
    for number in range(rounds):
        common.progress(f"routing: round {number + 1} of {rounds}")
        for name, value in {**macro(number), **matching(number)}.items():
            samples.setdefault(name, []).append(value)
    figures = {
        name: common.figure(values, "ms" if "_ms_" in name else "s", "lower") for name, values in samples.items()
    }
    common.report("routing", figures, common.versions(("numpy", "scipy", "POT")), given.json)


if __name__ == "__main__":
    main()
