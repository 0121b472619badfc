"""GH's and AGH's tables and figures, ours beside the paper's.

`agh_printed` is the paper's AGH, with its moves alone, and `agh` ctxflow's: both stand beside the paper's AGH. The
paper prints no numbers in Figure 2. What is not stated otherwise is of `paper_instance.json`; docs/placement.md says
why figures differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ctxflow.policies.agh import Problem
from ctxflow.policies.agh.problem import paper_instance
from ctxflow.simulator.experiments import ExperimentRequest, Figure, Tell, median, rounded
from ctxflow_papers.gh_agh import experiments, printed, table4
from ctxflow_papers.gh_agh.experiments import FACTORS, SETTINGS, SHAPES, Runtime, Step
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.pictures import Results, draw_all
from ctxflow_papers.gh_agh.studies import ablation, stress

STRESSED = ("exact", "improved", "agh", "agh-printed", "gh", "agh+1.25")
INFLATIONS = (1.0, 1.2, 1.5)
PLANNED = ("gh", "agh-printed", "agh")
GRIDS = {"figure2d": ("delay", "error"), "figure2e": ("budget", "price"), "figure2f": ("price", "delay")}
PARTS = {
    "stress": 0.04, "draws": 0.2, "budgets": 0.04, "grids": 0.04, "storage": 0.01, "ablation": 0.06, "days": 0.41,
    "runtimes": 0.2,
}  # fmt: skip
"""The experiments, and about which share of the time each takes."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything.

    :ivar shape: of the random draws. :ivar time_limit: seconds for the exact method, each time.
    """

    shape: tuple[int, int, int] = (6, 6, 10)
    scenarios: int = 500
    draws: int = 20
    ablated: int = 100
    factors: tuple[float, ...] = FACTORS
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    time_limit: float = 60.0
    days: table4.Scale = dataclasses.field(default_factory=table4.Scale)


QUICK = Scale((3, 3, 3), 10, 1, 1, (0.8, 1.2), ((3, 3, 3), (4, 4, 5)), 2.0, table4.Scale(1, 24, 1, (0.05,)))
QUICK_SHAPE = (4, 4, 5)
"""Of the instance of a quick run, which is not the paper's, and beside which none of its figures stands."""


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation: an `Experiment`."""
    scale, seed = (QUICK, request.seed) if request.quick else (Scale(), request.seed)
    problem = draw(1, QUICK_SHAPE) if request.quick else paper_instance()
    part = _parts(request.progress)
    figures, results = _plans(problem, scale, seed, part)
    if request.quick:
        figures = {name: dataclasses.replace(figure, paper=None) for name, figure in figures.items()}
    if request.pictures is not None:
        draw_all(request.pictures, results)
    request.progress(1.0, "done")
    return figures


def _plans(problem: Problem, scale: Scale, seed: int, part: Any) -> tuple[dict[str, Figure], Results]:
    tell = part("stress")
    stressed = stress(problem, STRESSED, INFLATIONS, scale.scenarios, seed, scale.time_limit)
    tell = part("draws")
    draws = experiments.stressed_draws(scale.shape, scale.draws, scale.scenarios, seed, scale.time_limit, tell)
    part("budgets")
    table2 = experiments.budgets(problem, SETTINGS, PLANNED, scale.scenarios, seed)
    part("grids")
    grids = {name: experiments.grid(problem, *axes, scale.factors) for name, axes in GRIDS.items()}
    part("storage")
    storages = experiments.storages(problem)
    part("ablation")
    alone, many = ablation([problem]), ablation([draw(seed + n, scale.shape) for n in range(scale.ablated)])
    days = table4.run(problem, scale.days, seed, scale.time_limit, part("days"))
    methods = ("gh", "agh-printed", "agh", "exact")
    times = experiments.runtimes(scale.shapes, methods, scale.time_limit, seed, part("runtimes"))
    figures = dict(_stress(stressed, scale.scenarios)) | dict(_draws(draws)) | dict(_budgets(table2, scale.scenarios))
    for name, axes in GRIDS.items():
        figures |= dict(_grid(name, axes, grids[name]))
    figures |= dict(_storages(storages)) | dict(_ablation(alone, many, scale.ablated))
    figures |= dict(table4.figures(days)) | dict(_runtimes(times))
    return figures, Results(stressed, grids, times, days)


def _parts(progress: Tell) -> Any:
    """A function that begins a part, and gives what the part is to tell how far it is."""

    def begin(name: str) -> Step:
        names = list(PARTS)
        before = sum(PARTS[each] for each in names[: names.index(name)])
        progress(before, name)
        return lambda done: progress(before + done * PARTS[name], name)

    return begin


def _key(name: str) -> str:
    return name.replace("-", "_").replace("+", "_margin_")


def _stress(rows: Iterable[dict[str, Any]], scenarios: int) -> Iterator[tuple[str, Figure]]:
    """Figures 2a to 2c."""
    for row in rows:
        name = f"stress_{row['inflation']}_{_key(row['method'])}"
        yield f"{name}_cost", Figure(rounded(row["cost"]), "$", "lower", 0.0, scenarios)
        yield f"{name}_violated", Figure(rounded(100 * row["violated"]), "% of types", "lower", 0.0, scenarios)
        for term in ("rental", "unserved"):  # The other terms hardly differ: the picture has them.
            yield f"{name}_{term}", Figure(rounded(row[term]), "$", "lower", 0.0, scenarios)


def _draws(rows: list[dict[str, float]]) -> Iterator[tuple[str, Figure]]:
    """Whether Figure 2a's claim holds on other instances."""
    for method in ("gh", "agh-printed", "agh"):
        ratios = [row[method] / row["exact"] for row in rows]
        under = 100 * float(np.mean([ratio < 1 - 1e-6 for ratio in ratios]))
        yield f"draws_1.5_{_key(method)}_under_exact", Figure(rounded(under), "% of draws", "higher", 0.0, len(rows))
        yield f"draws_1.5_{_key(method)}_over_exact", median(ratios, "times the cost", "lower")
        whole = sum(row[method] for row in rows) / sum(row["exact"] for row in rows)
        yield (
            f"draws_1.5_{_key(method)}_sum_over_exact",
            Figure(rounded(whole), "times the cost", "lower", 0, len(rows)),
        )


