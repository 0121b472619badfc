"""Live AGH in its own units: contexts, tiers, workers, seconds of loading."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.agh.live_work import ContextOption, Offer, Wanted
from ctxflow.policies.agh.staffing import Staffing, StaffingProblem
from ctxflow.policies.agh.staffing_program import unserved_price

OFFERS = [Offer("cheap", 5, 1.0), Offer("dear", 8, 3.0)]


def problem(*rates, seconds=2.0, load=30.0, offers=OFFERS, max_delay=None):
    wanted = [
        Wanted(f"app{n}", rate, (ContextOption(f"c{n}", {"cheap": seconds, "dear": seconds / 2}, load),), max_delay)
        for n, rate in enumerate(rates)
    ]
    return StaffingProblem.of(wanted, {each.app: {each.candidates[0].context: 1.0} for each in wanted}, offers)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(10, 9000), min_size=1, max_size=3))
def test_workers_have_one_context_and_do_what_they_are_counted_for(rates):
    asked = problem(*rates)
    staffing = asked.solve()
    assert len({(each.context, each.tier) for each in staffing.crews}) == len(staffing.crews)
    served = dict.fromkeys((task.context for task in asked.tasks), 0.0)
    for each in staffing.crews:
        served[each.context] += each.share
    for task, unserved in zip(asked.tasks, staffing.unserved, strict=True):
        assert served[task.context] + unserved == pytest.approx(1.0)
    counts = asked.counts(1.0, staffing)
    for offer in OFFERS:
        assert sum(n for (_, tier), n in counts.items() if tier == offer.name) <= offer.workers
    for task in asked.tasks:
        workers = {tier: n for (context, tier), n in counts.items() if context == task.context}
        able = sum(0.9 * 3600 * n / task.item_seconds(tier) for tier, n in workers.items())
        assert able >= served[task.context] * task.per_hour * (1 - 1e-6)


def test_work_goes_where_a_workers_hour_costs_least_for_it():
    assert problem(1000.0).counts(1.0, problem(1000.0).solve()) == {("c0", "cheap"): 1}
    assert problem(1000.0, max_delay=1.5).counts(1.0, problem(1000.0, max_delay=1.5).solve()) == {("c0", "dear"): 1}


def test_a_new_plan_has_to_pay_for_its_loads():
    small, large = problem(1000.0), problem(9000.0)
    before = small.revised(1.0, Staffing((), ()), 1.0, 0.0)
    assert {each.tier for each in before.crews} == {"cheap"}
    assert not large.revised(1.0, before, 1.0, 0.0).short, "what is unserved is dearer than any load"
    kept = large.revised(1.0, before, 1.0, 0.0)
    assert small.revised(1.0, kept, 1.0, 0.0).crews != kept.crews, "it saves more in an hour than a load takes"
    on_dear = problem(1000.0, max_delay=1.5).solve()
    assert {each.tier for each in on_dear.crews} == {"dear"}
    assert {each.tier for each in problem(1000.0).revised(1.0, on_dear, 1.0, 0.0).crews} == {"cheap"}
    assert problem(1000.0, load=1e6).revised(1.0, on_dear, 1e-6, 0.0) == on_dear, "it would load longer than it saves"


def test_fewer_workers_load_nothing():
    kept = problem(9000.0).solve()
    there = {each.tier: each.workers for each in kept.crews}
    less = problem(1000.0, load=1e6).revised(1.0, kept, 1e-6, 0.0)
    assert sum(each.workers for each in less.crews) < sum(there.values())
    assert all(each.workers <= there[each.tier] for each in less.crews)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_division_of_the_workers_costs_less(data):
    """Against all numbers of workers of two contexts on two tiers."""
    seconds = [{tier: data.draw(st.floats(0.2, 5)) for tier in ("cheap", "dear")} for _ in range(2)]
    rates = [data.draw(st.floats(10, 4000)) for _ in range(2)]
    wanted = [Wanted(f"a{n}", rates[n], (ContextOption(f"c{n}", seconds[n], 30.0),)) for n in range(2)]
    offers = [Offer("cheap", 3, 1.0), Offer("dear", 3, 2.5)]
    asked = StaffingProblem.of(wanted, {f"a{n}": {f"c{n}": 1.0} for n in range(2)}, offers)
    found = asked.solve()
    best = float("inf")
    for one in itertools.product(range(4), repeat=2):
        for two in itertools.product(range(4), repeat=2):
            if any(a + b > 3 for a, b in zip(one, two, strict=True)):
                continue
            left = [
                max(
                    0.0,
                    1 - sum(0.9 * 3600 * n / (seconds[c][t] * rates[c]) for n, t in zip(own, seconds[c], strict=True)),
                )
                for c, own in enumerate((one, two))
            ]
            held = one[0] + two[0] + 2.5 * (one[1] + two[1])
            best = min(best, held + unserved_price(offers) * sum(left))
    assert asked.dollars(found) <= best * (1 + 1e-3) + 1e-6


@settings(max_examples=20, deadline=None)
@given(rates=st.lists(st.floats(10, 90000), min_size=1, max_size=3))
def test_the_share_that_fits_is_served_and_hardly_more_is(rates):
    asked = problem(*rates)
    share = asked.fitting(1.0)
    if share > 1e-9:
        assert not asked.solve(share).short
    if share < 0.99:
        assert asked.solve(min(1.0, share * 1.01)).short


def test_workers_that_are_not_enough_are_shared_alike():
    asked = problem(90000.0, 90000.0)
    share = asked.fitting(asked.possible())
    assert not asked.solve(share).short and 0 < share < 1
    counts = asked.counts(share, asked.solve(share))
    asked.fill(counts)
    assert sum(counts.values()) == sum(offer.workers for offer in OFFERS)


def test_without_workers_there_is_no_problem():
    with pytest.raises(ValueError, match="no worker to be had"):
        problem(1.0, offers=[Offer("cheap", 0, 1.0)])
