"""The window of `opportunistic` by what it is told, and the end of the queue; runs are in test_window_jobs.py."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from ctxflow.policies.opportunistic import Opportunistic
from ctxflow.policies.registry import make
from ctxflow.policies.simple import Fixed
from ctxflow.policies.throughput_curves import CurveOdds, EvictionRisk, InFlightCost
from ctxflow.policies.windows import WindowLearner
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneContext, SceneWorker


@pytest.mark.parametrize("before", [1.0, 0.5])
def test_a_window_that_is_worth_something_else_than_before_shows_another_workload(before):
    learner = WindowLearner(16, 16)
    app = SceneApp("ask", "model", backlog=10**6)
    worker = SceneWorker("w", flying={"model": 15})
    scene = Scene(apps={"ask": app}, workers={"w": worker})
    learner._move = lambda level, now: None
    learner._seen = {learner._level: [(math.log(before * 16 * 100 / 2.0), 1e-4)], 3: [(math.log(500.0), 1e-4)]}
    for number in range(100):
        scene.now = 100.0 + number / 8
        learner.finished(scene, app, worker, 2.0, 100)
    assert (3 in learner._seen) == (before == 1.0)


def test_a_workload_that_changes_is_noticed_where_many_workers_have_large_windows():
    learner = WindowLearner(512, 512)
    app = SceneApp("ask", "model", backlog=10**6)
    workers = {f"w{n}": SceneWorker(f"w{n}", flying={"model": 511}) for n in range(8)}
    scene = Scene(apps={"ask": app}, workers=workers)
    chance = random.Random(1)
    learner._move = lambda level, now: None
    begun = {}
    for number in range(75_000):
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


def test_bounds():
    assert (WindowLearner(first=5, most=7).window, WindowLearner(64, 1).window) == (4, 1)
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


def test_workers_that_are_about_to_go_do_not_show_what_the_engine_bears():
    learner = WindowLearner(64)
    app = SceneApp("ask", "model", backlog=1000)
    worker = SceneWorker("w", noticed=1.0)
    scene = Scene(apps={"ask": app}, workers={"w": worker})
    for number in range(1000):
        scene.now, worker.flying["model"] = float(number), 50 - number % 50
        learner.finished(scene, app, worker, 5.0, 100)
    assert learner.window == 64


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


def cost(rate=0.0, grace=0.0, noticed=0.0, seconds=(10.0, 30.0)):
    return InFlightCost(5, np.array(seconds), EvictionRisk(rate, grace, noticed)).slot_seconds


def test_what_is_lost_runs_again_from_its_beginning():
    assert cost(1e-6)(1.0) == pytest.approx(20.0, rel=1e-4)
    assert cost(0.1)(1.0) == pytest.approx((np.expm1(1.0) + np.expm1(3.0)) / 2 / 0.1)
    assert cost(0.1)(2.0) > 2 * cost(0.1)(1.0)


def test_with_notice_only_what_cannot_end_in_the_grace_is_lost():
    assert cost(0.1, grace=60.0, noticed=1.0)(1.0) == pytest.approx(20.0)
    assert 20.0 < cost(0.1, grace=20.0, noticed=1.0)(1.0) < cost(0.1, grace=20.0, noticed=0.5)(1.0) < cost(0.1)(1.0)


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
