"""Calls that overlap: what a library process does from the first call of an item on, or with an async context.

It runs one event loop, on its main thread. Each call of an item is a task there, answered as soon as it ends, in any
order; so is one that waits for a call on a thread, where the context bears several (call_flights.py). Calls of other
kinds are run one after the other, on the loop's thread, with no call on another. All that overlaps runs in the
process's one folder; what it prints is common, and the last lines may be another call's. A notice of eviction changes
nothing for items in flight: the scheduler gives no more of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pickle
import selectors
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from select import POLLOUT
from typing import Any, NoReturn

from ctxflow.errors import ContextLost
from ctxflow.host.call_flights import CallThreads, Flight, Stepped, ThreadFlight
from ctxflow.host.call_results import dump_results
from ctxflow.host.call_surroundings import STAGED
from ctxflow.host.call_troubles import user_traceback
from ctxflow.host.context_building import opened_recipe, seldom_collecting
from ctxflow.host.library_calls import LibraryCalls, context_loss
from ctxflow.host.library_messages import (
    TO_LIBRARY,
    AskLoop,
    BuildContext,
    CloseContext,
    LoopAnswered,
    LoopBegan,
    ParkContext,
    RunCall,
    ToLibrary,
    WakeContext,
)
from ctxflow.host.running_calls import CallInterrupted, CallTable
from ctxflow.host.wire import BlockingChannel, Trouble
from ctxflow.on_worker import when_lost

_CANCEL_SECONDS = 0.5  # How long items may take to end before what was built is closed.


class LibraryLoop:
    """Runs the calls of a library process on an event loop.

    :param asked: the pipe, and `running` the memory, of `Interrupts`.
    """

    def __init__(self, library: LibraryCalls, asked: int, running: int) -> None:
        self._library = library
        self._table = CallTable(running)
        self._loop = asyncio.SelectorEventLoop(_OwnSelector(library, self._table))
        self._flights: dict[int, Flight] = {}
        self._waiting: collections.deque[RunCall] = collections.deque()  # Those that overlap with no other of theirs.
        self._one: Flight | None = None  # Of these, the one that runs.
        self._asked = asked
        self._closing = contextlib.AsyncExitStack()
        self._lost = False
        self._threads: CallThreads | None = None
        self._on_threads = 0  # Calls.
        self._closes = False
        self._tasks: set[asyncio.Task[None]] = set()  # Which the loop itself does not keep.

    def serve(self, message: ToLibrary) -> NoReturn:
        """Handle a message and all that follow, until the process ends."""
        library, loop = self._library, self._loop
        asyncio.set_event_loop(loop)
        library.awaits = True
        library.interrupts.heard = self._asked_more
        when_lost(self._told_lost)
        loop.add_reader(self._asked, library.interrupts.look)
        self._open_channels()
        library.send(library.to_host, LoopBegan())
        self._handle(message)
        while True:
            # What the user's tasks raise that is to end a program ends the task alone.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    def _open_channels(self) -> None:
        library = self._library
        host = LoopChannel(library.host, self._loop, self._handle, lambda: os._exit(0))
        library.to_host = library.to_line = self._host = self._line = host
        if library.line is not library.host:
            self._open_line(library.line)

    def _open_line(self, line: BlockingChannel) -> None:
        # If it is the line to the driver that ends: the host ends this process.
        self._library.to_line = self._line = LoopChannel(line, self._loop, self._handle, lambda: None)

    def _handle(self, message: ToLibrary) -> None:
        if isinstance(message, RunCall):
            if message.style == "item":
                self._begin(Flight(message, self._item(message), _one_result))
            else:
                self._waiting.append(message)
                self._next()
        elif isinstance(message, BuildContext):
            self._keep(self._load(message))
        elif isinstance(message, CloseContext):
            self._keep(self._close())
        elif isinstance(message, (ParkContext, WakeContext)):
            self._keep(self._move(message))
        elif isinstance(message, AskLoop):
            self._library.send(self._host, LoopAnswered())
        else:
            self._library.handle(message)

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the context

    async def _load(self, load: BuildContext) -> None:
        library = self._library
        try:
            library.begin_load(load)
            if library.line is not library.host:
                self._open_line(library.line)
            library.enter_load(load)
            with seldom_collecting():
                library.value = await opened_recipe(load).build_async(self._closing)
        except BaseException as error:
            library.load_failed(load, error)
        else:
            self._closes = True
            library.send(library.to_host, LoopBegan(closes=True))
            library.loaded(load)

    async def _move(self, message: ParkContext | WakeContext) -> None:
        """Park or wake what was built: no call is in flight."""
        library, began = self._library, time.monotonic()
        try:
            moves = library.begin_move(message)
            if isinstance(moves, Awaitable):
                await moves
        except BaseException as error:
            library.not_moved(message.context, error)
        else:
            library.moved(message, began)

    async def _close(self) -> None:
        """Have nobody use any more what was built, close it, and end."""
        for flight in self._flights.values():
            flight.stop("closed")
        if tasks := [flight.task for flight in self._flights.values()]:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        try:
            await self._closing.aclose()
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def _lose(self, error: ContextLost) -> None:
        """Tell the host that what was built is of no more use, once; it ends this process."""
        if not self._lost:
            self._lost = True
            self._library.lost(error)

    def _told_lost(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._lose, ContextLost(text))

    # --- calls that overlap

    async def _item(self, call: RunCall) -> Any:
        """Call the function of an item."""
        library = self._library
        library.place.enter()
        values = pickle.loads(call.body)
        function = library.function(call)
        constants = library.opened(call.constants) if call.constants else {}
        result = function(*(values if call.context == "" else (library.value, *values)), **constants)
        return await result if isinstance(result, Awaitable) else result

    def _begin(self, flight: Flight) -> None:
        call = flight.call
        self._flights[call.call] = flight
        deadline = None
        if call.timeout:
            flight.deadline = deadline = time.monotonic() + call.timeout
            flight.timer = self._loop.call_later(call.timeout, flight.stop, "timeout")
        self._table.begin(call.call, deadline)
        if self._library.interrupts.asked(call.call):
            flight.stop("cancelled")
        flight.task = self._loop.create_task(self._run(flight))

    async def _run(self, flight: Flight) -> None:
        """Run a call, and answer it."""
        library, call = self._library, flight.call
        try:
            flight.begin()
            result = await Stepped(flight.coroutine, call.call, self._table, library)
            if flight.why:
                raise asyncio.CancelledError  # It has heard of that, and returned all the same.
            body = flight.finish(result)
            made = None if flight.files is None else flight.files.take(failed=False)
        except BaseException as error:
            library.end_fork()
            self._raised(flight, error)
        else:
            library.output.mend()
            app, rest = self._left(flight)
            library.finished(call, flight.started, body, flight.extent, made, rest, app)
        self._ended(flight)

    def _left(self, flight: Flight) -> tuple[str, Sequence[str]]:
        """Return the app's name, and what is in the folder of calls on threads after the last of them."""
        if flight.notes is None or len(self._flights) > 1:
            return "", ()
        return flight.notes.app, self._library.place.rest({STAGED})

    def _raised(self, flight: Flight, error: BaseException) -> None:
        library, call = self._library, flight.call
        if (lost := context_loss(error)) is not None:
            self._lose(lost)
        if self._lost or flight.why == "closed":
            return  # What is in flight is answered with the loss.
        if flight.why == "timeout":
            library.output.mend()
            what, more = ("item", "what it waited for") if flight.notes is None else ("call", "where it was")
            text = (
                f"the {what} took longer than its timeout of {call.timeout:g} s: raise that, or see in the traceback "
                f"{more}"
            )
            library.answer_trouble(call, flight.started, Trouble("timeout", "Timeout", text, user_traceback(error)))
            return
        if flight.why == "cancelled":
            ended = CallInterrupted("nobody waits for the answer of this call any more")
            error = ended.with_traceback(error.__traceback__)
        library.answer_error(call, flight.started, error, flight.files, flight.notes)

    def _ended(self, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        self._table.end(flight.call.call)
        self._library.interrupts.forget(flight.call.call)
        del self._flights[flight.call.call]
        self._library.mend_handlers()
        if flight is self._one:
            self._one = None
        elif isinstance(flight, ThreadFlight):
            self._on_threads -= 1
            if not self._flights:
                self._library.place.leave()
        else:
            return
        if self._waiting:
            self._loop.call_soon(self._next)

    def _asked_more(self) -> None:
        self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        """End the items in flight that nobody waits for."""
        for number, flight in self._flights.items():
            if self._library.interrupts.asked(number):
                flight.stop("cancelled")

    # --- calls on threads, and those that run one after the other

    def _next(self) -> None:
        while self._waiting and self._one is None:
            beside = self._waiting[0].threads > 1
            if self._on_threads and not beside:
                return
            call = self._waiting.popleft()
            if beside:
                self._begin_on_thread(call)
                continue
            for channel in (self._host, self._line):
                channel.at_once = True
            began = time.monotonic()
            later = self._library.call(call)
            for channel in (self._host, self._line):
                channel.at_once = False
            self._shift(time.monotonic() - began)
            if later is not None:
                self._one = Flight(call, later.coroutine, later.finish)
                self._one.files = later.files
                self._begin(self._one)

    def _begin_on_thread(self, call: RunCall) -> None:
        if self._threads is None:
            self._threads = CallThreads(self._library, self._loop, call.threads)
            self._library.send(self._library.to_host, LoopBegan(self._closes, threads=True))
        self._on_threads += 1
        self._begin(ThreadFlight(call, self._threads, self._library.place.enter))

    def _shift(self, seconds: float) -> None:
        """Give the items in flight the time in which the loop stood still for another call."""
        for flight in self._flights.values():
            if flight.timer is not None and not flight.why:
                flight.timer.cancel()
                flight.deadline += seconds
                flight.timer = self._loop.call_later(flight.deadline - time.monotonic(), flight.stop, "timeout")
                self._table.end(flight.call.call)
                self._table.begin(flight.call.call, flight.deadline)


def _one_result(result: Any) -> bytes:
    return dump_results([result])


class _OwnSelector(selectors.DefaultSelector):
    """Notes when the loop waits; and ends processes that the user's code forked, and that came back to it."""

    def __init__(self, library: LibraryCalls, table: CallTable) -> None:
        super().__init__()
        self._library, self._table = library, table

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._library.end_fork()
        self._table.turn(False)
        try:
            return super().select(timeout)
        finally:
            self._table.turn(True)


class LoopChannel:
    """One end of a connection on the loop; what is sent in one of its turns goes in one system call.

    :param heard: called with each message that comes; `ended` once no more can.
    :ivar at_once: whether to send, and wait for that, before the loop turns again.
    """

    def __init__(
        self,
        channel: BlockingChannel,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[ToLibrary], None],
        ended: Callable[[], object],
    ) -> None:
        self._channel, self._loop = channel.unblocked(), loop
        self._heard, self._ended = heard, ended
        self._unsent: list[bytes] = []
        self.at_once = False
        loop.add_reader(self._channel, self._receive)
        loop.call_soon(self._receive)  # What came with the message before.

    def send_frame(self, data: bytes) -> None:
        """Send a message that is framed already; it is dropped where nobody hears any more."""
        if self._channel.closed:
            return
        self._unsent.append(data)
        if self.at_once:
            self._flush()
            while self._channel.pending and not self._channel.closed:
                self._channel.wait(events=POLLOUT)
                self._channel.flush()
        elif len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._unsent:
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            self._unsent = []
            self._channel.send_frame(data)
        if self._channel.pending:
            self._loop.add_writer(self._channel, self._more)

    def _more(self) -> None:
        self._channel.flush()
        if not self._channel.pending or self._channel.closed:
            self._loop.remove_writer(self._channel)

    def _receive(self) -> None:
        if self._channel.closed:
            return
        for head, body in self._channel.receive():
            self._heard(TO_LIBRARY.open(head, body))
        if self._channel.closed:
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            self._ended()
