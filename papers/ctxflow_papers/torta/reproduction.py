"""TORTA's tables and figures, ours beside the paper's.

Dollars and units of overhead cannot be compared (the paper prints neither prices, nor powers, nor its unit), so these
stand beside round-robin's. Methods are compared at the middle load, and with the best baseline at all loads. A figure's
unit has the half width of its 95 % confidence interval over seeds. docs/routing.md says why figures differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ctxflow.policies.torta.macro import Networks
from ctxflow.policies.torta.quantities import Floats
from ctxflow.simulator.experiments import ExperimentRequest, Figure, rounded
from ctxflow_papers.torta import experiments, printed
from ctxflow_papers.torta.experiments import BASELINES, Compared, Condition, Course
from ctxflow_papers.torta.pictures import Results, draw_all
from ctxflow_papers.torta.settings import GPUS, KINDS, LOADS, MIGRATION_STAGES, SLOTS, SWITCH_STAGES
from ctxflow_papers.torta.world import TOPOLOGIES, switch_seconds

RATIOS = {"response": "lower", "power": "lower", "overhead": "lower", "waiting": "lower"}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything."""

    topologies: tuple[str, ...] = TOPOLOGIES
    seeds: int = 3
    slots: int = SLOTS
    surge_slots: int = 200
    failure_slots: int = 180
    accuracies: tuple[float, ...] = printed.ACCURACIES
    tasks: tuple[int, ...] = tuple(printed.MILP)
    limit: float = 300.0
    condition_slots: int = 160


