"""What failed runs elsewhere: on another host, else on other GPUs; where there is nobody else, or for long, there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_hosts import GPU_ERROR, ORDINARY, Host, Pool, black_hole
from scheduler_bench import Bench, only, run_of

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


def runs(commands):
    return [(run.worker, list(run.items)) for run in only(commands, cmd.Run)]


def test_halves_run_on_another_host_and_the_one_where_they_failed_takes_what_else_waits():
    bench = Bench(batching={"policy": "fixed", "size": 4, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 14)
    first = run_of(bench.worker_with("model", "w1", host="h1"))
    second = run_of(bench.worker_with("model", "w2", host="h2"))
    assert runs(bench.fail(first)) == [("w1", [8, 9, 10, 11])], "not what has just failed there"
    assert runs(bench.finish(second)) == [("w2", [0, 1])]


def test_what_waits_for_another_host_is_not_built_for_where_it_failed():
    bench = Bench(batching={"policy": "fixed", "size": 1})
    bench.app("verify", "model", retries=1)
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    bench.join("w2", host="h2")
    assert bench.fail(run) == [cmd.Load("w2", "model")], "w1 could run it at once, and is not to"
    assert runs(bench.ready("w2", "model")) == [("w2", [0])]


@pytest.mark.parametrize("machine", [False, True])
def test_an_error_of_the_machine_costs_a_lone_item_nothing_the_first_time(machine):
    bench = Bench(batching={"policy": "fixed", "size": 1})
    bench.app("verify", "model")
    bench.submit("verify", 3)
    run = run_of(bench.finish(run_of(bench.worker_with("model", "w1", host="h1"))))
    other = run_of(bench.worker_with("model", "w2", host="h2"))
    commands = bench.fail(run, machine=machine)
    assert [list(bury.items) for bury in only(commands, cmd.Bury)] == ([] if machine else [[1]])
    if machine:
        again = run_of(bench.finish(other))
        assert (again.worker, list(again.items)) == ("w2", [1])
        [bury] = only(bench.fail(again, machine=True), cmd.Bury)
        assert list(bury.items) == [1], "two hosts say so"


def test_a_batch_that_met_a_bad_machine_moves_whole_and_is_halved_where_it_fails_again():
    bench = Bench(batching={"policy": "fixed", "size": 4})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    bench.join("w2", host="h2")
    bench.fail(run, machine=True)
    again = run_of(bench.ready("w2", "model"))
    assert (again.worker, list(again.items)) == ("w2", [0, 1, 2, 3])
    commands = bench.fail(again, machine=True)
    assert sorted(items for _, items in runs(commands)) in ([[0, 1]], [[0, 1], [2, 3]])


def test_halves_of_what_met_a_bad_machine_go_back_to_where_it_was_not_the_machine():
    bench = Bench(batching={"policy": "fixed", "size": 4})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    bench.join("w2", host="h2")
    bench.fail(run, machine=True)
    again = run_of(bench.ready("w2", "model"))
    assert runs(bench.fail(again)) == [("w2", [0, 1])], (
        "an item's fault: w1, which failed as a machine does, comes last"
    )


def test_alone_on_its_host_a_worker_runs_again_what_failed_there():
    bench = Bench(batching={"policy": "fixed", "size": 4})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    assert runs(bench.fail(run, machine=True)) == [("w1", [0, 1])]


def test_on_one_host_other_gpus_are_elsewhere():
    bench = Bench(batching={"policy": "fixed", "size": 2, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    first = run_of(bench.worker_with("model", "w1", host="h1", devices=("GPU-0",)))
    second = run_of(bench.worker_with("model", "w2", host="h1", devices=("GPU-1",)))
    assert runs(bench.fail(first, machine=True)) == []
    assert runs(bench.finish(second)) == [("w2", [0, 1])], "whole"


@pytest.mark.parametrize("why", ["noticed", "draining", "suspect"])
def test_who_is_about_to_go_or_cannot_build_the_context_is_nobody_to_wait_for(why):
    bench = Bench(batching={"policy": "fixed", "size": 2, "share": False})
    bench.app("verify", "model", retries=1)
    bench.submit("verify", 4)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    bench.join("w2", host="h2")
    if why == "noticed":
        bench.tell(ev.EvictionNotice, "w2")
    elif why == "suspect":
        bench.fail_context("w2", "model")
    else:
        bench.state.drain(bench.state.workers["w2"])
    assert runs(bench.fail(run)) == [("w1", [0])]


def test_nobody_waits_for_ever_for_a_host_that_has_other_things_to_do():
    bench = Bench(batching={"policy": "fixed", "size": 1})
    bench.app("verify", "model", retries=1)
    bench.app("urgent", "model", priority=9)
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model", "w1", host="h1"))
    bench.submit("urgent", 1)
    assert run_of(bench.worker_with("model", "w2", host="h2")).app == "urgent"
    assert runs(bench.fail(run)) == []
    bench.now = bench.scheduler.next_wake - 0.5
    assert runs(bench.tell(ev.Tick)) == []
    bench.now = bench.scheduler.next_wake
    assert runs(bench.tell(ev.Tick)) == [("w1", [0])]


def test_rows_answered_one_by_one_move_whole_where_the_machine_is_bad():
    bench = Bench(batching={"policy": "fixed", "size": 4, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 8)
    first = run_of(bench.worker_with("model", "w1", host="h1"))
    second = run_of(bench.worker_with("model", "w2", host="h2"))
    bench.some(first, 0, 1)
    assert runs(bench.fail(first, machine=True, at=1)) == []
    assert runs(bench.finish(second)) == [("w2", [1, 2, 3])]


@given(
    seed=st.integers(0, 99),
    hosts=st.integers(2, 5),
    workers=st.integers(1, 3),
    size=st.sampled_from([1, 3, 50]),
    retries=st.integers(0, 2),
    bad=st.sets(st.integers(0, 199), max_size=5),
    since=st.sampled_from([0.0, 3.0]),
    failure=st.sampled_from([GPU_ERROR, ORDINARY]),
    evictions=st.sampled_from([0.0, 0.2]),
)
def test_one_bad_host_costs_no_row_whatever_else_happens(
    seed, hosts, workers, size, retries, bad, since, failure, evictions
):
    good = [Host(f"good{n}", workers=workers) for n in range(hosts - 1)]
    often = evictions if hosts > 2 else 0.0  # With nobody else there, and again and again, there is no elsewhere.
    hole = black_hole("bad", since, failure, workers=workers)
    pool = Pool([hole, *good], 200, size, retries, seed, bad, often).run()
    if failure.machine:
        assert not pool.lost_rows
    assert pool.dead.keys() >= bad and pool.makespan
