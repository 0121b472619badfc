#!/usr/bin/env python3
"""Victim selection on 100 saturated nodes of 8 GPUs: what a decision takes, how often it is aligned, how it grows.

    benchmarks/preemption.py [--json] [--quick]

Backs the README's sentence on who gives way on 100 nodes, and all tables of docs/preemption.md but the paper's. One
decision covers all nodes: candidates, scores, the best one, and the GPUs and cores that the preemptor gets.
Preemptors of workload B (4 GPUs) and C (2 GPUs) of FlexTopo's Table 3 take turns, guaranteed, each on a cluster of
its own draw with instances at random places; every method decides each case, so the methods are interleaved.
`hit_rate` is that of IMP for guaranteed preemptors and of the exact search for guaranteed and best-effort ones; IMP
for best-effort ones, where it is not exact, has a figure of its own; `baseline_hit_rate` is the standard selection's
on the same clusters. The growth is the time per node at 5,000 nodes beside that at 100.

Then preemptors one after the other, each of which takes its place before the next is decided on: `later_LAYOUT` is
Table 3's cluster and 50 preemptors, `later_drawn` machines, gangs and priorities of many kinds
(`ctxflow_papers.flextopo.drawn`): of 16 preemptors on 12 machines `without` is the share that found no place,
`victims_priorities` the sum of the priorities of a placed one's victims. `exact` looks ahead, `exhaustive` is the same
choice without. Each round has other seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import common

from ctxflow.simulator.experiments import quantile
from ctxflow_papers.flextopo.drawn import drawn, play_all
from ctxflow_papers.flextopo.experiments import WAYS, Tallies, independent, sequential, timed
from ctxflow_papers.flextopo.workloads import LAYOUTS, B, saturated

LAYOUT = "random"
LATER = ("imp", "exhaustive", "exact")
PARTS = {"several": (0, 1), "cores_bind": (2,), "new": (3,)}
"""Drawn cases by the rest of their seeds: several workloads run, and are scaled up; the same, of many cores; workloads
are scaled up that do not run yet."""

METHODS = {"imp": "imp", "exact": "exact", "exhaustive": "exhaustive", "standard": "standard"}


def times(samples: Sequence[Sequence[float]], share: float) -> common.Figure:
    """A quantile of decision times, of each round."""
    return common.figure([1000 * quantile(each, share) for each in samples], "ms", "lower")


def figures_of(rounds: Sequence[Tallies], growth: dict[str, list[float]]) -> dict[str, common.Figure]:
    """All figures, from the tallies of the rounds."""
    figures = {}
    for stem, way in METHODS.items():
        for workload, suffix in (("B", ""), ("C", "2")):
            for share in (0.5, 0.9):
                samples = [tallies[way, workload].seconds for tallies in rounds]
                figures[f"{stem}{suffix}_p{share * 100:.0f}_ms"] = times(samples, share)
        checks = [quantile(tallies[way, "B"].checks, 0.5) for tallies in rounds]
        figures[f"{stem}_checks"] = common.figure(checks, "a decision", "lower")
    for name, ways in (
        ("hit_rate", ("imp", "exact", "exact_best_effort")),
        ("imp_best_effort_hit_rate", ("imp_best_effort",)),
        ("baseline_hit_rate", ("standard",)),
    ):
        tallies = [[each[way, kind] for way in ways for kind in "BC"] for each in rounds]
        rates = [100 * sum(t.hits for t in each) / sum(t.asked for t in each) for each in tallies]
        figures[name] = common.figure(rates, f"% of decisions, {LAYOUT} layout")
    for way in ("imp", "exact"):
        ratios = [large / small for small, large in zip(growth[f"{way} 100"], growth[f"{way} 5000"], strict=True)]
        figures[f"{way}_growth_5000"] = common.figure(ratios, "times the time per node at 100 nodes", "lower")
    return figures


def grow(rounds: int) -> dict[str, list[float]]:
    """Seconds per node, at 100 and at 5,000 nodes: the median of some decisions, each round."""
    chance = random.Random(1)
    clusters = {nodes: saturated(nodes, LAYOUT, chance) for nodes in (100, 5000)}
    ways = {way.name: way for way in WAYS if way.name in ("imp", "exact")}
    samples: dict[str, list[float]] = {}
    for number in range(rounds):
        common.progress(f"preemption: growth, round {number + 1} of {rounds}")
        for name, way in ways.items():
            for nodes, cluster in clusters.items():
                seconds = [timed(cluster, B, way)[1] for _ in range(5)]
                samples.setdefault(f"{name} {nodes}", []).append(quantile(seconds, 0.5) / nodes)
    return samples


def in_turn(rounds: int, cycles: int, cases: int) -> dict[str, common.Figure]:
    """Preemptors one after the other: who finds no place, and whom the others preempt."""
    ways = [way for way in WAYS if way.name in LATER]
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        common.progress(f"preemption: one after the other, round {number + 1} of {rounds}")
        for layout in LAYOUTS:
            tallies = sequential(100, layout, cycles, 50, number, ways)
            for way in LATER:
                both = [tallies[way, kind] for kind in "BC"]
                share = 100 * (1 - sum(t.placed for t in both) / sum(t.asked for t in both))
                found.setdefault(f"later_{layout}_{way}_without", []).append(share)
        for part, rest in PARTS.items():
            seeds = range(4 * cases * number, 4 * cases * (number + 1))
            played = play_all((drawn(seed) for seed in seeds if seed % 4 in rest), LATER)
            for way, each in played.items():
                name = f"later_drawn_{part}_{way}"
                found.setdefault(f"{name}_without", []).append(100 * each.without_place / each.asked)
                found.setdefault(f"{name}_victims_priorities", []).append(each.priorities / each.placed)
                found.setdefault(f"{name}_gpus", []).append(each.gpus / len(each.seconds))
                found.setdefault(f"{name}_p50_ms", []).append(1000 * quantile(each.seconds, 0.5))
    units = {"without": "% of preemptors", "priorities": "a placed one", "gpus": "GPUs given, a preemptor"}
    units["ms"] = "ms of process time"
    return {
        name: common.figure(values, units[name.rsplit("_", 1)[1]], "higher" if name.endswith("gpus") else "lower")
        for name, values in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Victim selection on 100 saturated nodes.")
    parser.add_argument("--rounds", type=int, default=5, help="how often all is measured (5)")
    parser.add_argument("--decisions", type=int, default=400, help="decisions a round (400)")
    parser.add_argument("--quick", action="store_true", help="1 round of 20 decisions: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1 or given.decisions < 2:
        parser.error("give 1 round or more, of 2 decisions or more")
    rounds, decisions = (1, 20) if given.quick else (given.rounds, given.decisions)
    tallies = []
    for number in range(rounds):
        common.progress(f"preemption: round {number + 1} of {rounds}")
        tallies.append(independent(100, LAYOUT, decisions, number))
    figures = figures_of(tallies, grow(rounds)) | in_turn(rounds, *((1, 2) if given.quick else (10, 30)))
    common.report("preemption", figures, common.versions(()), given.json)


if __name__ == "__main__":
    main()
