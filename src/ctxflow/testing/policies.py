# ruff: noqa: D102 - the tests' names say what they check
"""The policies' contract suite: what holds for every policy of a family, as pytest tests that its author subclasses.

    class TestNearest(RoutingContract):
        def make(self): return Nearest()

There is a class for each family. It asks the policy in scenes drawn at random (`policy_scenes`), as time goes by, where
nothing was measured, in an empty run and among many workers: what it decides must be possible, the view stay as it was,
and another policy made the same decide the same. At last it decides in whole runs in virtual time, with evictions.

`CTXFLOW_CONTRACT_SEEDS=100:120` draws from these seeds in place of the first twelve: more of them, or others.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from ctxflow.executors.simulated import SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies import registry
from ctxflow.policies.protocols import Assignment, PlaceRequest, Plan, Trial, Verdict, View
from ctxflow.policies.views import AppView, WorkerView
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.testing.policy_scenes import Scene, Story, drawn, with_machines
from ctxflow.testing.window_contract import (
    LONGEST,
    HealthWindows,
    PreemptionWindows,
    RoutingWindows,
    ScalingWindows,
    SessionsWindows,
    WindowRuns,
    elsewhere,
)


def _seeds(chosen: str) -> range:
    """Return a range that is written FIRST:END.

    >>> _seeds("100:120")
    range(100, 120)
    """
    first, _, end = chosen.partition(":")
    return range(int(first), int(end))


SEEDS = _seeds(os.environ.get("CTXFLOW_CONTRACT_SEEDS", "0:12"))
STEPS = 12  # How often a policy is asked in a scene, a few seconds apart.
MOST_IN_FLIGHT = 100_000  # Items on a worker: a window beyond this is none.
CONTEXTS = ("small", "large")


class PolicyContract(WindowRuns):
    """What holds for the policies of every family (its name, as in a site file); subclass one of the classes below."""

    family = ""

    def ask(self, policy: Any, scene: Scene) -> object:
        """Ask for all that it decides in a scene, check that it is possible, and return it as data."""
        raise NotImplementedError

    def test_it_is_a_policy_of_its_family(self) -> None:
        assert registry.make(self.family, self.make()) is not None

    @pytest.mark.parametrize("seed", SEEDS)
    def test_what_it_decides_is_possible(self, seed: int) -> None:
        list(self._decisions(seed))

    @pytest.mark.parametrize("seed", SEEDS[:4])
    def test_it_decides_the_same_for_the_same(self, seed: int) -> None:
        assert list(self._decisions(seed)) == list(self._decisions(seed))

    @pytest.mark.parametrize("seed", SEEDS[:4])
    def test_it_bears_that_nothing_was_measured(self, seed: int) -> None:
        list(self._decisions(seed, measured=0.0))

    def test_it_bears_an_empty_run(self) -> None:
        self._asked(self.make(), Scene())
        for parts in ({"workers": 0}, {"apps": 0}, {"tiers": 0}, {"workers": 0, "apps": 0}):
            list(self._decisions(1, **parts))

    def test_it_bears_many_workers(self) -> None:
        list(self._decisions(2, steps=2, workers=300, apps=20, tiers=4, sessions=100))

    def _decisions(self, seed: int, steps: int = STEPS, measured: float = 0.7, **sizes: int) -> Iterator[object]:
        """Ask one policy in one scene, again and again while time goes by."""
        policy, scene = self.make(), drawn(seed, measured=measured, **sizes)
        story = Story(scene, seed, measured)
        for number in range(steps):
            yield self._asked(policy, scene)
            story.go_on((0.5, 3.0, 40.0)[number % 3])

    def _asked(self, policy: Any, scene: Scene) -> object:
        before = pickle.loads(pickle.dumps(scene))  # As `deepcopy`, in a fifth of its time.
        found = self.ask(policy, scene)
        assert scene == before, "a policy must not change what it sees"
        return found

    @pytest.mark.parametrize("seed", [1, 2])
    def test_a_run_answers_every_item(self, seed: int) -> None:
        self._run(seed)

    def test_a_run_is_the_same_for_a_seed(self) -> None:
        assert self._run(3) == self._run(3)

    def _run(self, seed: int) -> list[str]:
        """Run two apps on two tiers whose workers are evicted now and then; return what was commanded."""
        kinds = {"fast": ("NVIDIA A100", 1.0), "slow": ("NVIDIA A10", 2.5)}
        calls: dict[tuple[str, str | None], GpuTimes] = {
            (tier, model): GpuTimes({"": 0.2 * speed}) for tier, (model, speed) in kinds.items()
        }
        loads: dict[tuple[str, str | None], Drawn] = {(tier, model): Drawn(5.0) for tier, (model, _) in kinds.items()}
        times = MixedTimes({f"ask-{name}": calls for name in CONTEXTS}, dict.fromkeys(CONTEXTS, loads))
        machines = [
            SimulatedMachine(f"{tier}-{n}", model, tier, gpus=1, available=pools.evicted(120.0, 30.0))
            for tier, (model, _) in kinds.items()
            for n in range(4)
        ]
        workload = Workload(
            [ev.ContextSpec(name, name, gpus=1) for name in CONTEXTS],
            [ev.AppSpec(f"ask-{name}", f"ask-{name}", name) for name in CONTEXTS],
            [(0.0, "ask-small", 300), (5.0, "ask-large", 200), (60.0, "ask-small", 100), (90.0, "ask-large", 1)],
        )
        commanded: list[str] = []
        policies = Policies.chosen({"batching": {"policy": "fixed", "size": 8}, self.family: self.watched(self.make())})
        tiers = [ev.TierSpec(tier, 0, 4, gpus=1, price=price) for tier, price in (("fast", 3.0), ("slow", 1.0))]
        outcome = Simulation(
            SimulatedEngine(machines, times, seed=seed), policies, workload, tiers, seed=seed,
            listener=lambda event, commands: commanded.extend(map(repr, commands)),
        ).run(until=LONGEST)  # fmt: skip
        assert (outcome.done, outcome.dead) == (workload.total, 0)
        return commanded


def _number(value: object, least: float = 0.0, most: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


class RoutingContract(RoutingWindows, PolicyContract):
    """What holds for every routing policy; one with `warm` is asked for that too."""

    family = "routing"

    def ask(self, policy: Any, scene: Scene) -> object:
        given: list[Assignment] = []
        if scene.free and scene.ready:  # Else a run does not ask.
            given = list(self.checked(scene, scene.ready, policy.assign(scene, scene.ready)))
        warmed = list(policy.warm(scene)) if hasattr(policy, "warm") else []
        for each in warmed:
            assert each.worker in scene.free, f"{each.worker} is not free"
            assert each.app in scene.apps, f"there is no app {each.app}"
        return given, warmed

    def checked(self, view: View, ready: Sequence[AppView], given: Iterable[Assignment]) -> Iterator[Assignment]:
        """Yield who is to do what, one by one, and check that it is possible."""
        free = {name: worker.free_slots for name, worker in view.free.items()}
        left = {app.id: app.backlog for app in ready}
        apps = {app.id: app for app in ready}
        for each in given:
            assert each.worker in free, f"{each.worker} is not free"
            assert each.app in apps, f"{each.app} has nothing queued"
            assert view.can_run(apps[each.app], view.workers[each.worker]), f"{each.worker} cannot run {each.app}"
            if view.drains(apps[each.app], view.workers[each.worker]):
                others = elsewhere(view, apps[each.app], free)
                assert not others, f"{each.worker} is drained for {each.app}, and {others[0]} has room"
            free[each.worker] -= 1
            left[each.app] -= 1
            assert free[each.worker] >= 0, f"{each.worker} gets more calls than it has slots free"
            assert left[each.app] >= 0, f"{each.app} gets more workers than it has items"
            yield each

    def watched(self, policy: Any) -> Any:
        return _WatchedRouting(self, policy)

    def test_work_is_given_to_who_is_free(self) -> None:
        """One worker is free that holds or may load the context, and something is queued: nothing speaks against it."""
        for seed in SEEDS:
            scene = drawn(seed, workers=4, apps=1, tiers=1)
            (app,) = scene.apps.values()
            app.backlog, app.waiting_since = 50, scene.now - 1000.0
            worker = next(iter(scene.workers.values()))
            worker.noticed, worker.draining, worker.gpus = None, False, 8
            worker.running.clear()
            for held in worker.contexts.values():
                held.state = "ready"
            if scene.can_run(app, worker):
                given = self.make().assign(scene, scene.ready)
                assert list(self.checked(scene, scene.ready, given)), "nobody works"


class _WatchedRouting:
    """A routing policy whose assignments are checked against the run's own view."""

    def __init__(self, contract: RoutingContract, policy: Any) -> None:
        self._contract, self._policy = contract, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterator[Assignment]:
        """Decide as the policy does."""
        return self._contract.checked(view, ready, self._policy.assign(view, ready))


