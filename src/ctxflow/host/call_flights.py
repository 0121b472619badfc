"""Calls in flight in a library process: how each is begun, awaited, and had to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

from ctxflow.host.call_notes import CallNotes
from ctxflow.host.call_threads import CallThreads
from ctxflow.host.library_calls import LibraryCalls
from ctxflow.host.library_messages import RunCall
from ctxflow.host.running_calls import CallTable


class Flight:
    """A call in flight, awaited on the loop.

    :param finish: makes what is answered of what the coroutine returns.
    :ivar why: why it is to end: "timeout", "cancelled" or "closed"; "" if it is not.
    :ivar extent: as of `LibraryCalls.finished`.
    """

    __slots__ = ("_began", "call", "coroutine", "deadline", "files", "finish", "started", "task", "timer", "why")
    notes: CallNotes | None = None
    extent: Mapping[str, Any] = {}

    task: asyncio.Task[None]

    def __init__(self, call: RunCall, coroutine: Awaitable[Any], finish: Callable[[Any], bytes]) -> None:
        self.call, self.coroutine, self.finish = call, coroutine, finish
        self.files: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = 0.0
        self.started = time.monotonic()
        self.why = ""
        self._began = False

    def begin(self) -> None:
        """Note that it runs; raise `CancelledError` if it is to end already."""
        self._began = True
        if self.why:
            if asyncio.iscoroutine(self.coroutine):
                self.coroutine.close()
            raise asyncio.CancelledError

    def stop(self, why: str) -> None:
        """Have it end."""
        if not self.why:
            self.why = why
            if self._began:  # A task that is cancelled before never runs, and would not be answered.
                self._cancel()

    def _cancel(self) -> None:
        self.task.cancel()


class ThreadFlight(Flight):
    """A call on a thread.

    :param enter: goes to where calls run.
    """

    def __init__(self, call: RunCall, threads: CallThreads, enter: Callable[[], None]) -> None:
        self._thread = threads.call(call)
        self.notes = self._thread.notes
        super().__init__(call, self._run(threads, enter), lambda body: body)

    async def _run(self, threads: CallThreads, enter: Callable[[], None]) -> bytes:
        enter()
        self.extent, body = await threads.run(self._thread)
        return body

    def _cancel(self) -> None:
        if not self._thread.there:  # Its function was async, and is awaited by now.
            self.task.cancel()
            return
        if self.why == "timeout":
            self._thread.show_where()
        self._thread.interrupt()


class Stepped:
    """Awaits something, and notes while its code runs which call that is: what blocks the loop is found by it."""

    def __init__(self, awaited: Awaitable[Any], call: int, table: CallTable, library: LibraryCalls) -> None:
        self._awaited, self._call, self._table, self._library = awaited, call, table, library

    def __await__(self) -> Generator[Any, None, Any]:
        steps: Any = self._awaited.__await__()
        error: BaseException | None = None
        while True:
            self._table.running(self._call)
            try:
                wanted = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                self._library.end_fork()
                self._table.running(0)
            error = None
            try:
                yield wanted
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown
