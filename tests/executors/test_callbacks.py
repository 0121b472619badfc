"""Callbacks of futures: they run beside the run, so that none of them holds up an answer."""

import threading
import time

import parsl
import pytest
from executor_helpers import started

from ctxflow import ContextExecutor, batch_app
from ctxflow.executors import futures as futures_module
from ctxflow.testing.worker_calls import wait_for
from waiting import FOREVER, eventually, finished, happened


@batch_app
def add_one(numbers):
    return [n + 1 for n in numbers]


@pytest.fixture(params=["alone", "with parsl"])
def call(request, tmp_path):
    """Make a call and get its future, both ways."""
    if request.param == "alone":
        with started(tmp_path / "run", workers=1):
            yield add_one
    else:
        with parsl.load(ContextExecutor.config(workers=1, run_dir=str(tmp_path))):
            yield add_one


def test_a_callback_may_wait_for_other_calls(call):
    """Each makes a call and waits for it, and for that one's callback in turn."""
    depth, done, found = 4, threading.Event(), []

    def go_on(future):
        found.append(finished(future).result())
        if len(found) < depth:
            following, begun = call(found[-1]), threading.Event()
            following.add_done_callback(go_on)
            following.add_done_callback(lambda _: begun.set())
            finished(following).result()
            happened(begun)
        else:
            done.set()

    call(0).add_done_callback(go_on)
    happened(done)
    assert found == [1, 2, 3, 4]


def test_a_callback_that_blocks_holds_up_neither_answers_nor_callbacks(call):
    go, order = threading.Event(), []
    call(0).add_done_callback(lambda _: go.wait())
    futures = [call(n) for n in range(20)]
    for future in futures:
        future.add_done_callback(lambda future: order.append(future.result()))
    try:
        assert [finished(future).result() for future in futures] == list(range(1, 21))
        eventually(lambda: len(order) == 20)
    finally:
        go.set()


def test_callbacks_come_in_the_order_of_the_answers_and_in_one_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(futures_module, "_CALLBACK_SECONDS", FOREVER)  # None of them blocks.
    threads, order = set(), []

    def note(future):
        threads.add(threading.current_thread().name)
        order.append(future.result())

    with started(tmp_path / "run", workers=1) as executor:
        executor.submit(wait_for, {}, str(tmp_path / "go"))
        for n in range(200):
            executor.submit(pow, {}, n, 1).add_done_callback(note)
        (tmp_path / "go").touch()
    assert order == list(range(200)), "all have run when the block has ended"
    assert threads == {"ctxflow-run"}


def test_a_callback_of_what_is_answered_runs_at_once(tmp_path):
    with started(tmp_path / "run", workers=1) as executor:
        future = executor.submit(pow, {}, 2, 3)
        finished(future).result()
        found = []
        future.add_done_callback(lambda _: found.append(threading.current_thread()))
        assert found == [threading.current_thread()]


def test_a_callback_that_raises_is_told_and_ends_nothing(tmp_path, caplog):
    with started(tmp_path / "run", workers=1) as executor:
        executor.submit(wait_for, {}, str(tmp_path / "go"))
        future = executor.submit(pow, {}, 2, 3)
        future.add_done_callback(lambda _: 1 / 0)
        (tmp_path / "go").touch()
        assert finished(executor.submit(pow, {}, 2, 3)).result() == 8
    assert "a callback of a future raised" in caplog.text and "ZeroDivisionError" in caplog.text


def test_callbacks_of_calls_that_the_end_cancels_may_wait_for_one_another(tmp_path):
    executor = started(tmp_path / "run", workers=1)
    executor.start()
    first, second = (executor.submit(time.sleep, {}, 60) for _ in range(2))
    errors = []
    first.add_done_callback(lambda _: errors.append(finished(second).exception()))
    second.add_done_callback(lambda _: errors.append(finished(first).exception()))
    executor.shutdown()
    assert [type(error).__name__ for error in errors] == ["RunEnded"] * 2
    assert not {"ctxflow-run", "ctxflow-watch"} & {thread.name for thread in threading.enumerate()}
