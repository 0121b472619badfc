"""When a context is broken: on how many hosts it failed, who still builds it, and what it was before."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_hosts import ORDINARY, Host, Pool
from scheduler_bench import Bench, only, run_of

from ctxflow.scheduler import Limits
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


def bench_of(*hosts, failures=3, workers=1, asked=0, **limits):
    """Workers on these hosts, all building the model, `h1/0` and so on."""
    bench = Bench(Limits(failures=failures, **limits), batching={"policy": "fixed", "size": 1, "share": False})
    if asked:
        bench.tell(ev.TierOffered, ev.TierSpec("default", 0, asked))
    bench.app("verify", "model")
    bench.submit("verify", 100)
    bench.now = 1.0
    for host in hosts:
        for number in range(workers):
            assert only(bench.join(f"{host}/{number}", host=host), cmd.Load)
    return bench


def broken(bench):
    return bench.state.contexts["model"].broken is not None


def test_workers_of_one_host_count_as_one():
    bench = bench_of("bad", "good", workers=3)
    for number in range(3):
        bench.fail_context(f"bad/{number}", "model")
    assert not broken(bench)
    bench.now = 16.0
    assert run_of(bench.ready("good/0", "model"))
    assert not broken(bench)


def test_one_bad_host_ends_no_run_however_often_its_builds_fail():
    bad = Host("bad", builds=lambda now, rng: ORDINARY)
    good = [Host(f"good{n}", build_seconds=15.0) for n in range(3)]
    pool = Pool([bad, *good], 2000, size=10, limits=Limits()).run()
    assert not pool.dead and len(pool.done) == 2000
    without = Pool(good, 2000, size=10).run()
    assert pool.makespan <= 1.15 * without.makespan


def test_who_had_begun_before_the_last_failure_may_show_that_it_can_be_built():
    bench = bench_of("h1", "h2", "h3", "h4")
    for host in ("h1", "h2", "h3"):
        bench.now += 1.0
        bench.fail_context(f"{host}/0", "model")
    assert not broken(bench)
    bench.now = 500.0
    bench.tell(ev.Tick)
    assert not broken(bench)
    assert run_of(bench.ready("h4/0", "model"))
    bench.now = 5000.0
    bench.tell(ev.Tick)
    assert not broken(bench) and not bench.state.undecided


@pytest.mark.parametrize("how", ["fails", "lost", "evicted", "too late"])
def test_a_context_is_broken_once_nobody_builds_it_any_more(how):
    bench = bench_of("h1", "h2", "h3", "h4", verdict=100.0)
    for host in ("h1", "h2", "h3"):
        bench.fail_context(f"{host}/0", "model")
    bench.now = 50.0
    if how == "fails":
        commands = bench.fail_context("h4/0", "model")
    elif how == "too late":
        bench.now = 101.0
        assert bench.scheduler.next_wake <= 101.0
        commands = bench.tell(ev.Tick)
    else:
        commands = bench.lose("h4/0", evicted=how == "evicted")
    [bury] = only(commands, cmd.Bury)
    assert len(bury.items) == 100 and broken(bench)


def test_one_that_begins_after_the_last_failure_is_not_waited_for():
    bench = bench_of("h1", "h2", "h3", "h4")
    for host in ("h1", "h2", "h3"):
        bench.fail_context(f"{host}/0", "model")
    bench.now = 20.0
    assert only(bench.join("h5/0", host="h5"), cmd.Load)
    bench.now = 30.0
    assert only(bench.lose("h4/0", evicted=True), cmd.Bury)


def test_hosts_that_are_awaited_could_still_build_it():
    bench = bench_of("h1", workers=3, asked=12)
    for number in range(3):
        bench.fail_context(f"h1/{number}", "model")
    assert not broken(bench), "the first host of several"
    for _ in range(20):
        bench.now += 61.0
        for command in only(bench.tell(ev.Tick), cmd.Load):
            bench.fail_context(command.worker, "model")
    assert broken(bench), "nobody came in ten minutes"


def test_where_all_fail_it_is_broken():
    bench = bench_of("h1", "h2", failures=5)
    for _ in range(30):
        if not broken(bench):
            bench.now += 61.0
            waiting = [w.id for w in bench.state.workers.values() if w.contexts]
            waiting += [command.worker for command in only(bench.tell(ev.Tick), cmd.Load)]
            for worker in waiting:
                bench.fail_context(worker, "model")
    assert broken(bench)


@pytest.mark.parametrize(("builds", "enough"), [(1, 13), (500, 3)])
def test_one_that_was_built_before_is_broken_when_that_many_failures_are_implausible(builds, enough):
    bench = bench_of("h1", failures=3)
    for _ in range(builds - 1):
        bench.ready("h1/0", "model")
        bench.now += 1.0
        bench.tell(ev.ContextUnloaded, "h1/0", "model")
    bench.ready("h1/0", "model")
    bench.now += 1.0
    bench.tell(ev.ContextUnloaded, "h1/0", "model")
    count = 0
    while not broken(bench):
        count += 1
        bench.now += 1.0
        bench.fail_context("h1/0", "model", kind="crash")
        bench.now += 61.0
        bench.tell(ev.Tick)
    assert count == enough


def test_killed_builds_of_a_soak_break_nothing():
    """A third of the builds are killed, as in a run whose processes are killed all the time."""
    bench = bench_of("h1", failures=3)
    for _ in range(2000):
        bench.now += 1.0
        if "model" not in bench.state.workers["h1/0"].contexts:
            bench.now += 61.0
            bench.tell(ev.Tick)
        if bench.state.random.random() < 1 / 3:
            bench.fail_context("h1/0", "model", kind="crash")
        else:
            bench.ready("h1/0", "model")
            bench.tell(ev.ContextUnloaded, "h1/0", "model")
    assert not broken(bench) and bench.state.contexts["model"].builds > 1000


def test_builds_that_are_ended_together_are_one_misfortune():
    bench = bench_of("h1", workers=8)
    bench.ready("h1/0", "model")
    bench.now += 1.0
    for number in range(1, 8):
        bench.fail_context(f"h1/{number}", "model", kind="crash")
    assert bench.state.contexts["model"].streak == 1 and not broken(bench)


def test_a_suspect_is_asked_again_after_a_pause_that_doubles_though_others_can():
    bench = bench_of("h1", "h2", retry_seconds=5.0)
    bench.fail_context("h1/0", "model")
    bench.ready("h2/0", "model")
    for pause in (5.0, 10.0, 20.0):
        begun = bench.now
        bench.now = begun + pause - 0.1
        assert not only(bench.tell(ev.Tick), cmd.Load)
        bench.now = begun + pause
        assert only(bench.tell(ev.Tick), cmd.Load) == [cmd.Load("h1/0", "model")]
        bench.fail_context("h1/0", "model")
    assert not broken(bench)


def test_what_somebody_has_built_is_not_broken_however_many_others_fail():
    bench = bench_of("h1", "h2", "h3", "h4")
    bench.ready("h4/0", "model")
    for _ in range(14):
        for host in ("h1", "h2", "h3"):
            if "model" in bench.state.workers[f"{host}/0"].contexts:
                bench.fail_context(f"{host}/0", "model")
        bench.now += 100_000.0
        bench.tell(ev.Tick)
    assert bench.state.undecided and not broken(bench)
    bench.lose("h4/0", evicted=True)
    bench.fail_context("h1/0", "model")
    assert broken(bench)


@given(hosts=st.integers(2, 5), bad=st.integers(1, 4), workers=st.integers(1, 3), seed=st.integers(0, 9))
def test_hosts_that_cannot_build_are_no_matter_while_two_can(hosts, bad, workers, seed):
    some = [Host(f"bad{n}", workers, builds=lambda now, rng: ORDINARY) for n in range(bad)]
    good = [Host(f"good{n}", workers, build_seconds=15.0) for n in range(hosts)]
    pool = Pool([*some, *good], 300, size=5, seed=seed, limits=Limits(failures=3)).run()
    assert not pool.dead and math.isfinite(pool.makespan)
