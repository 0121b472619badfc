# ruff: noqa: D102 - the tests' names say what they check
"""The engines' contract on contexts that are parked and woken (`Park`, `Wake`).

Subclass `ParkingContract` beside `ctxflow.testing.engines.EngineContract`, with the same hooks. An engine whose
`ContextReady` never says that a context `parks` is never told to park one.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import Sequence
from typing import Any

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing import worker_calls as work
from ctxflow.testing.contract_hooks import Contract, ContractRun


class Counting:
    """A context that counts its calls; parked it is of no use. Some trouble is had where it says so."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.numbers = itertools.count(1)
        self.here = True

    def park(self) -> None:
        if self.trouble == "park":
            raise MemoryError("no room for it")
        if self.trouble == "park ends":
            os._exit(3)
        self.here = False

    def wake(self) -> None:
        if self.trouble == "wake":
            raise OSError("it is gone")
        if self.trouble == "wake ends":
            os._exit(3)
        self.here = True


class CountingOnLoop:
    """The same on an event loop, with async ways to park and wake."""

    def __init__(self) -> None:
        self.numbers, self.here = itertools.count(1), True

    async def park(self) -> None:
        self.here = False

    async def wake(self) -> None:
        self.here = True


async def _on_loop() -> CountingOnLoop:
    return CountingOnLoop()


def _numbered(context: Any, items: Sequence[Any]) -> list[tuple[bool, int]]:
    return [(context.here, next(context.numbers)) for _ in items]


class ParkingContract(Contract):
    """Subclass it as a pytest class, and say how to make an engine."""

    def _built(self, run: ContractRun, function: Any = Counting, *args: Any) -> tuple[str, str]:
        context = run.declare(function, *args)
        (worker,) = run.start()
        assert run.load(worker, context).parks
        return worker, context

    def _parked(self, run: ContractRun, function: Any = Counting, *args: Any) -> tuple[str, str]:
        worker, context = self._built(run, function, *args)
        self._counts(run, worker, context, 1)
        run.execute(cmd.Park(worker, context))
        parked = run.wait(ev.ContextParked)
        assert (parked.worker, parked.context) == (worker, context)
        assert parked.seconds >= 0
        assert parked.memory is None or parked.memory > 0
        assert not parked.gpu_memory
        return worker, context

    def _wakes(self, run: ContractRun, worker: str, context: str, number: int = 2) -> None:
        run.execute(cmd.Wake(worker, context))
        woken = run.wait(ev.ContextWoken)
        assert (woken.worker, woken.context) == (worker, context)
        assert woken.seconds >= 0
        self._counts(run, worker, context, number)

    def _counts(self, run: ContractRun, worker: str, context: str, number: int) -> None:
        self._gives(run, [(True, number)], worker, context, _numbered, [0])

    def test_a_parked_context_goes_on_with_what_it_had_built(self, run: ContractRun) -> None:
        worker, context = self._parked(run)
        self._wakes(run, worker, context)
        run.execute(cmd.Park(worker, context))
        run.wait(ev.ContextParked)
        self._wakes(run, worker, context, 3)

    def test_so_does_one_on_an_event_loop(self, run: ContractRun) -> None:
        worker, context = self._parked(run, _on_loop)
        self._wakes(run, worker, context)

    def test_so_does_one_that_has_nothing_to_say_to_that(self, run: ContractRun) -> None:
        worker, context = self._built(run, work.slow, 0)
        run.execute(cmd.Park(worker, context), cmd.Wake(worker, context))
        run.wait(ev.ContextWoken)
        self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    def test_two_take_turns(self, run: ContractRun) -> None:
        worker, first = self._built(run)
        second = run.declare(Counting)
        self._counts(run, worker, first, 1)
        run.execute(cmd.Park(worker, first), cmd.Load(worker, second))
        assert run.wait(ev.ContextParked).context == first
        assert run.wait(ev.ContextReady).context == second
        self._counts(run, worker, second, 1)
        for turn in (2, 3):
            for sleeper, other in ((second, first), (first, second)):
                run.execute(cmd.Park(worker, sleeper), cmd.Wake(worker, other))
                assert run.wait(ev.ContextParked).context == sleeper
                assert run.wait(ev.ContextWoken).context == other
                self._counts(run, worker, other, turn)

    def test_a_parked_context_can_be_unloaded_and_loaded_again(self, run: ContractRun) -> None:
        worker, context = self._parked(run)
        run.execute(cmd.Unload(worker, context), cmd.Load(worker, context))
        assert run.wait(ev.ContextUnloaded).context == context
        run.wait(ev.ContextReady)
        self._counts(run, worker, context, 1)

    def test_so_can_one_that_is_being_parked_or_woken(self, run: ContractRun) -> None:
        worker, context = self._parked(run)
        for command in (cmd.Wake(worker, context), cmd.Park(worker, context)):
            run.execute(command, cmd.Unload(worker, context), cmd.Load(worker, context))
            run.wait(ev.ContextUnloaded)
            run.wait(ev.ContextReady)
            assert not run.all(ev.ContextWoken)
            self._counts(run, worker, context, 1)

    def test_what_is_not_to_be_parked_says_so(self, run: ContractRun) -> None:
        self._needs_code()
        (worker,) = run.start()
        assert not run.load(worker, run.declare(Counting, park=False)).parks

    def test_what_cannot_be_parked_or_woken_fails_and_can_be_built_again(self, run: ContractRun) -> None:
        self._needs_code()
        (worker,) = run.start()
        for trouble, error in (
            ("park", "MemoryError"), ("park ends", "LibraryDied"), ("wake", "OSError"), ("wake ends", "LibraryDied"),
        ):  # fmt: skip
            context = run.declare(Counting, trouble)
            run.load(worker, context)
            run.execute(cmd.Park(worker, context))
            if trouble.startswith("wake"):
                run.wait(ev.ContextParked)
                run.execute(cmd.Wake(worker, context))
            failed = run.wait(ev.ParkFailed)
            assert (failed.context, failed.failure.error) == (context, error)
            run.load(worker, context)
            self._counts(run, worker, context, 1)
            assert not run.all(ev.ContextUnloaded), "it is told twice"

    def test_a_library_process_that_dies_while_it_is_parked_is_told_of(self, run: ContractRun) -> None:
        self._needs_code()
        worker, context = self._built(run)
        run.run(worker, context, work.pid_of, [0])
        [pid] = pickle.loads(run.wait(ev.BatchFinished).results)
        run.execute(cmd.Park(worker, context))
        run.wait(ev.ContextParked)
        os.kill(pid, signal.SIGKILL)
        assert run.wait(ev.ContextUnloaded).context == context
        run.load(worker, context)
        self._counts(run, worker, context, 1)
