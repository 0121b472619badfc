"""TurboServe's tables and figures, ours beside the paper's; docs/scaling.md says why figures differ.

A figure stands beside the paper's only where it was measured: what a trace is generated to is in the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from ctxflow.policies.turboserve.autoscaling import Profiled
from ctxflow.policies.turboserve.rebalancing import most_sessions
from ctxflow.simulator.experiments import ExperimentRequest, Figure, rounded
from ctxflow.simulator.session_serving import Served
from ctxflow_papers.turboserve import experiments, printed
from ctxflow_papers.turboserve.experiments import CURVES, Compared, Windows, mean
from ctxflow_papers.turboserve.matching import BASELINES
from ctxflow_papers.turboserve.pictures import Results, draw_all
from ctxflow_papers.turboserve.traces import Statistics


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything.

    :ivar traces: that the strategies are compared on at matched cost; `whole`: those also at matched latency, and
        without a mechanism. A run of T5 takes as long as twelve of T1's, one of T6 as long as ten.
    :ivar curves: the traces on which other curves are tried.
    """

    traces: tuple[Statistics, ...] = printed.TRACES[:4]
    whole: tuple[Statistics, ...] = printed.TRACES[:1]
    curves: tuple[Statistics, ...] = printed.TRACES[:1]
    boots: tuple[float, ...] = (0.0, 10.0, 30.0, 60.0, 120.0)
    levels: int = 10
    studies: int = 3
    placements: int = 80
    windows: bool = True


SMALL = dataclasses.replace(printed.STUDY, name="small", window=240.0)
"""The trace of a quick run, which is not one of the paper's."""
QUICK = Scale((SMALL,), (), (), (0.0, 30.0), 2, 1, 20, False)


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation that needs no GPU: an `Experiment`."""
    scale, seed = QUICK if request.quick else Scale(), request.seed
    done = _on_all_cores(_tasks(scale, seed), request.progress)
    found = {wanted.name: done[f"trace {wanted.name}"] for wanted in scale.traces}
    rows = done["levels"]
    figures = headline(found) | dict(_traces(found)) | dict(_curves(scale, done))
    for setting in experiments.SETTINGS:
        figures |= dict(_study(setting, done[f"study {setting}"], scale.studies))
    for seconds in scale.boots:
        figures |= dict(_boot(scale.traces[0].name, seconds, done[f"boot {seconds:g}"]))
    figures |= dict(_levels(list(enumerate(rows, 1))))
    if scale.windows:
        figures |= dict(_windows(done["windows"]))
    figures |= dict(_placements(scale.placements, seed))
    if request.quick:
        figures = {name: dataclasses.replace(figure, paper=None) for name, figure in figures.items()}
    if request.pictures is not None:
        draw_all(request.pictures, Results(found, done["study "], scale.traces[0], seed))
    request.progress(1.0, "done")
    return figures


def _tasks(scale: Scale, seed: int) -> dict[str, Callable[[], Any]]:
    """What there is to run, by name, the longest first."""
    call, first = functools.partial, scale.traces[0]
    tasks: dict[str, Callable[[], Any]] = {}
    for wanted in sorted(scale.traces, key=lambda each: -sum(each.active)):
        tasks[f"trace {wanted.name}"] = call(experiments.compared, wanted, seed, whole=wanted in scale.whole)
    for setting in experiments.SETTINGS:
        tasks[f"study {setting}"] = call(experiments.study, printed.STUDY, scale.studies, seed, setting)
    if scale.windows:
        tasks["windows"] = call(experiments.windows, scale.levels, seed)
    tasks["levels"] = call(experiments.profiled_levels, scale.levels)
    for wanted in scale.curves:
        for curve in CURVES:
            if curve != "proportional":
                tasks[f"{curve} {wanted.name}"] = call(experiments.compared, wanted, seed, curve, whole=False)
    for seconds in scale.boots:
        tasks[f"boot {seconds:g}"] = call(experiments.boot, first, seed, seconds)
    return tasks


def _on_all_cores(tasks: Mapping[str, Callable[[], Any]], tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Run tasks, each in a process of its own."""
    found: dict[str, Any] = {}
    cores = min(len(os.sched_getaffinity(0)), len(tasks))
    tell(0.0, "sessions, in runs of seconds to minutes")
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(task): name for name, task in tasks.items()}
        for future in as_completed(waiting):
            found[waiting[future]] = future.result()
            tell(len(found) / len(tasks), f"{waiting[future].strip()} is done")
    return found


def less(ours: float, theirs: float) -> float:
    """By how many % ours is less.

    >>> less(3.0, 4.0)
    25.0
    """
    return 100 * (1 - ours / theirs)


