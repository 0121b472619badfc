"""Calls in flight in a library process, awaited on its loop: how each is begun, and had to end.

Plain calls overlap on threads, where the context's author said how many it bears (`@context(concurrency=)`). No thread
can be stopped: a call that is to end, at its timeout or since nobody waits for it, has an exception raised in it as
soon as Python code of its runs; until then it keeps its thread, and its place in the window.
"""

from __future__ import annotations

import _thread
import asyncio
import collections
import ctypes
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ctxflow.host.call_surroundings import CallNotes, Later
from ctxflow.host.library_calls import LibraryCalls
from ctxflow.host.library_messages import PartFinished, RunCall
from ctxflow.host.running_calls import CallInterrupted, CallTable

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_FRAMES_SHOWN = 6


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


class CallThreads:
    """The threads of a library process; begun as they are needed.

    :param threads: the most of them.
    """

    def __init__(self, library: LibraryCalls, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._library, self._loop = library, loop
        self._pool = ThreadPoolExecutor(threads, "ctxflow-call")

    def call(self, call: RunCall) -> ThreadCall:
        """Return a call that will run on a thread."""
        return ThreadCall(self._library, self._loop, call)

    async def run(self, call: ThreadCall) -> tuple[dict[str, Any], bytes]:
        """Run a call; return what `LibraryCalls.run` does, or raise what it does."""
        call.there = True
        outcome = await self._loop.run_in_executor(self._pool, call.run)
        call.there = False
        call.send_parts()  # A future that is done at once is not waited for.
        if isinstance(outcome, Later):
            return {}, outcome.finish(await outcome.coroutine)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class _Withdrawn(BaseException):
    """Raised in place of a pending exception that is withdrawn."""


def _withdraw() -> None:
    """Raise and catch another exception in place of one that is pending in this thread.

    Clearing it (a null exception) leaves CPython's flag for pending exceptions set: the whole process is slower, and
    on 3.10 and 3.11 a traced or profiled function never begins.
    """
    try:
        _raise_in(_thread.get_ident(), _Withdrawn)
        while True:
            pass
    except _Withdrawn:
        pass


class ThreadCall:
    """A call on a thread.

    :ivar notes: of the call. :ivar there: whether it is on its thread, or waits for that.
    """

    def __init__(self, library: LibraryCalls, loop: asyncio.AbstractEventLoop, call: RunCall) -> None:
        self._library, self._loop, self._call = library, loop, call
        self.notes = CallNotes(self._tell)
        self._parts: collections.deque[PartFinished] = collections.deque()
        self._lock = _thread.allocate_lock()
        self._thread = 0  # While something may be raised in it.
        self._asked = False
        self.there = False

    def run(self) -> tuple[dict[str, Any], bytes] | BaseException:
        """Run it; return its results, or what it has raised: a future takes no StopIteration."""
        try:
            try:
                self._begin()
                return self._library.run(self._call, self.notes)
            finally:
                self._library.end_fork()
                self._end()
        except BaseException as error:
            return error

    def _begin(self) -> None:
        with self._lock:
            self._thread = _thread.get_ident()
            if self._asked:
                raise CallInterrupted

    def _end(self) -> None:
        try:
            self._go_deaf()
        except CallInterrupted:  # At the last moment; it comes once.
            self._go_deaf()
            raise

    def _go_deaf(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, 0
        if thread and self._asked:
            _withdraw()

    def _tell(self, part: PartFinished) -> None:
        self._parts.append(part)
        self._loop.call_soon_threadsafe(self.send_parts)

    def send_parts(self) -> None:
        """Send the results that have come; called on the loop."""
        while self._parts:
            self._library.send(self._library.to_line, self._parts.popleft())

    def interrupt(self) -> None:
        """Raise `CallInterrupted` in it, once; called on another thread."""
        with self._lock:
            if not self._asked:
                self._asked = True
                if self._thread:
                    _raise_in(self._thread, CallInterrupted)

    def show_where(self) -> None:
        """Print where it is, for the log, and for who is told that it did not end."""
        frame = sys._current_frames().get(self._thread)
        if frame is not None:
            text = "".join(traceback.format_stack(frame)[-_FRAMES_SHOWN:])
            sys.stderr.write(f"a call has taken longer than its timeout; it is at (innermost last)\n{text}")
            sys.stderr.flush()


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
