"""The experiments as figures for `ctxflow reproduce`: Figures 4 to 7 and Table 2 of the paper."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from ctxflow.simulator.experiments import ExperimentRequest, Figure, median, rounded
from ctxflow_papers.pervasive_context.experiments import Run, play
from ctxflow_papers.pervasive_context.pictures import draw_all
from ctxflow_papers.pervasive_context.settings import CALIBRATED, EXPERIMENTS, POOL_FLUID_SECONDS, Settings
from ctxflow_papers.pervasive_context.tasks import STATISTICS, TABLE_2, TaskTimes, statistics_of

QUICK = 3000
"""Items of each experiment in a quick run, whose times are not the paper's."""

DRAWS = 5
"""Of all that is random; one where there is a task for each inference, since those take the time of all others."""


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """Seconds of each experiment (pv5: inferences done), and Table 2: a `ctxflow.simulator.experiments.Experiment`."""
    experiments = EXPERIMENTS
    if request.quick:
        experiments = tuple(dataclasses.replace(each, items=QUICK, paper=None, paper_done=None) for each in EXPERIMENTS)
    runs: dict[str, Run] = {}
    for settings in experiments:
        request.progress(len(runs) / len(experiments), settings.name)
        runs[settings.name] = run(settings, request.seed, 1 if request.quick else DRAWS)
    if request.pictures is not None:
        draw_all(request.pictures, runs)
    figures = {name: figure for each in runs.values() for name, figure in times_of(each)}
    if not request.quick:
        figures |= dict(_comparisons(runs))
    return figures | dict(table_2(runs, request.quick))


def run(settings: Settings, seed: int, draws: int) -> Run:
    """Run an experiment as often as is told."""
    tasks = TaskTimes(settings.level)
    outcomes = [play(settings, seed, tasks)]
    if settings.name not in ("pv3_1", "pv4_1"):
        outcomes += [play(settings, seed + n) for n in range(1, draws)]
    return Run(settings, outcomes, tasks.seconds)


def times_of(each: Run) -> Iterator[tuple[str, Figure]]:
    """What Figure 4 shows of an experiment."""
    settings = each.settings
    if each.ended:
        done = [float(outcome.done) for outcome in each.outcomes]
        yield f"{settings.name}_done", median(done, "inferences", "higher", settings.paper_done)
    else:
        seconds = [outcome.seconds for outcome in each.outcomes]
        paper = None if settings.name in CALIBRATED else settings.paper
        yield f"{settings.name}_s", median(seconds, "s", "lower", paper)


def _comparisons(runs: Mapping[str, Run]) -> Iterator[tuple[str, Figure]]:
    """What the paper says of experiments beside each other."""
    best, retained = runs["pv4_100"], [runs[name].seconds for name in ("pv4_1", "pv4_100", "pv4_1k")]
    yield "pv4_100_vs_fluid", Figure(rounded(best.seconds / POOL_FLUID_SECONDS), "times", "lower")
    spread = 100 * (max(retained) / min(retained) - 1)
    yield "pv4_1_to_1k_spread", Figure(rounded(spread), "%", "lower", paper=12.3)
    done = {name: statistics.median(each.done for each in runs[name].outcomes) for name in ("pv5p", "pv5s")}
    yield "pv5s_more_than_pv5p", Figure(rounded(100 * (done["pv5s"] / done["pv5p"] - 1)), "%", paper=36.7)


def table_2(runs: Mapping[str, Run], quick: bool) -> Iterator[tuple[str, Figure]]:
    """Table 2: the times of tasks. The means are sums of what was derived from the paper, and pv3_1 is all of that."""
    for name, papers in TABLE_2.items():
        tasks = runs[name].tasks
        for what, value, paper in zip(STATISTICS, statistics_of(tasks), papers, strict=True):
            own = quick or what == "mean" or name == "pv3_1"
            figure = Figure(rounded(value), "s", "lower", n=len(tasks), paper=None if own else paper)
            yield f"table2_{name}_{what}", figure
