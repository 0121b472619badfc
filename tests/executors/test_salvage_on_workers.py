"""Apps that yield their results one by one, on real workers that are taken away."""

import json
import os
import threading
import time

import pytest
from executor_helpers import mapped_tenfold, started

from ctxflow import CallCrashed, batch_app
from ctxflow.executors.kept_files import EventLog
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import read_setup, replay
from ctxflow.testing.evictions import Evictions
from waiting import FOREVER, eventually


@batch_app(batch_size=100)
def noticed(numbers, *, place):
    """Stops at item 59 of the first batch until somebody has seen it."""
    for n in numbers:
        with open(os.path.join(place, "ran"), "a") as file:
            file.write(f"{n}\n")
        if n == 59:
            while not os.path.exists(os.path.join(place, "go")):
                time.sleep(0.01)
        yield -n


def test_a_notice_at_item_60_of_100_requeues_40(tmp_path):
    with started(tmp_path / "run", workers=1) as executor:
        results = noticed.map(range(100), place=str(tmp_path))
        eventually(lambda: (tmp_path / "ran").exists() and len((tmp_path / "ran").read_text().split()) == 60)
        engine = executor.engine
        [before] = engine.worker_pids()
        assert engine.evict(before, notice=30.0) == before
        assert engine.evict(before, notice=30.0) is None, "it has had notice"
        eventually(lambda: executor.run._scheduler.state.workers[before].noticed is not None)
        (tmp_path / "go").touch()
        assert list(results) == [-n for n in range(100)]
        status = executor.status()
    assert (status.retried_items, status.evictions, status.items_dead) == (40, 1, 0)
    assert (tmp_path / "ran").read_text().split() == [str(n) for n in range(100)], "no item ran twice"


@batch_app(batch_size=20, retries=0)
def steady(numbers):
    for n in numbers:
        time.sleep(0.003)
        yield 10 * n


@pytest.mark.parametrize("notice", [None, 0.0, 5.0], ids=["no notice", "no time", "time"])
def test_nothing_is_lost_and_nothing_comes_twice(tmp_path, notice):
    options = {"per_minute": 240, "seed": 3, "rejoin_seconds": 0.1, "at_most": 5, "notice": notice}
    with started(tmp_path / "run", workers=3, batching="opportunistic") as executor:
        with Evictions(executor, **options) as evictions:
            mapped = mapped_tenfold(steady.using(batch_size=200), 1500, evictions)
        status = executor.status()
    assert evictions.count > 0
    assert (status.items_dead, status.items_done) == (0, mapped)


def test_an_evicted_worker_whose_time_is_up_is_killed(tmp_path):
    @batch_app(batch_size=2)
    def hangs_once(numbers, *, place):
        for n in numbers:
            if n == 1 and not os.path.exists(place):
                open(place, "w").close()
                time.sleep(FOREVER)
            yield n

    with started(tmp_path / "run", workers=1) as executor:
        results = hangs_once.map(range(2), place=str(tmp_path / "hung"))
        eventually((tmp_path / "hung").exists)
        executor.engine.evict(notice=0.1)
        assert list(results) == [0, 1]
        assert executor.status().evictions == 1


# --- errors


@batch_app(batch_size=10)
def odd(numbers, *, how):
    for n in numbers:
        if n % 10 == 7:
            if how == "raise":
                raise ValueError(f"{n} is not liked")
            if how == "crash":
                os._exit(3)
            if how == "fork" and not os.fork():
                return
        if how == "crash" and n % 10 == 6:
            time.sleep(0.6)  # So that what came before the next item has been sent along.
        yield threading.Lock() if how == "unpicklable" and n % 10 == 7 else n


@batch_app(batch_size=10)
def generated(numbers):
    """A generator's expression is as good as a generator's function."""
    return (n * n for n in numbers)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    with started(tmp_path_factory.mktemp("run"), workers=1, batching={"policy": "fixed", "size": 10}) as executor:
        yield executor


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raise", ValueError, "7 is not liked"),
        ("unpicklable", TypeError, "return plain data instead"),
        ("crash", CallCrashed, "exit status 3"),
    ],
)
def test_a_bad_item_has_its_own_error_and_the_others_their_results(executor, how, error, words):
    before = executor.status()
    answers = list(odd.map(range(10), how=how, on_error="return"))
    bad = answers.pop(7)
    assert isinstance(bad, error) and words in str(bad)
    assert answers == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    after = executor.status()
    assert (after.items_dead - before.items_dead, after.items_done - before.items_done) == (1, 9)
    # The bad item (a crash has to come twice) and those after it: none before it ran again.
    assert after.retried_items - before.retried_items == 3 + (how == "crash")


def test_a_process_that_is_forked_in_between_answers_nothing(executor):
    assert list(odd.map(range(10), how="fork")) == list(range(10))


def test_a_generator_expression_is_as_good(executor):
    assert list(generated.map(range(25))) == [n * n for n in range(25)]


class Shy:
    """Can be pickled, and not opened."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("stay closed")


def test_a_result_that_cannot_be_opened_here_fails_its_item_alone(executor):
    @batch_app(batch_size=4)
    def shy(numbers):
        for n in numbers:
            time.sleep(0.3)
            yield Shy() if n == 2 else n

    answers = list(shy.map(range(4), on_error="return"))
    assert "stay closed" in str(answers.pop(2))
    assert answers == [0, 1, 3]


# --- the log


def test_the_log_has_no_results_and_leads_to_the_same_decisions(tmp_path):
    @batch_app
    def long(texts):  # Longer than half a second, so that results are sent along.
        for text in texts:
            time.sleep(0.02)
            yield text.upper()

    with (
        started(tmp_path / "run", workers=2, batching={"policy": "fixed", "size": 40}) as executor,
        Evictions(executor, per_minute=100, seed=5, rejoin_seconds=0.1, at_most=2, notice=2.0),
    ):
        assert list(long.map(f"secret-{n}" for n in range(160))) == [f"SECRET-{n}" for n in range(160)]
    [log] = (tmp_path / "run").rglob("events.jsonl")
    text = log.read_text()
    first, *events = text.splitlines(keepends=True)
    assert {"ItemsFinished", "BatchEnded"} <= {json.loads(line)["event"]["is"] for line in events}
    assert "secret" not in text.lower()
    fresh = read_setup(first).scheduler()
    assert replay(events, fresh) == len(events)
    fresh.validate()
    assert fresh.state.counters.done == 160


def test_results_do_not_live_on_in_the_log(tmp_path):
    log = EventLog(str(tmp_path / "events.jsonl"), "{}")
    log.add(ev.ItemsFinished(0.0, "w", 1, 0, 1, results=[object()]), [])
    [(event, _)] = log._unwritten
    log.close()
    assert event.results is None