class BatchingContract(PolicyContract):
    """What holds for every batching policy."""

    family = "batching"

    def ask(self, policy: Any, scene: Scene) -> object:
        assert _number(policy.linger), "linger is a number of seconds"
        sizes = []
        for app in scene.ready:
            for worker in list(scene.workers.values())[:50]:
                size = policy.size(scene, app, worker)
                assert isinstance(size, int) and size >= 0, f"a batch has {size!r} items"
                assert app.batch_size is None or size <= app.batch_size, "the app's own batch_size is a ceiling"
                sizes.append(size)
                if hasattr(policy, "coalesced"):
                    sizes.append(policy.coalesced(scene, app, worker))
                    assert isinstance(sizes[-1], int) and sizes[-1] >= 1, f"a step serves {sizes[-1]!r} sessions"
                sizes += self._windows(policy, scene, app, worker)
        twice = [self._twice(policy, scene, name) for name in list(scene.free)[:50]]
        return sizes, twice

    @staticmethod
    def _windows(policy: Any, scene: Scene, app: AppView, worker: WorkerView) -> Iterator[int]:
        """Yield a worker's window of an app, and again after some of its items were answered there."""
        if not hasattr(policy, "window"):
            return
        for seconds, tokens in ((0.5, 20), (3.0, 200), (0.0, None)):
            window = policy.window(scene, app, worker)
            assert isinstance(window, int) and not isinstance(window, bool), f"{window!r} items are in flight"
            assert 1 <= window <= MOST_IN_FLIGHT, f"{window} items are in flight"
            yield window
            if hasattr(policy, "finished"):
                policy.finished(scene, app, worker, seconds, tokens)

    def test_a_run_with_items_in_flight_answers_every_item_and_is_the_same_for_a_seed(self) -> None:
        assert self._overlapping(4) == self._overlapping(4)

    def _overlapping(self, seed: int) -> list[str]:
        """Run an app whose calls overlap on workers that are evicted now and then; return what was commanded."""
        kind = ("fast", "NVIDIA A100")
        times = MixedTimes(
            {"ask": {kind: GpuTimes({"": 0.1})}},
            shared={"ask": {kind: SharedPace(500.0, 8.0, tokens=50.0, spread=1.0)}},
        )
        available = pools.evicted(60.0, 10.0)
        machines = [SimulatedMachine(f"fast-{n}", kind[1], kind[0], gpus=1, available=available) for n in range(3)]
        app = ev.AppSpec("ask", "ask", "small", overlaps=True)
        workload = Workload([ev.ContextSpec("small", "small", gpus=1)], [app], [(0.0, "ask", 900), (60.0, "ask", 1)])
        commanded: list[str] = []
        outcome = Simulation(
            SimulatedEngine(machines, times, seed=seed), Policies.chosen({"batching": self.make()}), workload,
            [ev.TierSpec("fast", 0, 3, gpus=1)], seed=seed,
            listener=lambda event, commands: commanded.extend(map(repr, commands)),
        ).run(until=LONGEST)  # fmt: skip
        assert (outcome.done, outcome.dead) == (workload.total, 0)
        return commanded

    def test_a_window_is_asked_for_before_each_item(self) -> None:
        """Who is asked for it looks at few workers each time, on average."""
        policy, scene = self.make(), drawn(3, workers=200, apps=1, tiers=1)
        if not hasattr(policy, "window"):
            return
        (app,) = scene.apps.values()
        app.overlaps, app.backlog = True, 300
        looks, asked = 0, 3000

        def counted(context: str) -> int:
            nonlocal looks
            looks += 1
            return 1

        for worker in scene.workers.values():
            worker.in_flight = counted  # type: ignore[method-assign]
        workers = list(scene.workers.values())
        for number in range(asked):
            scene.now += 0.001
            policy.window(scene, app, workers[number % len(workers)])
        assert looks <= 20 * asked, f"it looks at {looks / asked:.0f} workers each time"

    @staticmethod
    def _twice(policy: Any, scene: Scene, name: str) -> int | None:
        number: int | None = policy.duplicate(scene, scene.workers[name])
        if number is not None:
            assert number in scene.attempts and scene.attempts[number].items, f"there is no batch {number}"
            assert scene.attempts[number].worker != name, "a worker runs it twice itself"
        return number


