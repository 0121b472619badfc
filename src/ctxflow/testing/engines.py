# ruff: noqa: D102 - the tests' names say what they check
"""The engines' contract suite: what every engine must do, as pytest tests that a plug-in's author subclasses.

    class TestMyEngine(EngineContract):
        def make(self): return MyEngine(workers=2)
        def evict(self, engine, worker): engine.lose(worker)

It includes the tests about contexts of contract_hooks.py; those about sessions are in session_contract.py.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxflow.ownership import lives
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing import worker_calls as work
from ctxflow.testing.contract_hooks import PATIENCE, ContextsContract, ContractRun


class EngineContract(ContextsContract):
    """Subclass it as a pytest class, and say how to make an engine; the hooks say what cannot be done."""

    def evict(self, engine: Any, worker: str) -> None:
        """Take a worker away at once, as a resource manager would."""
        pytest.skip("this engine cannot lose a worker on purpose")

    def reach(self, run: ContractRun, there: Callable[[], bool]) -> None:
        """Wait until a batch of 100 has done 59 items; `there` says so, where functions run."""
        run.until(there)

    def processes(self, engine: Any) -> list[int]:
        """Return all processes that the engine has started, and theirs."""
        pytest.skip("this engine starts no processes")

    # --- workers

    def test_workers_join_and_are_told_apart(self, run: ContractRun) -> None:
        assert len(set(run.start(2))) == 2

    def test_a_released_worker_is_lost_and_nobody_is_to_blame(self, run: ContractRun) -> None:
        (worker,) = run.start()
        run.execute(cmd.Acquire(self.tier, 0), cmd.Release(worker))
        lost = run.wait(ev.WorkerLost)
        assert (lost.worker, lost.evicted) == (worker, True)

    def test_an_evicted_worker_is_lost_and_another_takes_its_place(self, run: ContractRun) -> None:
        worker = run.ready()
        self.evict(run.engine, worker)
        lost = run.wait(ev.WorkerLost)
        assert (lost.worker, lost.evicted) == (worker, True)
        assert run.wait(ev.WorkerJoined).worker.id != worker

    def test_notice_comes_before_the_loss(self, run: ContractRun) -> None:
        (worker,) = run.start()
        self.notify(run.engine, worker)
        assert run.wait(ev.EvictionNotice).worker == worker
        assert run.wait(ev.WorkerLost).evicted

    # --- batches

    def test_a_batch_gives_one_result_an_item(self, run: ContractRun) -> None:
        worker = run.ready()
        attempt = run.run(worker, ev.PLAIN, work.add, [1, 2, 3], [10, 20, 30])
        finished = run.wait(ev.BatchFinished)
        assert (finished.worker, finished.attempt) == (worker, attempt)
        assert finished.seconds >= 0
        self._answers(finished, [11, 22, 33])

    def test_a_single_call_takes_any_arguments(self, run: ContractRun) -> None:
        worker = run.ready()
        run.apply(worker, divmod, 17, 5)
        self._answers(run.wait(ev.BatchFinished), (3, 2))

    def test_constants_come_beside_the_function(self, run: ContractRun) -> None:
        worker = run.ready()
        for shift in (10, 20):
            self._gives(run, [shift + 1, shift + 2], worker, ev.PLAIN, work.shifted, [1, 2], constants={"by": shift})

    def test_what_no_call_needs_any_more_is_forgotten(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.shifted, [1], constants={"by": 10})
        run.wait(ev.BatchFinished)
        self._gives(run, [["kept", "shifted", "shifted-10"]], worker, ev.PLAIN, work.kept, [0])
        run.engine.forget(["shifted-10", "shifted", "it never had this one"])
        self._gives(run, [["kept"]], worker, ev.PLAIN, work.kept, [0])

    def test_big_inputs_and_results_arrive_whole(self, run: ContractRun) -> None:
        worker = run.ready()
        big = os.urandom(5_000_000)
        self._gives(run, [big], worker, ev.PLAIN, work.same, [big])

    def test_an_exception_comes_with_traceback_and_output_and_costs_no_context(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        attempt = run.run(worker, ev.PLAIN, work.complain, ["x"])
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.lost_context, failed.failure.kind) == (attempt, False, "exception")
        assert failed.failure.error == "KeyError"
        assert "in complain" in failed.failure.traceback
        assert "about to raise" in failed.failure.output
        assert isinstance(pickle.loads(failed.exception), KeyError)
        self._gives(run, [1], worker, ev.PLAIN, work.same, [1])

    def test_an_input_that_cannot_be_sent_fails_its_batch_alone(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.same, [threading.Lock()])
        failed = run.wait(ev.BatchFailed)
        assert (failed.failure.kind, failed.lost_context) == ("input", False)
        assert isinstance(failed.exception, TypeError)
        self._gives(run, [1], worker, ev.PLAIN, work.same, [1])

    def test_a_crash_costs_the_context_and_not_the_worker(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = run.built()
        attempt = run.run(worker, context, work.crash, [1])
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.lost_context, failed.failure.kind) == (attempt, True, "crash")
        run.load(worker, context)
        self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    def test_a_timeout_costs_the_context_and_not_the_worker(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.sleep, [60], timeout=0.3)
        failed = run.wait(ev.BatchFailed)
        assert (failed.lost_context, failed.failure.kind) == (True, "timeout")
        run.load(worker, ev.PLAIN)

    def test_an_abandoned_batch_gives_no_answer_and_makes_room(self, run: ContractRun) -> None:
        worker, context = run.built()
        attempt = run.run(worker, context, work.sleep_with_context, [60])
        run.execute(cmd.Abandon(worker, attempt, context), cmd.Load(worker, context))
        run.wait(ev.ContextReady)
        self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    # --- interrupting batches

    def test_an_interrupted_batch_ends_soon_and_its_context_stays(self, run: ContractRun, tmp_path: Path) -> None:
        worker, context = run.built()
        for number in range(3):
            begun = tmp_path / f"begun-{number}"
            attempt = run.run(worker, context, work.sleep_with_context, [60], [str(begun)])
            if self.executes:
                run.until(begun.exists)
            run.execute(cmd.Interrupt(worker, attempt, context))
            failed = run.wait(ev.BatchFailed)
            assert (failed.attempt, failed.failure.kind, failed.lost_context) == (attempt, "cancelled", False)
            self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    def test_an_interrupt_of_a_batch_that_is_over_or_not_begun_hits_no_other(self, run: ContractRun) -> None:
        worker, context = run.built()
        over = run.run(worker, context, work.with_context, [1])
        run.wait(ev.BatchFinished)
        running = run.run(worker, context, work.sleep_with_context, [2])
        waiting = run.run(worker, context, work.sleep_with_context, [60])
        run.execute(cmd.Interrupt(worker, over, context), cmd.Interrupt(worker, waiting, context))
        run.until(lambda: bool(run.all(ev.BatchFinished)) and bool(run.all(ev.BatchFailed)))
        assert [event.attempt for event in run.all(ev.BatchFinished)] == [running]
        (failed,) = run.all(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (waiting, "cancelled", False)

    def test_a_batch_that_goes_on_when_it_is_interrupted_costs_the_context(
        self, run: ContractRun, tmp_path: Path
    ) -> None:
        self._needs_code()
        worker, context = run.built()
        begun = tmp_path / "begun"
        attempt = run.run(worker, context, work.ignore, [60], [str(begun)])
        run.until(begun.exists)
        run.execute(cmd.Interrupt(worker, attempt, context))
        failed = run.wait(ev.BatchFailed)
        assert (failed.attempt, failed.failure.kind, failed.lost_context) == (attempt, "cancelled", True)
        run.load(worker, context)
        self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    def test_an_interrupted_batch_has_sent_what_it_yielded_and_cleans_up(
        self, run: ContractRun, tmp_path: Path
    ) -> None:
        self._needs_code()
        worker, context = run.built()
        log = tmp_path / "log"
        attempt = run.run(worker, context, work.count_slowly, range(30), [str(log)] * 30)
        run.until(lambda: bool(run.all(ev.ItemsFinished)))
        run.execute(cmd.Interrupt(worker, attempt, context))
        failed = run.only(ev.BatchFailed)
        assert (failed.failure.kind, failed.lost_context) == ("cancelled", False)
        assert self._results(run).items() <= {n: n for n in range(30)}.items()
        assert log.read_text() == "closed"

    # --- results one by one

    def test_results_that_are_yielded_come_once_each(self, run: ContractRun, tmp_path: Path) -> None:
        self._needs_code()
        worker = run.ready()
        go = tmp_path / "go"
        run.run(worker, ev.PLAIN, work.yield_slowly, [0.3] * 8, [str(go)] * 8)
        run.until(lambda: bool(run.all(ev.ItemsFinished)))
        assert not run.all(ev.BatchEnded), "some come while it runs"
        go.touch()
        run.until(lambda: bool(run.all(ev.BatchEnded)))
        assert self._results(run) == dict.fromkeys(range(8), 0.3)
        assert run.all(ev.BatchEnded)[0].seconds >= 2.4
        self._gives(run, [0.0, 0.001], worker, ev.PLAIN, work.yield_slowly, [0.0, 0.001])

    def test_a_notice_ends_a_batch_with_the_item_in_flight(self, run: ContractRun, tmp_path: Path) -> None:
        """At item 60 of 100, 40 at most are to be done again."""
        worker = run.ready()
        there, go = tmp_path / "there", tmp_path / "go"
        attempt = run.run(worker, ev.PLAIN, work.yield_noticed, range(100), [str(there)] * 100, [str(go)] * 100)
        self.reach(run, there.exists)
        self.notify(run.engine, worker)
        run.until(lambda: bool(run.all(ev.EvictionNotice)))
        go.touch()
        run.until(lambda: bool(run.all(ev.WorkerLost)))
        (ended,) = run.all(ev.BatchEnded)
        assert (ended.worker, ended.attempt) == (worker, attempt)
        answered = {n for part in run.all(ev.ItemsFinished) for n in range(part.first, part.first + part.count)}
        assert sorted(answered) == list(range(len(answered)))
        assert len(answered) == 60
        if self.executes:
            assert self._results(run) == {n: -n for n in range(60)}

    def test_a_kill_without_notice_costs_what_was_not_sent_along(self, run: ContractRun) -> None:
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.yield_slowly, [0.01] * 100 + [60.0] * 2)
        self.reach(run, lambda: bool(run.all(ev.ItemsFinished)))
        self.evict(run.engine, worker)
        run.until(lambda: bool(run.all(ev.WorkerLost)))
        kinds = [type(event) for event in run.events]
        assert ev.ItemsFinished in kinds and ev.BatchEnded not in kinds
        assert kinds.index(ev.ItemsFinished) < kinds.index(ev.WorkerLost)

    @pytest.mark.parametrize(
        ("items", "good", "error"),
        [
            ([1, 2, "raise", 4], 2, "ValueError"),
            ([1, 2, "odd", 4], 2, "TypeError"),
            ([1, 2, 3, "raise after"], 3, "KeyError"),
            (["raise"], 0, "ValueError"),
        ],
        ids=["raises", "cannot be pickled", "raises at its end", "raises at once"],
    )
    def test_what_was_yielded_before_an_error_is_kept(
        self, run: ContractRun, items: list[Any], good: int, error: str
    ) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.yield_badly, items)
        run.until(lambda: bool(run.all(ev.BatchFailed)))
        assert self._results(run) == dict(enumerate(items[:good]))
        (failed,) = run.all(ev.BatchFailed)
        assert (failed.at, failed.lost_context) == (good, False)
        assert (failed.failure.kind, failed.failure.error) == ("exception", error)
        assert not run.all(ev.BatchEnded)
        self._gives(run, [1], worker, ev.PLAIN, work.same, [1])

    @pytest.mark.parametrize(
        ("function", "items"),
        [
            (work.as_one, [1, 2]),
            (work.as_one, [1]),
            (work.yield_badly, [1, 2, 3, "stop"]),
            (work.yield_badly, [1, 2, 3, "twice"]),
        ],
        ids=["one for a batch", "text for one item", "yields too few", "yields too many"],
    )
    def test_a_batch_without_one_result_for_each_item_breaks_the_contract(
        self, run: ContractRun, function: Any, items: list[Any]
    ) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, function, items)
        failed = run.only(ev.BatchFailed)
        assert (failed.failure.kind, failed.lost_context) == ("contract", False)
        assert f"for a batch of {len(items)} item" in failed.failure.message
        assert not run.all(ev.ItemsFinished) and not run.all(ev.BatchFinished), "they may be those of other items"
        run.events.clear()
        self._gives(run, [1], worker, ev.PLAIN, work.same, [1])

    def test_a_timeout_is_that_of_the_call_and_costs_what_was_not_sent_along(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.yield_slowly, [0.0])  # What that imports takes its time.
        run.wait(ev.BatchFinished)
        run.run(worker, ev.PLAIN, work.yield_slowly, [0.6, 0.0, 60.0], timeout=5.0)
        failed = run.only(ev.BatchFailed)
        assert (failed.failure.kind, failed.lost_context, failed.at) == ("timeout", True, None)
        assert self._results(run)[0] == 0.6

    # --- threads and ends

    def test_poll_returns_when_woken(self, run: ContractRun) -> None:
        run.start()
        ringing = threading.Event()

        def ring() -> None:
            ringing.set()
            run.engine.wake()

        timer = threading.Timer(0.2, ring)
        timer.start()
        while not ringing.is_set():
            run.poll(1000.0)  # If the wake were lost, the test's own timeout would end it.
        timer.join()

    def test_commands_come_from_other_threads_while_one_polls(self, run: ContractRun) -> None:
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.same, [0])  # What the function imports is there once a call has run.
        run.until(lambda: len(run.all(ev.BatchFinished)) == 1)
        total = 200

        def submit() -> None:
            for number in range(1, total):
                run.run(worker, ev.PLAIN, work.same, [number])

        thread = threading.Thread(target=submit)
        thread.start()
        run.until(lambda: len(run.all(ev.BatchFinished)) == total)
        thread.join()
        assert len({event.attempt for event in run.all(ev.BatchFinished)}) == total

    def test_stop_leaves_no_process(self, new_run: ContractRun) -> None:
        workers = new_run.start(2)
        new_run.load(workers[0], ev.PLAIN)
        new_run.run(workers[0], ev.PLAIN, work.sleep, [60])
        new_run.execute(cmd.Load(workers[1], new_run.declare(work.slow, 60)))
        before = self.processes(new_run.engine)
        assert before
        new_run.engine.stop()
        deadline = time.monotonic() + PATIENCE
        while left := [pid for pid in before if lives(pid, None)]:
            assert time.monotonic() < deadline, f"these were left: {left}"
            time.sleep(0.02)

    def test_nothing_happens_after_stop(self, new_run: ContractRun) -> None:
        (worker,) = new_run.start()
        new_run.engine.stop()
        new_run.engine.stop()
        new_run.execute(cmd.Acquire(self.tier, 2), cmd.Load(worker, ev.PLAIN))
        new_run.engine.wake()
        assert new_run.engine.poll(0.0) == []

    def test_it_can_be_stopped_while_workers_start(self, new_run: ContractRun) -> None:
        new_run.engine.start(new_run)
        new_run.execute(cmd.Acquire(self.tier, 2))

    @staticmethod
    def _results(run: ContractRun) -> dict[int, Any]:
        """Return the results that came one by one, by their place in the batch; those that come twice are the same."""
        found: dict[int, Any] = {}
        for event in run.all(ev.ItemsFinished):
            results = pickle.loads(event.results)
            assert len(results) == event.count
            for place, result in enumerate(results, event.first):
                assert found.setdefault(place, result) == result
        return found
