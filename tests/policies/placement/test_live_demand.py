"""What live AGH plans with: what tiers give of requests, and margins from the spread of what it knows."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.agh.live_demand import DEVIATIONS, MOST_MARGIN, Demand, Given, Spread
from ctxflow.policies.agh.live_plan import Bounds, Made, Moment
from ctxflow.policies.agh.live_work import ContextOption, Margin, Offer, Wanted
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneTier, SceneWorker

PATIENCE = 100.0


def scene(now, **tiers):
    """`tiers`: what was requested, and how many are there."""
    found = Scene(now=now)
    for name, (requested, there) in tiers.items():
        found.tiers[name] = SceneTier(name, 0, 12, requested=requested, boot_seconds=0.0)
        for number in range(there):
            found.workers[f"{name}-{number}"] = SceneWorker(f"{name}-{number}", tier=name)
    return found


def judged(*steps):
    """`steps`: seconds, workers requested, workers there; judged after the last one."""
    seen, now = Given(PATIENCE), 0.0
    for seconds, requested, there in steps:
        now += seconds
        seen.look(scene(now, a=(requested, there)))
    seen.judge(scene(now, a=steps[-1][1:]))
    return seen.offered("a", 12)


def test_a_tier_that_gave_all_that_was_requested_may_be_asked_for_all():
    assert judged((0, 3, 3), (500, 3, 3)) == 12
    assert judged((0, 0, 0), (500, 0, 0)) == 12
    assert judged((0, None, 0), (500, None, 0)) == 12


def test_a_tier_that_does_not_give_what_is_requested_counts_with_twice_what_it_gave():
    assert judged((0, 12, 3), (PATIENCE, 12, 3)) == 6
    assert judged((0, 12, 0), (PATIENCE, 12, 0)) == 0
    assert judged((0, 12, 3), (PATIENCE - 1, 12, 3)) == 12, "it has some time to give them"


def test_what_was_requested_only_just_now_was_not_refused():
    assert judged((0, 3, 3), (500, 12, 3)) == 12
    assert judged((0, 4, 3), (50, 12, 4), (60, 12, 4)) == 12, "the four that were requested first came"
    assert judged((0, 4, 3), (50, 12, 4), (PATIENCE, 12, 4)) == 8


def test_what_was_lost_while_it_is_requested_is_not_counted_on():
    seen = Given(PATIENCE)
    for now, there in ((0.0, 8), (10.0, 3)):
        seen.look(scene(now, a=(8, there)))
        seen.judge(scene(now, a=(8, there)))
    assert seen.offered("a", 12) == 6
    released = Given(PATIENCE)
    for now, there in ((0.0, 8), (10.0, 3)):
        released.look(scene(now, a=(there, there)))
        released.judge(scene(now, a=(there, there)))
    assert released.offered("a", 12) == 12, "these were given back"


def test_a_tier_that_gives_again_counts_with_more_and_is_told():
    seen = Given(PATIENCE)
    for now, requested, there in ((0.0, 12, 1), (PATIENCE, 12, 1), (PATIENCE + 10, 2, 2)):
        seen.look(now_scene := scene(now, a=(requested, there)))
        if requested == 12:
            seen.judge(now_scene)
    assert seen.offered("a", 12) == 2 and seen.gives_again(now_scene)
    seen.judge(now_scene)
    assert seen.offered("a", 12) == 4 and not seen.gives_again(now_scene)


@given(st.lists(st.tuples(st.floats(0.1, 80), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30))
def test_no_tier_is_counted_with_less_than_was_requested_of_it_and_given(steps):
    """Whatever happens: a tier counts with all, unless it had fewer than requested at some look."""
    assert judged(*steps) == 12 or any(there < requested for _, requested, there in steps)
    full = [(seconds, min(requested, there), there) for seconds, requested, there in steps]
    assert judged(*full) == 12


# --- margins


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=40))
def test_a_margin_grows_with_the_spread_and_is_bounded(shown):
    key, spread, wider = ("a", "t"), Spread(), Spread()
    spread.compare({key: shown}, {key: 1.0})
    wider.compare({key: [1 + 1.2 * (each - 1) for each in shown]}, {key: 1.0})
    margin = spread.margin(key)
    assert 0 <= margin.work <= margin.delay <= MOST_MARGIN
    assert wider.margin(key) >= margin
    assert spread.margin(("b", "t")) == Margin(), "nothing is known of it"


def test_margins_shrink_as_workers_are_as_they_were_and_grow_when_speeds_change():
    key, spread = ("a", "t"), Spread()
    margins = []
    for mean in (1.0, 1.0, 1.0, 1.25):
        spread.compare({key: [mean] * 4}, {key: mean})
        margins.append(spread.margin(key).delay)
    first, second, third, changed = margins
    assert first > second > third and changed > third
    assert changed >= DEVIATIONS * (4 * 0.25**2 / 17) ** 0.5 - 0.01


SECONDS = {"near": 2.0, "far": 1.0}  # `near` is close to the limit, and cheaper.
LIMIT = 2.2


def planned(drawn, margin):
    """Plan with workers whose speeds are up to a quarter off; the plan and the option that it was made with."""
    demand = Demand(600.0, 300.0, margin)
    shown = {tier: [s * drawn.uniform(0.75, 1.25) for _ in range(8)] for tier, s in SECONDS.items()}
    means = {tier: sum(each) / len(each) for tier, each in shown.items()}
    demand._spread.compare({("a", t): each for t, each in shown.items()}, {("a", t): m for t, m in means.items()})
    margins = {
        tier: Margin(margin, margin) if margin is not None else demand._spread.margin(("a", tier)) for tier in means
    }
    option = ContextOption("c", means, 10.0, margins=margins)
    offers = [Offer("near", 8, 0.5), Offer("far", 8, 2.0)]
    bounds = {offer.name: Bounds(0, offer.workers, 1, "") for offer in offers}
    wanted = [Wanted("a", drawn.uniform(500, 9000), (option,), LIMIT)]
    return Moment(wanted, offers, bounds, {}, [], Made(), 1 / 6, 0.05)().plan, wanted[0]


def broken(margin):
    """The share of workers of 100 drawn plans on which an item takes longer than its limit, a quarter off."""
    late = workers = 0
    for seed in range(100):
        drawn = random.Random(seed)
        plan, _ = planned(drawn, margin)
        for (_, tier), count in plan.holders.items():
            workers += count
            late += sum(SECONDS[tier] * drawn.uniform(0.75, 1.25) > LIMIT for _ in range(count))
    return late / workers


def test_delays_a_quarter_off_break_hardly_a_limit_with_the_margin_and_many_without():
    """Two deviations leave about one worker in forty, and what is known of a tier is itself from eight workers."""
    assert broken(0.0) > 0.1
    assert broken(None) < 0.025


def test_workers_that_are_slower_than_measured_still_do_all():
    """With the margin measured, workers a twentieth slower do the work that was planned; the utilization is besides."""
    for seed in range(20):
        plan, wanted = planned(random.Random(seed), None)
        able = sum(n * 3600 / (1.05 * wanted.candidates[0].seconds[tier]) for (_, tier), n in plan.holders.items())
        assert able >= wanted.per_hour


def test_a_plan_says_its_margins():
    plan, wanted = planned(random.Random(1), None)
    assert plan.margins and plan.margins == {pair: wanted.candidates[0].margins[pair[1]] for pair in plan.holders}
    fixed, _ = planned(random.Random(1), 0.3)
    assert set(fixed.margins.values()) == {(0.3, 0.3)}
    assert planned(random.Random(1), 0.0)[0].margins == {}


def test_a_margin_that_no_tier_has_room_for_is_cut_and_the_limit_stays():
    plan, _ = planned(random.Random(3), 1.5)
    assert {tier for _, tier in plan.holders} == {"far"} and not plan.reasons
    assert all(SECONDS["far"] * (1 + delay) <= 1.3 * LIMIT for _, delay in plan.margins.values())


def test_a_share_that_is_set_is_for_seconds_and_errors_and_measured_errors_are_not_known_to_spread():
    run = scene(100.0, near=(1, 1))
    run.apps["a"] = SceneApp("a", "c", backlog=9, max_error=0.1, arrived=9)
    run.workers["near-0"].pace["a"] = (2.0, 50)
    limits = {}
    for margin in (None, 0.25):
        demand = Demand(600.0, 300.0, margin)
        demand.measured(run)
        [wanted] = demand.wanted(run)
        limits[margin] = wanted.max_error
        assert wanted.candidates[0].seconds == {"near": 2.0} and wanted.candidates[0].measured == {"near"}
        assert (margin is None) == (wanted.candidates[0].margins["near"] != (0.25, 0.25))
    assert limits == {None: 0.1, 0.25: pytest.approx(0.08)}


def test_a_tier_without_a_measurement_of_an_app_is_tried_where_it_may_be_a_little_faster_than_it_is_for_others():
    run = scene(100.0, near=(1, 1), far=(1, 1))
    for name, paces in (("a", {"near": 2.0}), ("b", {"near": 3.0, "far": 3.0})):
        run.apps[name] = SceneApp(name, f"c{name}", backlog=9, arrived=9)
        for tier, seconds in paces.items():
            run.workers[f"{tier}-0"].pace[name] = (seconds, 50)
    demand = Demand(600.0, 300.0)
    demand.measured(run)
    seconds = {each.app: each.candidates[0].seconds for each in demand.wanted(run)}
    assert seconds == {"a": {"near": 2.0, "far": pytest.approx(1.5)}, "b": {"near": 3.0, "far": 3.0}}