class PlacementContract(PolicyContract):
    """What holds for every placement policy; one with `planning` is asked for that too, and gets what it computes."""

    family = "placement"

    def ask(self, policy: Any, scene: Scene) -> object:
        plans = [self._checked(policy.plan(scene), scene)]
        compute = policy.planning(scene) if hasattr(policy, "planning") else None
        if compute is not None:
            made = compute()
            assert repr(compute()) == repr(made), "what it computes for a plan is not the same each time"
            policy.planned(made)
            plans.append(self._checked(policy.plan(scene), scene))
        return plans

    @staticmethod
    def _checked(plan: Plan, scene: Scene) -> Plan:
        for context, tiers in plan.tiers.items():
            assert tiers <= scene.tiers.keys(), f"{context} is to be on tiers that there are not: {tiers}"
        for name, (fewest, most) in plan.workers.items():
            tier = scene.tiers[name]
            assert tier.minimum <= fewest <= most <= tier.maximum, f"{fewest} to {most} workers of {name}"
        for (_, name), workers in plan.holders.items():
            assert name in scene.tiers and workers >= 0
        shares: dict[str, float] = {}
        for (app, _), share in plan.shares.items():
            assert 0 <= share <= 1
            shares[app] = shares.get(app, 0.0) + share
        assert all(abs(total - 1) < 1e-6 for total in shares.values()), "an app's shares are all of it"
        assert all(isinstance(reason, str) for reason in plan.reasons)
        return plan


