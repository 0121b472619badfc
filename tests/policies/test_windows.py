"""The window of `opportunistic`: what it finds on engines of all kinds, and what it does where something changes."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from engine_in_flight import SHAPES, Run, cliff, flat, hard, hyperbolic, saturating

from ctxflow.policies.opportunistic import Opportunistic
from ctxflow.policies.registry import make
from ctxflow.policies.simple import Fixed
from ctxflow.policies.throughput_curves import LEVELS, CurveOdds, EvictionRisk, InFlightCost
from ctxflow.policies.windows import WindowLearner
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneContext, SceneWorker


def best(rate):
    return max(rate(n) for n in LEVELS)


def drawn(seed):
    """A case: a shape with a knee from 1 to 512, lengths that vary, tokens counted or not, noise, several workers."""
    chance = random.Random(seed)
    rate = SHAPES[seed % len(SHAPES)](2 ** chance.uniform(0, 9))
    options = {
        "seed": seed, "spread": chance.choice([0.5, 1.0]), "counted": chance.random() < 0.75,
        "workers": chance.choice([1, 1, 2]), "drift": chance.choice([0, 0, 0.03]),
    }  # fmt: skip
    return rate, options


@pytest.mark.timeout(900)
def test_the_window_found_is_nearly_always_within_three_per_cent_of_the_best():
    shares = []
    for seed in range(24):
        rate, options = drawn(seed)
        run = Run(rate, Opportunistic(), **options).go_on(10_000 * options["workers"])
        shares.append(rate(run.window) / best(rate))
        assert len(run.windows) <= 16, "it wanders"
    good = sum(share >= 0.97 for share in shares)
    assert good >= 0.85 * len(shares), sorted(shares)[:5]


@pytest.mark.parametrize("knee", [8, 64])
def test_it_is_far_below_the_largest_where_that_gains_nothing(knee):
    run = Run(hard(knee), Opportunistic(), spread=0.5).go_on(12_000)
    assert knee <= run.window <= 4 * knee


def useful(rate, window, evictions, seed):
    """Tokens a second with a fixed window, evictions included."""
    run = Run(rate, Fixed(window=window), seed=seed, evictions=evictions, length=5.0).go_on(6000)
    return run.tokens / run.scene.now


@pytest.mark.parametrize(("evictions", "knee"), [(1 / 60, 20), (1 / 120, 40)])
def test_evictions_that_lose_what_is_in_flight_make_it_smaller(evictions, knee):
    rate = saturating(knee)
    calm = Run(rate, Opportunistic(), length=5.0).go_on(8000)
    run = Run(rate, Opportunistic(), evictions=evictions, length=5.0).go_on(8000)
    assert run.window < calm.window
    found = useful(rate, run.window, evictions, 7)
    others = [useful(rate, window, evictions, 7) for window in LEVELS[2::3]]
    assert found >= 0.95 * max(others)


def test_different_kinds_of_workers_get_different_windows():
    policy = Opportunistic()
    small = Run(hard(6), policy, spread=0.5, tier="small").go_on(4000)
    large = Run(hard(300), policy, spread=0.5, tier="large").go_on(8000)
    assert small.window < 100 < large.window
    again = Run(hard(6), policy, spread=0.5, tier="small")
    assert policy.window(again.scene, again.app, next(iter(again.scene.workers.values()))) == small.window


def test_no_window_is_more_than_the_context_bears():
    run = Run(hyperbolic(30), Opportunistic(), bears=20).go_on(3000)
    assert max(window for _, window in run.windows) == 16
    assert WindowLearner(64, 1).window == 1


def test_a_workload_that_changes_is_measured_anew():
    policy = Opportunistic()
    run = Run(saturating(16), policy, spread=0.5).go_on(8000)
    before = len(run.windows)
    run.length = 4.0
    run.rate = saturating(60)
    run.go_on(16_000)
    assert len(run.windows) > before
    assert run.rate(run.window) >= 0.9 * best(run.rate)


def test_a_workload_that_changes_is_noticed_where_many_workers_have_large_windows():
    learner = WindowLearner(512, 512)
    app = SceneApp("ask", "model", backlog=10**6)
    workers = {f"w{n}": SceneWorker(f"w{n}", flying={"model": 511}) for n in range(8)}
    scene = Scene(apps={"ask": app}, workers=workers)
    chance = random.Random(1)
    learner._move = lambda level, now: None
    begun = {}
    for number in range(100_000):
        scene.now = 100.0 + number / 100
        learner.finished(
            scene, app, workers[f"w{number % 8}"], 2.0 if number < 50_000 else 5.0, chance.randint(90, 110)
        )
        if not learner._counted and learner.measured != sum(begun.values()):
            begun[number] = learner.measured - sum(begun.values())
    assert len(begun) == 1 and 50_000 < min(begun) < 70_000, "what was known is forgotten once, soon after the change"


def test_what_was_in_flight_in_stretches_that_are_over_is_not_kept_for_ever():
    learner = WindowLearner(4, 4)
    app = SceneApp("ask", "model", backlog=10**6)
    worker = SceneWorker("w")
    scene = Scene(apps={"ask": app}, workers={"w": worker})
    learner._look = lambda *those: None
    for number in range(40_000):
        scene.now, worker.flying["model"] = float(number), 3 if number % 8 < 6 else 0
        learner.finished(scene, app, worker, 0.5, 100)
    assert 0 < len(learner._lost) <= 1024


def test_the_same_items_lead_to_the_same_windows():
    first, second = (Run(cliff(20), Opportunistic(), seed=5, drift=0.03).go_on(3000).windows for _ in range(2))
    assert first == second


def test_bounds():
    assert Run(hyperbolic(500), Opportunistic(window=8, most_window=100)).go_on(6000).window <= 96
    assert min(window for _, window in Run(flat(1), Opportunistic()).go_on(4000).windows) >= 1
    assert WindowLearner(first=5, most=7).window == 4
    for options in ({"window": 0}, {"most_window": 0}):
        with pytest.raises(ValueError, match="1 or more"):
            Opportunistic(**options)


def test_items_that_end_while_the_window_is_not_full_tell_nothing():
    learner = WindowLearner(64)
    app = SceneApp("ask", "model", backlog=100)
    worker = SceneWorker("w", flying={"model": 10})
    scene = Scene(apps={"ask": app}, workers={"w": worker})
    for number in range(1000):  # As where others still load, or where items come slowly.
        scene.now = float(number)
        learner.finished(scene, app, worker, 5.0, 100)
    assert (learner.measured, learner.window) == (0, 64)
    app.backlog = 0
    worker.flying["model"] = 64
    learner.finished(scene, app, worker, 5.0, 100)
    assert learner.measured == 0


# --- how likely a curve is


def test_without_measurements_nothing_is_certain():
    good = CurveOdds({}).good(0.03)
    assert all(0 < each < 1 for each in good)


def test_a_curve_that_is_flat_between_two_windows_is_unlikely_to_rise_beyond():
    flat_there = CurveOdds({11: (1.0, 1e-4), 15: (1.0, 1e-4)})
    rising = CurveOdds({11: (1.0, 1e-4), 15: (1.0 + math.log(3.5), 1e-4)})
    assert flat_there.good(0.03)[11] > 0.7 > 0.01 > rising.good(0.03)[11]
    assert rising.better(15, 0.03)[17] > flat_there.better(15, 0.03)[17]


def test_the_dearer_what_is_in_flight_the_smaller_the_best_window():
    odds = CurveOdds({11: (1.0, 1e-4), 15: (1.1, 1e-4)})
    seconds = np.array([30.0, 60.0])
    costs = [InFlightCost(11, seconds, EvictionRisk(rate)) for rate in (0.0, 1e-3, 1e-2, 1e-1)]
    best_of = [int(odds.expected(cost).argmax()) for cost in costs]
    assert best_of == sorted(best_of, reverse=True) and best_of[0] > best_of[-1]


# --- the fixed window, and the end of the queue


def scene_of(workers, backlog, flying=0):
    held = {"model": SceneContext("model")}
    made = {f"w{n}": SceneWorker(f"w{n}", contexts=dict(held), flying={"model": flying}) for n in range(workers)}
    app = SceneApp("ask", "model", backlog=backlog, overlaps=True, running=workers * flying)
    return Scene(apps={"ask": app}, workers=made), app


def test_a_fixed_window_is_the_number_given():
    scene, app = scene_of(4, 1000)
    assert Fixed(window=16).window(scene, app, scene.workers["w0"]) == 16
    assert Fixed().window(scene, app, scene.workers["w0"]) == 64
    assert make("batching", {"policy": "coalescing", "window": 7}).window(scene, app, scene.workers["w0"]) == 7
    with pytest.raises(ValueError, match="1 or more"):
        Fixed(window=0)


@pytest.mark.parametrize("policy", [Fixed, Opportunistic])
def test_the_end_of_the_queue_is_shared(policy):
    scene, app = scene_of(4, 0, flying=0)
    app.backlog = 40
    assert {policy().window(scene, app, worker) for worker in scene.workers.values()} == {10}
    scene, app = scene_of(4, 4, flying=3)
    assert policy().window(scene, app, scene.workers["w0"]) == 4, "what is in flight counts"
    scene.workers["w3"].draining = True
    assert policy().window(scene, app, scene.workers["w0"]) == 5, "who leaves gets nothing more"
    assert Fixed(share=False).window(scene, app, scene.workers["w0"]) == 64


def test_who_does_not_hold_the_context_has_no_share():
    scene, app = scene_of(2, 40)
    scene.workers["w1"].contexts.clear()
    assert Fixed().window(scene, app, scene.workers["w0"]) == 40


def test_a_faster_kind_gets_more_of_the_end():
    scene, app = scene_of(2, 30)
    policy = Opportunistic()
    scene.workers["w0"].tier = "fast"
    for worker, throughput in (("w0", 200.0), ("w1", 100.0)):
        learner = SimpleNamespace(window=64, throughput=throughput)
        policy._learners["ask", scene.workers[worker].tier, None] = learner
    assert [policy.window(scene, app, worker) for worker in scene.workers.values()] == [20, 10]
