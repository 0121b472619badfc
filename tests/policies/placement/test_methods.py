"""The methods: feasible answers, their order by cost, the exact bound, the mechanisms, hopeless problems."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.agh import METHODS, Mechanisms, check, solve
from ctxflow.policies.agh.draft import Choices
from ctxflow.policies.agh.exact import _credible, exact
from ctxflow.policies.agh.heuristics import greedy, orderings, random_starts
from ctxflow.policies.agh.problem import Arrays, azure_instance, paper_instance
from ctxflow_papers.gh_agh.instances import draw, tightened
from suite.depth import for_release, some

SEEDS = st.integers(0, 10**6)
SMALL = draw(1, (3, 3, 4))
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


def altered(problem, field, index=None, **values):
    """A problem with values of one of its parts changed, or of all of them."""
    parts = list(getattr(problem, field))
    for n in range(len(parts)) if index is None else [index]:
        parts[n] = parts[n].model_copy(update=values)
    return problem.model_copy(update={field: tuple(parts)})


@pytest.mark.parametrize(
    "problem", [SMALL, *for_release(paper_instance(), azure_instance())], ids=lambda problem: problem.name
)
def test_methods_on_the_instances(problem):
    found = {method: solve(problem, method) for method in METHODS}
    total = {method: each.costs.total for method, each in found.items()}
    assert all(each.feasible for each in found.values())
    assert found["exact"].proven and found["exact"].gap < 1e-4
    bound = found["exact"].bound
    assert bound <= total["improved"] + 1e-6 <= total["agh"] + 2e-6 <= total["gh"] + 3e-6
    assert total["agh"] <= 1.02 * bound
    assert total["improved"] <= 1.005 * bound


@settings(max_examples=some(8, deeply=25), deadline=None)
@given(
    seed=SEEDS, shape=SHAPES, budget=st.sampled_from([20.0, 45.0, 75.0, 100.0]), storage=st.sampled_from([300, 1000])
)
def test_heuristics_keep_every_constraint(seed, shape, budget, storage):
    problem = draw(seed, shape, budget_dollars=budget, storage_gb=storage)
    gh, printed, agh = (solve(problem, method) for method in ("gh", "agh-printed", "agh"))
    assert [*gh.violations, *printed.violations, *agh.violations] == []
    assert agh.costs.total <= gh.costs.total + 1e-6
    assert printed.costs.total <= gh.costs.total + 1e-6


@settings(max_examples=some(4, deeply=12), deadline=None)
@given(seed=SEEDS, shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))
def test_no_answer_is_below_the_bound(seed, shape):
    problem = draw(seed, shape)
    found = solve(problem, "exact", time_limit=20)
    assert found.feasible
    for method in ("gh", "agh", "improved"):
        assert solve(problem, method).costs.total >= found.bound - 1e-6 * max(1.0, found.bound)


@settings(max_examples=some(3, deeply=6), deadline=None)
@given(
    seed=st.integers(0, 99),
    shape=st.sampled_from(some([(3, 3, 3)], deeply=[(3, 3, 3), (4, 4, 5), (5, 3, 4)])),
    storage=st.sampled_from([300.0, None]),
)
def test_agh_leaves_hardly_more_unserved_than_the_exact_method_and_never_costs_more_than_gh(seed, shape, storage):
    problem = draw(seed, shape, storage_gb=storage)
    gh, agh, exact = (solve(problem, method, time_limit=20) for method in ("gh", "agh", "exact"))
    assert gh.feasible and agh.feasible and exact.feasible and exact.proven
    more = np.array(agh.allocation.unserved) - np.array(exact.allocation.unserved)
    assert 100 * more.mean() <= 1.0
    assert agh.costs.total <= gh.costs.total + 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_the_paper_s_formulation_has_the_same_optimum(seed):
    arrays = Arrays.of(draw(seed, (3, 3, 3)))
    tight, printed = exact(arrays), exact(arrays, tightened=False)
    assert tight.closed and printed.closed
    assert tight.bound == pytest.approx(printed.bound, rel=1e-3)


def test_the_optimum_of_a_small_problem_by_hand():
    """One type, one model, two tiers: the cheaper one needs two GPUs for the delay, and still costs less."""
    problem = altered(draw(0, (1, 1, 2)), "tiers", dollars_per_hour=1.0, memory_gb=1000.0)
    problem = altered(problem, "tiers", 0, dollars_per_hour=3.0)
    problem = altered(problem, "query_types", delay_dollars_per_ms=0.0, max_error=1.0, max_delay_seconds=1.0)
    slow = 1.5 / problem.query_types[0].tokens
    table = (((slow / 2, slow),),)
    problem = problem.model_copy(update={
        "compute_seconds_per_token": table, "budget_dollars": 1e4, "storage_gb": 1e4,
        "communication_seconds_per_token": (((0.0, 0.0),),),
    })  # fmt: skip
    for method in METHODS:
        (deployment,) = solve(problem, method).allocation.deployments
        assert (deployment.tier, deployment.gpus) == (1, 2), method


def test_a_wrong_optimum_is_not_believed():
    problem = draw(1, (3, 3, 3))
    arrays = Arrays.of(problem)
    right = exact(arrays)
    cheap = greedy(arrays).total
    assert _credible(problem, right, cheap, 1e-4)
    assert not _credible(problem, dataclasses.replace(right, bound=2 * cheap), cheap, 1e-4)
    assert not _credible(problem, dataclasses.replace(right, allocation=None, bound=None), cheap, 1e-4)
    broken = dataclasses.replace(right.allocation, deployments=())
    routed = dataclasses.replace(right, allocation=dataclasses.replace(broken, routes=()))
    assert not _credible(problem, routed, cheap, 1e-4)


def test_at_its_time_limit_exact_has_a_bound_and_is_never_worse_than_agh():
    for seed in some((3,), deeply=(3, 5)):
        problem = tightened(draw(seed, (6, 6, 10)), "throughput", seed)
        found = solve(problem, "exact", time_limit=0.01)
        assert not found.proven
        assert found.bound is None or found.bound <= found.costs.total
        assert found.costs.total <= solve(problem, "agh").costs.total + 1e-6


def test_improved_counts_work_and_not_time():
    problem = tightened(draw(4, (4, 4, 5)), "throughput", 4)
    assert solve(problem, "improved").allocation == solve(problem, "improved").allocation


@pytest.mark.parametrize(("switch", "broken"), [("select", {"5f", "5i"}), ("upgrade", {"5i"})])
def test_without_m1_or_m3_infeasible_answers_appear(switch, broken):
    seen = set()
    for seed in range(12):
        found = solve(draw(seed), "agh", mechanisms=Mechanisms(**{switch: False}))
        seen |= {violation.constraint for violation in found.violations}
    assert "5i" in seen
    assert seen <= broken


def test_without_m1_a_model_is_put_where_it_does_not_fit():
    problem = altered(paper_instance(), "models", weights_gb=60.0)
    found = solve(problem, "gh", mechanisms=Mechanisms(select=False))
    assert "5f" in {violation.constraint for violation in found.violations}
    assert solve(problem, "gh").feasible


def test_without_m2_the_cost_rises():
    with_m2 = [solve(draw(seed), "agh-printed").costs.total for seed in range(6)]
    without = [solve(draw(seed), "agh", mechanisms=Mechanisms(rank=False)) for seed in range(6)]
    assert all(found.feasible for found in without)
    assert sum(found.costs.total for found in without) > sum(with_m2)


def test_m1_chooses_the_fewest_gpus_and_then_the_smaller_delay():
    arrays = Arrays.of(paper_instance())
    chosen = Choices(arrays, Mechanisms()).config
    for i, j, k in itertools.product(*map(range, chosen.shape)):
        fits = arrays.fits[j, k] & (arrays.delay[i, j, k] <= arrays.max_delay[i])
        fits &= arrays.rent[k] * arrays.gpus <= arrays.problem.budget_dollars
        if chosen[i, j, k] < 0:
            assert not fits.any()
            continue
        best = min(np.flatnonzero(fits), key=lambda c: (arrays.gpus[c], arrays.delay[i, j, k, c]))
        assert chosen[i, j, k] == best


def test_orderings_are_eight_and_some_at_random():
    arrays = Arrays.of(paper_instance())
    found = list(orderings(arrays, seed=3))
    assert len(found) == 8 + random_starts(arrays) == 28
    assert all(sorted(order) == list(range(6)) for order in found)
    assert found == list(orderings(arrays, seed=3)) != list(orderings(arrays, seed=4))


@pytest.mark.parametrize(
    ("shape", "starts"), [((6, 6, 10), 20), ((10, 10, 10), 10), ((15, 15, 10), 5), ((20, 20, 20), 3)]
)
def test_random_starts(shape, starts):
    assert random_starts(Arrays.of(draw(0, shape))) == starts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("problem", "constraint", "text"),
    [
        (paper_instance().model_copy(update={"budget_dollars": 0.0}), "5c", "the budget of 0 $ does not pay"),
        (altered(paper_instance(), "tiers", memory_gb=0.01), "5f", "no model fits any tier"),
        (altered(paper_instance(), "tiers", gpus=0), "gpus", "no tier has as many GPUs"),
        (paper_instance().model_copy(update={"storage_gb": 1.0}), "5h", "holds no model"),
        (altered(paper_instance(), "query_types", max_delay_seconds=1e-6), "5i", "the fastest model"),
        (altered(paper_instance(), "query_types", max_error=0.0), "5j", "the best model"),
        *for_release(
            (altered(paper_instance(), "query_types", 5, max_error=0.014, max_delay_seconds=2.0), "5j", "contradict")
        ),
    ],
)
def test_the_impossible_is_explained(problem, constraint, text, method):
    found = solve(problem, method, time_limit=60)
    assert found.feasible
    assert found.allocation.unserved[5] > 0
    reason = next(each for each in found.reasons if each.query_type in ("", "Video"))
    assert reason.constraint == constraint
    assert text in reason.text


def test_what_has_to_be_served_and_cannot_be_is_infeasible():
    problem = some(SMALL, deeply=paper_instance())
    problem = altered(problem, "query_types", 0, max_delay_seconds=1e-4, max_unserved=0.1)
    assert [each.constraint for each in solve(problem, "agh").violations] == ["unserved"]
    found = solve(problem, "exact")
    assert (found.allocation, found.proven, found.feasible) == (None, True, False)
    assert found.reasons[0].constraint == "5i"


def test_the_stock_of_gpus_is_kept():
    problem = altered(paper_instance(), "tiers", gpus=1)
    for method in METHODS:
        found = solve(problem, method)
        assert found.feasible and all(each.gpus == 1 for each in found.allocation.deployments)


def test_unknown_method():
    with pytest.raises(ValueError, match="there is no placement method 'best': choose one of gh, agh"):
        solve(paper_instance(), "best")


def test_data_of_a_solution():
    problem = paper_instance()
    data = solve(problem, "agh").as_data()
    assert data["feasible"] and data["bound"] is None and data["violations"] == []
    assert sum(route["share"] for route in data["routes"]) == pytest.approx(6)
    assert check(problem, solve(problem, "agh").allocation) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("most", [0.0, 0.3])
def test_what_has_to_be_served_is_served_even_where_leaving_it_is_cheaper(method, most):
    problem = altered(some(SMALL, deeply=paper_instance()), "query_types", unserved_dollars=0.01)
    found = solve(altered(problem, "query_types", max_unserved=most), method)
    assert found.feasible
    assert max(found.allocation.unserved) <= most + 1e-6


@pytest.mark.parametrize("seeds", [range(2), *for_release(range(2, 30))], ids=str)
def test_required_demand_keeps_the_order_of_the_methods(seeds):
    for seed in seeds:
        problem = altered(draw(seed, (3, 3, 4)), "query_types", unserved_dollars=1.0, max_unserved=0.1)
        found = {method: solve(problem, method) for method in ("gh", "agh", "improved", "exact")}
        total = {name: each.costs.total if each.feasible else np.inf for name, each in found.items()}
        assert total["improved"] <= total["agh"] + 1e-6 <= total["gh"] + 2e-6
        assert total["exact"] <= total["improved"] * (1 + 1e-4) + 1e-6


def test_an_answer_that_the_checker_refuses_is_not_an_improvement():
    problem = altered(draw(5, (2, 2, 2)), "query_types", 0, queries_per_hour=1e13)
    found = {method: solve(problem, method) for method in ("agh", "improved", "exact")}
    assert found["improved"].feasible
    assert found["improved"].costs.total <= found["agh"].costs.total
    assert not found["exact"].proven or found["exact"].gap <= 1e-4