def _budgets(rows: Mapping[tuple[str, str], dict[str, Any]], scenarios: int) -> Iterator[tuple[str, Figure]]:
    """Table 2."""
    for (setting, method), row in rows.items():
        papers = printed.BUDGETS[setting, method.removesuffix("-printed")]
        name = f"{setting}_{_key(method)}"
        values = {"payment": row["rental"], "cost": row["cost"], "violated": 100 * row["violated"]}
        for (term, value), paper in zip(values.items(), papers, strict=True):
            unit = "% of types" if term == "violated" else "$"
            yield f"{name}_{term}", Figure(rounded(value), unit, "lower", 0.0, scenarios, paper)


def _grid(name: str, axes: tuple[str, str], found: experiments.Grid) -> Iterator[tuple[str, Figure]]:
    """Figures 2d to 2f: the paper only draws them."""
    for (a, b), value in found.items():
        yield f"{name}_{axes[0]}_{a}_{axes[1]}_{b}", Figure(rounded(value), "$", "lower")


def _storages(found: Mapping[float, tuple[float, float]]) -> Iterator[tuple[str, Figure]]:
    for size, (cost, unserved) in found.items():
        yield f"storage_{size:g}_cost", Figure(rounded(cost), "$", "lower")
        yield f"storage_{size:g}_unserved", Figure(rounded(100 * unserved), "% of demand", "lower")


def _ablation(alone: list[dict[str, Any]], many: list[dict[str, Any]], draws: int) -> Iterator[tuple[str, Figure]]:
    """Table 3, on the paper's instance and on random ones."""
    for row in alone:
        name = f"ablation_without_{row['without']}" if row["without"] else "ablation_all"
        cost, feasible = printed.ABLATION[row["without"]]
        unit = _breaking("1 if feasible", row)
        yield f"{name}_feasible", Figure(float(not row["infeasible"]), unit, "higher", 0.0, 1, feasible)
        yield f"{name}_cost", Figure(rounded(row["cost"]), "$", "lower", 0.0, 1, cost)
    whole = many[0]["cost"]
    for row in many[1:]:
        name = f"ablation_draws_without_{row['without']}"
        infeasible = rounded(100 * row["infeasible"])
        yield f"{name}_infeasible", Figure(infeasible, _breaking("% of draws", row), "lower", 0.0, draws)
        rise = rounded(100 * (row["cost"] / whole - 1))
        paper = printed.WITHOUT_M2 if row["without"] == "M2" else None
        yield f"{name}_rise", Figure(rise, "% of the cost", "lower", 0.0, draws, paper)


def _breaking(unit: str, row: dict[str, Any]) -> str:
    return f"{unit}; breaks {', '.join(row['violated'])}" if row["violated"] else unit


def _runtimes(found: Mapping[tuple[tuple[int, int, int], str], Runtime]) -> Iterator[tuple[str, Figure]]:
    """Table 5."""
    for (shape, method), runtime in found.items():
        paper = printed.RUNTIMES[method.removesuffix("-printed")].get(shape)
        unit = "s" if runtime.done else "s, not proven"
        name = "x".join(map(str, shape))
        yield f"runtime_{name}_{_key(method)}", Figure(rounded(runtime.seconds), unit, "lower", 0.0, 1, paper)