def latency_saved(found: Mapping[str, Compared]) -> list[float]:
    """% less worst-case latency at matched cost, by trace and baseline."""
    return [less(pair.ours.worst, pair.theirs.worst) for each in found.values() for pair in each.latency.values()]


def wait_saved(found: Mapping[str, Compared]) -> list[float]:
    """% less of the longest that a user waited for a chunk, at matched cost, by trace and baseline."""
    pairs = [pair for each in found.values() for pair in each.latency.values()]
    return [less(pair.ours.longest_wait, pair.theirs.longest_wait) for pair in pairs]


def latency_foreseen(found: Mapping[str, Compared]) -> list[float]:
    """% less worst-case latency at the same cost of a schedule that knows the future, by trace and baseline."""
    return [less(each.foreseen, pair.theirs.worst) for each in found.values() for pair in each.latency.values()]


def cost_saved(found: Mapping[str, Compared]) -> list[float]:
    """% less cost at matched worst-case latency, by trace and baseline."""
    pairs = [pair for each in found.values() for pair in each.cost.values()]
    return [less(pair.ours.gpu_seconds, pair.theirs.gpu_seconds) for pair in pairs]


def headline(found: Mapping[str, Compared]) -> dict[str, Figure]:
    """The paper's claims: means over traces and baselines, the bounds, what it costs to leave a mechanism out."""
    latency, cost, traces = latency_saved(found), cost_saved(found), list(found.values())
    pairs = [pair for each in traces for pair in (*each.latency.values(), *each.cost.values())]
    above = [100 * each.above_paper_bound for each in traces]
    same = [100 * each.above_same for each in traces]
    strict = [100 * each.above_bound for each in traces]
    figures = {
        "latency_saved": _mean(latency, "% of the worst", "higher", printed.LATENCY_SAVED),
        "latency_saved_foreseen": _mean(latency_foreseen(found), "% of the worst, at most", "higher"),
        "wait_saved": _mean(wait_saved(found), "% of the longest wait", "higher"),
        "matched_within": Figure(rounded(max(pair.apart for pair in pairs)), "%, at most", "lower", 0.0, len(pairs)),
        "above_dp": _mean(above, "% above, 1-minute slots", "lower", printed.ABOVE_DP),
        "above_dp_most": Figure(rounded(max(above)), "% above", "lower", 0.0, len(above), printed.WORST_ABOVE_DP),
        "above_dp_least": Figure(rounded(min(above)), "% above", "lower", 0.0, len(above)),
        "above_same": _mean(same, "% above, at its longest chunk", "lower"),
        "above_same_most": Figure(rounded(max(same)), "% above", "lower", 0.0, len(same)),
        "above_unbeatable": _mean(strict, "% above, 1 s slots", "lower"),
        "above_unbeatable_least": Figure(rounded(min(strict)), "% above", "lower", 0.0, len(strict)),
    }
    if cost:
        figures["cost_saved"] = _mean(cost, "% of the cost", "higher", printed.COST_SAVED)
    for name in ("migration", "autoscaling", "anticipation"):
        rises = [
            100 * (each.without[name].gpu_seconds / each.full.gpu_seconds - 1)
            for each in traces
            if each.full is not None and name in each.without
        ]
        if rises:
            figures[f"without_{name}"] = _mean(rises, "% more cost", "higher", printed.WITHOUT.get(name))
    return figures


def _mean(values: Sequence[float], unit: str, better: str, paper: float | None = None) -> Figure:
    return Figure(rounded(mean(values)), unit, better, rounded(max(values) - min(values)), len(values), paper)


def _traces(found: Mapping[str, Compared]) -> Iterator[tuple[str, Figure]]:
    """Figure 7, which the paper only draws, and Table 2."""
    for trace, each in found.items():
        yield f"{trace}_above_dp", Figure(rounded(100 * each.above_paper_bound), "% above", "lower", 0.0, 1)
        yield f"{trace}_above_same", Figure(rounded(100 * each.above_same), "% above", "lower", 0.0, 1)
        yield f"{trace}_above_unbeatable", Figure(rounded(100 * each.above_bound), "% above", "lower", 0.0, 1)
        for name in BASELINES:
            if name in each.latency:
                pair = each.latency[name]
                yield f"{trace}_worst_{name}", _seconds(pair.theirs)
                yield f"{trace}_worst_ours_beside_{name}", _seconds(pair.ours)
            if name in each.cost:
                pair = each.cost[name]
                yield f"{trace}_cost_{name}", _hours(pair.theirs)
                yield f"{trace}_cost_ours_beside_{name}", _hours(pair.ours)


