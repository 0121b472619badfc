"""The experiments: against the baselines, without a mechanism, beside the bounds, section 3.2, and Appendix A's.

Everything that the paper leaves open is fixed here before anything is compared: the latency curve goes through Table 9
(668 ms with 5 sessions, in proportion, since chunks are bound by computing) and has Table 4's 1,054 ms at about 8
sessions; K is 12, which T2's 154 active sessions on 16 GPUs need; a boot takes 30 s.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxflow.policies.turboserve.autoscaling import (
    Levels,
    Parameters,
    Profiled,
    Replayed,
    cheapest,
    constant,
    levels,
    profile,
)
from ctxflow.policies.turboserve.rebalancing import PowerCurve, Rule, rebalance
from ctxflow.simulator.session_serving import Cluster, Placing, Served, SessionTrace, Strategy, serve
from ctxflow_papers.turboserve.bounds import best_placement, cheapest_schedule, tuned
from ctxflow_papers.turboserve.matching import MATCH, TOLERANCE, Runs
from ctxflow_papers.turboserve.traces import Statistics, burst, generate, ten_windows

CURVES = {
    "proportional": PowerCurve(0.0, 0.1336),
    "half_fixed": PowerCurve(0.334, 0.0668),
    "convex": PowerCurve(0.0, 0.668 / 5**1.365, 1.365),
}
"""All have Table 9's 668 ms with 5 sessions, the last also its mean of 410 ms with 3.5. The first is the default."""
BASELINES = {
    "round_robin": Strategy("round-robin", False),
    "load_aware": Strategy("load-aware", False),
    "memory_aware": Strategy("memory-aware", False),
}
OURS = Strategy()
UNMOVED = Strategy(migrates=False, spare=None)
"""Ours without migration: the number of sessions does not say how full the fullest GPU is, so its load does (rho)."""
PAPERS_LOOP = Strategy(anticipates=False, spare=None)
CANDIDATES = tuple(Parameters(rho, TOLERANCE) for rho in (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5))
HISTORY = 1000
"""What is added to a trace's seed for the trace that its parameters are profiled on."""


