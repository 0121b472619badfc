"""TurboServe's tables and figures, ours beside the paper's; docs/scaling.md says why figures differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ctxflow.policies.turboserve.autoscaling import Parameters, Profiled, target_gpus
from ctxflow.policies.turboserve.rebalancing import most_sessions
from ctxflow.simulator.experiments import ExperimentRequest, Figure, rounded
from ctxflow.simulator.session_serving import Served
from ctxflow_papers.turboserve import experiments, printed
from ctxflow_papers.turboserve.experiments import BASELINES, CURVES, Compared, Windows, mean
from ctxflow_papers.turboserve.pictures import Results, draw_all
from ctxflow_papers.turboserve.traces import TEN_MOST, Statistics, burst, generate


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything.

    :ivar traces: that the strategies are compared on. :ivar curves: the traces on which other curves are tried.
    """

    traces: tuple[Statistics, ...] = printed.TRACES
    curves: tuple[Statistics, ...] = (printed.TRACES[0], printed.TRACES[2])
    boots: tuple[float, ...] = (0.0, 10.0, 30.0, 60.0, 120.0)
    levels: int = 10
    studies: int = 10
    placements: int = 80
    grid: tuple[Parameters, ...] = experiments.GRID


SMALL = dataclasses.replace(printed.STUDY, name="small", window=240.0)
"""The trace of a quick run, which is not one of the paper's."""
QUICK = Scale((SMALL,), (), (0.0, 30.0), 3, 1, 20, experiments.GRID[1::3])


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation that needs no GPU: an `Experiment`."""
    scale, seed = QUICK if request.quick else Scale(), request.seed
    found = {}
    weights = {wanted.name: sum(wanted.arrivals) for wanted in scale.traces}
    done = 0
    for wanted in scale.traces:
        request.progress(0.7 * done / sum(weights.values()), f"{wanted.name}: ours, the baselines and the bounds")
        found[wanted.name] = experiments.compared(wanted, seed)
        done += weights[wanted.name]
    figures = headline(found) | dict(_traces(found))
    request.progress(0.7, "other latency curves")
    figures |= dict(_curves(scale.curves, seed))
    request.progress(0.85, "section 3.2")
    saved = {
        name: experiments.study(printed.STUDY, scale.studies, seed, each) for name, each in experiments.SETTINGS.items()
    }
    figures |= dict(_study(saved, scale.studies))
    request.progress(0.9, "boots, volatility and placement")
    figures |= dict(_boots(scale, found, seed)) | dict(_statistics(scale, seed))
    rows = experiments.profiled_levels(scale.levels)
    figures |= dict(_levels(rows)) | dict(_windows(experiments.windows([row for _, row in rows], seed, scale.grid)))
    figures |= dict(_placements(scale.placements, seed))
    if request.quick:
        figures = {name: dataclasses.replace(figure, paper=None) for name, figure in figures.items()}
    if request.pictures is not None:
        draw_all(request.pictures, Results(found, saved[""], scale.traces[0], seed))
    request.progress(1.0, "done")
    return figures


def less(ours: float, theirs: float) -> float:
    """By how many % ours is less.

    >>> less(3.0, 4.0)
    25.0
    """
    return 100 * (1 - ours / theirs)


def latency_saved(found: Mapping[str, Compared]) -> list[float]:
    """% less worst-case latency at matched cost, by trace and baseline."""
    return [less(pair.ours.worst, pair.theirs.worst) for each in found.values() for pair in each.latency.values()]


def latency_foreseen(found: Mapping[str, Compared]) -> list[float]:
    """% less worst-case latency at the same cost of a schedule that knows the future, by trace and baseline."""
    return [
        less(each.foreseen[name], pair.theirs.worst) for each in found.values() for name, pair in each.latency.items()
    ]


def cost_saved(found: Mapping[str, Compared]) -> list[float]:
    """% less cost at matched worst-case latency, by trace and baseline."""
    pairs = [pair for each in found.values() for pair in each.cost.values()]
    return [less(pair.ours.gpu_seconds, pair.theirs.gpu_seconds) for pair in pairs]


def headline(found: Mapping[str, Compared]) -> dict[str, Figure]:
    """The paper's claims: means over traces and baselines, the bounds, what it costs to leave a mechanism out."""
    latency, cost, traces = latency_saved(found), cost_saved(found), list(found.values())
    pairs = [pair for each in traces for pair in (*each.latency.values(), *each.cost.values())]
    above = [100 * each.above_paper_bound for each in traces]
    strict = [100 * each.above_bound for each in traces]
    figures = {
        "latency_saved": _mean(latency, "% of the worst", "higher", printed.LATENCY_SAVED),
        "latency_saved_foreseen": _mean(latency_foreseen(found), "% of the worst, at most", "higher"),
        "cost_saved": _mean(cost, "% of the cost", "higher", printed.COST_SAVED),
        "matched_within": Figure(rounded(max(pair.apart for pair in pairs)), "%, at most", "lower", 0.0, len(pairs)),
        "above_dp": _mean(above, "% above, 1-minute slots", "lower", printed.ABOVE_DP),
        "above_dp_most": Figure(rounded(max(above)), "% above", "lower", 0.0, len(above), printed.WORST_ABOVE_DP),
        "above_dp_least": Figure(rounded(min(above)), "% above", "lower", 0.0, len(above)),
        "above_unbeatable": _mean(strict, "% above, 1 s slots", "lower"),
        "above_unbeatable_least": Figure(rounded(min(strict)), "% above", "lower", 0.0, len(strict)),
    }
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
        yield f"{trace}_profiled_utilization", Figure(each.profiled, "of K", "higher")
        yield f"{trace}_above_dp", Figure(rounded(100 * each.above_paper_bound), "% above", "lower", 0.0, 1)
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


