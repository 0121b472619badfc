"""Who goes first, who gives way, how many workers there are; and messages that come too late."""

import pytest
from scheduler_bench import Bench, only, run_of

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

# --- who goes first


def test_priority_then_deadline_then_age():
    bench = Bench()
    wishes = {"old": {}, "due": {"deadline": 9.0}, "sooner": {"deadline": 5.0}, "first": {"priority": 1}}
    for name, wish in wishes.items():
        bench.app(name, "model", **wish)
        bench.submit(name, 1)
    run, order = run_of(bench.worker_with("model")), []
    while run:
        order.append(run.app)
        started = only(bench.finish(run), cmd.Run)
        run = started[0] if started else None
    assert order[-3:] == ["sooner", "due", "old"]
    assert order.index("first") <= 1  # What the context was built for may go before it.


def test_linger_holds_a_short_queue_and_no_longer():
    bench = Bench(batching={"policy": "fixed", "size": 4, "linger": 2.0, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    bench.finish(run_of(bench.worker_with("model")))
    bench.now = 10.0
    assert bench.submit("verify", 1) == [] and bench.scheduler.next_wake == 12.0
    bench.now = 11.9
    assert bench.tell(ev.Tick) == []
    bench.now = 12.0
    assert list(run_of(bench.tell(ev.Tick)).items) == [4]


def test_a_batch_that_fills_while_it_lingers_goes_at_once():
    bench = Bench(batching={"policy": "fixed", "size": 4, "linger": 60.0, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    bench.finish(run_of(bench.worker_with("model")))
    bench.submit("verify", 3)
    bench.now = 1.0
    assert list(run_of(bench.submit("verify", 1)).items) == [4, 5, 6, 7]


class NeverMind:
    """Holds everything back, however long it has waited."""

    linger = 0.0

    def size(self, view, app, worker):
        return 0

    def duplicate(self, view, worker):
        return None


def test_a_policy_that_holds_work_back_for_ever_is_asked_at_intervals():
    bench = Bench(batching=NeverMind())
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert not only(bench.worker_with("model"), cmd.Run)
    for _ in range(5):
        assert bench.scheduler.next_wake >= bench.now + 0.1
        bench.now = bench.scheduler.next_wake
        assert not only(bench.tell(ev.Tick), cmd.Run)


# --- placement and scaling


class OnlyOn:
    """Lets a context be on some tiers only, and bounds the workers."""

    def __init__(self, tiers, workers):
        self._plan = Plan({name: frozenset(allowed) for name, allowed in tiers.items()}, workers)

    def plan(self, view):
        return self._plan


def test_a_plan_says_where_a_context_may_be_and_how_many_workers_there_are():
    bench = Bench(placement=OnlyOn({"model": ["gpu"]}, {"gpu": (1, 2)}))
    assert bench.tell(ev.TierOffered, ev.TierSpec("gpu", 0, 10)) == [
        cmd.Place((("model", ("gpu",)),), (("gpu", 1, 2),), ()),
        cmd.Acquire("gpu", 2),
    ]
    assert bench.tell(ev.Tick) == [], "nothing has changed"
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert not only(bench.join("w1", tier="cpu"), cmd.Load)
    assert cmd.Load("w2", "model") in bench.join("w2", tier="gpu")


class Seen:
    """Permits every context that it knows on the tiers it knows and on no other, and notes what it saw."""

    def __init__(self):
        self.saw = []

    def plan(self, view):
        self.saw.append((len(view.tiers), len(view.workers)))
        return Plan({name: frozenset(view.tiers) for name in view.contexts})


def test_placement_is_asked_when_a_tier_a_context_or_a_worker_is_new():
    placement = Seen()
    bench = Bench(placement=placement)
    bench.tell(ev.TierOffered, ev.TierSpec("gpu", 0, 1))
    bench.context("model")
    bench.context("model")
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert not only(bench.join("w1", tier="cpu"), cmd.Load), "the plan made for the new context forbids it"
    assert only(bench.join("w2", tier="gpu"), cmd.Load)
    assert placement.saw == [(1, 0), (1, 0), (1, 1), (1, 2)]


class Target:
    """Holds as many workers as it is told."""

    def __init__(self, workers):
        self.workers = workers

    def target(self, view):
        return {"default": self.workers}


def test_scaling_asks_for_workers_and_gives_idle_ones_back():
    scaling = Target(3)
    bench = Bench(scaling=scaling)
    assert bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 10)) == [cmd.Acquire("default", 3)]
    bench.app("verify", "model")
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model"))
    bench.join("w2", "w3")
    assert bench.tell(ev.Tick) == [], "the wish has not changed"
    scaling.workers = 1
    assert bench.tell(ev.Tick) == [cmd.Acquire("default", 1), cmd.Release("w2"), cmd.Release("w3")]
    assert bench.submit("verify", 8) == [], "a worker that was given back gets nothing"
    for worker in ("w2", "w3"):
        bench.lose(worker, evicted=True)
    assert bench.state.counters.evicted == 0, "what was given back was not taken"
    scaling.workers = 0
    assert bench.tell(ev.Tick) == [cmd.Acquire("default", 0)], "a busy worker finishes first"
    bench.tell(ev.ItemsCancelled, range(1, 9))
    bench.finish(run)
    assert bench.tell(ev.Tick) == [cmd.Release("w1")]


def test_workers_that_were_started_by_hand_are_nobodys_to_give_back():
    bench = Bench(scaling=Target(1))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 10))
    bench.join("held")
    bench.tell(ev.WorkerJoined, ev.WorkerSpec("by hand", acquired=False))
    assert bench.tell(ev.Tick) == []
    released = bench.join("one too many") + bench.tell(ev.Tick)
    assert len(released) == 1 and released[0].worker != "by hand"
    assert not bench.state.workers["by hand"].draining


def test_the_wish_stays_within_the_sites_bounds():
    bench = Bench(scaling=Target(50))
    assert bench.tell(ev.TierOffered, ev.TierSpec("default", 1, 4)) == [cmd.Acquire("default", 4)]
    bench = Bench(scaling=Target(0))
    assert bench.tell(ev.TierOffered, ev.TierSpec("default", 1, 4)) == [cmd.Acquire("default", 1)]


def test_evictions_are_measured_by_tier():
    bench = Bench()
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.join("w1", "w2")
    assert bench.state.tiers["default"].eviction_rate is None, "nobody measured it"
    assert bench.view.tiers["default"].lifetimes is None
    bench.now = 100.0
    bench.lose("w1", evicted=True)
    assert list(bench.view.tiers["default"].lifetimes) == [100.0]
    assert bench.state.tiers["default"].eviction_rate == pytest.approx(0.01)


# --- odd messages


def test_messages_about_what_is_gone_have_no_effect():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model"))
    bench.lose("w1", evicted=True)
    assert bench.finish(run) == bench.fail(run) == []
    assert bench.ready("w1", "model") == bench.fail_context("w1", "model") == []
    assert bench.lose("w1") == bench.tell(ev.EvictionNotice, "w1") == []
    assert bench.tell(ev.ContextUnloaded, "w1", "model") == bench.tell(ev.ContextStaged, "w1", "model") == []


def test_what_was_never_declared_is_an_error():
    bench = Bench()
    with pytest.raises(KeyError):
        bench.scheduler.handle(ev.ItemsSubmitted(0.0, "nobody", range(1)))


def test_a_name_that_joins_twice_is_one_worker():
    bench = Bench()
    bench.join("w1", "w1")
    assert len(bench.state.workers) == 1 and bench.state.counters.joined == 1
