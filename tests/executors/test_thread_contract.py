"""Plain calls that overlap: the engines' contract, embedded and simulated; and apps whose context bears several."""

import contextlib
import os
import threading

from executor_helpers import started
from test_item_contract import TestEmbedded as Embedded
from test_item_contract import TestSimulated as Simulated

from ctxflow import CallCrashed, batch_app, context, context_app
from ctxflow.testing.thread_contract import ThreadContract
from waiting import FOREVER, finished


class TestEmbedded(ThreadContract):
    make = Embedded.make
    notify = Embedded.notify


class TestSimulated(ThreadContract):
    executes, tier = False, "default"
    make = Simulated.make
    notify = Simulated.notify


@context(concurrency=3)
def barrier():
    return threading.Barrier(3)


def met(shared, seconds):
    """Whether as many are there at once as the context bears."""
    with contextlib.suppress(threading.BrokenBarrierError):
        shared.wait(seconds)
        return True
    return False


@batch_app(barrier(), batch_size=2)
def together(shared, items):
    return [met(shared, FOREVER)] * len(items)


@context_app(barrier())
def one(shared, seconds):
    return met(shared, seconds)


def test_apps_whose_context_bears_three_have_three_calls_on_one_worker(tmp_path):
    with started(tmp_path / "run", workers=1):
        assert list(together.map(range(12))) == [True] * 12
        calls = [one(FOREVER) for _ in range(3)]
        assert [finished(call).result() for call in calls] == [True] * 3


def test_a_context_that_bears_one_has_one_at_a_time(tmp_path):
    with started(tmp_path / "run", workers=1):
        single = one.using(context=barrier.options(concurrency=1)())
        calls = [single(0.3) for _ in range(3)]
        assert [finished(call).result() for call in calls] == [False] * 3


@context(concurrency=4)
def nothing():
    return None


@batch_app(nothing(), batch_size=1)
def dies_at_seven(shared, items):
    if items[0] == 7:
        os._exit(3)
    return [-item for item in items]


def test_the_one_that_ends_the_process_is_found_and_no_other_dies(tmp_path):
    with started(tmp_path / "run", workers=2):
        answers = list(dies_at_seven.map(range(20), on_error="return"))
    assert isinstance(answers.pop(7), CallCrashed)
    assert answers == [-n for n in range(20) if n != 7]
