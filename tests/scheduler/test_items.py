"""What becomes of items: batches, bisection, crashes, losses, duplicates, cancelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import Bench, drive, only, run_of

from ctxflow.policies.simple import Fixed
from ctxflow.scheduler import Limits
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

# --- items


def test_an_item_walks_from_submission_to_delivery():
    bench = Bench()
    bench.app("verify", "model")
    assert bench.submit("verify", 3) == []
    assert bench.join("w1") == [cmd.Load("w1", "model")]
    run = run_of(bench.ready("w1", "model"))
    assert (run.worker, run.app, run.context, list(run.items)) == ("w1", "verify", "model", [0, 1, 2])
    assert bench.finish(run) == [cmd.Deliver(run.attempt, run.items)]
    assert bench.view.workers["w1"].seconds_per_item("verify") == pytest.approx(1 / 3)
    assert bench.finish(run) == [], "told twice, heard once"


def test_files_are_staged_before_the_context_is_built():
    bench = Bench()
    bench.context("model", files=True)
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert bench.join("w1") == [cmd.Stage("w1", "model")]
    assert bench.tell(ev.ContextStaged, "w1", "model") == [cmd.Load("w1", "model")]
    assert bench.tell(ev.ContextStaged, "w1", "model") == []
    assert run_of(bench.ready("w1", "model")).items


def test_a_free_worker_takes_what_is_queued_at_once():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.finish(run_of(bench.worker_with("model")))
    assert list(run_of(bench.submit("verify", 1)).items) == [1], "nothing waits for a batch to fill"


def test_a_short_queue_is_shared_among_the_workers():
    bench = Bench(batching={"policy": "fixed", "size": 100})
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.finish(run_of(bench.worker_with("model")))
    run = run_of(bench.submit("verify", 1))
    bench.join("w2", "w3")
    bench.submit("verify", 9)
    assert [len(run_of(bench.ready(w, "model")).items) for w in ("w2", "w3")] == [3, 2]
    assert len(run_of(bench.finish(run)).items) == 2


def test_calls_that_are_no_items_go_one_by_one():
    bench = Bench()
    bench.app("call", "model", batch=False, batch_size=50)
    bench.submit("call", 3)
    run = run_of(bench.worker_with("model"))
    assert list(run.items) == [0]
    assert list(run_of(bench.finish(run)).items) == [1]


def test_the_apps_wish_for_a_batch_size_counts():
    bench = Bench()
    bench.app("verify", "model", batch_size=2)
    bench.submit("verify", 3)
    run = run_of(bench.worker_with("model"))
    assert list(run.items) == [0, 1]


# --- failures of items


@pytest.mark.parametrize("bad", [{0}, {5}, {2, 3}, {0, 7}, set(range(8))])
def test_bisection_finds_exactly_the_bad_items(bad):
    bench = Bench(batching={"policy": "fixed", "size": 8})
    bench.app("verify", "model")
    bench.submit("verify", 8)
    dead, done = drive(bench, bench.worker_with("model"), bad)
    assert dead == sorted(bad), "in the order of the inputs"
    assert sorted(done) == sorted(set(range(8)) - bad)
    assert (bench.state.counters.dead, bench.state.counters.done) == (len(bad), 8 - len(bad))


def test_bisection_keeps_the_halves_together_and_before_the_rest():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 8)
    run = run_of(bench.worker_with("model"))
    assert list(run.items) == [0, 1, 2, 3]
    first = run_of(bench.fail(run))
    assert first.items == (0, 1)
    second = run_of(bench.finish(first))
    assert second.items == (2, 3)
    assert list(run_of(bench.finish(second)).items) == [4, 5, 6, 7]


def test_an_exception_costs_the_retries_that_the_app_grants():
    bench = Bench()
    bench.app("verify", "model", retries=2)
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model"))
    run = run_of(bench.fail(run))
    run = run_of(bench.fail(run))
    [bury] = bench.fail(run)
    assert isinstance(bury, cmd.Bury) and bury.items == [0] and bury.context is None
    assert bury.failure.error == "ValueError"


@pytest.mark.parametrize("crashes", [1, 2, 3])
def test_a_crash_costs_the_context_and_counts_against_the_item_alone(crashes):
    bench = Bench(Limits(crashes=crashes))
    bench.app("verify", "model")
    bench.submit("verify", 4)
    dead, done = drive(bench, bench.worker_with("model"), {2}, "crash", lost_context=True)
    assert (dead, done) == ([2], [0, 1, 3])
    # The whole batch, the half with the item, and the item alone as often as it may.
    assert bench.state.counters.crashes == 2 + crashes
    # After the last crash there may be nothing left to build it for.
    assert bench.state.counters.loads in (2 + crashes, 1 + 2 + crashes)


@given(items=st.integers(1, 8), some=st.integers(0, 7), at=st.none() | st.integers(0, 7), cancelled=st.integers(-1, 7))
def test_a_batch_whose_results_cannot_be_told_apart_dies_at_once(items, some, at, cancelled):
    bench = Bench(batching={"policy": "fixed", "size": items, "share": False})
    bench.app("verify", "model", retries=5)
    bench.submit("verify", items + 1)
    run = run_of(bench.worker_with("model"))
    some, at = min(some, items), None if at is None else min(at, items - 1)
    if some:
        bench.some(run, 0, some)
    gone = set(range(some)) | {cancelled} & set(range(items))
    bench.tell(ev.ItemsCancelled, [cancelled] if cancelled >= 0 else [])
    commands = bench.fail(run, "contract", at=at)
    left = sorted(set(range(items)) - gone)
    assert [list(bury.items) for bury in only(commands, cmd.Bury)] == [left] * bool(left)
    rest = [list(run.items) for run in only(commands, cmd.Run)]
    assert rest == ([] if cancelled == items else [[items]]), "what had not begun goes on"
    assert bench.state.counters.retried == 0


def test_an_input_that_cannot_be_sent_dies_at_once():
    bench = Bench(Limits(crashes=5))
    bench.app("verify", "model", retries=5)
    bench.submit("verify", 4)
    dead, done = drive(bench, bench.worker_with("model"), {1}, "input")
    assert (dead, sorted(done)) == ([1], [0, 2, 3])
    assert bench.state.counters.batches == 5  # 0123, 01, 23, 0, 1


def test_what_shares_the_library_process_with_a_crash_goes_back_at_no_cost():
    bench = Bench(Limits(crashes=1))
    bench.app("one", "model", retries=0)
    bench.app("two", "model", retries=0)
    bench.submit("one", 1)
    started = only(bench.worker_with("model", slots=2), cmd.Run)
    started += only(bench.submit("two", 1), cmd.Run)
    [killer, bystander] = started
    commands = bench.fail(killer, "crash", lost_context=True)
    assert only(commands, cmd.Bury)[0].items == [0]
    assert only(commands, cmd.Load) == [cmd.Load("w1", "model")]
    assert list(run_of(bench.ready("w1", "model")).items) == list(bystander.items) == [1]


# --- losses of workers


def test_an_eviction_costs_an_item_nothing():
    bench = Bench(Limits(losses=2))
    bench.app("verify", "model")
    bench.submit("verify", 2)
    for number in range(10):
        run = run_of(bench.worker_with("model", f"w{number}"))
        assert list(run.items) == [0, 1]
        assert bench.lose(run.worker, evicted=True) == []
    assert bench.state.counters.evicted == 10 and bench.state.counters.dead == 0


def test_notice_makes_a_loss_an_eviction_and_a_worker_take_nothing_new():
    bench = Bench(Limits(losses=1))
    bench.app("verify", "model")
    bench.submit("verify", 1)
    run = run_of(bench.worker_with("model"))
    bench.tell(ev.EvictionNotice, "w1")
    assert bench.submit("verify", 1) == []
    assert bench.finish(run) == [cmd.Deliver(run.attempt, run.items)]
    bench.lose("w1")
    assert bench.state.counters.evicted == 1
    assert list(run_of(bench.worker_with("model", "w2")).items) == [1]


def test_items_whose_workers_are_lost_k_times_running_are_isolated_and_die_alone():
    bench = Bench(Limits(losses=3, crashes=2), batching={"policy": "fixed", "size": 2})
    bench.app("verify", "model")
    bench.submit("verify", 2)
    killer, sizes, dead, done = 1, [], [], []
    for number in range(20):
        if not bench.state.open:
            break
        run = run_of(bench.worker_with("model", f"w{number}"))
        while run is not None and killer not in run.items:
            sizes.append(len(run.items))
            commands = bench.finish(run)
            done += [item for command in only(commands, cmd.Deliver) for item in command.items]
            run = run_of(commands) if only(commands, cmd.Run) else None
        if run is not None:
            sizes.append(len(run.items))
            buried = only(bench.lose(run.worker), cmd.Bury)
            dead += [item for command in buried for item in command.items]
            assert all("were lost 3 times running" in command.failure.message for command in buried)
    assert (dead, done) == ([1], [0])
    assert sizes == [2, 2, 2, 1, 1, 1], "three losses, then the halves, and the killer as often as it may crash"


def test_one_loss_among_many_items_suspects_nobody():
    bench = Bench(Limits(losses=2))
    bench.app("verify", "model")
    bench.submit("verify", 4)
    run = run_of(bench.worker_with("model"))
    bench.lose("w1")
    run = run_of(bench.worker_with("model", "w2"))
    assert list(run.items) == [0, 1, 2, 3], "together, in order"
    bench.finish(run)
    assert not bench.state.losses, "what is answered is forgotten"


def test_losses_with_an_eviction_between_them_are_not_running():
    bench = Bench(Limits(losses=2))
    bench.app("verify", "model")
    bench.submit("verify", 2)
    for number in range(8):
        run = run_of(bench.worker_with("model", f"w{number}"))
        assert list(run.items) == [0, 1], "together: nobody suspects them"
        bench.lose(run.worker, evicted=bool(number % 2))
    run_of(bench.worker_with("model", "w8"))
    bench.lose("w8")
    assert list(run_of(bench.worker_with("model", "w9")).items) == [0, 1]
    bench.lose("w9")
    assert list(run_of(bench.worker_with("model", "w10")).items) == [0], "twice running: they are tried apart"


# --- duplicates


class DuplicateAll(Fixed):
    """Lets an idle worker repeat any batch of another."""

    def duplicate(self, view, worker):
        others = [attempt.id for attempt in view.attempts.values() if attempt.worker != worker.id]
        return others[0] if others else None


@pytest.fixture
def duplicated():
    """Two workers that run the same two items."""
    bench = Bench(batching=DuplicateAll(2, share=False))
    bench.app("verify", "model")
    bench.submit("verify", 2)
    first = run_of(bench.worker_with("model"))
    bench.submit("verify", 2)
    bench.join("w2")
    other = run_of(bench.ready("w2", "model"))
    second = run_of(bench.finish(other))
    assert (second.worker, list(second.items)) == ("w2", list(first.items))
    return bench, first, second


@pytest.mark.parametrize("winner", [0, 1])
def test_the_first_answer_wins_and_is_delivered_once(duplicated, winner):
    bench, *runs = duplicated
    commands = bench.finish(runs[winner])
    assert [list(command.items) for command in only(commands, cmd.Deliver)] == [[0, 1]]
    assert not only(bench.finish(runs[1 - winner]), cmd.Deliver)
    assert bench.state.counters.done == 4 and bench.state.counters.duplicates == 1


def test_a_duplicate_that_fails_costs_nothing_while_the_other_runs(duplicated):
    bench, first, second = duplicated
    assert not only(bench.fail(second), cmd.Bury)
    assert bench.lose("w2") == []
    [deliver] = only(bench.finish(first), cmd.Deliver)
    assert list(deliver.items) == [0, 1]
    assert bench.state.counters.retried == 0


def test_if_both_fail_the_items_are_bisected_once(duplicated):
    bench, first, _ = duplicated
    bench.lose("w2", evicted=True)
    run = run_of(bench.fail(first))
    assert run.items == (0,)


# --- cancelling


def test_cancelled_items_leave_the_queue_and_running_ones_are_not_delivered():
    bench = Bench(batching={"policy": "fixed", "size": 2, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 5)
    run = run_of(bench.worker_with("model"))
    assert bench.tell(ev.ItemsCancelled, [1, 2, 3]) == []
    commands = bench.finish(run)
    [deliver] = only(commands, cmd.Deliver)
    assert (list(deliver.items), list(deliver.positions)) == ([0], [0])
    assert list(run_of(commands).items) == [4]
    assert bench.state.counters.cancelled == 3


def test_items_cancelled_one_by_one_are_left_out_of_later_batches():
    bench = Bench(batching={"policy": "fixed", "size": 3, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 12)
    run = run_of(bench.worker_with("model"))
    app = bench.state.apps["verify"]
    for item in (1, 4, 5, 9):
        bench.tell(ev.ItemsCancelled, [item])
    assert app.backlog == 6 and len(app.queue) == 9, "the queue is not looked through each time"
    commands = bench.finish(run)
    assert list(run_of(commands).items) == [3, 6, 7]
    run = run_of(commands)
    for item in (8, 10, 11):
        assert app.backlog and bench.tell(ev.ItemsCancelled, [item]) == []
    assert not app.backlog and not app.queue
    assert not only(bench.finish(run), cmd.Run) and not bench.state.open


def test_cancel_with_stop_interrupts_what_runs_for_nobody_else():
    bench = Bench(batching={"policy": "fixed", "size": 2, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 6)
    run = run_of(bench.worker_with("model"))
    assert bench.tell(ev.ItemsCancelled, [0], stop=True) == [], "item 1 is still wanted"
    assert bench.tell(ev.ItemsCancelled, [1], stop=True) == [cmd.Interrupt("w1", run.attempt, "model")]
    assert bench.tell(ev.ItemsCancelled, [0, 1], stop=True) == [], "it is told once"
    run = run_of(bench.fail(run, "cancelled"))
    assert list(run.items) == [2, 3], "the worker has kept its context"
    assert bench.tell(ev.ItemsCancelled, [2, 3]) == [], "without `stop` a call goes on"
    run = run_of(bench.finish(run))
    bench.tell(ev.ItemsCancelled, [4, 5], stop=True)
    assert not only(bench.finish(run), cmd.Deliver), "it was quicker"
    assert (bench.state.counters.dead, bench.state.counters.retried, bench.state.open) == (0, 0, {})


def test_an_interrupted_call_that_costs_its_context_is_nobodys_fault():
    bench = Bench(batching={"policy": "fixed", "size": 2, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 4)
    bench.join("w1", slots=2)
    first, second = only(bench.ready("w1", "model"), cmd.Run)
    bench.tell(ev.ItemsCancelled, [0, 1], stop=True)
    commands = bench.fail(first, "cancelled", lost_context=True)
    assert only(commands, cmd.Load) == [cmd.Load("w1", "model")]
    assert not only(commands, cmd.Bury) and not bench.state.crashes and not bench.state.raised
    assert bench.fail(second, "cancelled", lost_context=True) == [], "it was queued again already"
    assert list(run_of(bench.ready("w1", "model")).items) == [2, 3]


def test_a_claim_for_cancelled_items_keeps_no_worker_waiting():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 2)
    bench.join("w1")
    bench.tell(ev.ItemsCancelled, [0, 1])
    assert bench.ready("w1", "model") == []
    assert list(run_of(bench.submit("verify", 1)).items) == [2]


def test_a_worker_that_joins_with_a_topology_beside_a_running_batch_is_asked_for_a_duplicate():
    bench = Bench()
    bench.app("a")
    bench.join("w1")
    bench.submit("a", 4)
    bench.ready("w1")
    assert bench.join("w2", topology={"sockets": 2}) == []