def _curves(traces: Sequence[Statistics], seed: int) -> Iterator[tuple[str, Figure]]:
    """The comparison under other latency curves, and K by curve."""
    for name, curve in CURVES.items():
        yield f"most_sessions_{name}", Figure(most_sessions(curve, 0.668), "sessions in 668 ms", "higher", 0.0, 1, 5.0)
        for count in (1, 5, 12):
            yield f"chunk_{name}_{count}", Figure(rounded(1000 * curve(count)), "ms", "lower")
        if name != "proportional" and traces:
            found = {each.name: experiments.compared(each, seed, name, whole=False) for each in traces}
            yield f"latency_saved_{name}", _mean(latency_saved(found), "% of the worst", "higher")
            yield f"cost_saved_{name}", _mean(cost_saved(found), "% of the cost", "higher")


def _study(saved: Mapping[str, Mapping[str, tuple[float, float]]], traces: int) -> Iterator[tuple[str, Figure]]:
    """Figure 4, by what the paper leaves open."""
    for setting, found in saved.items():
        for name, values in found.items():
            for what, value, paper in zip(("latency", "cost"), values, printed.FIGURE_4[name], strict=True):
                figure = Figure(rounded(value), "% less", "higher", 0.0, traces, paper)
                yield f"study_{setting}{name}_{what}", figure


def _boots(scale: Scale, found: Mapping[str, Compared], seed: int) -> Iterator[tuple[str, Figure]]:
    wanted = scale.traces[0]
    rho = found[wanted.name].profiled
    for seconds, served in experiments.boots(wanted, seed, scale.boots, rho).items():
        yield f"{wanted.name}_boot_{seconds:g}_worst", _seconds(served)
        yield f"{wanted.name}_boot_{seconds:g}_cost", _hours(served)


def _statistics(scale: Scale, seed: int) -> Iterator[tuple[str, Figure]]:
    """Tables 11 and 12, of the generated traces: arrivals and departures are exact."""
    for wanted in (*scale.traces, printed.STUDY):
        for number, (value, paper) in enumerate(zip(generate(wanted, seed).active(), wanted.active, strict=True), 1):
            yield f"{wanted.name}_active_{number}", Figure(rounded(value), "sessions", "higher", 0.0, 1, paper)


def _levels(rows: Sequence[tuple[int, Profiled]]) -> Iterator[tuple[str, Figure]]:
    """Tables 5 and 6; costs beside that of the first level, since the paper's unit is not said."""
    for (level, row), paper, rho, cost in zip(
        rows, printed.VOLATILITIES, printed.UTILIZATIONS, printed.COSTS, strict=False
    ):
        trace = burst(level)
        arrivals = sum(on and time > 0 for time, _, on in trace.events)
        yield f"level_{level}_volatility", Figure(rounded(row.volatility), "sessions", "lower", 0.0, 1, paper)
        yield f"level_{level}_arrivals", Figure(arrivals, "sessions", "lower", 0.0, 1, printed.ARRIVALS[level - 1])
        peak = int(trace.counts(10.0)[1].max())
        yield f"level_{level}_peak", Figure(peak, "sessions", "lower", 0.0, 1, printed.PEAKS[level - 1])
        unit = "of K" if row.valid else "of K, too slow"
        yield f"level_{level}_utilization", Figure(row.parameters.utilization, unit, "higher", 0.0, 1, rho)
        ratio, theirs = row.replayed.cost / rows[0][1].replayed.cost, cost / printed.COSTS[0]
        yield f"level_{level}_cost", Figure(rounded(ratio), "times level 1", "lower", 0.0, 1, rounded(theirs))


def _windows(found: Windows) -> Iterator[tuple[str, Figure]]:
    """Tables 7 to 10."""
    for number, (peak, rho, gpus, chosen) in enumerate(
        zip(TEN_MOST, printed.ORACLE_UTILIZATIONS, printed.ORACLE_GPUS, found.chosen, strict=True), 1
    ):
        target = target_gpus(peak, 5, rho, most=16)
        yield f"w{number}_oracle_gpus", Figure(target, "GPUs, at Table 8's rho", "lower", 0.0, 1, gpus)
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
