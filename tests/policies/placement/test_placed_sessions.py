"""Sessions under the placement policy `agh`, on the simulated engine: planned with all else, never cut off by it."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of
from suite.depth import some

PERIOD = 100.0
LOAD = 20.0
COUNTS = {"cheap": 12, "fast": 6}
CHUNK = {"cheap": 0.25, "fast": 0.125}  # Seconds that each session adds to a step: of a second, K is 3 or so, and 7.
ENDLESS = 10**9


class Streams(Simulation):
    """A simulation in which "talk" is an app of sessions: so many are opened, or the oldest closed, at a time."""

    def __init__(self, arrivals, prices, policies, seed=1, tiers=None, **engine_options):
        machines = [SimulatedMachine(f"{t}-{n}", t, t, gpus=1) for t, count in COUNTS.items() for n in range(count)]
        items = {
            "talk": {(t, t): GpuTimes({t: CHUNK[t]}, 0.05) for t in COUNTS},
            "ask": {(t, t): GpuTimes({t: 2.0}, 0.2) for t in COUNTS},
        }
        loads = {model: {(t, t): Drawn(LOAD) for t in COUNTS} for model in ("talker", "asker")}
        times = MixedTimes(items, loads, {t: Drawn(5.0) for t in COUNTS})
        engine = SimulatedEngine(machines, times, None, seed, state_bytes=10, **engine_options)
        contexts = [ev.ContextSpec(name, name, gpus=1) for name in ("talker", "asker")]
        apps = [
            ev.AppSpec("talk", "talk", "talker", batch=False, sessions=True, keep_every=4, chunk_target=1.0),
            ev.AppSpec("ask", "ask", "asker"),
        ]
        offered = tiers or tiers_of(machines)
        offered = [dataclasses.replace(tier, price=prices[tier.name]) for tier in offered]
        chosen = {
            "placement": {"policy": "agh", "period": PERIOD, "clear": 200.0},
            "batching": {"policy": "coalescing", "size": 4},
        }
        super().__init__(
            engine,
            Policies.chosen({**chosen, **policies}),
            Workload(contexts, apps, arrivals),
            offered,
            listener=self._noted,
        )
        self.numbers, self.offers = 0, {tier.name: tier for tier in offered}
        self.last: dict[int, float] = {}
        self.gap: Counter[int] = Counter()  # The longest time between two chunks, by session.
        self.seen = []  # At ticks: time, who holds what where, the plan, the workers of each tier.

    def _arrive(self, time, app, count):
        if app == "ask":
            super()._arrive(time, app, count)
        elif app == "talk":
            for _ in range(count):
                self.numbers += 1
                self._feed(ev.SessionOpened(time, self.numbers, app, ENDLESS))
            for number in sorted(self.last)[: max(0, -count)]:
                self.last.pop(number)
                self._feed(ev.SessionClosed(time, number))
        else:  # A tier is offered with so many workers.
            self._feed(ev.TierOffered(time, dataclasses.replace(self.offers[app], maximum=count)))

    def _noted(self, event, commands):
        for command in commands:
            if type(command) is cmd.DeliverChunk:
                if command.session in self.last:
                    since = event.time - self.last[command.session]
                    self.gap[command.session] = max(self.gap[command.session], since)
                self.last[command.session] = event.time
        if type(event) is ev.Tick:
            state = self.scheduler.state
            if int(event.time) % 20 == 0:
                self.scheduler.validate()
            held = Counter((each, w.tier) for w in state.workers.values() if not w.draining for each in w.contexts)
            workers = Counter(worker.tier for worker in state.workers.values() if not worker.draining)
            self.seen.append((event.time, held, state.plan, workers))

    def planned(self, context):
        """The workers that the plan that holds wants for a context."""
        return sum(n for (each, _), n in self.scheduler.state.plan.holders.items() if each == context)

    def carriers(self):
        """The workers that carry sessions."""
        return [worker for worker in self.scheduler.state.workers.values() if worker.sessions]


def asked(until, each=40):
    return [(float(time), "ask", each) for time in range(0, int(until), 20)]


PRICES = {"cheap": 0.3, "fast": 2.0}


@pytest.fixture(scope="module", params=["least-loaded", "turboserve"])
def run(request):
    arrivals = sorted([*asked(900), (0.0, "talk", 6), (450.0, "talk", 18)])
    found = Streams(arrivals, PRICES, {"sessions": request.param})
    found.run(900)
    return found


def test_sessions_are_demand_of_their_context(run):
    before = next(plan for time, _, plan, _ in run.seen if time > 400)
    after = run.seen[-1][2]
    for plan, sessions in ((before, 6), (after, 24)):
        talkers = {tier: n for (each, tier), n in plan.holders.items() if each == "talker"}
        # K is 3 or 4 on a cheap worker, and 7 or 8 on a fast one.
        assert sum(n * {"cheap": 4, "fast": 8}[tier] for tier, n in talkers.items()) >= sessions, plan
        assert sum(n * {"cheap": 3, "fast": 7}[tier] for tier, n in talkers.items()) <= 1.5 * sessions, plan
    assert all(plan.holders["talker", "cheap"] >= plan.holders.get(("talker", "fast"), 0) for plan in (before, after))


def test_more_sessions_than_planned_for_are_planned_at_once(run):
    # K as it may be measured when it is planned: 4 of the cheap ones, 8 of the fast.
    carried = [
        (time, sum(n * {"cheap": 4, "fast": 8}[tier] for (each, tier), n in plan.holders.items() if each == "talker"))
        for time, _, plan, _ in run.seen
    ]
    assert all(sessions < 24 for time, sessions in carried if 400 < time < 450)
    assert next(time for time, sessions in carried if time > 450 and sessions >= 24) <= 450 + PERIOD / 5 + 2


def test_no_session_waits_for_its_chunk_though_plans_change(run):
    plans = {tuple(sorted(plan.holders.items())) for _, _, plan, _ in run.seen}
    assert len(plans) >= 3
    assert max(run.gap.values()) < LOAD, run.gap


def test_what_sessions_do_not_want_is_left_to_others(run):
    _, held, plan, _ = run.seen[-1]
    assert held["talker", "cheap"] <= plan.holders["talker", "cheap"] + 1
    assert held["asker", "cheap"] + held["asker", "fast"] >= 4


def test_a_context_that_goes_to_another_tier_takes_its_sessions_along_without_a_pause():
    # The cheap tier comes half way: it is worth the move.
    tiers = [ev.TierSpec("cheap", 0, 0, gpus=1), ev.TierSpec("fast", 0, 6, gpus=1)]
    arrivals = sorted([*asked(900, 4), (0.0, "talk", 6), (450.0, "cheap", 12)])
    run = Streams(arrivals, {"cheap": 0.1, "fast": 9.0}, {}, tiers=tiers)
    run.run(900)
    before = next(plan for time, _, plan, _ in run.seen if time > 440)
    assert before.tiers["talker"] == {"fast"} and run.scheduler.state.plan.tiers["talker"] == {"cheap"}
    assert {worker.tier for worker in run.carriers()} == {"cheap"}
    assert run.seen[-1][3]["fast"] == 0
    assert len(run.last) == 6 and max(run.gap.values()) < LOAD / 2, run.gap


def test_a_tier_is_not_given_back_while_its_sessions_have_nowhere_to_go():
    tiers = [ev.TierSpec("cheap", 0, 0, gpus=1), ev.TierSpec("fast", 0, 6, gpus=1)]
    arrivals = sorted([*asked(900, 4), (0.0, "talk", 6), (450.0, "cheap", 12)])
    run = Streams(arrivals, {"cheap": 0.1, "fast": 9.0}, {}, tiers=tiers)
    run.engine._market.ask = _without(run.engine._market.ask, "cheap")  # It never gives any.
    run.run(900)
    assert {worker.tier for worker in run.carriers()} == {"fast"}
    assert len(run.last) == 6 and max(run.gap.values()) < LOAD / 2, run.gap


def _without(ask, tier):
    return lambda name, workers: ask(name, 0 if name == tier else workers)


def test_sessions_that_end_leave_their_workers_to_others():
    arrivals = sorted([*asked(900, 120), (0.0, "talk", 18), (450.0, "talk", -18)])
    run = Streams(arrivals, PRICES, {})
    run.run(900)
    before = next(plan for time, _, plan, _ in run.seen if time > 440)
    assert sum(n for (each, _), n in before.holders.items() if each == "talker") >= 2
    assert run.planned("talker") == 0 and not run.carriers()


@settings(max_examples=some(2, deeply=4), deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(1, 25), st.integers(-6, 8)), max_size=4),
    each=st.sampled_from([0, 4, 60]),
    sessions=st.sampled_from(["least-loaded", "turboserve"]),
    scaling=st.sampled_from(["fixed", "queue-proportional", "closed-loop"]),
    planning_seconds=st.sampled_from([0.0, 30.0]),
)
# The worker that a session was on its way to is released: others that have its context have room.
@example([(4, 3)], 60, "least-loaded", "queue-proportional", 30.0)
# Of workers beyond the plan all but those with sessions run batches or load.
@example([(2, 4)], 60, "least-loaded", "queue-proportional", 30.0)
@example([(4, 6), (6, 2), (13, -1), (16, 5)], 0, "turboserve", "fixed", 30.0)
def test_whatever_comes_and_goes_plans_cut_no_session_off(changes, each, sessions, scaling, planning_seconds):
    arrivals = [(10.0 * at, "talk", count) for at, count in changes]
    arrivals = sorted([*asked(300, each), (0.0, "ask", 1), (5.0, "talk", 3), *arrivals])
    run = Streams(arrivals, PRICES, {"sessions": sessions, "scaling": scaling}, planning_seconds=planning_seconds)
    run.run(300)
    run.scheduler.validate()
    # A session that was on a worker goes on there or elsewhere: at most a step of all sessions and a batch lie between.
    assert all(gap < LOAD for gap in run.gap.values()), run.gap
