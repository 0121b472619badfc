"""Planning again: what is kept, when it is changed, and what a change costs."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.agh import Allocation, Deployment, Route, check, solve
from ctxflow.policies.agh.problem import Arrays, paper_instance
from ctxflow.policies.agh.solution import Switching, carried, over_deployments, plan_rolling
from ctxflow_papers.gh_agh.instances import draw

PROBLEM = paper_instance()


def with_rates(problem, factor):
    kinds = tuple(
        kind.model_copy(update={"queries_per_hour": kind.queries_per_hour * factor}) for kind in problem.query_types
    )
    return problem.model_copy(update={"query_types": kinds})


def test_the_first_plan_is_the_method_s():
    first = plan_rolling(PROBLEM, method="agh-printed")
    assert first.allocation == solve(PROBLEM, "agh-printed").allocation
    assert first.switched and first.switching_dollars == 0


def test_nothing_changes_without_a_reason():
    first = plan_rolling(PROBLEM)
    again = plan_rolling(PROBLEM, first.allocation)
    assert not again.switched
    assert again.allocation == first.allocation
    assert again.kept_dollars == pytest.approx(solve(PROBLEM, "agh").costs.total)
    assert str(again).startswith("keeps what runs")


def test_a_dear_plan_is_left_unless_leaving_costs_more():
    dear = solve(PROBLEM, "gh").allocation
    assert plan_rolling(PROBLEM, dear).switched
    saved = solve(PROBLEM, "gh").costs.total - solve(PROBLEM, "agh").costs.total
    for slow in (Switching(start_seconds=1e6), Switching(load_seconds_per_gb=1e6), Switching(least_gain=0.9)):
        found = plan_rolling(PROBLEM, dear, switching=slow)
        assert not found.switched and found.allocation.deployments == dear.deployments
    brief = Switching(start_seconds=1800.0, hold_hours=0.01)
    assert not plan_rolling(PROBLEM, dear, switching=brief).switched
    longer = dataclasses.replace(brief, hold_hours=24.0)
    found = plan_rolling(PROBLEM, dear, switching=longer)
    assert found.switched and 0 < found.switching_dollars < saved
    assert found.kept_dollars - found.new_dollars == pytest.approx(saved)


def test_what_breaks_a_constraint_is_left_whatever_it_costs():
    dear = solve(PROBLEM, "gh").allocation
    must = tuple(kind.model_copy(update={"max_unserved": 0.0}) for kind in PROBLEM.query_types)
    strict = PROBLEM.model_copy(update={"query_types": must})
    fewer = dataclasses.replace(dear, deployments=dear.deployments[:1], routes=(), unserved=(1.0,) * 6)
    found = plan_rolling(strict, fewer, switching=Switching(start_seconds=1e9))
    assert found.switched and check(strict, found.allocation) == []


def test_gpus_that_went_away_take_their_deployments_along():
    plan = solve(PROBLEM, "agh").allocation
    (tier,) = {each.tier for each in plan.deployments}
    gone = PROBLEM.model_copy(update={
        "tiers": tuple(
            each.model_copy(update={"gpus": 0}) if n == tier else each for n, each in enumerate(PROBLEM.tiers)
        )
    })  # fmt: skip
    found = plan_rolling(gone, plan)
    assert found.switched and check(gone, found.allocation) == []
    assert all(each.tier != tier for each in found.allocation.deployments)
    one = carried(plan, PROBLEM, with_stock(PROBLEM, tier, 1))
    assert [each.gpus for each in one.deployments] == [1]


def with_stock(problem, tier, gpus):
    tiers = list(problem.tiers)
    tiers[tier] = tiers[tier].model_copy(update={"gpus": gpus})
    return problem.model_copy(update={"tiers": tuple(tiers)})


def test_plans_are_carried_over_by_name():
    big, small = draw(1), draw(1)
    keep = [0, 1, 2, 4, 5]
    tables = {
        field: tuple(tuple(tuple(row[k] for k in range(10)) for row in getattr(big, field)[i]) for i in keep)
        for field in ("compute_seconds_per_token", "communication_seconds_per_token", "error", "gflop_per_token",
                      "resident_queries")
    }  # fmt: skip
    small = big.model_copy(update={"query_types": tuple(big.query_types[i] for i in keep), **tables})
    plan = solve(big, "agh").allocation
    found = plan_rolling(small, plan, before=big)
    assert not found.switched
    assert check(small, found.allocation) == []
    names = {small.query_types[route.query_type].name for route in found.allocation.routes}
    assert names == {kind.name for kind in small.query_types}


def test_what_is_not_allowed_any_more_is_left_out():
    plan = Allocation((Deployment(0, 0, 8, 1, 8),), (Route(0, 0, 0, 1.0),), (0.0,) + (1.0,) * 5)
    tiers = tuple(tier.model_copy(update={"tensor_parallel": (1, 2)}) for tier in PROBLEM.tiers)
    assert carried(plan, PROBLEM, PROBLEM) == plan
    found = carried(plan, PROBLEM, PROBLEM.model_copy(update={"tiers": tiers}))
    assert (found.deployments, found.routes, found.unserved) == ((), (), (1.0,) * 6)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 500),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5)),
    factor=st.sampled_from([0.2, 0.9, 1.5, 4.0]),
    start=st.sampled_from([0.0, 300.0]),
)
def test_every_step_keeps_all_constraints_and_costs_no_more(seed, shape, factor, start):
    problem = draw(seed, shape)
    previous = solve(problem, "gh").allocation
    later = with_rates(problem, factor)
    found = plan_rolling(later, previous, method="agh-printed", switching=Switching(start_seconds=start))
    assert check(later, found.allocation) == []
    total = found.allocation.costs(later).total
    assert total == pytest.approx(found.new_dollars if found.switched else min(found.kept_dollars, total))
    assert total <= found.kept_dollars + 1e-6


def test_routes_are_chosen_anew_over_what_runs():
    plan = solve(PROBLEM, "agh").allocation
    nowhere = dataclasses.replace(plan, routes=(), unserved=(1.0,) * 6)
    again = over_deployments(Arrays.of(PROBLEM), nowhere).allocation()
    assert again.deployments == plan.deployments
    assert check(PROBLEM, again) == [] and again.costs(PROBLEM).unserved < 6 * 100


@pytest.mark.parametrize("field", ["start_seconds", "load_seconds_per_gb", "hold_hours", "least_gain"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_nonsense_prices_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Switching(**{field: value})
