"""Bounds that are bounds: what the clock and the pooled server say, and that no policy beats a game's bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.league import lower_bounds, public_workloads
from ctxflow.league.contests import contests
from ctxflow.league.games import GameLost
from ctxflow.league.lower_bounds import Clock, ScenarioBounds, shortest_first
from ctxflow.policies.registry import names
from suite.depth import for_release, some

RATES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=5)
ITEMS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=6)


def clock_of(stretches):
    """A rate for each stretch, and 1 after the last."""
    times = [0, *itertools.accumulate(length for length, _ in stretches)]
    return Clock(
        [*((float(t), float(r)) for t, (_, r) in zip(times, stretches, strict=False)), (float(times[-1]), 1.0)]
    )


@settings(max_examples=200, deadline=None)
@given(RATES, st.floats(0, 60), st.floats(0.01, 50))
def test_the_clock_does_in_a_time_what_it_does(stretches, begin, work):
    clock = clock_of(stretches)
    end = clock.done(begin, work)
    assert end >= begin and clock.work(begin, end) == pytest.approx(work)
    assert clock.work(begin, begin + (end - begin) / 2) <= work


def test_a_clock_that_stops_is_never_done():
    assert Clock([(0.0, 2.0), (5.0, 0.0)]).done(0.0, 11.0) == float("inf")
    assert shortest_first([(0.0, 11.0, 1)], Clock([(0.0, 2.0), (5.0, 0.0)])) == (float("inf"), float("inf"))


def in_order(items, clock, order):
    """Serve items in an order, idle until each has come: the sum of their responses, and the end."""
    now = total = 0.0
    for number in order:
        come, work = items[number]
        now = clock.done(max(now, come), work)
        total += now - come
    return total, now


@settings(max_examples=150, deadline=None)
@given(ITEMS, RATES, st.randoms(use_true_random=False))
def test_no_order_beats_the_shortest_first(given_items, stretches, chance):
    arrivals = sorted((float(time), float(work), count) for time, work, count in given_items)
    clock = clock_of(stretches)
    best, end = shortest_first(arrivals, clock)
    items = [(time, work) for time, work, count in arrivals for _ in range(count)]
    for _ in range(20):
        order = list(range(len(items)))
        chance.shuffle(order)
        total, last = in_order(items, clock, order)
        assert total >= best - 1e-6 and last >= end - 1e-6
    by_arrival = in_order(items, clock, range(len(items)))
    assert by_arrival[1] == pytest.approx(end)  # Who is never idle without need is done at the same time.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=5))
def test_it_is_the_optimum_where_that_is_known_by_trying_all(items):
    """On one server in slots of one unit, all schedules that may change their mind are tried."""
    arrivals = sorted((float(time), float(work), 1) for time, work in items)
    found, _ = shortest_first(arrivals, Clock([(0.0, 1.0)]))
    best: dict[tuple[int, tuple[int, ...]], float] = {}

    def least(now, left):
        if not any(left):
            return 0.0
        key = now, left
        if key not in best:
            there = [n for n, work in enumerate(left) if work and arrivals[n][0] <= now]
            waits = len(there)
            steps = [tuple(w - (n == m) for m, w in enumerate(left)) for n in there] or [left]
            best[key] = waits + min(least(now + 1, step) for step in steps)
        return best[key]

    assert found == pytest.approx(least(0, tuple(int(work) for _, work, _ in arrivals)))


def test_items_that_take_as_long_as_it_happens_have_no_bound():
    scenario = public_workloads.flash_crowd(0)
    apps = tuple(app.model_copy(update={"spread": 0.3}) for app in scenario.workload.apps)
    workload = scenario.workload.model_copy(update={"apps": apps})
    with pytest.raises(ValueError, match="spread"):
        ScenarioBounds(lower_bounds.Scenario(scenario.site, workload, scenario.traces), 0)


WORKLOADS = [(contest, workload) for contest in contests() for workload in contest.workloads]
CHEAP = {"routing": "many-models", "batching": "few-long-items", "scaling": "many-models"}
FEW = [each for each in WORKLOADS if each[1].name == CHEAP.get(each[0].family, each[0].workloads[0].name)]
MORE = [each for each in WORKLOADS if each not in FEW]


def named(part):
    return part.family if hasattr(part, "family") else part.name


@pytest.mark.parametrize(("contest", "workload"), [*FEW, *for_release(*MORE)], ids=named)
def test_no_policy_beats_the_bound_on_any_seed(contest, workload):
    seed = WORKLOADS.index((contest, workload))  # Each workload another one; test_league checks others of its games.
    for policy in names(contest.family)[:: some(2, deeply=1)]:
        try:
            outcome = workload.arena(seed).play(policy, 2_000_000)
        except GameLost as error:
            pytest.fail(f"{policy}, seed {seed}: {error}")
        assert 0 < outcome.bound <= outcome.score, (policy, seed)
        assert set(contest.beside) <= set(outcome.beside)
