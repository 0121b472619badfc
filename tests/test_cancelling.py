"""What nobody waits for any more: queued calls go, running ones end within two seconds, and contexts stay."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app
from waiting import FOREVER, eventually, finished


@context
def process():
    return os.getpid()


@batch_app(process(), batch_size=1, executor="cancelling")
def sleep(pid, seconds):
    time.sleep(sum(seconds))
    return [pid] * len(seconds)


@batch_app(process(), batch_size=4, executor="cancelling")
def held(pid, folders):
    """Wait until each folder has a file "go"."""
    for folder in folders:
        (folder / "begun").touch()
    while not all((folder / "go").exists() for folder in folders):
        time.sleep(0.01)
    return [pid] * len(folders)


@batch_app(process(), executor="cancelling")
def stubborn(pid, folders):
    while True:
        with contextlib.suppress(BaseException):
            (folders[0] / "begun").touch()
            time.sleep(FOREVER)


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
    return finished(nap(0)).result()


def folders(parent, count):
    made = [parent / str(number) for number in range(count)]
    for each in made:
        each.mkdir()
    return made


def is_idle(executor):
    return executor.run.wait_idle(0)


def running_calls(executor):
    with executor.run._lock:
        return len(executor.run._scheduler.state.attempts)


def leave_by_break(executor, tmp_path):
    for _ in sleep.map([0] + [FOREVER] * 50):
        break


def close(executor, tmp_path):
    results = sleep.map([0] + [FOREVER] * 50)
    next(results)
    results.close()


def drop(executor, tmp_path):
    next(sleep.map([0] + [FOREVER] * 50))


def reads_a_map(thread):
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_globals["__name__"] != "ctxflow.map_results":
        frame = frame.f_back
    return frame is not None


def interrupt(executor, tmp_path, how=signal.SIG_UNBLOCK):
    def ctrl_c():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        eventually(lambda: running_calls(executor) and reads_a_map(threading.main_thread()))
        os.kill(os.getpid(), signal.SIGINT)

    results = sleep.map([FOREVER] * 50)  # As in a notebook, where a name holds it on.
    with pytest.raises(KeyboardInterrupt):
        before = signal.pthread_sigmask(how, [signal.SIGINT])
        try:
            threading.Thread(target=ctrl_c).start()
            list(results)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    eventually(lambda: is_idle(executor))
    assert list(results) == []


def interrupt_just_before_a_wait(executor, tmp_path):
    """Python then knows of it, and the wait for a lock goes on, as where another thread gets the signal."""
    interrupt(executor, tmp_path, signal.SIG_BLOCK)


def cancel_futures(executor, tmp_path):
    futures = [sleep(FOREVER) for _ in range(5)]
    eventually(lambda: running_calls(executor))
    assert all(future.cancel() for future in futures)
    assert all(future.cancelled() for future in futures)


def cancel_a_call(executor, tmp_path):
    future = nap(FOREVER)
    eventually(lambda: running_calls(executor))
    assert future.cancel() and future.cancelled() and future.cancel()


def cancel_items_of_one_batch(executor, tmp_path):
    before, *others = folders(tmp_path, 5)
    first = held(before)  # The others come together behind it.
    futures = [held(each) for each in others]
    (before / "go").touch()
    assert finished(first).result()
    eventually(lambda: all((each / "begun").exists() for each in others))
    for future in futures:
        future.cancel()


@pytest.mark.parametrize(
    "way",
    [
        leave_by_break,
        close,
        drop,
        interrupt,
        interrupt_just_before_a_wait,
        cancel_futures,
        cancel_a_call,
        cancel_items_of_one_batch,
    ],
    ids=lambda way: way.__name__,
)
def test_calls_that_nobody_waits_for_end_soon_and_the_context_stays(executor, pid, way, tmp_path):
    way(executor, tmp_path)
    eventually(lambda: is_idle(executor))
    assert finished(nap(0)).result() == pid, "the context was not built again"
    assert executor.status().items_dead == 0


def test_others_whose_items_share_a_batch_get_their_answers(executor, pid, tmp_path):
    places = folders(tmp_path, 3)
    first, wanted, other = (held(each) for each in places)
    (places[0] / "go").touch()
    finished(first).result()
    eventually(lambda: all((each / "begun").exists() for each in places))
    assert other.cancel()
    for each in places[1:]:
        (each / "go").touch()
    assert finished(wanted).result() == pid
    assert other.cancelled()


def test_an_answered_future_cannot_be_cancelled(executor):
    future = nap(0)
    finished(future).result()
    assert not future.cancel()


def test_a_call_that_goes_on_all_the_same_costs_the_context_and_nobody_else(executor, pid, tmp_path):
    future = stubborn(tmp_path)
    eventually((tmp_path / "begun").exists)
    waiting = nap(0)
    assert future.cancel()
    assert finished(waiting).result() != pid
    assert executor.status().items_dead == 0


def test_a_context_that_is_being_built_for_what_was_cancelled_is_of_use(executor, tmp_path):
    place, go = str(tmp_path / "builds"), tmp_path / "go"

    @context
    def slow_context():
        with open(place, "a") as file:
            file.write("built\n")
        while not go.exists():
            time.sleep(0.01)
        return 10

    app = nap.using(slow_context())
    future = app(FOREVER)
    eventually(lambda: os.path.exists(place))
    assert future.cancel()
    go.touch()
    assert finished(app(0)).result() == 10
    assert (tmp_path / "builds").read_text() == "built\n"