def cluster(name: str, curve: str = "proportional", boot_seconds: float = 30.0) -> Cluster:
    """The cluster of a trace: 64 GPUs for T4 to T6, else 16; an eighth of them is held at least."""
    most = 64 if name in ("T4", "T5", "T6") else 16
    return Cluster(most, most // 8, 12, CURVES[curve], boot_seconds)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Ours beside another at matched cost or latency, and by how many % the matched ones differ."""

    ours: Served
    theirs: Served
    apart: float


@dataclasses.dataclass
class Compared:
    """One trace.

    :ivar profiled: the utilization that the offline profiler found on another trace of the same statistics.
    :ivar own: ours with it. :ivar latency: by baseline, at matched cost. :ivar cost: by baseline, at matched latency.
    :ivar foreseen: by baseline, the longest chunk in s of a schedule that knows the future, at the same cost.
    :ivar above_paper_bound: own cost over the DP on 1-minute slots at the profiled utilization, less 1.
    :ivar above_bound: own cost over the DP that no run with the same longest chunk can beat, less 1.
    :ivar full: ours at the target latency, None if out of reach. :ivar without: what it costs without a mechanism.
    """

    profiled: float
    own: Served
    latency: dict[str, Pair] = dataclasses.field(default_factory=dict)
    cost: dict[str, Pair] = dataclasses.field(default_factory=dict)
    foreseen: dict[str, float] = dataclasses.field(default_factory=dict)
    above_paper_bound: float = 0.0
    above_bound: float = 0.0
    full: Served | None = None
    without: dict[str, Served] = dataclasses.field(default_factory=dict)


def compared(wanted: Statistics, seed: int, curve: str = "proportional", whole: bool = True) -> Compared:
    """Ours beside the baselines and the bounds on one trace, and, on the whole, without a mechanism."""
    where = cluster(wanted.name, curve)
    runs = Runs(generate(wanted, seed), where)
    target = where.curve(where.capacity)
    rho = _profiled(generate(wanted, seed + HISTORY), where, target)
    found = Compared(rho, runs.at(OURS, rho))
    _matched_cost(runs, found)
    _matched_latency(runs, found, target)
    found.above_paper_bound = found.own.gpu_seconds / paper_bound(runs.trace, where, rho) - 1
    found.above_bound = found.own.gpu_seconds / bound(runs.trace, where, found.own.together) - 1
    if whole:
        _without(runs, found, target)
    return found


def _profiled(history: SessionTrace, where: Cluster, target: float) -> float:
    def replay(each: Parameters) -> Replayed:
        found = serve(history, where, dataclasses.replace(OURS, levels=(constant(each),)))
        return Replayed(found.gpu_seconds, found.worst)

    return cheapest(CANDIDATES, replay, target * (1 + MATCH))[0].utilization


def _matched_cost(runs: Runs, found: Compared) -> None:
    """Baselines get the GPUs that ours holds on average, and ours is brought to exactly their cost."""
    gpus = max(1, round(found.own.gpu_seconds / runs.trace.seconds))
    for name, baseline in BASELINES.items():
        theirs = runs.serve(dataclasses.replace(baseline, gpus=gpus))
        ours = runs.of_cost(OURS, theirs.gpu_seconds)
        found.foreseen[name] = runs.cluster.curve(fewest_together(runs.trace, runs.cluster, theirs.gpu_seconds))
        found.latency[name] = Pair(ours, theirs, 100 * abs(ours.gpu_seconds / theirs.gpu_seconds - 1))


def _matched_latency(runs: Runs, found: Compared, target: float) -> None:
    """Baselines get the fewest GPUs that keep the target, and ours what keeps the latency that they then have."""
    for name, baseline in BASELINES.items():
        theirs = runs.fewest(baseline, target)
        ours = runs.of_latency(OURS, theirs.worst) if theirs else None
        if theirs and ours:
            found.cost[name] = Pair(ours, theirs, 100 * max(0.0, ours.worst / theirs.worst - 1))


def _without(runs: Runs, found: Compared, target: float) -> None:
    found.full = runs.of_latency(OURS, target)
    without = {
        "migration": runs.of_latency(UNMOVED, target),
        "autoscaling": runs.fewest(Strategy(), target),
        "anticipation": runs.of_latency(PAPERS_LOOP, target),
    }
    found.without = {name: each for name, each in without.items() if each is not None}


def paper_bound(trace: SessionTrace, where: Cluster, utilization: float) -> float:
    """GPU-seconds of the paper's bound: the fewest GPUs for the target in each minute, then the dynamic program."""
    most = trace.counts(60.0)[1]
    needs = np.ceil(most / (where.capacity * utilization)).clip(where.least, where.most).astype(int)
    return cheapest_schedule(needs.tolist(), 60.0, where.boot_seconds, where.most // 2).gpu_seconds


def bound(trace: SessionTrace, where: Cluster, together: int) -> float:
    """GPU-seconds that no run with at most so many sessions on a GPU can beat: the fewest sessions of every second."""
    return _by_second(trace.counts(1.0)[0], where, together)


def fewest_together(trace: SessionTrace, where: Cluster, gpu_seconds: float) -> int:
    """The fewest sessions on the fullest GPU for so much: GPUs are ready for the most sessions of every second."""
    most = trace.counts(1.0)[1]
    for together in range(max(1, math.ceil(most.max() / where.most)), int(most.max())):
        if _by_second(most, where, together) <= gpu_seconds:
            return together
    return int(most.max())


def _by_second(sessions: NDArray[np.int_], where: Cluster, together: int) -> float:
    needs = np.maximum(where.least, np.ceil(sessions / together)).astype(int)
    return cheapest_schedule(needs.tolist(), 1.0, where.boot_seconds, where.most // 2).gpu_seconds


@dataclasses.dataclass(frozen=True)
class Setting:
    """What section 3.2 leaves open.

    :ivar placing: where the base configuration puts a session: 3.2 says where the load is least, 7.1 says in turns.
    """

    boot_seconds: float = 30.0
    placing: Placing = "load-aware"


SETTINGS = {
    "": Setting(),
    "at_once_": Setting(0.0),
    "at_once_round_robin_": Setting(0.0, "round-robin"),
}
"""The first is the one of all other experiments; the others say what the paper's figures may come from."""


def study(wanted: Statistics, seeds: int, seed: int, setting: Setting = SETTINGS[""]) -> dict[str, tuple[float, float]]:
    """Section 3.2 on 8 GPUs: what rebalancing every 10 s, autoscaling and both save on the base configuration.

    :returns: % less worst-case latency and % less cost, means over some traces; autoscaling keeps the base's latency.
    """
    saved: dict[str, list[tuple[float, float]]] = {}
    where = Cluster(8, 1, 5, CURVES["proportional"], setting.boot_seconds)
    ours, unmoved = (dataclasses.replace(each, placing=setting.placing) for each in (OURS, UNMOVED))
    for number in range(seeds):
        runs = Runs(generate(wanted, seed + number), where)
        base = runs.serve(dataclasses.replace(unmoved, gpus=8))
        found = {
            "migration": runs.serve(dataclasses.replace(ours, gpus=8, period=10.0)),
            "autoscaling": runs.of_latency(unmoved, base.worst),
            "both": runs.of_latency(ours, base.worst),
        }
        for name, each in found.items():
            got = each or base
            less = 100 * (1 - got.worst / base.worst), 100 * (1 - got.gpu_seconds / base.gpu_seconds)
            saved.setdefault(name, []).append(less)
    return {name: (mean([a for a, _ in rows]), mean([b for _, b in rows])) for name, rows in saved.items()}


def boots(wanted: Statistics, seed: int, seconds: Sequence[float], utilization: float) -> dict[float, Served]:
    """Ours with the same target by boot time."""
    trace = generate(wanted, seed)
    return {each: Runs(trace, cluster(wanted.name, boot_seconds=each)).at(OURS, utilization) for each in seconds}


SMALL = Cluster(16, 1, 5, CURVES["proportional"])
"""Appendix A's: five sessions a GPU, 16 GPUs."""
SMALL_TARGET = 0.70
"""Seconds: five sessions, and a migration of one of them."""
GRID = tuple(Parameters(rho / 100) for rho in (95, 80, 65, 50, 40, 25))


def profiled_levels(number: int) -> list[tuple[int, Profiled]]:
    """Tables 5 and 6: each level's volatility and the parameters found, without anticipation, as in the paper."""
    segments = []
    for level in range(1, number + 1):
        trace = burst(level)
        seen = serve(trace, SMALL, Strategy(gpus=16)).volatilities
        segments.append((max(seen[len(seen) // 2 :]), trace))
    rows = profile(segments, GRID, _replay_small, SMALL_TARGET)
    return list(enumerate(rows, 1))


def _replay_small(trace: SessionTrace, each: Parameters) -> Replayed:
    found = serve(trace, SMALL, dataclasses.replace(PAPERS_LOOP, levels=(constant(each),)))
    return Replayed(found.gpu_seconds, found.worst)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Tables 7 to 9: the tuned oracle and the online mapping, without anticipation, and ours with it."""

    chosen: Sequence[Parameters]
    oracle: Served
    mapped: Served
    anticipating: Served


def windows(rows: Sequence[Profiled], seed: int, grid: Sequence[Parameters] = GRID) -> Windows:
    """The ten windows; the oracle's target is what the mapping's longest chunk is, so that costs can be compared."""
    trace = ten_windows(seed)
    mapping = levels(rows)
    mapped = serve(trace, SMALL, dataclasses.replace(PAPERS_LOOP, levels=(mapping,)))
    anticipating = serve(trace, SMALL, dataclasses.replace(OURS, levels=(mapping,)))

    def served(chosen: Sequence[Parameters]) -> Served:
        each: tuple[Levels, ...] = tuple(constant(parameters) for parameters in chosen)
        return serve(trace, SMALL, dataclasses.replace(PAPERS_LOOP, levels=each, stretch=120.0))

    def replay(chosen: Sequence[Parameters]) -> list[Replayed]:
        return [Replayed(cost, worst) for worst, cost in served(chosen).by_stretch]

    chosen = tuned(10, grid, replay, max(mapped.worst, SMALL_TARGET))
    return Windows(chosen, served(chosen), mapped, anticipating)


def placement_gaps(cases: int, seed: int, rule: Rule) -> list[float]:
    """By how many % the longest chunk is over the exhaustive optimum's after rebalancing small placements.

    In turns sessions are at random places, and only on the first half of the GPUs, as after a scale-out.
    """
    chance = random.Random(f"{seed} placement")
    curve, found = CURVES["proportional"], []
    for case in range(cases):
        residents: dict[object, list[object]] = {gpu: [] for gpu in range(chance.randint(2, 4))}
        used = len(residents) if case % 2 else (len(residents) + 1) // 2
        for session in range(chance.randint(2, 6)):
            residents[chance.randrange(used)].append(session)
        best = best_placement([each for there in residents.values() for each in there], list(residents), curve)[0]
        counts = {gpu: len(there) for gpu, there in residents.items()}
        for move in rebalance(residents, curve, rule=rule):
            counts[move.source] -= 1
            counts[move.target] += 1
        found.append(100 * (curve(max(counts.values())) / best - 1))
    return found


def mean(values: Sequence[float]) -> float:
    """The mean, not a number without any."""
    return statistics.fmean(values) if values else float("nan")
