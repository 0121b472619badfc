"""What nobody waits for any more: queued calls go, running ones end within two seconds, and contexts stay."""

import contextlib
import os
import threading
import time

import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app

SOON = 10.0  # Two seconds, on a machine that has other things to do; the calls would take a minute.


@context
def process():
    return os.getpid()


@batch_app(process(), batch_size=1, executor="cancelling")
def sleep(pid, seconds):
    time.sleep(sum(seconds))
    return [pid] * len(seconds)


@batch_app(process(), batch_size=4, executor="cancelling")
def sleep_together(pid, seconds):
    time.sleep(sum(seconds))
    return [pid] * len(seconds)


@batch_app(process(), executor="cancelling")
def stubborn(pid, seconds):
    until = time.monotonic() + sum(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(until - time.monotonic())
    return seconds


@context_app(process(), executor="cancelling")
def nap(pid, seconds):
    time.sleep(seconds)
    return pid


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=1, label="cancelling")
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture
def pid(executor):
    return nap(0).result(timeout=60)


def until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_idle(executor):
    return executor.run.wait_idle(0)


def running_calls(executor):
    with executor.run._lock:
        return len(executor.run._scheduler.state.attempts)


def leave_by_break(executor):
    for _ in sleep.map([0] + [60] * 50):
        break


def close(executor):
    results = sleep.map([0] + [60] * 50)
    next(results)
    results.close()


def drop(executor):
    next(sleep.map([0] + [60] * 50))


def interrupt(executor):
    def ctrl_c():
        until(lambda: running_calls(executor))
        time.sleep(0.3)
        os.kill(os.getpid(), 2)

    threading.Thread(target=ctrl_c).start()
    results = sleep.map([60] * 50)  # As in a notebook, where a name holds it on.
    with pytest.raises(KeyboardInterrupt):
        list(results)
    until(lambda: is_idle(executor))
    assert list(results) == []


def cancel_futures(executor):
    futures = [sleep(60) for _ in range(5)]
    until(lambda: running_calls(executor))
    assert all(future.cancel() for future in futures)
    assert all(future.cancelled() for future in futures)


def cancel_a_call(executor):
    future = nap(60)
    until(lambda: running_calls(executor))
    assert future.cancel() and future.cancelled() and future.cancel()


def cancel_items_of_one_batch(executor):
    first = sleep_together(0.5)  # The others come together behind it.
    futures = [sleep_together(60) for _ in range(4)]
    assert first.result(timeout=SOON)
    until(lambda: running_calls(executor))
    time.sleep(0.2)
    for future in futures:
        future.cancel()


@pytest.mark.parametrize(
    "way",
    [leave_by_break, close, drop, interrupt, cancel_futures, cancel_a_call, cancel_items_of_one_batch],
    ids=lambda way: way.__name__,
)
def test_calls_that_nobody_waits_for_end_soon_and_the_context_stays(executor, pid, way):
    way(executor)
    until(lambda: is_idle(executor))
    assert nap(0).result(timeout=SOON) == pid, "the context was not built again"
    assert executor.status().items_dead == 0


def test_others_whose_items_share_a_batch_get_their_answers(executor, pid):
    first = sleep_together(0.3)
    wanted, other = sleep_together(0.4), sleep_together(0.4)
    first.result(timeout=SOON)
    until(lambda: running_calls(executor))
    assert other.cancel()
    assert wanted.result(timeout=SOON) == pid
    assert other.cancelled()


def test_an_answered_future_cannot_be_cancelled(executor):
    future = nap(0)
    future.result(timeout=60)
    assert not future.cancel()


def test_a_call_that_goes_on_all_the_same_costs_the_context_and_nobody_else(executor, pid):
    future = stubborn(60)
    until(lambda: running_calls(executor))
    time.sleep(0.3)
    waiting = nap(0)
    assert future.cancel()
    assert waiting.result(timeout=30) != pid
    assert executor.status().items_dead == 0


def test_a_context_that_is_being_built_for_what_was_cancelled_is_of_use(executor, tmp_path):
    place = str(tmp_path / "builds")

    @context
    def slow_context():
        with open(place, "a") as file:
            file.write("built\n")
        time.sleep(0.6)
        return 10

    app = nap.using(slow_context())
    future = app(60)
    until(lambda: os.path.exists(place))
    assert future.cancel()
    assert app(0).result(timeout=60) == 10
    assert (tmp_path / "builds").read_text() == "built\n"
