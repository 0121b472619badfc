"""Asking for workers, waiting for them before the first call, and what is measured of those who lend them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_bench import Bench, drive, only, run_of

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import first_needed

# --- waiting for workers before the first call


def waiting(start_when, *maxima, **policies):
    """A bench with tiers of so many workers, all of which are asked for."""
    bench = Bench(start_when=start_when, **policies)
    for n, maximum in enumerate(maxima):
        bench.tell(ev.TierOffered, ev.TierSpec(f"t{n}", 0, maximum))
    return bench


def test_contexts_are_built_and_calls_wait_for_the_share_of_all_tiers():
    bench = waiting(0.75, 2, 2)
    bench.app("verify", "model")
    bench.submit("verify", 12)
    for name, tier in (("w1", "t0"), ("w2", "t1")):
        assert bench.join(name, tier=tier) == [cmd.Load(name, "model")]
        assert bench.ready(name, "model") == [], "its context is built, and waits"
    commands = bench.join("w3", tier="t0")
    assert {run.worker for run in only(commands, cmd.Run)} == {"w1", "w2"}
    assert cmd.Load("w3", "model") in commands


def test_once_begun_it_never_waits_again():
    bench = waiting(1.0, 2)
    bench.app("verify", "model")
    bench.join("w1", "w2", tier="t0")
    bench.lose("w1", evicted=True)
    bench.lose("w2", evicted=True)
    bench.submit("verify", 1)
    assert run_of(bench.worker_with("model", "w3", tier="t0"))


def test_those_started_by_hand_count():
    bench = waiting(1.0, 2)
    bench.app("verify", "model")
    bench.submit("verify", 4)
    bench.worker_with("model", "mine", tier="elsewhere", acquired=False)
    assert only(bench.join("w2", tier="t0"), cmd.Run)


def test_a_worker_that_is_lost_before_does_not_count():
    bench = waiting(1.0, 2)
    bench.app("verify", "model")
    bench.submit("verify", 2)
    bench.worker_with("model", "w1", tier="t0")
    bench.lose("w1")
    assert not only(bench.worker_with("model", "w2", tier="t0"), cmd.Run)
    assert only(bench.join("w3", tier="t0"), cmd.Run)


def test_it_begins_when_fewer_are_asked_for():
    bench = waiting(1.0, 4)
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert not only(bench.worker_with("model", tier="t0"), cmd.Run)
    assert run_of(bench.tell(ev.TierOffered, ev.TierSpec("t0", 0, 1)))


@pytest.mark.parametrize("routing", ["context-affinity", "round-robin", "least-loaded"])
def test_nothing_is_unloaded_while_workers_are_awaited(routing):
    """Each worker builds one context; a policy that takes apps in turn would build and unload for ever."""
    bench = waiting(1.0, 3, routing=routing)
    for name in ("first", "second"):
        bench.context(name, gpus=1)
        bench.app(name, name)
        bench.submit(name, 4)
    seen = []
    for worker in ("w1", "w2"):
        [load] = only(bench.join(worker, tier="t0", gpus=1, gpu_memory=10), cmd.Load)
        seen += bench.ready(worker, load.context)
    for bench.now in range(5):
        seen += bench.tell(ev.Tick)
    assert seen == []
    assert len(only(bench.join("w3", tier="t0", gpus=1), cmd.Run)) == 2


@pytest.mark.parametrize(("share", "asked", "needed"), [(0.95, 20, 19), (0.07, 100, 7), (0.01, 5, 1), (0.5, 0, 1)])
def test_how_many_are_needed(share, asked, needed):
    assert first_needed(waiting(share, asked).state) == needed


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_that_is_none(share):
    with pytest.raises(ValueError, match="start_when is a share of the workers asked for: give 0 to 1"):
        Bench(start_when=share)


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "by hand", "lose", "submit", "tick", "cancel"]), st.integers(0, 9)), max_size=40
)


FOUND = [("join", 1), ("by hand", 0), *[("join", 0)] * 3, ("submit", 6), ("lose", 0), ("lose", 0), ("lose", 1)]


@example(0.5, 2, 1, FOUND)
@settings(deadline=None)
@given(st.sampled_from([0.1, 0.5, 0.95, 1.0]), st.integers(1, 6), st.integers(1, 6), STEPS)
def test_no_call_before_and_no_item_lost(share, most, other, steps):
    """Whatever comes and goes before: the first call is given when the share is there, and all are answered then."""
    bench = waiting(share, most, other)
    bench.app("verify", "model")
    needed, names, cancelled, begun = first_needed(bench.state), 0, 0, False
    for step, number in steps:
        bench.now += 1
        commands = []
        if step in ("join", "by hand"):
            names += 1
            tier = f"t{number % 2}"
            commands = bench.join(f"w{names}", tier=tier, acquired=step == "join")
        elif step == "lose" and bench.state.workers:
            commands = bench.lose(sorted(bench.state.workers)[number % len(bench.state.workers)], evicted=number > 4)
        elif step == "submit":
            commands = bench.submit("verify", number)
        elif step == "cancel":
            cancelled += sum(item in bench.state.open for item in [number])
            commands = bench.tell(ev.ItemsCancelled, [number])
        elif step == "tick":
            commands = bench.tell(ev.Tick)
        begun = begun or len(bench.state.workers) >= needed
        assert bench.state.awaiting == (not begun)
        for command in commands:  # One that is ready may lead to more loads, which are answered too.
            if isinstance(command, cmd.Load):
                commands += bench.ready(command.worker, command.context)
        assert begun or not only(commands, cmd.Run)
        if begun:
            drive(bench, only(commands, cmd.Run), bad=set())
    commands = bench.submit("verify", 1)
    for n in range(needed):
        commands += bench.join(f"last{n}", tier="t0")
    drive(bench, commands, bad=set())
    counters = bench.state.counters
    assert not bench.state.open
    assert (counters.done, counters.cancelled) == (bench.next_item - cancelled, cancelled)


# --- jobs, and what is measured of them


def test_the_match_rate_counts_only_the_time_in_which_workers_were_lacking():
    bench = Bench()
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    tier = bench.state.tiers["t"]
    assert tier.match_rate is None, "nobody measured it"
    for n, bench.now in enumerate((30.0, 60.0)):
        bench.tell(ev.JobStarted, "t", f"{n}.0", waited=bench.now)
        bench.join(f"w{n}", tier="t")
    bench.now = 3600.0
    bench.tell(ev.Tick)
    assert tier.match_rate == pytest.approx(120.0), "2 jobs in a minute"
    bench.lose("w0", evicted=True)
    bench.tell(ev.Tick)
    bench.now = 3660.0
    bench.tell(ev.Tick)
    assert tier.match_rate == pytest.approx(60.0), "and none in another"


def test_nothing_is_lacking_while_nothing_is_asked_for():
    bench = bench_of(ev.TierSpec("default", 0, 8))
    bench.app("verify", "model", batch_size=1)
    bench.tell(ev.Tick)
    bench.now = 1000.0
    assert bench.submit("verify", 1) == [cmd.Acquire("default", 1)]
    bench.now = 1060.0
    bench.tell(ev.JobStarted, "default", "1.0", waited=60.0)
    bench.join("w1")
    assert bench.state.tiers["default"].match_rate == pytest.approx(60.0), "a job in a minute"


def test_evicted_jobs_are_not_counted_with_evicted_workers():
    bench = Bench()
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 4))
    bench.join("w1", tier="t")
    bench.now = 50.0
    bench.tell(ev.JobEvicted, "t", "1.0", "preempted")
    bench.lose("w1", evicted=True)
    bench.tell(ev.JobEvicted, "t", "2.0", "preempted before it joined")
    tier = bench.state.tiers["t"]
    assert (tier.lifetimes, tier.jobs_evicted, bench.state.counters.evicted) == ([50.0], 2, 1)
    assert tier.eviction_rate == pytest.approx(1 / 50)


def test_held_jobs_are_counted_by_reason():
    bench = Bench()
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 4))
    for job, reason in (("1.0", "the disk is full"), ("2.0", "the disk is full"), ("3.0", "no such image")):
        assert bench.tell(ev.JobHeld, "t", job, reason) == []
    assert bench.state.tiers["t"].held == {"the disk is full": 2, "no such image": 1}
    bench.tell(ev.JobHeld, "a tier that nobody offered", "4.0", "why not")


# --- in proportion to the queue


def bench_of(*tiers, **options):
    bench = Bench(
        scaling={"policy": "queue-proportional", "calls_per_worker": 1, "linger": 5, **options},
        batching={"policy": "fixed", "size": 1},
    )
    for tier in tiers:
        bench.tell(ev.TierOffered, tier)
    return bench


def test_the_first_items_are_answered_with_workers_at_once():
    bench = bench_of(ev.TierSpec("default", 0, 8))
    bench.app("verify", "model", batch_size=1)
    bench.now = 1.0
    assert bench.submit("verify", 3) == [cmd.Acquire("default", 3)]
    bench.now = 1.01
    assert bench.submit("verify", 1) == [], "a queue that is there already waits for the next tick"
    bench.now = 2.0
    assert bench.tell(ev.Tick) == [cmd.Acquire("default", 4)]


def test_a_worker_of_one_tier_lowers_what_the_other_is_asked_for():
    bench = bench_of(ev.TierSpec("cheap", 0, 8, price=1.0), ev.TierSpec("dear", 0, 8, price=2.0))
    bench.app("verify", "model", batch_size=1)
    bench.now = 1.0
    assert bench.submit("verify", 2) == [cmd.Acquire("cheap", 2), cmd.Acquire("dear", 2)]
    bench.now = 1.5
    assert cmd.Acquire("cheap", 1) not in bench.join("w1", tier="dear"), "it may wait for the next tick"
    bench.now = 2.0
    assert cmd.Acquire("cheap", 1) in bench.tell(ev.Tick)


def test_a_worker_beyond_what_its_tier_was_asked_for_is_given_back_before_it_builds_anything():
    bench = bench_of(ev.TierSpec("cheap", 0, 8, price=1.0), ev.TierSpec("dear", 0, 8, price=2.0))
    bench.app("verify", "model", batch_size=1)
    bench.now = 1.0
    bench.submit("verify", 1)
    bench.join("w1", tier="cheap")
    bench.now = 2.0
    assert cmd.Acquire("dear", 0) in bench.tell(ev.Tick)
    bench.now = 2.5
    assert bench.join("w2", tier="dear") == [cmd.Release("w2")]


def test_gpus_and_the_plan_say_which_tiers_are_asked():
    bench = bench_of(ev.TierSpec("cpu", 0, 8), ev.TierSpec("gpu", 0, 8, gpus=1))
    bench.context("model", gpus=1)
    bench.app("verify", "model", batch_size=1)
    bench.now = 1.0
    assert bench.submit("verify", 2) == [cmd.Acquire("gpu", 2)]


def test_busy_workers_finish_and_idle_ones_go_after_the_linger():
    bench = bench_of(ev.TierSpec("default", 0, 8))
    bench.app("verify", "model", batch_size=1)
    bench.now = 1.0
    bench.submit("verify", 2)
    runs = [run_of(bench.worker_with("model", name)) for name in ("w1", "w2")]
    bench.finish(runs[0])
    for bench.now in (2.0, 4.0, 5.9):
        assert bench.tell(ev.Tick) == []
    bench.now = 7.0
    assert bench.tell(ev.Tick) == [cmd.Acquire("default", 1), cmd.Release("w1")]
    bench.now = 100.0
    assert bench.tell(ev.Tick) == [], "it runs a call still"
    bench.finish(runs[1])
    bench.tell(ev.Tick)
    bench.now = 105.0
    assert only(bench.tell(ev.Tick), cmd.Release) == [cmd.Release("w2")]
