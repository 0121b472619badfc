"""Items in flight: windows are kept full, drained for other work, and nobody is accused for what one of them did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.registry import make
from ctxflow.policies.simple import Fixed
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

CRASH = ev.Failure("crash", "LibraryDied", "killed")


class Windowed(Fixed):
    """A window that a test may change."""

    def __init__(self, most, size=10):
        super().__init__(size)
        self.most = most
        self.heard, self.asked = [], 0

    def window(self, view, app, worker):
        self.asked += 1
        return self.most

    def finished(self, view, app, worker, seconds, tokens):
        self.heard.append((worker.id, worker.in_flight(app.context), seconds, tokens))


class Run:
    """A scheduler with workers that hold what they are told to, and the attempts that they have."""

    def __init__(
        self, window=3, workers=1, slots=1, routing="context-affinity", scaling="fixed", concurrency=None,
        batching=None, memory=80,
    ):  # fmt: skip
        self.now, self.batching = 0.0, batching or Windowed(window)
        policies = Policies(
            make("routing", routing), self.batching, make("placement", "everywhere"), make("preemption", "none"),
            make("scaling", scaling),
        )  # fmt: skip
        self.scheduler = Scheduler(policies, Limits(retry_seconds=1.0))
        self.state, self.running, self.delivered, self.buried = self.scheduler.state, {}, [], []
        self.released = []
        self.tell(ev.TierOffered, ev.TierSpec("default", 0, max(1, workers)))
        for context in ("engine", "other"):
            self.tell(ev.ContextDeclared, ev.ContextSpec(context, context, memory=memory, concurrency=concurrency))
        spec = ev.AppSpec("ask", "ask", "engine", batch=False, overlaps=True)
        self.tell(ev.AppDeclared, spec)
        self.tell(ev.AppDeclared, ev.AppSpec("work", "work", "other", priority=1))
        for number in range(workers):
            host = f"h{number}"
            self.tell(ev.WorkerJoined, ev.WorkerSpec(f"w{number}", host=host, slots=slots, memory=100))

    def tell(self, kind, *values, **named):
        self.now += 0.01
        for command in self.scheduler.handle(kind(self.now, *values, **named)):
            if isinstance(command, cmd.Run):
                self.running[command.attempt] = command
            elif isinstance(command, cmd.Load):
                self.tell(ev.ContextReady, command.worker, command.context, seconds=1.0)
            elif isinstance(command, cmd.Deliver):
                self.delivered += command.items
            elif isinstance(command, cmd.Bury):
                self.buried += command.items
            elif isinstance(command, cmd.Release):
                self.released.append(command.worker)
        self.scheduler.validate()

    def submit(self, items, app="ask"):
        self.tell(ev.ItemsSubmitted, app, items)

    def finish(self, item, **named):
        attempt = self.attempt_of(item)
        self.tell(ev.BatchFinished, self.running.pop(attempt).worker, attempt, 1.0, **named)

    def fail(self, item, failure, lost_context=False, beside=()):
        attempt, beside = self.attempt_of(item), [self.attempt_of(each) for each in beside]
        run = self.running.pop(attempt)
        if lost_context:
            same = [n for n, each in self.running.items() if (each.worker, each.context) == (run.worker, run.context)]
            for number in same:
                del self.running[number]
        self.tell(ev.BatchFailed, run.worker, attempt, failure, lost_context=lost_context, beside=beside)

    def attempt_of(self, item):
        return next(number for number, run in self.running.items() if item in run.items)

    def on(self, worker):
        return sorted(item for run in self.running.values() if run.worker == worker for item in run.items)


def test_a_window_is_kept_full_and_ends_in_any_order():
    run = Run(window=3)
    run.submit(range(10))
    assert run.on("w0") == [0, 1, 2]
    for item, there in ((1, [0, 2, 3]), (3, [0, 2, 4]), (0, [2, 4, 5])):
        run.finish(item)
        assert run.on("w0") == there
    assert run.delivered == [1, 3, 0]


def test_the_policy_hears_of_each_item_and_its_window_may_change():
    run = Run(window=2)
    run.submit(range(10))
    run.finish(0, tokens=70)
    assert run.batching.heard == [("w0", 1, 1.0, 70)]
    run.batching.most = 5
    run.finish(1)
    assert run.on("w0") == [2, 3, 4, 5, 6]
    run.batching.most = 1
    for item in (2, 3, 4, 5):
        run.finish(item)
    assert run.on("w0") == [6]


def test_a_context_bears_no_more_than_it_says():
    run = Run(window=64, concurrency=4)
    run.submit(range(10))
    assert run.on("w0") == [0, 1, 2, 3]
    run = Run(concurrency=2)
    run.submit(range(100), "work")
    assert sorted(len(each.items) for each in run.running.values()) == [10, 10], "two batches at a time"


def test_all_that_overlaps_takes_one_slot():
    run = Run(window=3, slots=2)
    run.submit(range(10))
    assert run.state.workers["w0"].unused_slots == 1
    run.submit(range(100, 130), "work")
    assert len(run.on("w0")) == 3, "there is no room for the other context, and what is in flight goes on"


@pytest.mark.parametrize("routing", ["least-loaded", "round-robin"])
def test_a_worker_is_drained_for_work_that_goes_first(routing):
    run = Run(window=3, routing=routing)
    run.submit(range(100))
    run.submit(range(100, 110), "work")
    for _ in range(60):
        if any(item >= 100 for item in run.on("w0")):
            break
        run.finish(run.on("w0")[0])
    assert any(item >= 100 for item in run.on("w0")), "the more urgent app never got the worker"
    assert len(run.delivered) < 20, "it was filled again and again meanwhile"


def test_an_item_that_raises_fails_alone_and_its_retry_needs_nobody_to_stop():
    run = Run(window=3)
    run.tell(ev.AppDeclared, ev.AppSpec("again", "again", "engine", batch=False, overlaps=True, retries=1))
    run.submit(range(10), "again")
    failure = ev.Failure("exception", "ValueError", "bad")
    run.fail(1, failure)
    assert run.on("w0") == [0, 1, 2] and not run.buried
    run.fail(1, failure)
    assert run.on("w0") == [0, 2, 3] and run.buried == [1]
    run.fail(2, ev.Failure("input", "ItemRefused", "never"))
    assert run.on("w0") == [0, 3, 4] and run.buried == [1, 2], "it is not tried again"


def test_whoever_kills_the_engine_is_found_and_nobody_else_suffers():
    run = Run(window=4)
    run.submit(range(12))
    crashes = 0
    while run.state.open:
        there = run.on("w0")
        if 2 in there:
            crashes += 1
            run.fail(there[0], CRASH, lost_context=True)
        else:
            run.finish(there[0])
    assert run.buried == [2] and sorted(run.delivered) == [each for each in range(12) if each != 2]
    assert crashes == 4, "twice with others, then twice alone"


@pytest.mark.parametrize(("window", "contexts", "most"), [(64, 5, 30), (512, 6, 60)])
def test_a_killer_in_a_large_window_has_few_of_the_others_run_alone(window, contexts, most):
    run = Run(window=window)
    run.submit(range(window + 100))
    killer, crashes, rounds, alone = window // 2, 0, 0, set()
    while run.state.open:
        there = run.on("w0")
        if len(there) == 1 and there != [killer] and run.state.apps["ask"].isolated.items:
            alone.update(there)
        if killer in there:
            crashes += 1
            run.fail(there[0], CRASH, lost_context=True)
            continue
        rounds += 1  # Of about as much time each.
        for item in there:
            run.finish(item)
            if killer in run.on("w0"):
                break
    assert run.buried == [killer] and len(run.delivered) == window + 99
    assert crashes == contexts
    assert rounds <= most and len(alone) <= 16


def test_suspects_run_apart_from_others_and_each_has_its_place_again_after_a_loss():
    run = Run(window=64)
    run.submit(range(100))
    for _ in range(2):
        run.fail(0, CRASH, lost_context=True)
    suspects = set(range(64))
    assert len(run.on("w0")) == 8 and suspects.issuperset(run.on("w0"))
    run.finish(run.on("w0")[0])
    assert len(run.on("w0")) == 8 and suspects.issuperset(run.on("w0")), "the next takes its place"
    run.running.clear()
    run.tell(ev.WorkerLost, "w0", evicted=True)
    run.tell(ev.WorkerJoined, ev.WorkerSpec("w1", host="h1", memory=100))
    assert len(run.on("w1")) == 8 and suspects.issuperset(run.on("w1")), "as many at a time as before"
    while suspects.intersection(run.on("w1")):
        there = run.on("w1")
        assert suspects.issuperset(there) and len(there) <= 8
        run.finish(there[0])
    assert len(run.on("w1")) == 36


def test_one_worker_at_a_time_runs_suspects_and_the_others_stay_full():
    run = Run(window=16, workers=4)
    run.submit(range(1000))
    for _ in range(2):
        run.fail(0, CRASH, lost_context=True)
    for name in run.state.workers:
        run.finish(run.on(name)[0])
    (turning,) = [each.id for each in run.state.workers.values() if each.turning]
    for item in run.on(turning):
        run.finish(item)
    for _ in range(100):
        apart = [name for name in run.state.workers if run.state.workers[name].windows["engine"] < 16]
        assert apart in ([turning], [])
        assert all(len(run.on(name)) == 16 for name in run.state.workers if name not in apart)
        run.finish(run.on(turning)[0])
    assert not run.state.apps["ask"].isolated.items and not run.buried


@pytest.mark.parametrize("app", ["ask", "work"], ids=["items that overlap", "a batch"])
def test_no_item_is_accused_where_somebody_stopped_the_library_process(app):
    run = Run(window=4)
    run.submit(range(8), app)
    for times in range(run.state.limits.losses):
        assert not run.state.apps[app].isolated.items, times
        there = run.on("w0")
        run.fail(there[0], ev.Failure("lost", "Unresponsive", "was stopped", machine=True), lost_context=True)
    assert not run.buried and run.state.counters.crashes == run.state.limits.losses
    assert run.state.apps[app].isolated.items, "at last they may be to blame"
    while run.state.open:
        run.finish(run.on("w0")[0])
    assert sorted(run.delivered) == list(range(8))


def test_what_runs_apart_says_nothing_of_a_window():
    run = Run(window=64)
    run.submit(range(64))
    for _ in range(2):
        run.fail(0, CRASH, lost_context=True)
    for _ in range(64):
        run.finish(run.on("w0")[0])
    assert not run.batching.heard and "ask" not in run.state.workers["w0"].paces
    assert len(run.delivered) == 64


def test_who_kills_its_worker_is_found_likewise():
    run = Run(window=64)
    run.submit(range(80))
    killer, losses = 20, 0
    while run.state.open:
        there = run.on(f"w{losses}")
        assert losses < 3 or len(there) <= 16
        if killer not in there:
            run.finish(there[0])
            continue
        run.running.clear()
        run.tell(ev.WorkerLost, f"w{losses}")
        losses += 1
        run.tell(ev.WorkerJoined, ev.WorkerSpec(f"w{losses}", host=f"h{losses}", memory=100))
    assert run.buried == [killer] and len(run.delivered) == 79
    assert losses == 6, "three times with the others, once with eight, twice alone"


def test_all_that_a_context_was_ended_for_are_counted_at_once_and_nobody_else():
    run = Run(window=9)
    run.submit(range(10))
    late = ev.Failure("timeout", "Timeout", "it went on")
    run.fail(0, late, lost_context=True, beside=range(1, 8))
    assert sorted(run.buried) == list(range(8)) and run.on("w0") == [8, 9]
    assert run.state.contexts["engine"].builds == 2


def test_of_those_that_a_context_was_ended_for_some_may_have_ended_before():
    run = Run(window=3)
    run.submit(range(3))
    worker, first, second = "w0", run.attempt_of(0), run.attempt_of(1)
    run.finish(0)
    late = ev.Failure("timeout", "Timeout", "it went on")
    del run.running[second]
    run.tell(ev.BatchFailed, worker, first, late, lost_context=True, beside=(second,))
    assert run.buried == [1]


def test_suspects_of_calls_on_threads_stay_in_batches():
    run = Run(concurrency=2)
    run.submit(range(40), "work")
    for _ in range(2):
        run.fail(0, CRASH, lost_context=True)
    sizes = []
    while run.state.open:
        (there,) = [each.items for each in run.running.values()] if len(run.running) == 1 else [()]
        sizes.append(len(there))
        run.finish(run.on("w0")[0])
    assert sizes[:6] == [4, 4, 2, 4, 4, 2] and not run.buried


def test_one_worker_is_drained_for_a_suspect_and_the_others_go_on():
    run = Run(window=3, workers=3)
    run.submit(range(60))
    for _ in range(2):
        worker = next(each.worker for each in run.running.values() if 0 in each.items)
        run.fail(0, CRASH, lost_context=True)
    assert worker
    suspects = {item for group in run.state.apps["ask"].isolated for item in group.items}
    assert 0 in suspects and len(suspects) <= 3
    turning = [each.id for each in run.state.workers.values() if each.turning]
    assert len(turning) <= len(suspects)
    for _ in range(60):
        if not run.state.open:
            break
        run.finish(next(iter(next(iter(run.running.values())).items)))
    assert not run.buried and sorted(run.delivered) == list(range(60))


def test_a_lost_worker_costs_what_was_in_flight_and_order_is_kept():
    run = Run(window=4)
    run.submit(range(10))
    run.finish(1)
    assert run.on("w0") == [0, 2, 3, 4]
    run.running.clear()
    run.tell(ev.WorkerLost, "w0", evicted=True)
    assert list(run.state.apps["ask"].queue) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert run.state.counters.retried == 4


def test_after_notice_nothing_more_is_given_and_what_is_in_flight_ends():
    run = Run(window=3)
    run.submit(range(10))
    run.tell(ev.EvictionNotice, "w0")
    for item in (0, 1, 2):
        run.finish(item)
    assert run.on("w0") == [] and run.delivered == [0, 1, 2] and run.state.counters.retried == 0


def test_a_worker_that_is_too_many_is_drained_and_given_back():
    run = Run(window=3, workers=2)
    run.submit(range(100))
    run.tell(ev.TierOffered, ev.TierSpec("default", 0, 1))
    run.tell(ev.Tick)
    (leaving,) = [each.id for each in run.state.workers.values() if each.draining]
    for item in run.on(leaving):
        run.finish(item)
    run.tell(ev.Tick)
    assert run.released == [leaving]


@given(
    window=st.sampled_from([*range(1, 10), 20, 40]), workers=st.integers(1, 4), items=st.integers(1, 60), data=st.data()
)
def test_every_item_is_answered_once_whatever_is_lost(window, workers, items, data):
    run = Run(window=window, workers=workers)
    run.submit(range(items))
    joined = workers
    for _ in range(40):
        if not run.running:
            break
        number = data.draw(st.sampled_from(sorted(run.running)))
        worker, item = run.running[number].worker, run.running[number].items[0]
        what = data.draw(st.sampled_from(["finish"] * 6 + ["lose", "vanish", "crash"]))
        if what == "finish":
            run.finish(item)
        elif what == "crash":
            run.fail(item, CRASH, lost_context=True)
        else:
            run.running = {n: each for n, each in run.running.items() if each.worker != worker}
            run.tell(ev.WorkerLost, worker, evicted=what == "lose")
            run.tell(ev.WorkerJoined, ev.WorkerSpec(f"w{joined}", host=f"h{joined}", memory=100))
            joined += 1
        for name in run.state.workers:
            assert len(run.on(name)) <= window
    while run.running:
        run.finish(next(iter(run.running.values())).items[0])
    assert sorted(run.delivered + run.buried) == list(range(items))


@pytest.mark.parametrize("batching", ["fixed", "opportunistic"])
@pytest.mark.parametrize("workers", [1, 4])
def test_items_that_come_one_by_one_do_not_wait_for_one_that_is_in_flight(batching, workers):
    run = Run(workers=workers, batching=make("batching", batching))
    for number in range(48):
        run.submit([number])
    assert len(run.running) == 48, "the engines have room for all of them"
    run = Run(workers=workers, batching=make("batching", {"policy": batching, "window": 8}))
    for number in range(48):
        run.submit([number])
    assert len(run.running) == min(48, 8 * workers)


def test_what_was_submitted_waits_for_no_call_where_a_window_grows_later():
    run = Run(window=1)
    run.submit(range(10))
    run.batching.most = 3
    run.tell(ev.Tick)
    assert run.on("w0") == [0, 1, 2]
    run.batching.most = 5
    run.tell(ev.Tick)
    assert run.on("w0") == [0, 1, 2], "nothing has come since: a slow worker does not take more of what is left"


def test_a_full_worker_costs_each_new_item_one_question():
    run = Run(window=2, workers=4)
    run.submit(range(100))
    asked = run.batching.asked
    for number in range(100, 110):
        run.submit([number])
    assert run.batching.asked == asked + 10


def two_contexts():
    """Two apps of items, each on a context of its own, on a worker with two slots: each has three in flight."""
    run = Run(window=3, slots=2, memory=30)
    run.tell(ev.AppDeclared, ev.AppSpec("too", "too", "other", batch=False, overlaps=True))
    run.submit(range(100))
    run.submit(range(1000, 1100), "too")
    assert run.on("w0") == [0, 1, 2, 1000, 1001, 1002]
    return run


def test_a_context_that_is_drained_does_not_begin_again_before_the_others_are():
    run = two_contexts()
    worker = run.state.workers["w0"]
    run.state.turn(worker, worker.in_flight)
    for item in (0, 1, 2):
        run.finish(item)
    assert run.on("w0") == [1000, 1001, 1002] and worker.turning
    for item in (1000, 1001, 1002):
        run.finish(item)
    assert not worker.turning and len(run.on("w0")) == 6, "both go on"


def test_only_the_context_of_a_suspect_is_drained():
    run = two_contexts()
    for _ in range(2):
        run.fail(run.on("w0")[0], CRASH, lost_context=True)
    assert run.state.apps["ask"].isolated.items == 2, "and one of them runs"
    for _ in range(40):
        there = [item for item in run.on("w0") if item >= 1000]
        assert len(there) == 3, "the other context has a full window all the time"
        run.finish(there[0])
        for item in [item for item in run.on("w0") if item < 1000]:
            run.finish(item)
    assert not run.state.apps["ask"].isolated.items and not run.state.workers["w0"].turning


def test_work_for_which_a_worker_is_drained_gets_it_where_its_memory_needs_both_to_go():
    run = two_contexts()
    run.tell(ev.ContextDeclared, ev.ContextSpec("large", "large", memory=90))
    run.tell(ev.AppDeclared, ev.AppSpec("big", "big", "large", priority=9))
    run.submit([5000], "big")
    run.state.turn(run.state.workers["w0"], ["engine", "other"], "big")
    for _ in range(6):
        run.finish(run.on("w0")[0])
    assert run.on("w0") == [5000]


def test_a_cancelled_call_is_found_among_many_in_flight():
    run = Run(window=4, workers=2)
    run.submit(range(100))
    run.submit(range(200, 203), "work")
    run.state.attempts = Unread(run.state.attempts)
    heard = []
    handle = run.scheduler.handle
    for item in (1, 50, 7, 1):
        heard += handle(ev.ItemsCancelled(run.now, (item,), stop=True))
    calls = [run.running[each.attempt].items[0] for each in heard if isinstance(each, cmd.Interrupt)]
    assert calls == [1, 7]


class Unread(dict):
    """A table whose rows nobody looks through."""

    def values(self):
        raise AssertionError("all attempts are looked at")

    items = __iter__ = values
