#!/usr/bin/env python3
"""Sessions: what coalescing gains and a migration costs; how long a rebalancing takes, and what it saves on traces.

    benchmarks/sessions.py --json              40 rebalancings of each size, and T1 to T3 (some minutes)
    benchmarks/sessions.py --seeds 10          traces of seeds 0 to 9: means of each over the seeds (ten times as long)
    benchmarks/sessions.py --traces T5,T6      other traces (T5 and T6 take an hour)
    benchmarks/sessions.py --live              only what is measured on live sessions (two minutes)
    benchmarks/sessions.py --quick             4 rebalancings, and a small trace: to see that it runs

Backs the figures of docs/scaling.md and docs/sessions.md. What is measured on live sessions is in sessions_live.py.
`rebalance_ms_N` is the time of one call of `rebalance` with N GPUs and 6 sessions a GPU on average, all of which are on
random GPUs of the first three quarters, as after a scale-out by a third; each call has a placement of its own. The rest
is simulated with the shipped policies, for each seed of the traces: `latency_vs_baselines` is the mean over traces and
baselines in % (matched as docs/scaling.md says; `_foreseen`: of the bound that knows the future), `wait_vs_baselines`
the same for the longest wait for a chunk, `cost_vs_dp` is in % above the paper's dynamic program (`_most`, `_least`: of
any trace and seed), `cost_vs_same` above that at the run's longest chunk, and `cost_vs_unbeatable` above a bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Sequence

import common
import sessions_live

from ctxflow.policies.turboserve.rebalancing import MoveCosts, rebalance
from ctxflow.simulator.experiments import rounded
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.experiments import CURVES, compared, mean
from ctxflow_papers.turboserve.reproduction import SMALL, headline
from ctxflow_papers.turboserve.traces import Statistics

SIZES = (64, 256)
EACH = 6


def seconds(gpus: int, seed: int) -> float:
    """What one rebalancing takes."""
    chance = random.Random(f"{seed} {gpus}")
    residents: dict[object, list[object]] = {gpu: [] for gpu in range(gpus)}
    for session in range(EACH * gpus):
        residents[chance.randrange(3 * gpus // 4)].append(session)
    costs = MoveCosts({session: chance.uniform(0.023, 0.03) for session in range(EACH * gpus)}, 0.01)
    begun = time.perf_counter()
    moves = rebalance(residents, CURVES["proportional"], costs)
    taken = time.perf_counter() - begun
    counts = {gpu: len(there) for gpu, there in residents.items()}
    for move in moves:
        counts[move.source] -= 1
        counts[move.target] += 1
    if max(counts.values()) != EACH:
        raise SystemExit(f"rebalancing {gpus} GPUs leaves {max(counts.values())} sessions on one: {EACH} is the best")
    return taken


def simulated(traces: Sequence[Statistics], seeds: int) -> dict[str, common.Figure]:
    """What is saved, and what could be saved beyond that: of one seed, or means over several and their spread."""
    runs = [_headline(traces, seed) for seed in range(seeds)]
    if seeds == 1:
        return runs[0]
    figures = {}
    for name, figure in runs[0].items():
        values = [run[name].value for run in runs]
        value = {"most": max, "least": min}.get(name.rpartition("_")[2], mean)(values)
        spread = rounded(max(values) - min(values))
        figures[name] = dataclasses.replace(figure, value=rounded(value), spread=spread, n=len(values))
    return figures


def _headline(traces: Sequence[Statistics], seed: int) -> dict[str, common.Figure]:
    found = {}
    for number, wanted in enumerate(traces):
        common.progress(f"sessions: seed {seed}, trace {number + 1} of {len(traces)}")
        found[wanted.name] = compared(wanted, seed, whole=False)
    figures = headline(found)
    names = {
        "latency_vs_baselines": "latency_saved",
        "latency_vs_baselines_foreseen": "latency_saved_foreseen",
        "wait_vs_baselines": "wait_saved",
        "cost_vs_dp": "above_dp",
        "cost_vs_dp_most": "above_dp_most",
        "cost_vs_dp_least": "above_dp_least",
        "cost_vs_same": "above_same",
        "cost_vs_same_most": "above_same_most",
        "cost_vs_unbeatable": "above_unbeatable",
        "cost_vs_unbeatable_least": "above_unbeatable_least",
    }
    return {name: dataclasses.replace(figures[source], paper=None) for name, source in names.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Placing sessions and counting GPUs.")
    parser.add_argument("--rounds", type=int, default=40, help="rebalancings of each size (40)")
    parser.add_argument("--seeds", type=int, default=1, help="of the traces, from 0 (1)")
    parser.add_argument("--traces", default="T1,T2,T3", help="of T1 to T6, with commas between them (T1,T2,T3)")
    parser.add_argument("--quick", action="store_true", help="4 rebalancings and a small trace: to see that it runs")
    parser.add_argument("--live", action="store_true", help="only what is measured on live sessions (two minutes)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1 or given.seeds < 1:
        parser.error("give 1 round and 1 seed or more")
    names = given.traces.split(",")
    traces = [each for each in printed.TRACES if each.name in names]
    if len(traces) != len(names):
        parser.error(f"there are the traces {', '.join(each.name for each in printed.TRACES)}")
    rounds = 4 if given.quick else given.rounds
    figures = sessions_live.coalescing(1 if given.quick else 3, 2.0 if given.quick else 5.0)
    figures |= sessions_live.migrations(6 if given.quick else 30)
    for gpus in () if given.live else SIZES:
        samples = [1000 * seconds(gpus, number) for number in range(rounds)]
        figures[f"rebalance_ms_{gpus}"] = common.figure(samples, "ms", "lower")
    if not given.live:
        figures |= simulated((SMALL,) if given.quick else traces, given.seeds)
    common.report("sessions", figures, common.versions(("numpy", "torch", "transformers")), given.json)


if __name__ == "__main__":
    main()
