"""Plans in operation: many scenarios at once come to what each comes to alone."""

import numpy as np
import pytest

from ctxflow.policies.agh import Allocation, solve
from ctxflow.policies.agh.problem import paper_instance
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.operation import AT_ONCE, keeps_up, operate
from ctxflow_papers.gh_agh.studies import perturbed, stress

PROBLEM = paper_instance()


def busy():
    """The paper's instance with work that fills its GPUs."""
    table = tuple(tuple((10.0,) * 10 for _ in range(6)) for _ in range(6))
    return PROBLEM.model_copy(update={"gflop_per_token": table, "storage_gb": 1e6, "budget_dollars": 1e3})


def test_scenarios_share_nothing():
    plan = solve(PROBLEM, "agh").allocation
    random = np.random.default_rng(0)
    rates = random.uniform(0.8, 1.2, (AT_ONCE + 3, 6))
    delays, errors = random.uniform(0.75, 1.5, (2, AT_ONCE + 3, *PROBLEM.shape))
    together = operate(PROBLEM, plan, rates, delays, errors)
    for n in (0, 7, AT_ONCE, AT_ONCE + 2):
        alone = operate(PROBLEM, plan, rates[n : n + 1], delays[n : n + 1], errors[n : n + 1])
        assert together.total[n] == pytest.approx(alone.total[0], rel=1e-6)
        assert together.unserved[n] == pytest.approx(alone.unserved[0], abs=1e-6)


def test_rates_alone_come_to_the_same_by_the_short_way():
    problem = busy()
    plan = solve(problem, "agh").allocation
    rates = np.random.default_rng(1).uniform(0.5, 1.5, (40, 6)) * np.linspace(0.5, 9.0, 40)[:, None]
    full = keeps_up(problem, plan, rates)
    assert 0 < full.sum() < len(rates), "some fill the GPUs, some do not"
    ones = np.ones((len(rates), *problem.shape))
    short, long = operate(problem, plan, rates), operate(problem, plan, rates, ones, ones)
    assert short.total == pytest.approx(long.total, rel=1e-6)
    assert (short.unserved[full] < 1e-6).all() and short.unserved.max() > 0.01


def test_a_plan_of_nothing_serves_nothing():
    nothing = Allocation((), (), (1.0,) * 6)
    found = operate(PROBLEM, nothing, np.ones((2, 6)))
    assert found.unserved.min() == 1.0
    assert found.total == pytest.approx(sum(kind.unserved_dollars for kind in PROBLEM.query_types))
    assert keeps_up(PROBLEM, nothing, np.ones((2, 6))).all()


def test_a_margin_is_worth_its_rent_under_stress():
    rows = {row["method"]: row for row in stress(PROBLEM, ("agh", "agh+1.25"), (1.5,), scenarios=40)}
    assert rows["agh+1.25"]["rental"] > rows["agh"]["rental"]
    assert rows["agh+1.25"]["cost"] < rows["agh"]["cost"] / 2
    assert rows["agh+1.25"]["violated"] < rows["agh"]["violated"]
    terms = ("rental", "model_storage", "data_storage", "delay", "unserved")
    assert sum(rows["agh"][term] for term in terms) == pytest.approx(rows["agh"]["cost"])


def test_the_same_seed_gives_the_same_scenarios():
    problem = draw(0, (3, 3, 3))
    plan = solve(problem, "gh").allocation
    first, again, other = (perturbed(problem, plan, 5, seed=seed).total for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
