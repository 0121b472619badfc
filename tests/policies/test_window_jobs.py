"""Whole jobs with the windows of `opportunistic`, over the best fixed window of a sweep on the same evictions."""

import statistics

import numpy as np
import pytest
from jobs_in_flight import Job, compare, draw, sweep

from ctxflow.policies.opportunistic import Opportunistic
from ctxflow.policies.throughput_curves import EvictionRisk, InFlightCost
from ctxflow.policies.windows import WindowLearner
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneWorker


def test_short_jobs_on_engines_that_do_not_fall_lose_nothing_to_any_fixed_window():
    cases = [draw(number, "few") for number in range(1000, 1032) if number % 8 < 6]
    shares = [sweep(case)[1] / Job(case, Opportunistic()).seconds for case in cases]
    assert min(shares) >= 0.85 and statistics.mean(shares) >= 0.97, sorted(shares)[:4]


def test_evictions_that_come_as_often_as_items_end_do_not_mislead_the_search():
    # Drawn cases in which a window of 1 or one far too large was found once, and the jobs took 2 to 120 times as long.
    found = [compare(draw(number, "evicted")) for number in (6, 15, 26, 39, 40, 46)]
    jobs, windows, *_ = zip(*found, strict=True)
    assert statistics.median(windows) >= 0.9 and statistics.median(jobs) >= 0.6 and min(jobs) >= 0.35, (jobs, windows)


def cost(rate=0.0, grace=0.0, noticed=0.0, seconds=(10.0, 30.0)):
    return InFlightCost(5, np.array(seconds), EvictionRisk(rate, grace, noticed)).slot_seconds


def test_what_is_lost_runs_again_from_its_beginning():
    assert cost(1e-6)(1.0) == pytest.approx(20.0, rel=1e-4)
    assert cost(0.1)(1.0) == pytest.approx((np.expm1(1.0) + np.expm1(3.0)) / 2 / 0.1)
    assert cost(0.1)(2.0) > 2 * cost(0.1)(1.0)


def test_with_notice_only_what_cannot_end_in_the_grace_is_lost():
    assert cost(0.1, grace=60.0, noticed=1.0)(1.0) == pytest.approx(20.0)
    assert 20.0 < cost(0.1, grace=20.0, noticed=1.0)(1.0) < cost(0.1, grace=20.0, noticed=0.5)(1.0) < cost(0.1)(1.0)


def test_workers_that_are_about_to_go_do_not_show_what_the_engine_bears():
    learner = WindowLearner(64)
    app = SceneApp("ask", "model", backlog=1000)
    worker = SceneWorker("w", noticed=1.0)
    scene = Scene(apps={"ask": app}, workers={"w": worker})
    for number in range(1000):
        scene.now, worker.flying["model"] = float(number), 50 - number % 50
        learner.finished(scene, app, worker, 5.0, 100)
    assert learner.window == 64


@pytest.mark.parametrize("window", [64, 256])
def test_short_lives_do_not_end_the_search_at_one(window):
    case = draw(3, "evicted")
    job = Job(case, Opportunistic(window=window))
    assert min(job.windows["0"]) >= 16, job.windows
