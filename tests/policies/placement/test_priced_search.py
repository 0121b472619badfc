"""Sets of options: what their prices bound, and a search that follows the bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxflow.policies.agh import check, solve
from ctxflow.policies.agh.draft import Choices, Mechanisms
from ctxflow.policies.agh.heuristics import prohibitive
from ctxflow.policies.agh.option_sets import OptionSets
from ctxflow.policies.agh.priced_search import PricedSearch, neighbourhood
from ctxflow.policies.agh.problem import Arrays
from ctxflow.policies.agh.set_program import OptionTable, cuts
from ctxflow_papers.gh_agh.instances import BOUND_BY, draw, tightened
from suite.depth import some


def sets_of(limit, seed, shape=(3, 2, 3)):
    arrays = Arrays.of(tightened(draw(seed, shape), limit, seed))
    return OptionSets(OptionTable(arrays, prohibitive(arrays)))


@settings(max_examples=40, deadline=None)
@given(
    limit=st.sampled_from(BOUND_BY),
    seed=st.integers(0, 50),
    tries=st.lists(st.lists(st.integers(0, 999), max_size=3), min_size=2, max_size=5),
)
@example(limit="budget", seed=25, tries=[[], [0]])  # Of which no option fits the budget.
def test_no_set_costs_less_than_the_bound_that_others_prices_give(limit, seed, tries):
    sets = sets_of(limit, seed)
    count = len(sets.options.pair)
    chosen = [sorted({number % count for number in each}) if count else [] for each in tries]
    single = [each for each in chosen if len(set(sets.options.pair[each])) == len(each)]
    judged = [found for found in map(sets.judge, single) if found is not None]
    for found in judged:
        slack = 1e-6 * max(1.0, abs(found.relaxed))
        assert sets.bounds(found.chosen)[0] <= found.relaxed + slack
        sets.settle(found, np.inf, True)
        assert found.relaxed <= found.total + slack


@settings(max_examples=20, deadline=None)
@given(limit=st.sampled_from(BOUND_BY), seed=st.integers(0, 50))
@example(limit="budget", seed=33)  # Of which no option fits the budget.
def test_bounds_of_added_options_are_those_of_the_sets(limit, seed):
    sets = sets_of(limit, seed)
    assert sets.judge([]) is not None
    room = sets.options.room_beside([])
    single = sets.bounds([], room[:, None])
    assert all(single[n] == pytest.approx(sets.bounds([o])[0]) for n, o in enumerate(room))
    pairs = sets.bounds_of_pairs([], room)
    for n, one in enumerate(room[:6]):
        others = [sets.bounds([one, other])[0] for other in room]
        assert pairs[n] <= min(others) + 1e-6 * max(1.0, abs(min(others)))


@settings(max_examples=some(8, deeply=25), deadline=None)
@given(limit=st.sampled_from(BOUND_BY), seed=st.integers(0, 200))
def test_what_the_search_finds_keeps_every_constraint_and_costs_what_it_says(limit, seed):
    arrays = Arrays.of(tightened(draw(seed, (4, 3, 4)), limit, seed))
    sets = OptionSets(OptionTable(arrays, prohibitive(arrays)))
    found = PricedSearch(sets, 100_000).search([])
    allocation = sets.draft(found, Choices(arrays, Mechanisms())).allocation()
    assert check(arrays.problem, allocation) == []
    assert allocation.costs(arrays.problem).total == pytest.approx(found.total, rel=1e-6)


@pytest.mark.release
def test_it_finds_two_deployments_of_which_neither_alone_is_better():
    """The paper's instance, its work 120 times: one large deployment is the best of one, two small ones cost less."""
    problem = draw(1)
    data = [[[120 * each for each in row] for row in plane] for plane in problem.gflop_per_token]
    heavy = problem.model_copy(update={"gflop_per_token": tuple(tuple(map(tuple, plane)) for plane in data)})
    best = solve(heavy, "exact")
    assert best.proven
    assert solve(heavy, "agh").costs.total <= best.costs.total * 1.02


def test_a_neighbourhood_has_the_set_the_other_sizes_of_its_pairs_and_some_more():
    sets = sets_of("throughput", 3)
    found = PricedSearch(sets, 100_000).search([])
    assert found.chosen and found.total < sets.judge([]).total
    mask = neighbourhood(sets, found.chosen, 5)
    own = sets.options.options[list(found.chosen)]
    assert all(mask[tuple(each)] for each in own)
    pairs = {tuple(each[:2]) for each in own}
    options = {tuple(each) for each in sets.options.options.tolist()}
    assert all(mask[each] for each in options if each[:2] in pairs)
    assert mask.sum() == min(len(options), sum(each[:2] in pairs for each in options) + 5)


def test_cuts_say_what_some_options_can_serve_alone():
    delay, error = np.array([0.5, 2.0, 4.0]), np.array([2.0, 0.5, 0.1])
    found = cuts(delay, error, 1.0)
    for cut in found:
        served = 0.0
        grid = np.linspace(0, 1, 41)
        for shares in itertools.product(grid, repeat=len(cut.inside)):
            x = np.array(shares)
            if x.sum() <= 1 and delay[cut.inside] @ x <= 1 + 1e-9 and error[cut.inside] @ x <= 1 + 1e-9:
                served = max(served, x.sum())
        assert served <= cut.alone + 1e-9
        assert cut.alone - served <= 0.06
    assert found and found[0].inside.tolist() == [2]
