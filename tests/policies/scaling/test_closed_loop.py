"""TurboServe's controller on views made by hand, and on the simulated engine."""

import dataclasses
import itertools
import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.registry import described, make
from ctxflow.policies.turboserve.autoscaling import WINDOW
from ctxflow.policies.turboserve.scaling import ClosedLoop
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.studies import build, run
from ctxflow.simulator.workload_file import WorkloadFile
from ctxflow.sites import Site
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneTier, SceneWorker

BOOT = 30.0


@dataclasses.dataclass
class Run:
    """A run in which all calls are of one item and one app; workers are there at once."""

    now: float = 0.0
    backlog: int = 0
    arrived: int = 0
    there: int = 0
    maximum: int = 20
    boot_seconds: float | None = BOOT

    def view(self):
        return Scene(
            now=self.now, tiers={"a": SceneTier("a", maximum=self.maximum, boot_seconds=self.boot_seconds)},
            apps={"x": SceneApp("x", "model", self.backlog, arrived=self.arrived, batch_size=1, chunk_target=1.0)},
            workers={f"w{n}": SceneWorker(f"w{n}", "a") for n in range(self.there)},
        )  # fmt: skip

    def step(self, policy, seconds=0.0, submitted=0, answered=0):
        self.now += seconds
        self.arrived += submitted
        self.backlog += submitted - answered
        self.there = policy.target(self.view())["a"]
        return self.there


def steady(share, **options):
    return ClosedLoop(calls_per_worker=4, levels=[[share]], **options)


def test_as_many_as_bring_the_load_to_the_share():
    assert Run().step(steady(0.8), submitted=32) == 10
    assert Run().step(steady(0.5), submitted=32) == 16
    assert Run(maximum=7).step(steady(0.5), submitted=32) == 7


def test_nobody_is_held_for_nothing_and_nobody_beyond_a_worker_a_call():
    assert Run().step(steady(0.8)) == 0
    assert Run().step(steady(0.01), submitted=3) == 3


def test_within_the_tolerance_nothing_changes():
    run, policy = Run(), steady(0.8)
    assert run.step(policy, submitted=32) == 10
    assert run.step(policy, 100, submitted=3) == 10
    assert run.step(policy, 100, submitted=2) == 12


def test_fewer_only_after_a_boot_time():
    run, policy = Run(), steady(0.8)
    assert run.step(policy, submitted=32) == 10
    assert run.step(policy, 1, answered=24) == 10
    assert run.step(policy, BOOT - 1) == 10
    assert run.step(policy, 1) == 3


def test_volatile_arrivals_want_more_for_the_same_load():
    calm, wild = Run(), Run()
    policies = [ClosedLoop(levels=[[0.5, 0.8], [0.4]]) for _ in range(2)]
    for _ in range(10):
        calm.step(policies[0], 10, submitted=2)
    wild.step(policies[1], 100, submitted=20)
    assert calm.backlog == wild.backlog == 20
    assert calm.there < wild.there


def test_without_a_boot_time_from_the_site_its_own_counts():
    run, policy = Run(boot_seconds=None), steady(0.8, boot_seconds=5.0)
    assert run.step(policy, submitted=32) == 10
    run.step(policy, 1, answered=32)
    assert run.step(policy, 5) == 0


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60), st.floats(0, 1)), max_size=60))
def test_always_within_bounds_and_never_given_back_sooner_than_a_boot_after_asking(steps):
    run, policy, asked_at = Run(), ClosedLoop(levels=[[0.5, 0.8], [1.5, 0.5], [0.25]]), -BOOT
    for seconds, submitted, share in steps:
        before = run.there
        held = run.step(policy, seconds, submitted, answered=int(share * run.backlog))
        assert 0 <= held <= run.maximum
        if held > before:
            asked_at = run.now
        assert held >= before or run.now >= asked_at + BOOT