class PreemptionContract(PreemptionWindows, PolicyContract):
    """What holds for every preemption policy."""

    family = "preemption"

    def ask(self, policy: Any, scene: Scene) -> object:
        assert isinstance(policy.reserves, bool)
        assert all(map(_number, (policy.patience, policy.grace, policy.idle))), "these are seconds"
        found = []
        for gpus, affinity, priority in ((1, None, 1), (2, "best-effort", 1), (4, "guaranteed", 2), (9, None, 9)):
            for app in list(scene.apps)[:1]:
                for later in ((), (PlaceRequest(app, 1, 2, "guaranteed"),)):
                    request = PlaceRequest(app, priority, gpus, affinity, later)
                    room = policy.victims(scene, request)
                    found.append(room)
                    if room is not None:
                        self._check(policy, scene, request, room)
        return found

    @staticmethod
    def _check(policy: Any, scene: Scene, request: PlaceRequest, room: Any) -> None:
        assert policy.reserves, "it makes room, and says that it never does"
        machine = next(each for each in scene.machines.values() if each.name == room.machine)
        assert machine.tier == room.tier
        assert len(set(room.devices)) == request.gpus, f"{request.gpus} GPUs are needed, and {room.devices} given"
        users = {gpu.uuid: gpu.used_by for gpu in machine.topology.gpus}
        freed = {device for name in room.victims for device in scene.workers[name].devices}
        for device in room.devices:
            assert device in users, f"{machine.name} has no {device}"
            assert users[device] is None or device in freed, f"{device} is somebody's who does not give way"
        for name in room.victims:
            worker = scene.workers[name]
            assert worker.machine == room.machine and (worker.acquired or worker.pin is not None)
            doing = [scene.apps[attempt.app].priority for attempt in worker.running.values()]
            assert all(each < request.priority for each in doing), f"{name} does what is no less urgent"

    @pytest.mark.parametrize("gpus", [1, 2])
    @pytest.mark.parametrize("machines", [1, 4])
    def test_who_gives_way_is_less_urgent_and_frees_what_is_given(self, machines: int, gpus: int) -> None:
        for seed in SEEDS[:4]:
            scene = with_machines(drawn(seed, apps=4), machines, gpus)
            assert self._asked(self.make(), scene) == self._asked(self.make(), scene)


