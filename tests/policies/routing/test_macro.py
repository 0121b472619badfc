"""Transport, the forecast and the look-ahead: what every allocation guarantees, and that the plans are the best."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ctxflow.policies.torta.macro import by_lookahead
from ctxflow.policies.torta.quantities import amounts, forecast
from ctxflow.policies.torta.transport import balanced, capped, costs, lookahead, whole

SETTINGS = settings(max_examples=40, deadline=None)
anything = st.one_of(
    st.sampled_from([0.0, 0.0, float("nan"), float("inf"), -float("inf"), -3.0, 1e-300, 1e300]), st.floats(0, 1000)
)


@st.composite
def worlds(draw, numbers=anything):
    regions = draw(st.integers(1, 5))
    vector = st.lists(numbers, min_size=regions, max_size=regions).map(np.array)
    table = st.lists(vector, min_size=regions, max_size=regions).map(np.array)
    return draw(vector), draw(vector), draw(table), draw(vector)


def on_simplex(shares):
    return bool(np.isfinite(shares).all() and (shares >= 0).all() and np.allclose(shares.sum(axis=1), 1, atol=1e-12))


@SETTINGS
@given(worlds())
def test_whatever_is_given_the_rows_are_on_the_simplex_and_nobody_goes_where_nothing_is(world):
    demand, capacity, cost, before = world
    plans = {
        "balanced": balanced(demand, capacity, cost),
        "capped": capped(demand, capacity, cost),
        "lookahead": lookahead(np.array([demand, demand]), capacity, cost, before),
    }
    there = amounts(capacity) > 0
    for name, shares in plans.items():
        assert on_simplex(shares), name
        if there.any():
            assert shares[:, ~there].max(initial=0.0) == 0.0, name


@SETTINGS
@given(worlds(st.floats(0.1, 100)))
def test_capped_is_the_cheapest_plan_within_the_capacity(world):
    demand, capacity, cost, _ = world
    capacity *= 1.01 * demand.sum() / capacity.sum()
    regions = len(demand)
    leaving = np.kron(np.eye(regions), np.ones((1, regions)))
    arriving = np.kron(np.ones((1, regions)), np.eye(regions))
    best = linprog(cost.ravel(), A_ub=arriving, b_ub=capacity, A_eq=leaving, b_eq=demand)
    flows = capped(demand, capacity, cost) * demand[:, None]
    assert (flows.sum(axis=0) <= capacity * (1 + 1e-6)).all()
    assert (flows * cost).sum() == pytest.approx(best.fun, rel=1e-6)
    ahead = lookahead(demand[None, :], capacity, cost, np.zeros(regions), switching=0.0) * demand[:, None]
    assert (ahead * cost).sum() == pytest.approx(best.fun, rel=1e-6)


@SETTINGS
@given(worlds(st.floats(0.1, 100)))
def test_balanced_gives_each_region_its_share_and_power_prices_change_nothing(world):
    demand, capacity, cost, power = world
    flows = balanced(demand, capacity, cost) * demand[:, None]
    assert np.allclose(flows.sum(axis=0) / demand.sum(), capacity / capacity.sum())
    dearer = balanced(demand, capacity, cost + power[None, :]) * demand[:, None]
    assert (dearer * cost).sum() == pytest.approx((flows * cost).sum(), rel=1e-6)


def test_capped_goes_where_power_is_cheap_and_spills_over_at_the_cap():
    cost = costs([0.3, 0.1], [[0.0, 0.1], [0.1, 0.0]])
    assert np.allclose(capped([6, 0], [9, 4], cost), [[1 / 3, 2 / 3], [0, 1]])


def test_too_much_demand_makes_all_regions_overfull_by_the_same_factor():
    for plan in (capped, lambda d, c, k: lookahead([d], c, k, [0, 0], switching=0.0)):
        flows = plan([30, 10], [10, 10], [[0.1, 0.9], [0.1, 0.9]]) * np.array([[30], [10]])
        assert np.allclose(flows.sum(axis=0), [20, 20])


@pytest.mark.parametrize("plan", [balanced, capped, lambda d, c, k: lookahead([d, d], c, k, [1, 1, 1])])
def test_a_region_that_vanishes_gets_nothing_though_it_has_demand(plan):
    shares = plan([5, 5, 5], [10, 0, 10], np.ones((3, 3)) - np.eye(3))
    assert on_simplex(shares)
    assert shares[:, 1].max() == 0


def test_one_region_keeps_its_tasks():
    for shares in (balanced([3], [1], [[0]]), capped([3], [1], [[0]]), lookahead([[3]], [1], [[0]], [0])):
        assert shares.tolist() == [[1.0]]


def test_without_any_capacity_tasks_stay_at_home():
    for shares in (balanced([3, 4], [0, 0], np.ones((2, 2))), lookahead([[3, 4]], [0, 0], np.ones((2, 2)), [0, 0])):
        assert np.array_equal(shares, np.eye(2))


def test_the_look_ahead_is_no_dearer_than_any_sequence_of_plans():
    demand, capacity, cost = (
        np.array([[4.0, 4.0], [1.0, 7.0]]),
        np.array([6.0, 8.0]),
        np.array([[0.2, 0.3], [0.5, 0.1]]),
    )
    before, switching = np.array([0.0, 8.0]), 0.3

    def price(first, second):
        flows = [first * demand[0][:, None], second * demand[1][:, None]]
        inflow = [before, *(each.sum(axis=0) for each in flows)]
        if any((each > capacity + 1e-9).any() for each in inflow[1:]):
            return np.inf
        rises = sum(np.maximum(b - a, 0).sum() for a, b in itertools.pairwise(inflow))
        return sum((each * cost).sum() for each in flows) + switching * rises

    steps = np.linspace(0, 1, 13)
    rows = [np.array([[a, 1 - a], [b, 1 - b]]) for a in steps for b in steps]
    best = min(price(first, second) for first in rows for second in rows)
    chosen = lookahead(demand, capacity, cost, before, switching)
    assert min(price(chosen, second) for second in rows) <= best + 1e-9
    myopic = min(price(capped(demand[0], capacity, cost), second) for second in rows)
    assert myopic > best + 0.01


@SETTINGS
@given(st.integers(1, 6), st.data())
def test_whole_numbers_add_up_and_are_next_to_the_exact_ones(regions, data):
    raw = np.array([[data.draw(st.floats(0, 1)) for _ in range(regions)] for _ in range(regions)]) + np.eye(regions)
    shares = raw / raw.sum(axis=1, keepdims=True)
    counts = np.array([data.draw(st.integers(0, 10_000)) for _ in range(regions)])
    given_out = whole(shares, counts)
    assert np.array_equal(given_out.sum(axis=1), counts)
    assert (given_out >= 0).all()
    assert np.abs(given_out - shares * counts[:, None]).max() < 1 + 1e-6


@SETTINGS
@given(st.lists(st.lists(anything, min_size=3, max_size=3), min_size=0, max_size=6), st.integers(1, 4))
def test_a_forecast_is_always_a_number_of_tasks(history, horizon):
    expected = forecast(np.array(history).reshape(-1, 3), horizon)
    assert expected.shape == (horizon, 3)
    assert np.isfinite(expected).all()
    assert (expected >= 0).all()


def test_a_forecast_follows_a_surge_with_its_trend_and_shares():
    totals = np.array([100.0, 100, 140, 180, 220])
    history = totals[:, None] * np.array([[0.25, 0.75]])
    expected = forecast(history)
    assert expected[0].sum() > forecast(history, damping=0.0)[0].sum()
    assert np.allclose(expected[0] / expected[0].sum(), [0.25, 0.75])


def test_a_history_that_is_no_table_is_refused():
    with pytest.raises(ValueError, match="a table of slots and regions"):
        forecast([1.0, 2.0])
    with pytest.raises(ValueError, match="memory"):
        forecast([[1.0]], memory=0.0)


def test_whole_tasks_and_the_look_ahead_take_what_counts_as_none():
    assert whole([[0.5, 0.5], [1.0, 0.0]], [float("nan"), 3.0]).tolist() == [[0, 0], [3, 0]]
    assert whole(np.zeros((0, 0)), []).shape == (0, 0)
    nothing = np.zeros((0, 0))
    assert by_lookahead(np.zeros((1, 0)), np.zeros(0), nothing, nothing).shape == (0, 0)
    shares = by_lookahead(np.array([[np.nan, 4.0]]), np.array([5.0, 5.0]), np.full((2, 2), np.nan), np.eye(2))
    assert np.allclose(shares.sum(axis=1), 1.0)
