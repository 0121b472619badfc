"""Table 4: plans that stay for a day beside plans that are revised every five minutes, as figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from ctxflow.policies.agh import Problem, solve
from ctxflow.policies.agh.solution import Switching
from ctxflow.simulator.experiments import Figure, rounded
from ctxflow_papers.gh_agh.day import (
    SWITCHING,
    TRIALS,
    VOLATILITIES,
    WINDOWS,
    Days,
    Replanner,
    Step,
    demand,
    other_plans,
    rolling_problem,
    static,
)
from ctxflow_papers.gh_agh.printed import ROLLING

STATIC = {"dm_24h": "exact", "gh_24h": "gh", "agh_printed_24h": "agh-printed", "agh_24h": "agh"}
REVISED = {
    "agh_printed_5min": ("agh-printed", Switching()),
    "agh_printed_5min_priced": ("agh-printed", SWITCHING),
    "agh_5min_priced": ("agh", SWITCHING),
}
"""Methods, and what the planner takes a change to cost: nothing in the paper."""
OWN = "agh_5min_priced"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of it.

    :ivar own_trials: of the trials, how many with ctxflow's own AGH, which takes five times as long as the paper's;
        at the two highest volatilities alone.
    """

    trials: int = TRIALS
    windows: int = WINDOWS
    own_trials: int = 5
    volatilities: tuple[float, ...] = VOLATILITIES


@dataclasses.dataclass(frozen=True)
class Table:
    """What came out.

    :ivar days: by volatility and row.
    :ivar unloaded: the exact plan's and the paper's AGH's static days at the highest volatility, on the instance as
        it is, where throughput is plenty.
    :ivar other: by volatility, the share of windows in which GH deploys something else than at the start.
    """

    days: Mapping[tuple[float, str], Days]
    unloaded: Mapping[str, Days]
    other: Mapping[float, float]


def run(problem: Problem, scale: Scale, seed: int, time_limit: float, step: Step) -> Table:
    """All days.

    :param time_limit: seconds for the exact method's plan.
    """
    loaded = rolling_problem(problem)
    plans = {row: solve(loaded, method, time_limit=time_limit).allocation for row, method in STATIC.items()}
    days, other = {}, {}
    rounds = [(volatility, row) for volatility in scale.volatilities for row in REVISED]
    for number, (volatility, row) in enumerate(rounds):
        walk = demand(problem.shape[0], volatility, scale.trials, scale.windows, seed)
        if row == next(iter(REVISED)):
            for name, plan in plans.items():
                if plan is None:
                    raise ValueError(f"{STATIC[name]} has no plan after {time_limit:g} s: give it more")
                days[volatility, name] = static(loaded, plan, walk)
            other[volatility] = other_plans(loaded, walk, max(1, scale.windows // 6))
        if row == OWN and volatility not in scale.volatilities[-2:]:
            continue
        trials = scale.own_trials if row == OWN else scale.trials
        replanner = Replanner(loaded, *REVISED[row], seed)

        def tell(done: float, number: int = number) -> None:
            step((number + done) / len(rounds))

        days[volatility, row] = replanner.days(walk[:trials], tell)
    unloaded = {}
    for row in ("dm_24h", "agh_printed_24h"):
        plan = solve(problem, STATIC[row], time_limit=time_limit).allocation
        if plan is not None:
            unloaded[row] = static(problem, plan, walk)
    return Table(days, unloaded, other)


def figures(table: Table) -> Iterator[tuple[str, Figure]]:
    """Means, standard deviations, and what revising saves."""
    for (volatility, row), days in table.days.items():
        papers = ROLLING.get(_paper_row(row))
        place = VOLATILITIES.index(volatility)
        mean, deviation = (None, None) if papers is None else papers[place]
        name, count = f"rolling_{volatility}_{row}", len(days.dollars)
        spread = rounded(float(np.ptp(days.dollars)))
        yield name, Figure(rounded(float(days.dollars.mean())), "$", "lower", spread, count, mean)
        yield f"{name}_std", Figure(rounded(float(days.dollars.std())), "$", "lower", 0.0, count, deviation)
        if row in REVISED:
            yield from _saved(table, volatility, row)
            yield f"{name}_switches", Figure(rounded(float(days.switches.mean())), "a day", "lower", 0.0, count)
            switching = rounded(float(days.switching_dollars.mean()))
            yield f"{name}_switching", Figure(switching, "$", "lower", 0.0, count)
    for volatility, share in table.other.items():
        yield f"rolling_{volatility}_gh_other_plan", Figure(rounded(100 * share), "% of windows", "lower", 0.0, 1, 0.0)
    for row, days in table.unloaded.items():
        value = rounded(float(days.dollars.mean()))
        yield (
            f"rolling_unloaded_{row}",
            Figure(value, "$", "lower", rounded(float(np.ptp(days.dollars))), len(days.dollars)),
        )


def _saved(table: Table, volatility: float, row: str) -> Iterator[tuple[str, Figure]]:
    """A revised plan's cost with its changes over that of the exact plan that stays, and of the same method's."""
    days, place = table.days[volatility, row], VOLATILITIES.index(volatility)
    whole = float((days.dollars + days.switching_dollars).sum())
    for other in ("dm_24h", "agh_24h"):
        ours = other if other == "dm_24h" or row == OWN else "agh_printed_24h"
        stays = float(table.days[volatility, ours].dollars[: len(days.dollars)].sum())
        paper = rounded(100 * (ROLLING["agh_5min"][place][0] / ROLLING[other][place][0] - 1))
        name = f"rolling_{volatility}_{row}_vs_{'dm' if other == 'dm_24h' else 'static'}"
        yield (
            name,
            Figure(rounded(round(100 * (whole / stays - 1), 6) + 0.0), "%", "lower", 0.0, len(days.dollars), paper),
        )


def _paper_row(row: str) -> str:
    """The paper's row beside one of ours."""
    return row.replace("_printed", "").replace("_priced", "")
