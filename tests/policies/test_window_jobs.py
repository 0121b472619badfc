"""The windows of `opportunistic` in whole runs on simulated engines of many shapes, and what jobs lose by them."""

import dataclasses
import statistics
import sys
from pathlib import Path

import pytest

from ctxflow.policies.simple import Fixed
from ctxflow.policies.throughput_curves import LEVELS
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneWorker
from suite.depth import some

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from window_jobs import (
    BEST,
    Case,
    PerKind,
    ShapedPace,
    Watched,
    compare,
    drawn,
    endless,
    found,
    play,
    seconds,
    sweep,
)


def pace(shape, knee, tokens=70.0, spread=1.0):
    return ShapedPace(BEST, knee, tokens=tokens, spread=spread, shape=shape)


def watched(case, **options):
    """The policy, after a run of the case."""
    policy = Watched(case, **options)
    assert play(case, policy).done == case.items
    return policy


def test_the_window_found_is_nearly_always_within_three_per_cent_of_the_best():
    shares, changes = zip(*(found(endless(number, 2000)) for number in some(range(4), deeply=range(24))), strict=True)
    assert max(changes) <= 15, "it wanders"
    assert sum(share >= 0.97 for share in shares) >= 0.85 * len(shares), sorted(shares)[:5]


@pytest.mark.parametrize("knee", [8, 64])
def test_it_is_far_below_the_largest_where_that_gains_nothing(knee):
    assert knee <= watched(Case(0, (pace("hard", knee, spread=0.5),), 3000)).last["0"] <= 4 * knee


@pytest.mark.parametrize(("evictions", "knee"), some([(1 / 60, 20)], deeply=[(1 / 60, 20), (1 / 120, 40)]))
def test_evictions_that_lose_what_is_in_flight_make_it_smaller(evictions, knee):
    calm = Case(0, (pace("saturating", knee, tokens=350.0),), 2000)
    case = dataclasses.replace(calm, evictions=evictions, until=0.9)
    last = watched(case).last
    assert last["0"] < watched(calm).last["0"]
    limit = 0.95 * seconds(case, PerKind(last))
    for window in some(LEVELS[5::6], deeply=LEVELS[2::3]):
        assert seconds(case, Fixed(window=window), limit) >= limit, window


def test_evictions_that_come_as_often_as_items_end_do_not_mislead_the_search():
    cases = [dataclasses.replace(drawn(number, "evicted"), items=1000) for number in some((6,), deeply=(6, 26, 39))]
    jobs, windows = zip(*(compare(case, step=4) for case in cases), strict=True)
    assert statistics.median(windows) >= 0.9 and statistics.median(jobs) >= 0.6 and min(jobs) >= 0.35, (jobs, windows)


@pytest.mark.parametrize("window", [64, 256])
def test_short_lives_do_not_end_the_search_at_one(window):
    case = Case(0, (pace("exponential", 300, tokens=440.0),), 1000, evictions=1 / 60)
    policy = Watched(case, window=window)
    assert play(case, policy, until=900.0).account.evicted > 10
    assert min(policy.chosen["0"]) >= 16


def test_different_kinds_of_workers_get_different_windows():
    kinds = pace("hard", 6, spread=0.5), pace("hard", 300, spread=0.5)
    policy = watched(Case(0, kinds, 5000, kinds=(0, 1), slower=(1.0, 1.0)))
    assert policy.last["0"] < 100 < policy.last["1"]
    new = SceneWorker("new", gpu_model="0")
    app = SceneApp("ask", "context", backlog=10**6, overlaps=True)
    assert policy.window(Scene(apps={"ask": app}, workers={"new": new}), app, new) == policy.last["0"]


def test_no_window_is_more_than_the_context_bears():
    policy = watched(Case(0, (pace("hyperbolic", 30),), 1500, concurrency=20))
    assert policy.most == policy.last["0"] == 16


def test_a_workload_that_changes_is_measured_anew():
    early, late = pace("saturating", 16, spread=0.5), pace("saturating", 60, tokens=280.0, spread=0.5)
    calls = iter(range(10**6))
    case = Case(0, (early,), 10**6, later=lambda usual: usual if next(calls) < 1500 else late)
    policy = Watched(case)
    play(case, policy, until=1000.0)
    assert late.share(policy.last["0"]) >= 0.9


def test_the_same_items_lead_to_the_same_windows():
    first, second = (watched(endless(7, 1000)).chosen for _ in range(2))
    assert first == second and len(first["0"]) > 1


def test_bounds():
    assert watched(Case(0, (pace("hyperbolic", 500),), 2000), window=8, most_window=100).most == 96
    assert min(watched(Case(0, (pace("flat", 1),), 1000)).chosen["0"]) >= 1


def test_short_jobs_on_engines_that_do_not_fall_lose_nothing_to_any_fixed_window():
    cases = [drawn(number, "few") for number in range(1000, some(1008, deeply=1032)) if number % 8 < 6]
    shares = [sweep(case, step=4) / seconds(case, Watched(case)) for case in cases]
    assert min(shares) >= 0.85 and statistics.mean(shares) >= 0.97, sorted(shares)[:4]
