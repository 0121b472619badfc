"""TORTA's tables and figures, ours beside the paper's.

Dollars and units of overhead cannot be compared (the paper prints neither prices, nor powers, nor its unit), so these
stand beside round-robin's. Every figure is the median of the seeds; its unit has their spread. docs/routing.md says why
figures differ from the paper's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from ctxflow.policies.torta.quantities import Floats
from ctxflow.simulator.experiments import ExperimentRequest, Figure, median, rounded
from ctxflow_papers.torta import experiments, printed
from ctxflow_papers.torta.experiments import RESIZED, UNSIZED, Compared, Size
from ctxflow_papers.torta.pictures import Results, draw_all
from ctxflow_papers.torta.settings import LOADS
from ctxflow_papers.torta.world import TOPOLOGIES

RATIOS = ("response", "waiting", "power", "overhead")
OURS = ("torta", "torta_unsized")
UNIT = "of the lower bound"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything."""

    topologies: tuple[str, ...] = TOPOLOGIES
    loads: tuple[float, ...] = LOADS
    seeds: int = 3
    size: Size = dataclasses.field(default_factory=Size)
    tasks: tuple[int, ...] = tuple(printed.MILP)
    limit: float = 300.0


QUICK = Scale(("abilene",), (0.7,), 1, Size(0.05, 24, 12), (50,), 5.0)


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation that the policies decide: an `Experiment`."""
    scale = QUICK if request.quick else Scale()
    seeds = range(request.seed, request.seed + scale.seeds)
    every = len(scale.topologies) * len(scale.loads)
    found: dict[str, dict[float, Compared]] = {topology: {} for topology in scale.topologies}
    for number, (topology, load) in enumerate((t, load) for t in scale.topologies for load in scale.loads):
        share = 0.85 * number / every

        def told(name: str, topology: str = topology, load: float = load, share: float = share) -> None:
            request.progress(share, f"{topology} at {load}: {name}")

        found[topology][load] = experiments.compared(topology, load, seeds, scale.size, told=told)
    request.progress(0.85, "the failure of a region")
    failures = experiments.failures(seeds, scale.size)
    request.progress(0.95, "the exact program's time")
    milp = {tasks: experiments.milp_seconds(tasks, request.seed, scale.limit) for tasks in scale.tasks}
    results = Results(found, failures, milp)
    figures = dict(_figures(results))
    if request.quick:
        figures = {name: dataclasses.replace(figure, paper=None) for name, figure in figures.items()}
    if request.pictures is not None:
        draw_all(request.pictures, results)
    request.progress(1.0, "done")
    return figures


def of_seeds(values: Floats, unit: str, better: str = "lower", paper: float | None = None) -> Figure:
    """Return the median over seeds, with the largest less the smallest as its spread.

    >>> of_seeds(np.array([1.0, 5.0, 2.0]), "s").value
    2.0
    """
    return dataclasses.replace(median(values.tolist(), unit, better), paper=paper)


def _figures(results: Results) -> Iterator[tuple[str, Figure]]:
    for topology, loads in results.compared.items():
        for load, each in loads.items():
            yield from ratios(topology, load, each)
            yield from _methods(topology, load, each)
    for name, values in results.failures.items():
        yield f"failure_{name}_completed", of_seeds(100 * values["completed"], "%", "higher")
        yield f"failure_{name}_waiting", of_seeds(values["waiting"], "s")
        yield f"failure_{name}_response", of_seeds(values["response"], "s")
    for tasks, (seconds, solved) in results.milp.items():
        unit = "s" if solved else "s, stopped"
        yield f"milp_{tasks}", Figure(rounded(seconds), unit, "lower", 0.0, 1, printed.MILP.get(tasks))


def ratios(topology: str, load: float, each: Compared) -> Iterator[tuple[str, Figure]]:
    """Yield TORTA beside the best baseline of each metric on each seed: the unsized ones', and the sized ones'."""
    tables = {"response": printed.RESPONSE, "power": printed.POWER, "overhead": printed.OVERHEAD}
    papers: dict[str, float] = {}
    if topology in printed.RESPONSE:
        papers = {metric: rounded(table[topology][0] / min(table[topology][1:])) for metric, table in tables.items()}
        papers["waiting"] = rounded(1 - printed.WAITING_LESS / 100)
        papers["balance"] = rounded(printed.BALANCE[topology][0] - max(printed.BALANCE[topology][1:]))
    for name in OURS:
        for metric in RATIOS:
            paper = papers.get(metric) if name == "torta" else None
            begin = f"{topology}_{load}_{name}_{metric}"
            yield f"{begin}_vs_best", of_seeds(each.over(name, UNSIZED, metric), "of the best's", "lower", paper)
            yield f"{begin}_vs_sized", of_seeds(each.over(name, RESIZED, metric), "of the best sized's")
        for bound in ("response", "power"):
            yield f"{topology}_{load}_{name}_{bound}_vs_bound", of_seeds(each.over_bound([name], bound), UNIT)
        best = np.max([each.values[other]["balance"] for other in UNSIZED], axis=0)
        above = each.values[name]["balance"] - best
        paper = papers.get("balance") if name == "torta" else None
        yield f"{topology}_{load}_{name}_balance_above_best", of_seeds(above, "less the best's", "higher", paper)
    for who, names in (("torta_unsized", ("torta_unsized",)), ("best", UNSIZED)):
        begin = f"{topology}_{load}_{who}_power_vs_active_bound"
        yield begin, of_seeds(each.over_bound(names, "power_active"), UNIT)
    yield f"{topology}_{load}_best_response_vs_bound", of_seeds(each.over_bound(UNSIZED, "response"), UNIT)


def _methods(topology: str, load: float, each: Compared) -> Iterator[tuple[str, Figure]]:
    """Yield Figs. 8 to 11; the paper's, which has one load, stands at the middle one."""
    middle = load == LOADS[len(LOADS) // 2]
    base = each.values["round_robin"]
    for name, values in each.values.items():
        begin = f"{topology}_{load}_{name}"

        def paper(table: Mapping[str, tuple[float, ...]], over: bool = False, name: str = name) -> float | None:
            if not middle or name not in printed.METHODS:
                return None
            row = table[topology]
            return rounded(row[printed.METHODS.index(name)] / (row[-1] if over else 1.0))

        yield f"{begin}_response", of_seeds(values["response"], "s", "lower", paper(printed.RESPONSE))
        yield f"{begin}_waiting", of_seeds(values["waiting"], "s")
        yield f"{begin}_network", of_seeds(values["network"], "s")
        for metric, table in (("power", printed.POWER), ("overhead", printed.OVERHEAD)):
            ratio = values[metric] / np.maximum(base[metric], 1e-9)
            yield f"{begin}_{metric}", of_seeds(ratio, "of round-robin's", "lower", paper(table, True))
        yield f"{begin}_balance", of_seeds(values["balance"], "1/(1+CV)", "higher", paper(printed.BALANCE))
        yield f"{begin}_servers", of_seeds(values["active"], "servers", "lower")