def _seconds(served: Served) -> Figure:
    return Figure(rounded(served.worst), "s", "lower")


def _hours(served: Served) -> Figure:
    return Figure(rounded(served.gpu_seconds / 3600), "GPU-hours", "lower")


def _curves(scale: Scale, done: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The comparison under other latency curves, and K by curve."""
    for name, curve in CURVES.items():
        yield f"most_sessions_{name}", Figure(most_sessions(curve, 1.054), "sessions in 1,054 ms", "higher")
        if name != "proportional" and scale.curves:
            found = {each.name: done[f"{name} {each.name}"] for each in scale.curves}
            yield f"latency_saved_{name}", _mean(latency_saved(found), "% of the worst", "higher")


def _study(setting: str, found: Mapping[str, tuple[float, float]], traces: int) -> Iterator[tuple[str, Figure]]:
    """Figure 4, by what the paper leaves open."""
    for name, values in found.items():
        for what, value, paper in zip(("latency", "cost"), values, printed.FIGURE_4[name], strict=True):
            figure = Figure(rounded(value), "% less", "higher", 0.0, traces, paper)
            yield f"study_{setting}{name}_{what}", figure


def _boot(trace: str, seconds: float, served: Served) -> Iterator[tuple[str, Figure]]:
    yield f"{trace}_boot_{seconds:g}_worst", _seconds(served)
    yield f"{trace}_boot_{seconds:g}_cost", _hours(served)


def _levels(rows: Sequence[tuple[int, Profiled]]) -> Iterator[tuple[str, Figure]]:
    """Tables 5 and 6; costs beside that of the first level, since the paper's unit is not said."""
    for (level, row), paper, rho, cost in zip(
        rows, printed.VOLATILITIES, printed.UTILIZATIONS, printed.COSTS, strict=False
    ):
        yield f"level_{level}_volatility", Figure(rounded(row.volatility), "sessions", "lower", 0.0, 1, paper)
        unit = "of K" if row.valid else "of K, too slow"
        yield f"level_{level}_utilization", Figure(row.parameters.utilization, unit, "higher", 0.0, 1, rho)
        ratio, theirs = row.replayed.cost / rows[0][1].replayed.cost, cost / printed.COSTS[0]
        yield f"level_{level}_cost", Figure(rounded(ratio), "times level 1", "lower", 0.0, 1, rounded(theirs))


def _windows(found: Windows) -> Iterator[tuple[str, Figure]]:
    """Tables 8 and 9."""
    for number, (rho, chosen) in enumerate(zip(printed.ORACLE_UTILIZATIONS, found.chosen, strict=True), 1):
        yield f"w{number}_oracle_utilization", Figure(chosen.utilization, "of K", "higher", 0.0, 1, rho)
    gap = 100 * (found.mapped.gpu_seconds / found.oracle.gpu_seconds - 1)
    paper = rounded(100 * (printed.OURS_COST / printed.ORACLE_COST - 1))
    yield "ten_windows_above_oracle", Figure(rounded(gap), "% more cost", "lower", 0.0, 1, paper)
    yield "ten_windows_worst", Figure(rounded(1000 * found.mapped.worst), "ms", "lower", 0.0, 1, 667.46)
    yield "ten_windows_worst_oracle", Figure(rounded(1000 * found.oracle.worst), "ms", "lower", 0.0, 1, 668.05)
    yield "ten_windows_mean", Figure(rounded(1000 * found.mapped.mean), "ms", "lower", 0.0, 1, 421.57)
    yield "ten_windows_mean_oracle", Figure(rounded(1000 * found.oracle.mean), "ms", "lower", 0.0, 1, 410.47)
    more = 100 * (found.anticipating.gpu_seconds / found.oracle.gpu_seconds - 1)
    yield "ten_windows_anticipating_above_oracle", Figure(rounded(more), "% more cost", "lower")
    yield "ten_windows_anticipating_worst", Figure(rounded(1000 * found.anticipating.worst), "ms", "lower")


def _placements(cases: int, seed: int) -> Iterator[tuple[str, Figure]]:
    """Figure 9, right: the gap to the exhaustive placement."""
    for rule, paper in (("printed", printed.PLACEMENT_GAP), ("plateau-aware", printed.PLACEMENT_GAP)):
        gaps = experiments.placement_gaps(cases, seed, rule)  # type: ignore[arg-type]
        yield f"placement_gap_{rule.replace('-', '_')}", _mean(gaps, "% longer", "lower", paper)