def test_bursts_on_the_simulated_engine_come_and_go_without_flapping():
    """Two bursts half an hour apart: up, down, up, down, and never a reversal sooner than a boot after the last."""
    app = {"arrivals": [[0, 400], [1800, 400]], "item_seconds": 1.0, "batch_size": 10}
    site = Site(
        engine="taskvine", scaling="closed-loop",
        tiers=[{"name": "a", "workers": 12, "boot_seconds": BOOT, "gpus": 0, "provider": "condor"}],
    )  # fmt: skip
    asked = []

    def listen(event, commands):
        asked.extend((event.time, c.workers) for c in commands if isinstance(c, cmd.Acquire))

    result = run(build(Scenario(site, WorkloadFile(apps=[app], contexts=[{"gpus": 0}])), 0, listen))
    assert result.done == 800
    changes = [(t, b - a) for (_, a), (t, b) in zip([(0, 0), *asked], asked, strict=False) if a != b]
    turns = [t for (_, a), (t, b) in itertools.pairwise(changes) if (a > 0) != (b > 0)]
    assert max(n for _, n in asked) > 3
    assert 0 in [n for _, n in asked[1:]]
    assert len(turns) >= 2
    assert all(b - a >= BOOT for a, b in itertools.pairwise(turns))


def test_it_goes_by_its_name():
    made = make("scaling", {"policy": "closed-loop", "levels": [[1.0, 0.8], [0.5]], "tolerance": 0.05})
    assert made.levels.at(2.0).utilization == 0.5
    assert made.levels.at(2.0).tolerance == 0.05
    assert described("scaling", "closed-loop")["calls_per_worker"] == 4


@pytest.mark.parametrize(
    "options",
    [{"calls_per_worker": 0}, {"boot_seconds": -1}, {"batch_size": 0}, {"levels": []}, {"levels": [[1.0], [0.5]]},
     {"levels": [[2.0, 0.8], [1.0, 0.7], [0.5]]}, {"levels": [[0.0]]}, {"tolerance": -1}, {"reserve": -1}],
)  # fmt: skip
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match=r"give|levels"):
        ClosedLoop(**options)


# --- sessions


@dataclasses.dataclass
class Streams(Run):
    """A run of sessions: K is 4 where a worker has made a step."""

    active: int = 0
    idle: int = 0
    measured: bool = True
    room: int | None = None

    def view(self):
        view = super().view()
        names = list(view.workers)
        for worker in view.workers.values():
            worker.step_seconds = lambda app: {1: 0.1} if self.measured else {}
        view.capacity = lambda app, worker: 4
        view.state_room = lambda app, worker: self.room
        view.sessions = {
            n: types.SimpleNamespace(
                id=n,
                app="x",
                idle=n >= self.active,
                by_user=False,
                worker=names[n % len(names)] if names else None,
                state_bytes=10,
            )
            for n in range(self.active + self.idle)
        }
        return view


def test_sessions_are_shared_out_by_what_a_worker_was_measured_to_serve():
    run, policy = Streams(active=32), steady(0.8, sessions_per_worker=16)
    assert run.step(policy) == 3
    assert run.step(policy, 1) == 10


def test_sessions_are_shared_out_by_the_memory_for_their_states():
    for room, wanted in ((None, 10), (1000, 10), (25, 20), (5, 32)):
        run, policy = Streams(active=32, maximum=64, room=room), steady(0.8)
        run.step(policy)
        assert run.step(policy, 1) == min(32, wanted), room


@pytest.mark.parametrize("burst", [16, 24, 48, 64])
def test_after_a_burst_no_more_are_held_than_the_sessions_want(burst):
    run, policy = Streams(active=0, maximum=64), steady(0.8)
    run.step(policy, 1)
    run.active = burst
    held = [run.step(policy, 1) for _ in range(400)]
    assert max(held) > burst / 4 / 0.8, "more were expected"
    assert held[-1] <= burst / 4 / 0.8 + 1, "nobody came or went for long: there is nothing to have room for"


