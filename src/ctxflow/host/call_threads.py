"""Calls that overlap on threads: of a context whose author said how many calls it bears (`@context(concurrency=)`).

No thread can be stopped. A call that is to end, at its timeout or since nobody waits for it, has an exception raised in
it as soon as Python code of its runs; until then it keeps its thread, and its place in the window.
"""

from __future__ import annotations

import _thread
import asyncio
import collections
import ctypes
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ctxflow.host.call_notes import CallNotes, Later
from ctxflow.host.library_calls import LibraryCalls
from ctxflow.host.library_messages import PartFinished, RunCall
from ctxflow.host.running_calls import CallInterrupted

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING = ctypes.py_object()
_FRAMES_SHOWN = 6


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
            if self._thread:
                _raise_in(self._thread, _NOTHING)
            self._thread = 0

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
