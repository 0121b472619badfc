"""What policies see of windows: slots in use, room, full windows and speeds; and who is given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_attempts import Run, Windowed

from ctxflow.policies.simple import Fixed
from ctxflow.scheduler import events as ev
from ctxflow.testing.window_contract import places_left


def seen(run, app="ask", worker="w0"):
    view = run.state.view
    app, worker = view.apps[app], view.workers[worker]
    return worker.slots_used, view.room(app, worker), view.full_window(app, worker), worker.free_slots


def test_a_window_uses_the_share_of_its_slot_that_is_taken():
    run = Run(window=4)
    assert seen(run) == (0.0, 4, 4, 1)
    run.submit([0])
    assert seen(run) == (0.25, 3, 4, 1)
    run.submit(range(1, 9))
    assert seen(run) == (1.0, 0, 4, 0)
    run.finish(0)
    assert seen(run) == (1.0, 0, 4, 0), "the next took its place"


def test_a_share_of_a_short_queue_is_no_full_window():
    run = Run(workers=2, batching=Fixed(window=10))
    run.submit(range(10))
    assert [len(run.on(f"w{n}")) for n in range(2)] == [10, 0], "nobody else has the context"
    run = Run(workers=2, batching=Fixed(window=10))
    run.submit(range(40))
    for item in range(10, 38):
        run.finish(item)
    assert not run.state.ready and len(run.running) == 12
    there = len(run.on("w0"))
    assert there in (2, 10) and seen(run)[0] == there / 10


def test_a_worker_that_is_drained_has_no_room_and_all_of_its_slot_is_in_use():
    run = Run(window=4, routing="least-loaded")
    run.submit([0, 1])
    assert seen(run, "work")[1] == 0, "its slot is not unused"
    run.submit(range(100, 105), "work")
    assert seen(run) == (1.0, 0, 4, 0)


def test_what_does_not_overlap_uses_a_slot():
    run = Run(slots=2)
    run.submit(range(5), "work")
    assert seen(run, "work") == (1.0, 1, 1, 1)
    run.tell(ev.ItemsSubmitted, "ask", [100])
    assert seen(run)[0] == 1.0, "both contexts do not fit"


def test_threads_are_places():
    run = Run(concurrency=4, batching=Windowed(64, size=2))
    run.submit(range(6), "work")
    assert seen(run, "work") == (0.75, 1, 4, 1)
    run.submit(range(10, 12), "work")
    assert seen(run, "work") == (1.0, 0, 4, 0)


def test_an_item_goes_to_an_open_window_before_a_context_is_built_for_it():
    """The window was a share of the queue as it was, so that it was full; the other worker has nothing to do."""
    run = Run(workers=2, batching=Fixed(window=10))
    run.submit([0], "work")
    run.finish(0)
    run.submit([1])
    worker = next(iter(run.running.values())).worker
    loads = run.state.counters.loads
    for item in range(2, 8):
        run.submit([item])
    assert run.on(worker) == [1, 2, 3, 4, 5, 6, 7] and run.state.counters.loads == loads


@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 2), st.lists(st.integers(-6, 9), max_size=30), st.booleans()
)
def test_no_place_is_left_while_work_waits(window, workers, slots, steps, share):
    run = Run(workers=workers, slots=slots, batching=Fixed(size=3, window=window, share=share), memory=50)
    submitted = 0
    for step in steps:
        if step > 0:
            run.submit(range(submitted, submitted + step), "work" if step == 9 else "ask")
            submitted += step
        elif run.running:
            run.finish(next(iter(list(run.running.values())[step % len(run.running)].items)))
        assert list(places_left(run.state)) == []
        for worker in run.state.workers.values():
            assert 0 <= worker.slots_used <= worker.slots
            assert (worker.slots_used == 0) == (not worker.running and not worker.loading)
            for context, flying in worker.in_flight.items():
                assert flying <= worker.full[context] or context == "other"


# --- how fast a worker is


def measured(run, worker="w0"):
    worker = run.state.view.workers[worker]
    return worker.seconds_per_item("ask"), worker.calls_beside("ask")


def test_a_speed_is_that_of_a_full_window():
    """A window of four answers four items in two seconds; as it empties, each takes as long, and shares with fewer."""
    run = Run(window=4)
    run.submit(range(40))
    for item in range(36):
        run.now += 0.5
        run.tell(ev.BatchFinished, "w0", run.attempt_of(item), 2.0)
        run.running.pop(run.attempt_of(item))
    assert measured(run) == (pytest.approx(0.5), pytest.approx(4.0))
    for item in (36, 37, 38, 39):
        run.now += 0.1
        run.tell(ev.BatchFinished, "w0", run.attempt_of(item), 2.0)
        run.running.pop(run.attempt_of(item))
    assert measured(run) == (pytest.approx(0.5, rel=0.05), pytest.approx(4.0, rel=0.05)), (
        "the last ones shared with fewer"
    )
    assert run.state.view.workers["w0"].items_done("ask") == 40


def test_a_smaller_window_is_measured_anew():
    run = Run(window=8)
    run.submit(range(400))
    for _ in range(50):
        run.finish(run.on("w0")[0])
    assert measured(run) == (pytest.approx(1 / 8), pytest.approx(8.0))
    run.batching.most = 2
    for _ in range(300):
        run.finish(run.on("w0")[0])
    assert measured(run)[1] == pytest.approx(2.0, rel=0.2)


def test_a_little_at_first_is_forgotten_when_there_is_more():
    run = Run(window=8)
    for item in range(20):
        run.submit([item])
        run.finish(item)
    assert measured(run) == (pytest.approx(1.0), pytest.approx(1.0))
    run.submit(range(100, 700))
    for _ in range(500):
        run.finish(run.on("w0")[0])
    assert measured(run) == (pytest.approx(1 / 8, rel=0.1), pytest.approx(8.0, rel=0.1))


# --- who is given back


class Wanted:
    """A scaling policy that a test tells what to want."""

    workers = 3

    def target(self, view):
        return {"default": self.workers}


@pytest.mark.parametrize("lowered", [False, True])
def test_who_has_least_in_flight_is_given_back_first(lowered):
    run = Run(window=4, workers=3, scaling=Wanted())
    run.submit(range(12))
    for item in range(12):
        if item in run.on("w2") or item in run.on("w1")[1:]:
            run.finish(item)
    assert [len(run.on(name)) for name in ("w0", "w1", "w2")] == [4, 1, 0]
    run.state.policies.scaling.workers = 2 if not lowered else 3
    run.tell(ev.TierOffered, ev.TierSpec("default", 0, 2 if lowered else 8))
    run.tell(ev.Tick)
    assert [name for name, worker in run.state.workers.items() if not worker.draining] == ["w0", "w1"]
    run.state.policies.scaling.workers = 1
    run.tell(ev.Tick)
    assert [name for name, worker in run.state.workers.items() if not worker.draining] == ["w0"]
    run.finish(run.on("w1")[0])
    run.tell(ev.Tick)
    assert run.released == ["w2", "w1"], "what is in flight is answered first"