def test_who_comes_within_a_boot_time_is_anticipated():
    run, policy = Streams(active=16), steady(0.8)
    assert run.step(policy) == 5
    run.active = 24
    assert run.step(policy, 10) == 12  # As if for 36: 8 more within a boot, and 1.25 * sqrt(8) by chance.
    run.active = 20
    assert run.step(policy, BOOT - 1) == 12
    assert run.step(policy, 1) == 12
    assert run.step(policy, BOOT) == 10  # At 40 s as if for 29: 3 more, and 2.05 * sqrt(9), of which 0.8 to spare.
    run.active = 8
    assert run.step(policy, BOOT) > 3
    run.step(policy, WINDOW)
    assert run.step(policy, BOOT) == 3  # Nobody came or went for so long.


def test_many_idle_sessions_that_may_come_back_want_room():
    wanted = []
    for idle in (0, 40, 400):
        run, policy = Streams(active=24, idle=idle), steady(0.8)
        run.step(policy)
        run.active, run.idle = 20, idle
        wanted.append(run.step(policy, 10))
    # 4 of 20 cease within a boot, and 2.5 come by chance: 23. Of 40 idle ones 8 come back, which is 4 more than go: 27.
    # Of 400 come 80, but nobody can use more than a worker for each session.
    assert wanted == [8, 9, 20]


def test_sessions_that_have_nothing_to_do_want_nobody():
    run, policy = Streams(active=8), steady(0.8)
    view = run.view()
    for session in view.sessions.values():
        session.idle = True
    assert policy.target(view)["a"] == 0


def crowd(run, policy, size=32):
    """Sessions that come at once, stay for two minutes, and are gone for seven; what is held before and after."""
    before = run.there
    run.active += size
    for _ in range(120):
        run.step(policy, 1)
    run.active -= size
    for _ in range(420):
        run.step(policy, 1)
    return before, run.there


@pytest.mark.parametrize("base", [0, 8])
def test_there_is_room_for_a_crowd_that_came_twice_and_for_none_that_came_once(base):
    run, policy = Streams(active=base, maximum=64), steady(0.8)
    for _ in range(300):
        run.step(policy, 1)
    alone = run.there
    assert alone == math.ceil(base / 4 / 0.8)
    _, once = crowd(run, policy)
    assert once <= alone + 1
    _, twice = crowd(run, policy)
    assert twice >= (base + 32) / 4, "at full use"
    for _ in range(2400):
        run.step(policy, 1)
    assert run.there <= alone + 1, "they are long ago"


def test_no_room_is_kept_where_none_is_wanted():
    run, policy = Streams(active=8, maximum=64), steady(0.8, reserve=0)
    for _ in range(300):
        run.step(policy, 1)
    alone = run.there
    for _ in range(3):
        _, after = crowd(run, policy)
        assert after <= alone + 1


def test_where_nothing_can_be_measured_a_worker_is_loaded_by_what_the_user_says():
    policies = {
        "scaling": {"policy": "closed-loop", "levels": [[1.0]], "sessions_per_worker": 3, "anticipates": False},
        "batching": "coalescing",
    }
    wished = {}
    for target in (None, 0.8):
        scheduler = Scheduler(Policies.chosen(policies))
        asked = []
        for event in (
            ev.TierOffered(0.0, ev.TierSpec("t", 0, 20)),
            ev.ContextDeclared(0.0, ev.ContextSpec("model", "model")),
            ev.AppDeclared(0.0, ev.AppSpec("talk", "talk", "model", sessions=True, chunk_target=target)),
            *(ev.SessionOpened(0.0, number, "talk", 10**6) for number in range(12)),
            ev.WorkerJoined(1.0, ev.WorkerSpec("w", tier="t")),
            ev.ContextReady(1.0, "w", "model", 1.0),
            ev.StepFinished(2.0, "w", 1, 0.5, [{"made": 1}] * (12 if target is None else 1)),
            ev.Tick(3.0),
        ):
            asked += [each.workers for each in scheduler.handle(event) if isinstance(each, cmd.Acquire)]
        wished[target] = asked[-1]
    assert wished[None] == 4  # 12 sessions, 3 on each, though a step served all of them.
    assert wished[0.8] > 4  # One was measured to keep the target, and no more.
