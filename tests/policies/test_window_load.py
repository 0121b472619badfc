"""Load in places and not in workers: what scaling counts, how fast a worker is, and what one that goes would lose."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.agh.live_plan import without_impossible
from ctxflow.policies.agh.live_work import ContextOption, Wanted
from ctxflow.policies.agh.placement import AdaptivePlacement, Demand
from ctxflow.policies.helpers import FreeSlots, outstanding, paces, slot_items, work_at_stake
from ctxflow.policies.simple import QueueProportional
from ctxflow.policies.torta.scaling import Activation
from ctxflow.policies.turboserve.scaling import ClosedLoop
from ctxflow.testing.policy_scenes import SceneApp, SceneContext, SceneWorker
from ctxflow.testing.window_contract import WINDOW, in_flight

HELD = st.lists(st.integers(0, WINDOW), max_size=12)


@given(HELD, st.integers(0, 200))
def test_what_is_in_flight_counts_alike_wherever_it_is(held, queued):
    scene = in_flight(*(("ask", count) for count in held))
    scene.apps["ask"].backlog = queued
    size = WINDOW if held else 100
    assert outstanding(scene, 100) == {"ask": math.ceil((queued + sum(held)) / size), "other": 0}


@pytest.mark.parametrize("policy", [QueueProportional(calls_per_worker=1, linger=0.0), ClosedLoop(1, boot_seconds=0.0)])
def test_workers_that_have_little_in_flight_are_not_all_wanted(policy):
    """A dozen items are two windows, on however many workers they are; the loop loads workers to four fifths."""
    scene = in_flight()
    scene.apps["ask"].backlog = 12
    assert policy.target(scene)["default"] > 0
    scene = in_flight(*[("ask", 1)] * 12)
    scene.now += 100.0
    assert 0 < policy.target(scene)["default"] <= 3


@given(HELD.filter(any), st.integers(1, 12))
def test_as_many_are_held_as_full_windows_would_be(held, seconds):
    """However many workers the items in flight are spread over, a warm-up later those beyond that may go."""
    scene = in_flight(*(("ask", count) for count in held))
    policy = Activation(boot_seconds=1.0)
    policy.target(scene)
    scene.now += 10.0 * seconds
    assert policy.target(scene)["default"] == math.ceil(sum(held) / WINDOW)


def test_a_slot_of_unlike_workers_has_the_mean_of_their_windows():
    scene = in_flight(("ask", 1), ("ask", 1), ("ask", 1))
    scene.workers["w0"].gpu_model = "NVIDIA A100"
    full, scene.full_window = scene.full_window, lambda app, worker: 20 if worker.id == "w0" else 8
    assert slot_items(scene, scene.apps["ask"], 100) == pytest.approx(12.0)
    scene.workers["w1"].contexts.clear()
    assert slot_items(scene, scene.apps["ask"], 100) == pytest.approx(14.0), "who has not the context does not count"
    scene.workers.clear()
    assert slot_items(scene, scene.apps["ask"], 100) == 100
    scene.apps["ask"].concurrency = 6
    assert slot_items(scene, scene.apps["ask"], 100) == 6
    threads = SceneApp("threads", "model", concurrency=4, batch_size=5)
    assert slot_items(scene, threads, 100) == 20 and full(threads, SceneWorker("w")) == 4


def test_calls_on_threads_are_counted_in_slots():
    scene = in_flight(("ask", 0))
    scene.apps["threads"] = SceneApp("threads", "model", backlog=60, batch_size=5, concurrency=4)
    scene.items = 5
    assert outstanding(scene, 100)["threads"] == 3


# --- routing


@given(HELD.filter(bool), st.integers(1, 40))
def test_what_is_given_out_is_what_windows_have_room_for(held, queued):
    scene = in_flight(*(("ask", count) for count in held))
    app = scene.apps["ask"]
    app.backlog = queued
    slots, given = FreeSlots(scene), 0
    for worker in slots.able(app):
        before = slots.used[worker.id]
        items = slots.take(app, worker)
        given += items
        assert slots.used[worker.id] == pytest.approx(before + items / WINDOW)
        assert slots.left[worker.id] == 0
    assert given == sum(WINDOW - count for count in held) and slots.total == 0
    assert all(used == pytest.approx(1.0) for used in slots.used.values())


# --- how fast


def test_a_speed_that_was_measured_with_little_in_flight_does_not_count():
    scene = in_flight(*[("ask", WINDOW)] * 3, ("ask", 1))
    for worker in scene.workers.values():
        worker.pace["ask"] = (1 / worker.in_flight("for ask"), 50)
    assert [worker.id for worker, _ in paces(scene.workers.values(), "ask")] == ["w0", "w1", "w2"]
    scene.workers["w3"].gpu_model = "NVIDIA A100"
    assert [worker.id for worker, _ in paces(scene.workers.values(), "ask")][-1] == "w3", (
        "it is the only one of its kind"
    )
    demand = Demand(clear=100.0, period=50.0, margin=0.0)
    demand.look(scene)
    scene.workers["w3"].gpu_model = "NVIDIA A10"
    demand.measured(scene)
    (wanted,) = demand.wanted(scene)
    assert wanted.candidates[0].seconds == {"default": pytest.approx(1 / WINDOW)}
    assert wanted.candidates[0].delay("default") == pytest.approx(1.0), "an item is in flight with seven others"


def test_a_limit_on_the_delay_is_on_the_time_in_flight():
    option = ContextOption("model", {"gpus": 0.1}, 10.0, beside={"gpus": 20.0})
    (left,), reasons = without_impossible([Wanted("ask", 100.0, (option,), 1.0)])
    assert left.max_delay is None and reasons == [
        "ask: (5i) no tier answers an item within max_delay = 1 s: it is planned for without the limit"
    ]
    (left,), reasons = without_impossible([Wanted("ask", 100.0, (option,), 2.5)])
    assert left.max_delay == 2.5 and not reasons


def test_a_plan_says_that_a_window_breaks_a_limit():
    scene = in_flight(("ask", WINDOW))
    scene.apps["ask"].max_delay, scene.apps["ask"].backlog = 1.0, 100
    scene.workers["w0"].pace["ask"] = (0.5, 50)
    policy = AdaptivePlacement(period=20.0, clear=100.0)
    policy.plan(scene)
    policy.planned(policy.planning(scene)())
    assert len(policy.plan(scene).reasons) == 1, "eight share the time, so each takes four seconds"


# --- what is lost


@given(st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=WINDOW), min_size=1, max_size=3))
def test_what_is_at_stake_is_no_more_than_the_time_that_passed(windows):
    """Each window has a slot: what its items have had of it is the mean of their times."""
    scene = in_flight()
    worker = scene.workers["w"] = SceneWorker("w", slots=3)
    for number, ages in enumerate(windows):
        scene.apps[f"app{number}"] = SceneApp(f"app{number}", f"context{number}", overlaps=True)
        worker.contexts[f"context{number}"] = SceneContext(f"context{number}")
        for age in ages:
            scene.fly(f"app{number}", "w", 1, started=scene.now - age)
    means = [sum(ages) / len(ages) for ages in windows]
    assert work_at_stake(scene, worker) == pytest.approx(sum(means))
