# ruff: noqa: D102 - the tests' names say what they check
"""What holds for every policy where workers have windows of calls in flight: the part of `policies` that is about them.

A worker with a window has places, which are not slots: what it runs is the share of its window that is taken
(`WorkerView.slots_used`), what it could take is what its window has room for (`View.room`), and what it does in a
second was measured with so many in flight (`WorkerView.calls_beside`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ctxflow.executors.simulated import SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies.protocols import PlaceRequest, Trial, View
from ctxflow.policies.views import AppView
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.run_state import RunState
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.testing.policy_scenes import (
    Scene,
    SceneApp,
    SceneContext,
    SceneMachine,
    SceneSession,
    SceneTier,
    SceneWorker,
    topology,
)

LONGEST = 3000.0  # Seconds on its clock after which a run has failed.
WINDOW = 8
CONTEXTS = ("small", "large")


class WindowRuns:
    """Whole runs of apps whose calls overlap, on workers that are evicted now and then, beside an app of batches."""

    family = ""

    def make(self) -> Any:
        """Return a new policy: the same each time."""
        raise NotImplementedError

    def watched(self, policy: Any) -> Any:
        """Return a policy that decides as this one does, and checks what it decides in a live run."""
        return policy

    @pytest.mark.parametrize("seed", range(4))
    def test_a_run_with_windows_answers_every_item_and_leaves_no_place_free(self, seed: int) -> None:
        self._windowed(seed)

    def test_a_run_with_windows_is_the_same_for_a_seed(self) -> None:
        assert self._windowed(5) == self._windowed(5)

    def _windowed(self, seed: int) -> list[str]:
        """Run it, with two slots and contexts that fit beside each other where the seed is odd."""
        slots = 1 + seed % 2
        kinds = {"fast": ("NVIDIA A100", 1.0), "slow": ("NVIDIA A10", 0.4)}
        calls: dict[tuple[str, str | None], GpuTimes] = {}
        loads: dict[tuple[str, str | None], Drawn] = {}
        shared: dict[tuple[str, str | None], SharedPace] = {}
        for tier, (model, speed) in kinds.items():
            calls[tier, model], loads[tier, model] = GpuTimes({"": 0.2 / speed}), Drawn(5.0)
            shared[tier, model] = SharedPace(400.0 * speed, 6.0, tokens=40.0)
        asks = [f"ask-{name}" for name in CONTEXTS]
        times = MixedTimes(
            dict.fromkeys([*asks, "plain"], calls), dict.fromkeys(CONTEXTS, loads), shared=dict.fromkeys(asks, shared)
        )
        machines = [
            SimulatedMachine(f"{tier}-{n}", model, tier, gpus=1, slots=slots, available=pools.evicted(120.0, 30.0))
            for tier, (model, _) in kinds.items()
            for n in range(3)
        ]
        trickle = [(60.0 + n / 3, asks[n % 2], 1) for n in range(60)]
        workload = Workload(
            [ev.ContextSpec(name, name, gpus=2 - slots) for name in CONTEXTS],
            [
                *(ev.AppSpec(f"ask-{name}", f"ask-{name}", name, batch=False, overlaps=True) for name in CONTEXTS),
                ev.AppSpec("plain", "plain", "small"),
            ],
            [(0.0, "ask-small", 300), (5.0, "ask-large", 250), (20.0, "plain", 60), *trickle],
        )
        chosen = {"batching": {"policy": "fixed", "size": 8, "window": WINDOW}, self.family: self.watched(self.make())}
        commanded: list[str] = []

        def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
            commanded.extend(map(repr, commands))
            for app, worker in places_left(simulation.scheduler.state):
                raise AssertionError(f"{worker} has places left in its window, and {app} waits")

        simulation = Simulation(
            SimulatedEngine(machines, times, seed=seed), Policies.chosen(chosen), workload,
            [ev.TierSpec(tier, 0, 3, gpus=1, price=price) for tier, price in (("fast", 3.0), ("slow", 1.0))],
            seed=seed, listener=listen,
        )  # fmt: skip
        outcome = simulation.run(until=LONGEST)
        simulation.scheduler.validate()
        assert (outcome.done, outcome.dead) == (workload.total, 0)
        return commanded


def places_left(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield apps of items that wait, with the workers that could begin some of them at once and were given none."""
    for app in state.ready.values():
        for worker in state.view.free_holders(app.context) if app.windowed else ():
            if state.view.can_run(app.shown, worker) and state.view.room(app.shown, worker):
                yield app.id, worker.id


def elsewhere(view: View, app: AppView, free: Mapping[str, int]) -> list[str]:
    """Return the workers that could begin something of an app at once, of those that can take so many calls yet."""
    there = (each for each in view.free_holders(app.context) if free.get(each.id, 0) > 0)
    return [each.id for each in there if view.can_run(app, each) and view.room(app, each)]


def in_flight(*held: tuple[str, int]) -> Scene:
    """Return a run of two apps; each worker, on a host of its own, has so many items of one in flight, of `WINDOW`.

    All workers have both contexts, and one slot.
    """
    scene = Scene(now=1000.0, window=WINDOW, tiers={"default": SceneTier("default", maximum=64)})
    for number, name in enumerate(("ask", "other")):
        scene.apps[name] = SceneApp(name, f"for {name}", order=number, overlaps=True, arrived=100, batch_size=1)
    for number, (app, count) in enumerate(held):
        worker = SceneWorker(f"w{number}", host=f"h{number}", gpu_model="NVIDIA A10")
        worker.contexts = {each.context: SceneContext(each.context) for each in scene.apps.values()}
        scene.workers[worker.id] = worker
        if count:
            scene.fly(app, worker.id, count, started=scene.now - 5.0)
    return scene