class ScalingContract(ScalingWindows, PolicyContract):
    """What holds for every scaling policy."""

    family = "scaling"

    def ask(self, policy: Any, scene: Scene) -> Mapping[str, int]:
        wanted: Mapping[str, int] = policy.target(scene)
        for name, workers in wanted.items():
            tier = scene.tiers[name]
            assert isinstance(workers, int) and not isinstance(workers, bool), f"{workers!r} workers"
            assert tier.minimum <= workers <= tier.maximum, f"{workers} workers of {name}"
        return dict(wanted)

    def test_there_is_a_worker_where_there_is_work(self) -> None:
        """Somebody who may work is asked for, at the latest after ten minutes."""
        for seed in SEEDS[:4]:
            scene = drawn(seed, workers=0, apps=1, tiers=1, sessions=0)
            (app,) = scene.apps.values()
            app.backlog, app.waiting_since, scene.needs = 500, scene.now, {}
            policy = self.make()
            for tier in scene.tiers.values():
                tier.maximum = 5
            asked = []
            for _ in range(60):
                asked.append(sum(self.ask(policy, scene).values()))
                scene.now += 10.0
            assert max(asked) > 0, "nobody is asked for"


class SessionsContract(SessionsWindows, PolicyContract):
    """What holds for every session policy."""

    family = "sessions"

    def ask(self, policy: Any, scene: Scene) -> Mapping[int, str | None]:
        placed: Mapping[int, str | None] = policy.place(scene)
        for number, name in placed.items():
            session = scene.sessions[number]
            if name is not None:
                assert name in scene.workers, f"there is no worker {name}"
                # A move that is not possible has no effect: the session stays.
                possible = session.state == "placed" or scene.can_carry(session, scene.workers[name])
                assert possible, f"{name} may not carry it"
                assert not session.by_user, "only its user may resume it"
        return dict(placed)

    def test_a_session_that_waits_gets_a_worker(self) -> None:
        for seed in SEEDS:
            scene = drawn(seed, workers=4, apps=1, tiers=1, sessions=1)
            (session,) = scene.sessions.values()
            session.idle, session.by_user, session.state, session.worker = False, False, "waiting", None
            for worker in scene.workers.values():
                worker.sessions.clear()
            if any(scene.can_carry(session, worker) for worker in scene.workers.values()):
                assert self.ask(self.make(), scene), "it waits although somebody could carry it"


class HealthContract(HealthWindows, PolicyContract):
    """What holds for every health policy."""

    family = "health"

    def ask(self, policy: Any, scene: Scene) -> object:
        assert _number(policy.probation), "probation is a number of seconds"
        doubts: list[bool] = []
        for number, worker in enumerate(list(scene.workers.values())[:100]):
            for app in list(scene.apps.values())[:2]:
                fine = (number + int(scene.now)) % 3 > 0
                policy.observe(scene, Trial(worker, "call", app.id, app.id, fine))
                doubts.append(policy.doubts(scene, worker, app))
                assert isinstance(doubts[-1], bool)
        return doubts, self._judged(policy, scene)

    @staticmethod
    def _judged(policy: Any, scene: Scene) -> list[Verdict]:
        found = list(policy.judge(scene))
        hosts = {worker.host: worker.id for worker in scene.workers.values()}
        for verdict in found:
            assert verdict.host in hosts, f"there is nobody on {verdict.host}"
            assert not verdict.worker or scene.workers[verdict.worker].host == verdict.host
            assert isinstance(verdict.cause, str) and verdict.cause
        return found

    def test_nobody_is_named_where_nothing_fails(self) -> None:
        policy, scene = self.make(), drawn(5, workers=12, apps=1, tiers=1, measured=1.0)
        (app,) = scene.apps.values()
        scene.attempts.clear()
        for _ in range(200):
            for worker in scene.workers.values():
                worker.running.clear()
                policy.observe(scene, Trial(worker, "call", app.id, app.id, True, item_seconds=1.0))
            assert self._judged(policy, scene) == []
            scene.now += 1.0
