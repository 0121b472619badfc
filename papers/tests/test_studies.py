"""The studies: what is known of their figures beforehand."""

import pytest

from ctxflow.policies.agh import solve
from ctxflow.policies.agh.problem import paper_instance
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.studies import ablation, second_stage, stress


@pytest.mark.parametrize("method", ["gh", "agh", "exact"])
def test_a_scenario_as_planned_costs_no_more_than_planned(method):
    problem = draw(1, (3, 3, 4)) if method == "exact" else paper_instance()
    plan = solve(problem, method)
    cost, violated = second_stage(problem, plan.allocation, scenarios=1, spread=0.0, arrivals=0.0)
    assert cost <= plan.costs.total + 1e-6
    assert violated == 0.0
    if method == "exact":  # Nothing is cheaper than the optimum.
        assert cost == pytest.approx(plan.costs.total, rel=1e-3)


def test_more_stress_never_costs_less():
    rows = stress(paper_instance(), ("gh", "agh"), (1.0, 1.2, 1.5), scenarios=20)
    assert [(row["method"], row["inflation"]) for row in rows][:3] == [("gh", 1.0), ("agh", 1.0), ("gh", 1.2)]
    for method in ("gh", "agh"):
        costs = [row["cost"] for row in rows if row["method"] == method]
        violated = [row["violated"] for row in rows if row["method"] == method]
        assert costs == sorted(costs)
        assert violated == sorted(violated)


def test_unserved_demand_is_paid_for():
    problem = paper_instance()
    plan = solve(problem, "agh")
    cost, violated = second_stage(problem, plan.allocation, scenarios=3, inflation=1e6)
    assert violated == 1.0
    assert cost > 0.99 * sum(kind.unserved_dollars for kind in problem.query_types)


def test_ablation():
    rows = {row["without"]: row for row in ablation([draw(seed) for seed in range(12)])}
    assert rows[""]["infeasible"] == rows["M2"]["infeasible"] == 0
    assert rows["M1"]["infeasible"] > 0 and "5i" in rows["M1"]["violated"]
    assert rows["M3"]["infeasible"] > 0 and rows["M3"]["violated"] == ["5i"]
    assert rows["M2"]["cost"] > rows[""]["cost"]