def _queue(scene: Scene, app: str, items: int) -> None:
    scene.apps[app].backlog, scene.apps[app].waiting_since = items, scene.now - 1000.0


# --- families


class RoutingWindows(WindowRuns):
    """What holds for routing policies; those that leave a place free, or drain workers freely, say so by overriding."""

    @pytest.mark.parametrize("held", [3, WINDOW - 1])
    def test_a_place_in_a_window_is_free(self, held: int) -> None:
        scene = in_flight(("ask", held), ("ask", WINDOW))
        _queue(scene, "ask", 4)
        given = [(each.worker, each.app) for each in self.make().assign(scene, scene.ready)]
        assert given == [("w0", "ask")], "its window has room, and work waits"

    @pytest.mark.parametrize("turned", [False, True])
    def test_nobody_is_drained_for_what_others_have_places_for(self, turned: bool) -> None:
        scene = in_flight(*[("other", 1), ("ask", 5)][:: -1 if turned else 1])
        _queue(scene, "ask", 3)
        given = [(each.worker, each.app) for each in self.make().assign(scene, scene.ready)]
        assert given == [("w0" if turned else "w1", "ask")], "who has items of another app in flight is drained for it"


class ScalingWindows(WindowRuns):
    """What holds for scaling policies."""

    def test_no_more_workers_are_asked_for_than_windows_are_filled(self) -> None:
        """Forty items are five windows; what is asked for without any work is asked for anyway."""
        for held in ((), (("ask", 6), ("ask", 2))):
            scene = in_flight(*held)
            anyway = sum(self.make().target(scene).values()) if not held else len(held)
            _queue(scene, "ask", 40 - sum(count for _, count in held))
            policy = self.make()
            for _ in range(60):
                asked = sum(policy.target(scene).values())
                assert asked <= max(anyway, 40 / WINDOW) or asked == self._always(scene), f"{asked} for five windows"
                scene.now += 10.0

    def _always(self, scene: Scene) -> int:
        """Return what is asked for where nobody has anything to do: of a policy that heeds no work, always."""
        return sum(self.make().target(dataclasses.replace(scene, apps={}, attempts={}, workers={})).values())


class PreemptionWindows(WindowRuns):
    """What holds for preemption policies."""

    def test_of_equal_ones_those_give_way_that_lose_the_least(self) -> None:
        """All items in flight count, each with its share of the worker's time; how long a worker is there does not."""
        policy = self.make()
        if not policy.reserves:
            return
        ages = {"old": [60.0] * 8, "mixed": [1.0] * 7 + [60.0], "young": [10.0] * 8, "batch": [20.0]}
        scene = in_flight()
        for number, (name, begun) in enumerate(ages.items()):
            worker = SceneWorker(name, machine="m", host="m", devices=(f"GPU-m-{number}",), joined=10.0 * number)
            worker.contexts = {each.context: SceneContext(each.context) for each in scene.apps.values()}
            scene.workers[name] = worker
            for age in begun:
                scene.fly("ask", name, 1, started=scene.now - age)
        scene.machines["default m"] = SceneMachine("m", "default", topology("m", dict.fromkeys(range(8), "somebody")))
        for loser in ("mixed", "young", "batch", "old"):
            room = policy.victims(scene, PlaceRequest("other", 1, 1))
            assert room is not None and room.victims == (loser,), f"{loser} would lose the least"
            scene.workers[loser].draining = True


class SessionsWindows(WindowRuns):
    """What holds for session policies."""

    @pytest.mark.parametrize("busy", [0, 1])
    def test_a_session_goes_to_who_has_nothing_in_flight(self, busy: int) -> None:
        scene = in_flight(*[("ask", 0)] * busy, ("ask", WINDOW), *[("ask", 0)] * (1 - busy))
        scene.sessions[1] = SceneSession(1, "other", "for other", opened=scene.now)
        placed = self.make().place(scene)
        assert placed == {1: f"w{1 - busy}"}, "a step would wait for all that is in flight"


class HealthWindows(WindowRuns):
    """What holds for health policies."""

    def test_a_full_window_is_not_slow(self) -> None:
        """An item's share of the time is a tenth of a second everywhere; it is in flight as long as others share it."""
        scene = in_flight(("ask", WINDOW), *[("ask", 1)] * 11)
        policy, app = self.make(), scene.apps["ask"]
        for worker in scene.workers.values():
            worker.pace["ask"] = 0.5, 100
        for second in range(120):
            scene.now += 1.0
            for worker in scene.workers.values():
                policy.observe(scene, Trial(worker, "call", app.id, app.id, True, item_seconds=0.5))
                assert not policy.doubts(scene, worker, app)
            for attempt in scene.attempts.values():  # Each is answered when it has had its time, and another begins.
                share = 0.5 * scene.workers[attempt.worker].in_flight(app.context)
                attempt.started = scene.now - (second + attempt.id) % 8 / 8 * share
            assert list(policy.judge(scene)) == [], "a full window is taken for a slow host"
