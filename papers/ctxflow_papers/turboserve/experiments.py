"""The experiments: against the baselines, without a mechanism, beside the bounds, section 3.2, and Appendix A's.

Ours is what a site file loads, `sessions = "turboserve"` and `scaling = "closed-loop"`, on the scheduler and the
simulated engine (`session_serving`). What the paper leaves open is fixed here before anything is compared: the latency
curve goes through Table 9 (668 ms with 5 sessions, in proportion, since chunks are bound by computing) and has Table
4's 1,054 ms at about 8 sessions; K is 12, which T2's 154 active sessions on 16 GPUs need; a boot takes 30 s.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.policies.protocols import View
from ctxflow.policies.turboserve.autoscaling import (
    Parameters,
    Profiled,
    Replayed,
    constant,
    levels,
    profile,
)
from ctxflow.policies.turboserve.rebalancing import PowerCurve, Rule, rebalance
from ctxflow.policies.turboserve.scaling import ClosedLoop
from ctxflow.simulator.session_serving import Cluster, Served, SessionTrace, serve
from ctxflow_papers.turboserve.baselines import RoundRobin
from ctxflow_papers.turboserve.bounds import best_placement, cheapest_schedule, tuned
from ctxflow_papers.turboserve.matching import BASELINES, OURS, PAPERS_LOOP, UNMOVED, Runs, Strategy
from ctxflow_papers.turboserve.traces import Statistics, burst, generate, ten_windows

CURVES = {
    "proportional": PowerCurve(0.0, 0.1336),
    "half_fixed": PowerCurve(0.334, 0.0668),
    "convex": PowerCurve(0.0, 0.668 / 5**1.365, 1.365),
}
"""All have Table 9's 668 ms with 5 sessions, the last also its mean of 410 ms with 3.5. The first is the default."""
UTILIZATION = 0.9
"""Ours on every trace: with it the longest chunk of T1 is as long as with K sessions (`chosen`, seeds 3000 to 3005)."""


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

    :ivar own: ours with `UTILIZATION`. :ivar latency: by baseline, at matched cost.
    :ivar cost: by baseline, at matched latency.
    :ivar foreseen: the longest chunk in s of a schedule that knows the future, at the same cost: no run's is shorter.
    :ivar above_paper_bound: own cost over the paper's program, 1-minute slots at `UTILIZATION`, less 1. It is no bound:
        a run that is late costs less.
    :ivar above_same: own cost over the same program with the longest chunk that the run had, less 1.
    :ivar above_bound: own cost over the program that no run with as many sessions for a GPU can beat, less 1.
    :ivar full: ours at the target latency, None if out of reach. :ivar without: what it costs without a mechanism.
    """

    own: Served
    latency: dict[str, Pair] = dataclasses.field(default_factory=dict)
    cost: dict[str, Pair] = dataclasses.field(default_factory=dict)
    foreseen: float = 0.0
    above_paper_bound: float = 0.0
    above_same: float = 0.0
    above_bound: float = 0.0
    full: Served | None = None
    without: dict[str, Served] = dataclasses.field(default_factory=dict)


def compared(wanted: Statistics, seed: int, curve: str = "proportional", whole: bool = True) -> Compared:
    """Ours beside the baselines at matched cost and the bounds on one trace; on the whole, also what takes more runs.

    :param whole: also costs at matched latency, and what a mechanism is worth.
    """
    where = cluster(wanted.name, curve)
    runs = Runs(generate(wanted, seed), where)
    found = Compared(runs.at(OURS, UTILIZATION))
    _matched_cost(runs, found)
    paper = paper_needs(runs.trace, where, where.capacity * UTILIZATION)
    found.above_paper_bound = _above(found.own, paper, 60.0, where)
    found.above_same = _above(found.own, paper_needs(runs.trace, where, found.own.together), 60.0, where)
    found.above_bound = found.own.gpu_seconds / bound(runs.trace, where, shared(runs.trace, found.own)) - 1
    if whole:
        target = where.curve(where.capacity)
        _matched_latency(runs, found, target)
        _without(runs, found, target)
    return found


def chosen(traces: Sequence[Statistics], seeds: Sequence[int], candidates: Sequence[float]) -> dict[float, float]:
    """The mean over traces and seeds of the longest chunk in s, by utilization: how `UTILIZATION` was chosen."""
    found: dict[float, list[float]] = {each: [] for each in candidates}
    for wanted in traces:
        for seed in seeds:
            runs = Runs(generate(wanted, seed), cluster(wanted.name))
            for each in candidates:
                found[each].append(runs.at(OURS, each).worst)
    return {each: mean(values) for each, values in found.items()}


def _matched_cost(runs: Runs, found: Compared) -> None:
    """Baselines get the GPUs that ours holds on average, and ours is brought to exactly their cost."""
    gpus = max(1, round(found.own.gpu_seconds / runs.trace.seconds))
    cost = gpus * runs.trace.seconds
    ours = runs.of_cost(OURS, cost, UTILIZATION)
    found.foreseen = runs.cluster.curve(fewest_together(runs.trace, runs.cluster, cost))
    for name, baseline in BASELINES.items():
        theirs = runs.fixed(baseline, gpus)
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
        "autoscaling": runs.fewest(OURS, target),
        "anticipation": runs.of_latency(PAPERS_LOOP, target),
    }
    found.without = {name: each for name, each in without.items() if each is not None}


def _above(own: Served, needs: NDArray[np.int_], slot: float, where: Cluster) -> float:
    schedule = cheapest_schedule(needs.tolist(), slot, where.boot_seconds, where.most // 2)
    return own.gpu_seconds / schedule.gpu_seconds - 1


def paper_needs(trace: SessionTrace, where: Cluster, together: float) -> NDArray[np.int_]:
    """The GPUs that the paper's program has in each minute: the fewest for its most sessions, so many on each."""
    most = trace.counts(60.0)[1]
    return np.ceil(most / together).clip(where.least, where.most).astype(int)


