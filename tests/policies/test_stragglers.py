"""What idle workers run once more with fixed batches: what is on far slower workers, and nothing else."""

from types import SimpleNamespace

import pytest

from ctxflow.policies.simple import Fixed

READY = {"c": SimpleNamespace(state="ready")}


def worker(name, pace, done=100, flying=0):
    return SimpleNamespace(
        id=name,
        contexts=READY,
        in_flight=lambda context: flying,
        seconds_per_item=lambda app: pace,
        items_done=lambda app: done,
        calls_beside=lambda app: None,
    )


def view(there, asks, items, began, copies=1, **app):
    """A batch of so many items on one worker, begun so many seconds ago, and an idle one."""
    told = {"id": "a", "context": "c", "overlaps": False, "concurrency": None, "call_seconds": 0.0, **app}
    batch = {"app": "a", "items": tuple(range(items)), "started": 1000.0 - began}
    attempts = {n: SimpleNamespace(id=n, worker=there.id, **batch) for n in range(1, copies + 1)}
    workers = {each.id: each for each in (there, asks)}
    return SimpleNamespace(
        now=1000.0, workers=workers, free={asks.id: asks}, attempts=attempts, apps={"a": SimpleNamespace(**told)},
        answered=lambda attempt: False,
    )  # fmt: skip


FAST = worker("fast", 0.1)


@pytest.mark.parametrize(
    ("there", "items", "began", "twice"),
    [
        (worker("slow", 1.0), 100, 20.0, True),
        (worker("slow", 1.0), 100, 95.0, False),  # It is done sooner there.
        (worker("slow", 0.15), 100, 0.0, False),
        (worker("like it", 0.1), 1, 300.0, False),  # One item that takes long by its nature.
        (worker("new", None, 0), 100, 39.0, False),
        (worker("new", None, 0), 100, 50.0, True),
        (worker("new", None, 0), 1, 300.0, False),
        (worker("young", 1.0, 3), 100, 5.0, False),  # Three items may have been long ones.
    ],
)
def test_only_what_is_on_a_far_slower_worker_is_run_twice(there, items, began, twice):
    assert Fixed().duplicate(view(there, FAST, items, began), FAST) == (1 if twice else None)


def test_nothing_is_run_a_third_time_nor_what_overlaps_nor_beside_something():
    slow = worker("slow", 1.0)
    assert Fixed().duplicate(view(slow, FAST, 100, 20.0, copies=2), FAST) is None
    assert Fixed().duplicate(view(slow, FAST, 100, 20.0, overlaps=True), FAST) is None
    assert Fixed().duplicate(view(slow, FAST, 100, 20.0, concurrency=4), FAST) is None
    busy = worker("fast", 0.1, flying=1)
    assert Fixed().duplicate(view(slow, busy, 100, 20.0), busy) is None
    unknown = worker("new", None, 0)
    assert Fixed().duplicate(view(slow, unknown, 100, 20.0), unknown) is None


def test_what_was_answered_by_somebody_else_meanwhile_keeps_nothing_from_being_run_twice():
    slow = worker("slow", 1.0)
    seen = view(slow, FAST, 100, 20.0)
    first = seen.attempts[1]
    for number in range(2, 12):
        items = tuple(range(100 * number, 100 * number + 100))
        seen.attempts[number] = SimpleNamespace(**{**vars(first), "id": number, "items": items, "started": 970.0})
    seen.attempts[1].started = 979.0  # What takes the least of all.
    seen.answered = lambda attempt: attempt.id != 1
    assert Fixed().duplicate(seen, FAST) == 1
