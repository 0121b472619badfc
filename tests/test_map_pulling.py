"""Inputs that keep a map waiting: slow ones, ones that depend on its results, ones that raise or are dropped."""

import contextvars
import gc
import itertools
import queue
import threading
import time

import pytest

from ctxflow import ContextExecutor, batch_app, mapping
from ctxflow.mapping import MapWork
from waiting import eventually, happened, patience


@batch_app(executor="pulling")
def add_one(numbers):
    return [n + 1 for n in numbers]


@pytest.fixture(scope="module", autouse=True)
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=1, label="pulling")
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


def values(results, order):
    return (result for _, result in results) if order == "completed" else results


@pytest.mark.parametrize("order", ["input", "completed"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_generator_that_waits_for_results_of_its_own_map(order, window):
    results = queue.SimpleQueue()

    def source():
        yield 0
        while (number := results.get(timeout=patience())) < 20:
            yield number

    found = []
    for number in values(add_one.map(source(), order=order, window=window), order):
        found.append(number)
        results.put(number)
    assert found == list(range(1, 21))


def test_with_a_window_of_one_inputs_are_taken_when_they_are_asked_for():
    """As the built-in `map` does: so a list may grow while it is gone through."""
    tasks = [0]

    def source():
        yield from tasks

    for number in add_one.map(source(), window=1):
        if number < 5:
            tasks.append(number)
    assert tasks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", ["input", "completed"])
def test_results_that_are_there_come_while_the_inputs_stand_still(order):
    go = threading.Event()

    def source():
        yield from range(3)
        happened(go)
        yield from range(3, 6)

    results = values(add_one.map(source(), order=order), order)
    assert sorted(itertools.islice(results, 3)) == [1, 2, 3]
    go.set()
    assert sorted(results) == [4, 5, 6]


@pytest.mark.parametrize("window", [1, 2, 7])
def test_no_more_is_taken_than_was_asked_for(window):
    taken = []

    def source():
        for number in range(20):
            taken.append(number)
            yield number

    results = add_one.map(source(), window=window)
    eventually(lambda: len(taken) == window)
    for number in range(20):
        time.sleep(0.02)  # In which more could be taken.
        assert len(taken) <= min(20, window + number)
        assert next(results) == number + 1
    assert list(results) == []


def test_work_begins_before_anything_is_read(executor, monkeypatch):
    monkeypatch.setattr(mapping, "_FEED_SECONDS", patience())  # What has not come by then is submitted once it is read.
    before = executor.status().items_done
    results = add_one.map(n for n in range(500))
    eventually(lambda: executor.status().items_done == before + 500)
    assert list(results) == list(range(1, 501))


def test_a_generator_runs_in_the_context_of_who_made_the_map_and_ends_where_it_ran():
    name = contextvars.ContextVar("name")
    name.set("mine")
    threads, ended = set(), threading.Event()

    def source():
        try:
            for number in itertools.count():
                threads.add(threading.current_thread().name)
                yield number + (name.get() != "mine")
        finally:
            threads.add(threading.current_thread().name)
            ended.set()

    results = add_one.map(source(), window=10)
    assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    results.close()
    happened(ended)
    assert threads == {"ctxflow-inputs"}


@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_map_whose_inputs_stand_still_can_be_left(way):
    go, ended = threading.Event(), threading.Event()

    def source():
        yield 1
        happened(go)
        ended.set()

    results = add_one.map(source())
    assert next(results) == 2
    if way == "close":
        results.close()
    del results
    gc.collect()
    go.set()  # Had it been waited for, the source would have failed.
    happened(ended)
    eventually(lambda: "ctxflow-inputs" not in [thread.name for thread in threading.enumerate()])


@pytest.mark.parametrize("order", ["input", "completed"])
def test_who_waits_for_the_last_answers_sleeps(order, monkeypatch):
    """Once the inputs are over, only an answer is news."""
    looks, wait = [], MapWork.wait
    monkeypatch.setattr(MapWork, "wait", lambda work: (looks.append(1), wait(work)))

    @batch_app(executor="pulling")
    def slow(numbers):
        time.sleep(0.2)
        return numbers

    assert list(values(slow.map(iter(range(3)), order=order), order)) == [0, 1, 2]
    assert len(looks) < 50


def test_inputs_that_raise_lose_nothing_that_came_before(tmp_path):
    def source():
        yield from range(3)
        raise OSError("the feed is gone")

    file = tmp_path / "kept.jsonl"
    results, found = add_one.map(source(), resume=file), []
    with pytest.raises(OSError, match="the feed is gone"):
        for number in results:
            found.append(number)
    assert found == [1, 2, 3]
    assert list(add_one.map((n for n in range(5)), resume=file)) == [1, 2, 3, 4, 5]


def test_generators_side_by_side_with_lists_and_empty_ones():
    @batch_app(executor="pulling")
    def add(left, right):
        return [a + b for a, b in zip(left, right, strict=True)]

    assert list(add.map((n for n in range(4)), [10, 20, 30])) == [10, 21, 32]
    assert list(add_one.map(iter(()))) == []
    assert list(add_one.map(n for n in range(50_000))) == list(range(1, 50_001))
