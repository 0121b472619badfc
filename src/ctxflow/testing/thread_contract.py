# ruff: noqa: D102 - the tests' names say what they check
"""The engines' contract on plain calls that overlap, on threads of a library process whose context bears several.

Subclass `ThreadContract` beside `ctxflow.testing.engines.EngineContract`, with the same hooks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.errors import ContextLost
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing import worker_calls as work
from ctxflow.testing.contract_hooks import Contract, ContractRun


class Shared:
    """The context of these tests: what its calls have in common."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.go = threading.Event()


class ThreadContract(Contract):
    """Subclass it as a pytest class, and say how to make an engine."""

    def test_calls_of_a_context_that_bears_two_overlap(self, run: ContractRun) -> None:
        worker, context = _started(run)
        attempts = {run.run(worker, context, _meet, [number]) for number in (1, 2)}
        run.until(lambda: len(run.all(ev.BatchFinished)) == 2)
        assert {event.attempt for event in run.all(ev.BatchFinished)} == attempts
        for event, number in zip(sorted(run.all(ev.BatchFinished), key=lambda each: each.attempt), (1, 2), strict=True):
            self._answers(event, [number])

    def test_calls_of_a_context_that_bears_one_do_not(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run, concurrency=1)
        for number in (1, 2):
            run.run(worker, context, _alone, [number])
        for _ in range(2):
            self._answers(run.wait(ev.BatchFinished), [True])

    def test_what_goes_wrong_with_a_call_is_its_own(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        waiting = run.run(worker, context, _until_other, [0])
        for function, kind, error in (
            (_complain, "exception", "KeyError"),
            (_stop, "exception", "StopIteration"),
            (_leave, "exception", "SystemExit"),
            (_too_few, "contract", "BatchContractError"),
        ):
            failing = run.run(worker, context, function, [1, 2])
            failed = run.wait(ev.BatchFailed)
            assert (failed.attempt, failed.lost_context) == (failing, False)
            assert (failed.failure.kind, failed.failure.error) == (kind, error)
        self._let_go(run, worker, context, waiting)

    def test_what_was_yielded_before_an_error_is_kept(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        waiting = run.run(worker, context, _until_other, [0])
        failing = run.run(worker, context, _yield_then_raise, [5, 6, -1, 7])
        failed = run.only(ev.BatchFailed)
        assert (failed.attempt, failed.at, failed.failure.error) == (failing, 2, "ValueError")
        parts = [event for event in run.all(ev.ItemsFinished) if event.attempt == failing]
        places = [place for part in parts for place in range(part.first, part.first + part.count)]
        assert places == [0, 1], run.events
        assert [result for part in parts for result in pickle.loads(part.results)] == [5, 6]
        self._let_go(run, worker, context, waiting)

    def test_results_come_while_calls_that_yield_them_overlap(self, run: ContractRun, tmp_path: Path) -> None:
        self._needs_code()
        worker, context = _started(run)
        go = tmp_path / "go"
        attempts = {run.run(worker, context, _yield_slowly, [0.3] * 6, [str(go)] * 6) for _ in range(2)}
        run.until(lambda: {event.attempt for event in run.all(ev.ItemsFinished)} == attempts)
        assert not run.all(ev.BatchEnded), "some of both come while they run"
        go.touch()
        run.until(lambda: len(run.all(ev.BatchEnded)) == 2)
        for attempt in attempts:
            parts = [event for event in run.all(ev.ItemsFinished) if event.attempt == attempt]
            assert sorted(n for part in parts for n in range(part.first, part.first + part.count)) == list(range(6))

    def test_a_timeout_is_that_of_the_call_where_it_ends_the_call(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        run.run(worker, context, _given, [1])  # What that imports takes its time.
        run.wait(ev.BatchFinished)
        waiting = run.run(worker, context, _until_other, [0])
        late = run.run(worker, context, _spin, [60.0], timeout=0.5)
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (late, "timeout", False)
        assert "in _spin" in failed.failure.traceback
        self._let_go(run, worker, context, waiting)

    def test_a_call_that_goes_on_after_its_timeout_costs_the_context_and_is_blamed(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        run.run(worker, context, _until_other, [0])
        late = run.run(worker, context, work.ignore, [60.0], timeout=0.5)
        run.until(lambda: len(run.all(ev.BatchFailed)) == 2)
        blamed, beside = run.all(ev.BatchFailed)
        assert (blamed.attempt, blamed.failure.kind, blamed.lost_context) == (late, "timeout", True)
        assert beside.lost_context
        run.load(worker, context)
        self._gives(run, [1], worker, context, _given, [1])

    def test_an_interrupted_call_ends_alone(self, run: ContractRun, tmp_path: Path) -> None:
        self._needs_code()
        worker, context = _started(run)
        waiting = run.run(worker, context, _until_other, [0])
        log = tmp_path / "log"
        unwanted = run.run(worker, context, _yield_and_spin, range(30), [str(log)] * 30)
        run.until(lambda: bool(run.all(ev.ItemsFinished)))
        run.execute(cmd.Interrupt(worker, unwanted, context))
        failed = run.only(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (unwanted, "cancelled", False)
        assert log.read_text() == "closed"
        self._let_go(run, worker, context, waiting)

    def test_a_call_that_goes_on_when_it_is_interrupted_spares_those_beside_it(
        self, run: ContractRun, tmp_path: Path
    ) -> None:
        self._needs_code()
        worker, context = _started(run, concurrency=3)
        waiting = run.run(worker, context, _until_told, [str(tmp_path / "told")])
        begun = tmp_path / "begun"
        unwanted = run.run(worker, context, work.ignore, [60.0], [str(begun)])
        run.run(worker, context, _given, [1])
        run.until(begun.exists)
        run.wait(ev.BatchFinished)  # Both others have begun.
        run.execute(cmd.Interrupt(worker, unwanted, context))
        deadline = time.monotonic() + 7.0  # Longer than a call may go on that is by itself.
        while time.monotonic() < deadline:
            run.poll(0.5)
        assert not run.all(ev.BatchFailed)
        (tmp_path / "told").touch()
        assert run.wait(ev.BatchFinished).attempt == waiting
        failed = run.wait(ev.BatchFailed)  # Nobody is spared now.
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (unwanted, "cancelled", True)

    def test_a_library_process_that_dies_costs_what_was_in_flight(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        attempts = {run.run(worker, context, _until_other, [0]), run.run(worker, context, _kill_itself, [0])}
        run.until(lambda: len(run.all(ev.BatchFailed)) == 2)
        assert {event.attempt for event in run.all(ev.BatchFailed)} == attempts
        assert all(event.lost_context and event.failure.kind == "crash" for event in run.all(ev.BatchFailed))
        run.load(worker, context)
        self._gives(run, [1], worker, context, _given, [1])

    def test_a_context_that_is_lost_is_told_with_what_it_printed(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = _started(run)
        run.run(worker, context, _until_other, [0])
        run.run(worker, context, _lose, ["the engine is gone"])
        run.until(lambda: len(run.all(ev.BatchFailed)) == 2)
        for failed in run.all(ev.BatchFailed):
            assert failed.lost_context and "the engine is gone" in failed.failure.message
            assert "its last line" in failed.failure.output

    def test_a_notice_ends_all_with_the_items_in_flight(self, run: ContractRun, tmp_path: Path) -> None:
        self._needs_code()
        worker, context = _started(run)
        go = str(tmp_path / "go")
        attempts = {run.run(worker, context, _yield_noticed, range(100), [go] * 100) for _ in range(2)}
        run.until(lambda: {event.attempt for event in run.all(ev.ItemsFinished)} == attempts)
        self.notify(run.engine, worker)
        run.until(lambda: bool(run.all(ev.EvictionNotice)))
        Path(go).touch()
        run.until(lambda: bool(run.all(ev.WorkerLost)))
        assert {event.attempt for event in run.all(ev.BatchEnded)} == attempts
        for attempt in attempts:
            parts = [event for event in run.all(ev.ItemsFinished) if event.attempt == attempt]
            assert sorted(n for part in parts for n in range(part.first, part.first + part.count)) == list(range(3))

    def _let_go(self, run: ContractRun, worker: str, context: str, waiting: int) -> None:
        """Have the call end that waited meanwhile."""
        run.run(worker, context, _let_go, [0])
        run.until(lambda: waiting in [event.attempt for event in run.all(ev.BatchFinished)])


def _started(run: ContractRun, concurrency: int = 2) -> tuple[str, str]:
    """Start the engine with one worker whose context bears so many calls; return both."""
    context = run.declare(Shared, concurrency=concurrency)
    return run.ready(context), context


# --- what the calls do


def _meet(shared: Shared, items: Sequence[Any]) -> Sequence[Any]:
    """Answer once two are there."""
    shared.barrier.wait(20)
    return items


def _alone(shared: Shared, items: Sequence[Any]) -> list[bool]:
    """Answer whether this is the main thread, with nobody beside it."""
    with contextlib.suppress(threading.BrokenBarrierError):
        shared.barrier.wait(0.5)
        return [False]
    shared.barrier.reset()
    return [threading.current_thread() is threading.main_thread()]


def _until_other(shared: Shared, items: Sequence[Any]) -> Sequence[Any]:
    while not shared.go.wait(0.05):
        pass
    return items


def _let_go(shared: Shared, items: Sequence[Any]) -> Sequence[Any]:
    shared.go.set()
    return items


def _until_told(shared: Shared, files: Sequence[str]) -> Sequence[str]:
    work.wait_for(files[0])
    return files


def _given(shared: Shared, items: Sequence[Any]) -> Sequence[Any]:
    return items


def _complain(shared: Shared, items: Sequence[Any]) -> None:
    raise KeyError(items[0])


def _stop(shared: Shared, items: Sequence[Any]) -> None:
    raise StopIteration


def _leave(shared: Shared, items: Sequence[Any]) -> None:
    raise SystemExit(3)


def _too_few(shared: Shared, items: Sequence[Any]) -> list[Any]:
    return [items[0]]


def _spin(shared: Shared, seconds: Sequence[float]) -> Sequence[float]:
    """Take so long, and hear of what is raised in between."""
    until = time.monotonic() + sum(seconds)
    while time.monotonic() < until:
        time.sleep(0.01)
    return seconds


def _yield_then_raise(shared: Shared, items: Sequence[int]) -> Iterator[int]:
    for item in items:
        if item < 0:
            raise ValueError(item)
        yield item


def _yield_slowly(shared: Shared, seconds: Sequence[float], go: Sequence[str]) -> Iterator[float]:
    yield from work.yield_slowly(seconds, go)


def _yield_and_spin(shared: Shared, items: Sequence[int], log: Sequence[str]) -> Iterator[int]:
    """Yield one item after another, then go on for a minute; say so when it is closed."""
    try:
        for item in items:
            time.sleep(0.05)
            yield item
        _spin(shared, [60.0])
    finally:
        Path(log[0]).write_text("closed")


def _yield_noticed(shared: Shared, items: Sequence[int], go: Sequence[str]) -> Iterator[int]:
    """Yield two, which are sent then, the third when it may go on, and the rest at once."""
    for item in items:
        time.sleep(0.3 if item < 2 else 0.0)
        if item == 2:
            work.wait_for(go[0])
        yield item


def _kill_itself(shared: Shared, items: Sequence[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose(shared: Shared, messages: Sequence[str]) -> None:
    os.write(1, b"its last line\n")
    raise ContextLost(messages[0])
