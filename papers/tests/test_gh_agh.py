"""GH's and AGH's evaluation, small: what it is made of, and what has to come out whatever the chance."""

import dataclasses

import numpy as np
import pytest

from ctxflow.policies.agh import check, solve
from ctxflow.policies.agh.problem import paper_instance
from ctxflow.policies.agh.solution import Switching
from ctxflow.simulator.experiments import ExperimentRequest, report
from ctxflow_papers.gh_agh import experiments, printed, reproduction, table4
from ctxflow_papers.gh_agh.day import (
    SWITCHING,
    VOLATILITIES,
    Replanner,
    at,
    demand,
    other_plans,
    rolling_problem,
    static,
)
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.reproduction import reproduce

PROBLEM = paper_instance()
LOADED = rolling_problem(PROBLEM)


def test_demand_is_a_geometric_walk_from_one():
    walk = demand(6, 0.05, 30, 288, 3)
    assert walk.shape == (30, 288, 6)
    assert (walk[:, 0] == 1.0).all()
    steps = np.diff(np.log(walk), axis=1)
    assert steps.std() == pytest.approx(0.05, rel=0.02) and abs(steps.mean()) < 0.001
    assert np.log(walk[:, -1]).std() == pytest.approx(0.05 * np.sqrt(287), rel=0.25), "85 % over the day"
    assert (demand(6, 0.05, 30, 288, 3) == walk).all()
    assert (demand(6, 0.05, 30, 288, 4) != walk).any()


def test_a_day_without_change_costs_what_was_planned():
    plan = solve(LOADED, "agh")
    calm = np.ones((2, 3, 6))
    assert static(LOADED, plan.allocation, calm).dollars == pytest.approx(plan.costs.total)
    revised = Replanner(LOADED, "agh", Switching(), 0)
    days = revised.days(calm)
    assert days.dollars == pytest.approx(plan.costs.total)
    assert days.switches.tolist() == [0, 0] and revised.solved == 0


def test_plans_follow_a_demand_that_grows_and_falls():
    walk = np.ones((1, 6, 6))
    walk[0, 2:4] = 4.0
    stays = static(LOADED, solve(LOADED, "agh").allocation, walk)
    for method in ("agh-printed", "agh"):
        for switching in (Switching(), SWITCHING):
            replanner = Replanner(LOADED, method, switching, 0)
            days = replanner.days(walk)
            assert days.dollars[0] < stays.dollars[0] / 2, "the static plan leaves demand unserved"
            assert days.switches[0] >= 1 and days.switching_dollars[0] > 0
            assert replanner.solved >= 2
        runs, _, _ = replanner._day(walk[0], np.zeros(6, dtype=bool))
        for plan, factors in zip(runs, walk[0], strict=True):
            assert check(at(LOADED, factors), plan) == []


def test_windows_that_are_left_out_would_have_changed_nothing():
    walk = demand(6, 0.04, 1, 40, 0)
    replanner = Replanner(LOADED, "agh-printed", Switching(), 0)
    short = replanner.days(walk)
    skipped = replanner.solved
    _, switches, _ = replanner._day(walk[0], np.zeros(40, dtype=bool))
    assert replanner.solved - skipped == 40 > skipped
    assert switches == short.switches[0]


def test_a_price_on_switching_makes_plans_stay_longer():
    walk = demand(6, 0.05, 1, 60, 2) * 1.3
    free, dear = (Replanner(LOADED, "agh-printed", switching, 0).days(walk) for switching in (
        Switching(), Switching(start_seconds=3600.0, load_seconds_per_gb=60.0, hold_hours=0.1, least_gain=0.05)
    ))  # fmt: skip
    assert dear.switches[0] <= free.switches[0]
    assert dear.switching_dollars[0] <= free.switching_dollars[0]


def test_gh_keeps_its_plan_while_nothing_moves():
    assert other_plans(LOADED, np.ones((1, 4, 6)), 2) == 0.0
    reversed_rates = np.array([kind.queries_per_hour for kind in LOADED.query_types])[::-1]
    walk = np.ones((1, 2, 6)) * (reversed_rates / reversed_rates[::-1])
    assert 0.0 <= other_plans(LOADED, walk, 1) <= 1.0


