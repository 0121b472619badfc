"""Plans and sessions: they gather where a plan wants their context, and no worker goes from under them."""

import pytest
from scheduler_bench import only
from test_leaving import BROUGHT_OUT, asleep, tick
from test_steps import SessionBench, step_of
from test_together import Planned

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


class Placed(SessionBench):
    """Workers of two tiers whose contexts are built at once, and sessions that go on making chunks."""

    def __init__(self, sessions="least-loaded", **tiers):
        self.placed, self.heard, self.begun = Planned(), [], []
        super().__init__(workers=(), placement=self.placed, sessions=sessions)
        for name, workers in tiers.items():
            self.tell(ev.TierOffered, ev.TierSpec(name, 0, 4))
            self.join(*(f"{name}{n}" for n in range(workers)), tier=name)

    def tell(self, kind, *values, **named):
        commands = super().tell(kind, *values, **named)
        if kind is not ev.ContextReady:  # Its commands are among those of what led to it.
            self.heard += commands
            self.begun += only(commands, cmd.Step)
        for carry in only(commands, cmd.Carry):
            self.tell(ev.StateArrived, carry.worker, carry.session, carry.made)
        return commands

    def go(self, rounds=8):
        for _ in range(rounds):
            self.now += 1.0
            steps, self.begun = self.begun, []
            for step in steps:
                self.finish(step)
            self.tell(ev.Tick)

    def where(self):
        return {number: session.worker for number, session in self.state.sessions.items()}

    def plan(self, **plan):
        self.placed.now = Plan(**plan)
        self.go()


@pytest.mark.parametrize("sessions", ["least-loaded", "turboserve"])
def test_sessions_gather_on_as_many_workers_as_are_planned(sessions):
    bench = Placed(sessions, t=3)
    bench.build()
    bench.open(1, 2, 3)
    bench.go()
    assert len(set(bench.where().values())) == 3
    chunks = {number: session.chunks for number, session in bench.state.sessions.items()}
    bench.plan(tiers={"model": frozenset({"t"})}, holders={("model", "t"): 1})
    assert len(set(bench.where().values())) == 1
    assert sum("model" in worker.contexts for worker in bench.state.workers.values()) == 1
    assert all(session.chunks >= chunks[number] + 5 for number, session in bench.state.sessions.items())
    bench.open(4, 5)
    bench.go()
    assert len(set(bench.where().values())) == 1, "those that are new go there too"


def test_sessions_leave_a_tier_that_the_plan_leaves_and_it_shrinks_then():
    bench = Placed(a=1, b=1)
    bench.tell(ev.EvictionNotice, "b0")
    bench.lose("b0", evicted=True)
    bench.open(1, 2)
    bench.go()
    assert set(bench.where().values()) == {"a0"}
    bench.plan(tiers={"model": frozenset({"b"})}, workers={"a": (0, 0), "b": (0, 1)})
    assert set(bench.where().values()) == {"a0"} and not only(bench.heard, cmd.Release), "nobody else could carry them"
    bench.join("b1", tier="b")
    bench.go()
    assert set(bench.where().values()) == {"b1"} and only(bench.heard, cmd.Release) == [cmd.Release("a0")]


def test_the_sites_own_bounds_hold_for_workers_with_sessions_too():
    bench = Placed(a=1)
    bench.open(1)
    bench.go()
    bench.tell(ev.TierOffered, ev.TierSpec("a", 0, 0))
    bench.go()
    assert only(bench.heard, cmd.Release) == [cmd.Release("a0")]


def test_while_one_that_goes_holds_the_context_another_may_build_it():
    bench = Placed(t=2)
    bench.open(1)
    bench.plan(tiers={"model": frozenset({"t"})}, holders={("model", "t"): 1})
    [old] = bench.where().values()
    bench.tell(ev.EvictionNotice, old)
    bench.go(3)
    assert set(bench.where().values()) == {"t0", "t1"} - {old}


def test_a_context_by_which_states_come_out_stays_until_the_tier_has_shrunk():
    placed = Planned()
    bench = asleep(placement=placed)
    placed.now = Plan(tiers={"model": frozenset({"other"})}, workers={"default": (0, 0)})
    commands = tick(bench)
    step = step_of(commands)
    assert step.orders == BROUGHT_OUT
    assert not only(commands, cmd.Unload)
    commands = bench.finish(step) + tick(bench)
    assert only(commands, cmd.Release) == [cmd.Release("w1")] and not only(commands, cmd.Load)


def test_where_no_worker_goes_a_context_that_is_not_planned_does():
    placed = Planned()
    bench = asleep(placement=placed)
    placed.now = Plan(tiers={"model": frozenset({"other"})})
    assert only(tick(bench), cmd.Unload) == [cmd.Unload("w1", "model")]
