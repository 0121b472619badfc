# ruff: noqa: D102 - the tests' names say what they check
"""The engines' contract on items in flight: calls of one item that overlap in a library process.

Subclass `ItemContract` beside `ctxflow.testing.engines.EngineContract`, with the same hooks.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ctxflow.errors import ContextLost, ItemRefused
from ctxflow.executors.contract import CallPayload
from ctxflow.pickling import dumps
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing.contract_hooks import Contract, ContractRun


class ItemRun(ContractRun):
    """A run that gives its engine calls of one item that overlap."""

    def item(
        self,
        worker: str,
        context: str,
        function: Callable[..., Any],
        *values: Any,
        timeout: float | None = None,
    ) -> int:
        """Have an item run, without waiting for it; return the attempt."""
        return self.items(worker, context, function, [values], timeout)[0]

    def items(
        self,
        worker: str,
        context: str,
        function: Callable[..., Any],
        rows: list[tuple[Any, ...]],
        timeout: float | None = None,
    ) -> list[int]:
        """Have items run, all given at once; return their attempts."""
        part = self._pickled(function)
        attempts = [next(self._numbers) for _ in rows]
        for attempt, values in zip(attempts, rows, strict=True):
            payload = CallPayload("item", part, False, timeout, dumps(tuple(values), "the input"))
            self._calls[attempt] = lambda payload=payload: payload  # type: ignore[misc]
        self.execute(*(cmd.Run(worker, attempt, "app", context, (attempt,)) for attempt in attempts))
        return attempts

    def built_list(self) -> tuple[str, str]:
        """Start the engine with one worker whose context is an empty list, which its calls share; return both."""
        context = self.declare(list)
        return self.ready(context), context


class ItemContract(Contract):
    """Subclass it as a pytest class, and say how to make an engine."""

    runs = ItemRun

    def test_items_overlap_and_each_is_answered(self, run: ItemRun) -> None:
        worker, context = run.built_list()
        attempts = run.items(worker, context, _meet, [(n, 40) for n in range(40)])
        run.until(lambda: len(run.all(ev.BatchFinished)) == 40)
        finished = {event.attempt: event for event in run.all(ev.BatchFinished)}
        assert sorted(finished) == attempts
        for number, attempt in enumerate(attempts):
            self._answers(finished[attempt], [number])

    def test_the_one_that_ends_first_is_answered_first(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        slow = run.item(worker, context, _until_other)
        quick = run.item(worker, context, _let_go)
        assert [run.wait(ev.BatchFinished).attempt for _ in range(2)] == [quick, slow]

    def test_an_item_that_raises_fails_alone(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        waiting = run.item(worker, context, _until_other)
        for number, (function, kind, error) in enumerate(
            ((_complain, "exception", "KeyError"), (_refuse, "input", "ItemRefused"))
        ):
            failing = run.item(worker, context, function, number)
            failed = run.wait(ev.BatchFailed)
            assert (failed.attempt, failed.lost_context) == (failing, False)
            assert (failed.failure.kind, failed.failure.error) == (kind, error)
        run.item(worker, context, _let_go)
        run.until(lambda: waiting in [event.attempt for event in run.all(ev.BatchFinished)])

    def test_a_timeout_is_that_of_the_item_alone(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        run.item(worker, context, _meet, 7, 1)  # What that imports takes its time.
        self._answers(run.wait(ev.BatchFinished), [7])
        waiting = run.item(worker, context, _until_other)
        late = run.item(worker, context, _sleep, 60, timeout=0.3)
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (late, "timeout", False)
        run.item(worker, context, _let_go)
        run.until(lambda: waiting in [event.attempt for event in run.all(ev.BatchFinished)])

    def test_an_item_that_blocks_the_others_beyond_its_timeout_costs_the_context(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        run.item(worker, context, _until_other)
        blocking = run.item(worker, context, _block, timeout=0.3)
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (blocking, "timeout", True)

    def test_an_interrupted_item_ends_alone(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        run.item(worker, context, _meet, 7, 1)  # What that imports takes its time.
        self._answers(run.wait(ev.BatchFinished), [7])
        waiting = run.item(worker, context, _until_other)
        unwanted = run.item(worker, context, _sleep, 60)
        run.execute(cmd.Interrupt(worker, unwanted, context))
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (unwanted, "cancelled", False)
        run.item(worker, context, _let_go)
        run.until(lambda: waiting in [event.attempt for event in run.all(ev.BatchFinished)])

    def test_a_library_process_that_dies_costs_what_was_in_flight(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        attempts = {run.item(worker, context, _until_other) for _ in range(3)}
        attempts.add(run.item(worker, context, _kill_itself))
        run.until(lambda: len(run.all(ev.BatchFailed)) == 4)
        assert {event.attempt for event in run.all(ev.BatchFailed)} == attempts
        assert all(event.lost_context and event.failure.kind == "crash" for event in run.all(ev.BatchFailed))
        run.load(worker, context)
        run.item(worker, context, _meet, 7, 1)
        self._answers(run.wait(ev.BatchFinished), [7])

    def test_items_that_come_when_the_library_process_has_died_hide_nobody(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        attempts = {run.item(worker, context, _until_other), run.item(worker, context, _kill_itself)}
        deadline = time.monotonic() + 30
        ends = (ev.BatchFailed, ev.ContextUnloaded)
        while not any(isinstance(event, ends) for event in run.events) and time.monotonic() < deadline:
            run.poll(0.02)
            run.item(worker, context, _until_other)
        assert not run.all(ev.ContextUnloaded), "nobody would be asked what it did"
        run.until(lambda: attempts <= {event.attempt for event in run.all(ev.BatchFailed)})
        assert all(event.lost_context and event.failure.kind == "crash" for event in run.all(ev.BatchFailed))

    def test_a_context_that_is_lost_is_told_with_what_it_printed(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        run.item(worker, context, _until_other)
        run.item(worker, context, _lose, "the engine is gone")
        run.until(lambda: len(run.all(ev.BatchFailed)) == 2)
        for failed in run.all(ev.BatchFailed):
            assert failed.lost_context and failed.failure.kind == "crash"
            assert "the engine is gone" in failed.failure.message and "its last line" in failed.failure.output

    def test_an_async_context_is_built_and_closed_where_its_items_run(self, run: ItemRun, tmp_path: Path) -> None:
        self._needs_code()
        context = run.declare(_opened, str(tmp_path / "closed"))
        worker = run.ready(context)
        run.item(worker, context, _loop_of)
        self._answers(run.wait(ev.BatchFinished), [True])
        run.execute(cmd.Unload(worker, context))
        run.wait(ev.ContextUnloaded)
        deadline = time.monotonic() + 10
        while not (tmp_path / "closed").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "closed").read_text() == "on its loop"

    def test_what_is_in_flight_ends_when_there_is_notice(self, run: ItemRun) -> None:
        self._needs_code()
        worker, context = run.built_list()
        attempts = run.items(worker, context, _sleep, [(0.5,)] * 5)
        self.notify(run.engine, worker)
        run.until(lambda: bool(run.all(ev.WorkerLost)))
        assert {event.attempt for event in run.all(ev.BatchFinished)} == set(attempts)
        assert run.all(ev.WorkerLost)[0].evicted

    def test_plain_calls_go_on_beside_items(self, run: ItemRun) -> None:
        worker, context = run.built_list()
        item = run.item(worker, context, _meet, 7, 1)
        batch = run.run(worker, context, _lengths, [1, 2])
        run.until(lambda: len(run.all(ev.BatchFinished)) == 2)
        answers = {event.attempt: event for event in run.all(ev.BatchFinished)}
        self._answers(answers[item], [7])
        if self.executes:
            assert len(pickle.loads(answers[batch].results)) == 2


# --- what the items do; the context is a list that they share


async def _meet(shared: list[int], number: int, count: int) -> int:
    """Answer once so many are in flight."""
    shared.append(number)
    while len(shared) < count:
        await asyncio.sleep(0.01)
    return number


async def _until_other(shared: list[str]) -> str:
    while "go" not in shared:
        await asyncio.sleep(0.01)
    return "slow"


async def _let_go(shared: list[str]) -> str:
    shared.append("go")
    return "quick"


async def _complain(shared: list[str], number: int) -> None:
    raise KeyError(number)


async def _refuse(shared: list[str], number: int) -> None:
    raise ItemRefused(f"nobody can answer {number}")


async def _sleep(shared: list[str], seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _block(shared: list[str]) -> None:
    time.sleep(60)


async def _kill_itself(shared: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _lose(shared: list[str], message: str) -> None:
    sys.stdout.write("its last line\n")
    sys.stdout.flush()
    raise ContextLost(message)


async def _opened(file: str) -> AsyncIterator[Any]:
    loop = asyncio.get_running_loop()
    yield loop
    Path(file).write_text("on its loop" if asyncio.get_running_loop() is loop else "elsewhere")


async def _loop_of(loop: Any) -> bool:
    return asyncio.get_running_loop() is loop


def _lengths(shared: list[int], numbers: list[int]) -> list[int]:
    return [len(shared) for _ in numbers]