def test_scaled_changes_what_it_says():
    found = experiments.scaled(PROBLEM, delay=2.0, error=0.5, price=3.0, budget=0.5, media=5.0)
    for before, after in zip(PROBLEM.query_types, found.query_types, strict=True):
        assert after.max_delay_seconds == 2 * before.max_delay_seconds
        assert after.max_error == before.max_error / 2
        media = 5.0 if before.name in ("Image", "Video") else 1.0
        assert after.unserved_dollars == media * before.unserved_dollars
    assert found.tiers[0].dollars_per_hour == 3 * PROBLEM.tiers[0].dollars_per_hour
    assert found.budget_dollars == PROBLEM.budget_dollars / 2
    assert experiments.scaled(PROBLEM) == PROBLEM


def test_tighter_limits_and_higher_prices_never_cost_less():
    problem = draw(1, (4, 4, 5))
    for axes, falls in ((("delay", "error"), (True, True)), (("price", "delay"), (False, True))):
        grid = experiments.grid(problem, *axes, (0.8, 1.25))
        for other in (0.8, 1.25):
            for position in (0, 1):
                tight, wide = ((each, other) if position == 0 else (other, each) for each in (0.8, 1.25))
                low, high = (grid[wide], grid[tight]) if falls[position] else (grid[tight], grid[wide])
                assert low <= high * 1.02, "AGH is within 2 % of the optimum, which is monotone"
    storages = experiments.storages(problem, (50.0, 1000.0))
    assert storages[50.0][0] >= storages[1000.0][0] and storages[50.0][1] > storages[1000.0][1]


@pytest.mark.release
def test_quick_figures(tmp_path):
    told = []
    figures = reproduce(ExperimentRequest(quick=True, pictures=tmp_path, progress=lambda done, what: told.append(done)))
    assert told == pytest.approx(sorted(told)) and told[-1] == pytest.approx(1.0)  # Parts are floats that are added up.
    assert sum(reproduction.PARTS.values()) == pytest.approx(1.0)
    assert all(figure.paper is None for figure in figures.values()), "a quick run is not on the paper's instance"
    names = [f"gh-agh-{name}.png" for name in ("figure2abc", "figure2def", "table4", "table5")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for method in ("exact", "gh", "agh_printed", "agh", "improved"):
        costs = [figures[f"stress_{inflation}_{method}_cost"].value for inflation in (1.0, 1.2, 1.5)]
        assert costs == sorted(costs)
    assert figures["ablation_all_feasible"].value == 1
    assert set(report("gh-agh", figures)) == {"benchmark", "machine", "versions", "figures"}


def test_the_paper_s_numbers_stand_beside_ours():
    table = table4.Table(
        {(0.05, row): table4.Days(np.array([100.0, 120.0]), np.zeros(2), np.zeros(2)) for row in
         [*table4.STATIC, *table4.REVISED]}, {}, {0.05: 0.5},
    )  # fmt: skip
    figures = dict(table4.figures(table))
    assert figures["rolling_0.05_dm_24h"].paper == 909 and figures["rolling_0.05_dm_24h"].value == 110
    assert figures["rolling_0.05_agh_printed_5min"].paper == figures["rolling_0.05_agh_5min_priced"].paper == 474
    assert figures["rolling_0.05_agh_printed_5min_vs_dm"].paper == pytest.approx(-47.9, abs=0.1)
    assert figures["rolling_0.05_agh_printed_5min_vs_dm"].value == 0
    rows = [{"without": "M2", "infeasible": 0.0, "cost": 60.0, "violated": []}]
    alone = dict(reproduction._ablation(rows, [{"cost": 40.0}, *rows], 3))
    assert alone["ablation_without_M2_cost"].paper == 134.52
    assert alone["ablation_draws_without_M2_rise"] == dataclasses.replace(
        alone["ablation_draws_without_M2_rise"], value=50.0, paper=printed.WITHOUT_M2
    )
    assert len(printed.ROLLING["dm_24h"]) == len(VOLATILITIES)