QUICK = Scale(("abilene",), 1, 16, 30, 24, (0.5,), (50,), 5.0, 12)


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation: an `Experiment`."""
    scale = QUICK if request.quick else Scale()
    seeds = range(request.seed, request.seed + scale.seeds)
    networks = experiments.trained()
    found = _compared(scale, seeds, networks, request)
    request.progress(0.75, "the surge and the failure")
    surges = experiments.surges(networks, request.seed, scale.surge_slots)
    failures = experiments.failures(networks, seeds, scale.failure_slots)
    request.progress(0.85, "forecasts of each accuracy")
    accuracies = experiments.accuracies(networks, scale.accuracies, seeds, scale.topologies[0], scale.slots)
    request.progress(0.95, "the exact program's time")
    milp = {tasks: experiments.milp_seconds(tasks, request.seed, scale.limit) for tasks in scale.tasks}
    results = Results(found, surges, failures, accuracies, milp)
    figures = dict(_stages()) | dict(_figures(results))
    if networks is None:
        figures["networks"] = Figure(0.0, "none found: torta is the transport form")
    else:
        request.progress(0.97, "the advantage condition")
        figures |= dict(_condition(networks, experiments.condition(networks, "abilene", seeds, scale.condition_slots)))
    if request.quick:
        figures = {name: dataclasses.replace(figure, paper=None) for name, figure in figures.items()}
    if request.pictures is not None:
        draw_all(request.pictures, results)
    request.progress(1.0, "done")
    return figures


def _compared(
    scale: Scale, seeds: Sequence[int], networks: Networks | None, request: ExperimentRequest
) -> dict[str, dict[str, Compared]]:
    found: dict[str, dict[str, Compared]] = {}
    chosen = experiments.methods(networks)
    done, every = 0, len(scale.topologies) * len(chosen)
    for topology in scale.topologies:
        found[topology] = {}
        for name, method in chosen.items():
            request.progress(0.75 * done / every, f"{topology}: {name}")
            found[topology][name] = experiments.compared(topology, method, seeds, slots=scale.slots)
            done += 1
    return found


def interval(values: Floats) -> float:
    """The half width of the 95 % confidence interval of a mean, by Student's distribution; 0 of one value.

    >>> round(interval(np.array([1.0, 2.0, 3.0])), 2)
    2.48
    """
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def averaged(values: Floats, unit: str, better: str = "lower", paper: float | None = None) -> Figure:
    """The mean over seeds; the unit has its confidence interval."""
    shown = f"{unit} ±{interval(values):.2g}" if len(values) > 1 else unit
    spread = rounded(float(values.max() - values.min()))
    return Figure(rounded(float(values.mean())), shown, better, spread, len(values), paper)


def _figures(results: Results) -> Iterator[tuple[str, Figure]]:
    for topology, each in results.compared.items():
        yield from _topology(topology, each)
    yield from _surge(results.surges)
    for name, values in results.failures.items():
        yield f"failure_{name}_completed", averaged(100 * values["completed"], "%", "higher")
        yield f"failure_{name}_waiting", averaged(values["waiting"], "s")
        yield f"failure_{name}_response", averaged(values["response"], "s")
    for accuracy, values in results.accuracies.items():
        paper = printed.ACCURACY_RESPONSE.get(accuracy)
        yield f"accuracy_{accuracy}_response", averaged(values["response"], "s", "lower", paper)
        yield f"accuracy_{accuracy}_inference", averaged(values["inference"] + values["loading"], "s")
    for tasks, (seconds, solved) in results.milp.items():
        unit = "s" if solved else "s, stopped"
        yield f"milp_{tasks}", Figure(rounded(seconds), unit, "lower", 0.0, 1, printed.MILP.get(tasks))


def _topology(topology: str, found: Mapping[str, Compared]) -> Iterator[tuple[str, Figure]]:
    """Figs. 8 to 11 at the middle load, and against the best baseline at all loads."""
    middle = len(LOADS) // 2
    for name, each in found.items():
        values = {metric: each.values[metric][middle] for metric in each.values}
        theirs = printed.METHODS.index(name) if name in printed.METHODS else None

        def paper(
            table: Mapping[str, tuple[float, ...]], over: int | None = None, theirs: int | None = theirs
        ) -> float | None:
            if theirs is None:
                return None
            return rounded(table[topology][theirs] / (1.0 if over is None else table[topology][over]))

        yield f"{topology}_{name}_response", averaged(values["response"], "s", "lower", paper(printed.RESPONSE))
        for part in ("network", "waiting"):
            yield f"{topology}_{name}_{part}", averaged(values[part], "s")
        yield f"{topology}_{name}_inference", averaged(values["inference"] + values["loading"], "s")
        for metric, table in (("power", printed.POWER), ("overhead", printed.OVERHEAD)):
            ratio = values[metric] / found["round_robin"].values[metric][middle]
            yield f"{topology}_{name}_{metric}", averaged(ratio, "of round-robin's", "lower", paper(table, 3))
        yield f"{topology}_{name}_balance", averaged(values["balance"], "1/(1+CV)", "higher", paper(printed.BALANCE))
    yield from over_best(topology, found, "torta")
    yield from over_best(topology, found, "lookahead")


def over_best(topology: str, found: Mapping[str, Compared], name: str) -> Iterator[tuple[str, Figure]]:
    """A method beside the best baseline of each metric, at all loads together and at each."""
    tables = {"response": printed.RESPONSE, "power": printed.POWER, "overhead": printed.OVERHEAD}
    mine = name == "torta"
    for metric, better in RATIOS.items():
        papers = {key: table[topology][0] / min(table[topology][1:]) for key, table in tables.items()}
        papers["waiting"] = 1 - printed.WAITING_LESS / 100
        paper = rounded(papers[metric]) if mine else None
        ratio = experiments.over_best(found, metric, name)
        yield f"{topology}_{name}_{metric}_vs_best", averaged(ratio, "of the best baseline's", better, paper)
        for number, load in enumerate(LOADS):
            best = min(float(found[each].values[metric][number].mean()) for each in BASELINES)
            ratio = found[name].values[metric][number] / best
            yield f"{topology}_{name}_{metric}_vs_best_at_{load}", averaged(ratio, "of the best baseline's", better)
    above = printed.BALANCE[topology][0] - max(printed.BALANCE[topology][1:])
    gained = experiments.above_best(found, name)
    yield (
        f"{topology}_{name}_balance_above_best",
        averaged(gained, "less the best baseline's", "higher", rounded(above) if mine else None),
    )


def _surge(found: Mapping[str, Course]) -> Iterator[tuple[str, Figure]]:
    """Fig. 2."""
    for name, course in found.items():
        paper = printed.SURGE_WAIT if name == "reactive" else None
        count = len(course.at_surge)
        yield f"surge_{name}_waiting", Figure(rounded(float(course.at_surge.mean())), "s", "lower", 0.0, count, paper)
        late = 100 * float((course.at_surge > 10).mean())
        yield f"surge_{name}_waits_over_10_s", Figure(rounded(late), "% of tasks", "lower", 0.0, count)


def _stages() -> Iterator[tuple[str, Figure]]:
    """Fig. 3a's sums, and a switch on each GPU by our factors."""
    yield "stages_v100_migration", Figure(rounded(sum(MIGRATION_STAGES)), "s", "lower", 0.0, 1, printed.MIGRATION)
    yield "stages_v100_switch", Figure(rounded(sum(SWITCH_STAGES)), "s", "lower", 0.0, 1, printed.SWITCH)
    for number, gpu in enumerate(GPUS):
        model = gpu.suits * 2
        name = gpu.name.lower().replace(" ", "_")
        seconds = rounded(float(switch_seconds()[number, model]))
        yield f"stages_{name}_switch", Figure(seconds, f"s, a {KINDS[gpu.suits].name} model", "lower")


def _condition(networks: Networks, found: Condition) -> Iterator[tuple[str, Figure]]:
    """Theorem 3's, from measured constants; and what training reached on its own seeds."""
    yield "eps", Figure(rounded(found.eps), "|A - P*|, Abilene", "lower", 0.0, 1, printed.EPS)
    yield "s", Figure(rounded(found.s), "reactive transport's K_0 over ours", "higher", 0.0, 1, printed.S)
    least = found.least / found.own
    yield "s_least_baseline", Figure(rounded(least), "the steadiest baseline's K_0 over ours", "higher")
    for name in ("eps", "s"):
        value = networks.about.get(name)
        if isinstance(value, int | float):
            yield f"{name}_training", Figure(float(value), "on training seeds", "lower" if name == "eps" else "higher")
    yield "k0", Figure(rounded(found.reactive), "|A_t - A_t-1|^2, reactive transport", "lower")
    yield "lipschitz_response", Figure(rounded(found.response), "s for a unit of |A - A'|", "lower")
    yield "lipschitz_power", Figure(rounded(found.power), "s for a unit of |A - A'|", "lower")
    yield "condition_left", Figure(rounded(found.left), "(1 - 1/s) / eps", "higher")
    yield "condition_right", Figure(rounded(found.right), "(L_R + beta L_P) / (alpha K_0)", "lower")