def shared(trace: SessionTrace, served: Served) -> int:
    """The most sessions for each GPU that a run had ready, in any second: of both the fewest in it."""
    fewest, ready = trace.counts(1.0)[0], np.array(served.least_ready)
    return max(1, int(np.ceil(fewest / np.maximum(1, ready)).max()))


def bound(trace: SessionTrace, where: Cluster, together: int) -> float:
    """GPU-seconds that no run beats whose ready GPUs have at most so many sessions each in every second (`shared`)."""
    return _by_second(trace.counts(1.0)[0], where, together)


def fewest_together(trace: SessionTrace, where: Cluster, gpu_seconds: float) -> int:
    """The fewest sessions on the fullest GPU that any schedule has for so much, knowing what comes."""
    fewest = trace.counts(1.0)[0]
    for together in range(max(1, math.ceil(fewest.max() / where.most)), int(fewest.max())):
        if _by_second(fewest, where, together) <= gpu_seconds:
            return together
    return int(fewest.max())


def _by_second(sessions: NDArray[np.int_], where: Cluster, together: int) -> float:
    needs = np.maximum(where.least, np.ceil(sessions / together)).astype(int)
    return cheapest_schedule(needs.tolist(), 1.0, where.boot_seconds, where.most // 2).gpu_seconds


@dataclasses.dataclass(frozen=True)
class Setting:
    """What section 3.2 leaves open.

    :ivar base: where the base configuration puts a session: 3.2 says where the load is least, 7.1 says in turns.
    """

    boot_seconds: float = 30.0
    base: Strategy = UNMOVED


SETTINGS = {"": Setting(), "at_once_": Setting(0.0), "at_once_round_robin_": Setting(0.0, Strategy(RoundRobin))}
"""The first is the one of all other experiments; the others say what the paper's figures may come from."""
EVERY_TEN = Strategy({"policy": "turboserve", "every": 10.0})


def study(wanted: Statistics, seeds: int, seed: int, setting: str = "") -> dict[str, tuple[float, float]]:
    """Section 3.2 on 8 GPUs: what rebalancing every 10 s, autoscaling and both save on the base configuration.

    :param setting: a name of `SETTINGS`.
    :returns: % less worst-case latency and % less cost, means over some traces; autoscaling keeps the base's latency.
    """
    which = SETTINGS[setting]
    where = Cluster(8, 1, 5, CURVES["proportional"], which.boot_seconds)
    saved: dict[str, list[tuple[float, float]]] = {}
    for number in range(seeds):
        runs = Runs(generate(wanted, seed + number), where)
        base = runs.fixed(which.base, 8)
        found = {
            "migration": runs.fixed(EVERY_TEN, 8),
            "autoscaling": runs.of_latency(which.base, base.worst),
            "both": runs.of_latency(OURS, base.worst),
        }
        for name, each in found.items():
            got = each or base
            less = 100 * (1 - got.worst / base.worst), 100 * (1 - got.gpu_seconds / base.gpu_seconds)
            saved.setdefault(name, []).append(less)
    return {name: (mean([a for a, _ in rows]), mean([b for _, b in rows])) for name, rows in saved.items()}


def boot(wanted: Statistics, seed: int, seconds: float) -> Served:
    """Ours with the same target and another boot time."""
    return Runs(generate(wanted, seed), cluster(wanted.name, boot_seconds=seconds)).at(OURS, UTILIZATION)


SMALL = Cluster(16, 1, 5, CURVES["proportional"])
"""Appendix A's: five sessions a GPU, 16 GPUs."""
SMALL_TARGET = 0.70
"""Seconds: five sessions, and a migration of one of them."""
GRID = tuple(Parameters(rho / 100) for rho in (95, 80, 65, 50, 40, 25))
COARSE = GRID[1::2]


def profiled_levels(number: int) -> list[Profiled]:
    """Tables 5 and 6: each level's volatility and the parameters found, without anticipation, as in the paper."""
    segments = []
    for level in range(1, number + 1):
        trace = burst(level)
        seen = trace.volatilities()
        segments.append((max(seen[len(seen) // 2 :]), trace))
    return profile(segments, GRID, _replay_small, SMALL_TARGET)


def _replay_small(trace: SessionTrace, each: Parameters) -> Replayed:
    found = serve(trace, SMALL, SMALL.closed_loop(constant(each), **PAPERS_LOOP.options))
    return Replayed(found.gpu_seconds, found.worst)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Tables 7 to 9: the tuned oracle and the online mapping, without anticipation, and ours with it."""

    chosen: Sequence[Parameters]
    oracle: Served
    mapped: Served
    anticipating: Served


def windows(number: int, seed: int, grid: Sequence[Parameters] = COARSE) -> Windows:
    """The ten windows, with the mapping of so many levels; the oracle's target is the mapping's longest chunk."""
    trace = ten_windows(seed)
    mapping = levels(profiled_levels(number))
    mapped = serve(trace, SMALL, SMALL.closed_loop(mapping, **PAPERS_LOOP.options))
    anticipating = serve(trace, SMALL, SMALL.closed_loop(mapping))

    def served(chosen: Sequence[Parameters]) -> Served:
        scaling = SMALL.closed_loop(constant(chosen[0]), **PAPERS_LOOP.options)
        return serve(trace, SMALL, Timetable(chosen, SMALL, WINDOW, scaling), stretch=WINDOW)

    def replay(chosen: Sequence[Parameters]) -> list[Replayed]:
        return [Replayed(cost, worst) for worst, cost in served(chosen).by_stretch]

    chosen = tuned(10, grid, replay, max(mapped.worst, SMALL_TARGET))
    return Windows(chosen, served(chosen), mapped, anticipating)


WINDOW = 120.0
"""Seconds of each of the ten windows."""


class Timetable(ClosedLoop):
    """`closed-loop` with parameters by the time of the run instead of by volatility: what the tuned oracle turns.

    :param chosen: of each window. :param options: of `closed-loop`.
    """

    def __init__(self, chosen: Sequence[Parameters], where: Cluster, window: float, options: Mapping[str, Any]) -> None:
        super().__init__(**{name: value for name, value in options.items() if name != "policy"})
        rows = [where.closed_loop(constant(each))["levels"][0][0] for each in chosen]
        tolerance = self.levels.parameters[0].tolerance
        self._windows = [Parameters(row, tolerance) for row in rows]
        self._seconds = window

    def target(self, view: View) -> Mapping[str, int]:
        """Return the workers of each tier with the parameters of the present window."""
        number = min(int(view.now // self._seconds), len(self._windows) - 1)
        self.levels = constant(self._windows[number])
        return super().target(view)


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
