"""The lines of the embedded engine: the driver's own connections to library processes, past their hosts.

Calls go there and results come back; whatever else there is to say of a library process, its host says. What
does not live here: what is sent (host_messages.py), and what an answer means to the run (embedded.py). Not
thread-safe: the engine locks.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from ctxflow.executors.accepting import Acceptor
from ctxflow.executors.workers import Worker
from ctxflow.host.wire import Channel, Head, listen
from ctxflow.scheduler import events as ev

logger = logging.getLogger("ctxflow")
Answered = Callable[["Line", Head, bytes], None]


class Line:
    """One line: to the library process of a context on a worker."""

    def __init__(self, worker: Worker, context: str) -> None:
        self.worker = worker
        self.context = context
        self.key = secrets.token_hex(8)  # What its library process will name.
        self.channel: Channel | None = None
        self.ready: ev.ContextReady | None = None  # Reported by the host; waits for the line to be there.
        self.functions: set[str] = set()  # Those that the process was given.
        self.calls: dict[int, float] = {}  # Those that it has, in the order in which it runs them -> their timeouts.
        self._first_since = 0.0  # When the first of them began, at the latest.

    def begin(self, call: int, timeout: float | None) -> None:
        """It gets a call."""
        if not self.calls and timeout is not None:
            self._first_since = time.monotonic()
        self.calls[call] = timeout or float("inf")

    def ended(self, call: int) -> None:
        """A call has ended, so that the next one begins."""
        self.calls.pop(call, None)
        if self.calls:
            self._first_since = time.monotonic()

    def overdue(self, now: float, grace: float) -> tuple[int, float] | None:
        """The call that runs, and its timeout, if it has taken so many seconds longer than that."""
        call, timeout = next(iter(self.calls.items()), (0, float("inf")))
        return (call, timeout) if now >= self._first_since + timeout + grace else None

    def put_off(self, now: float) -> None:
        """Somebody was told of it: what is overdue is so anew, later."""
        self._first_since = now


class Lines:
    """All lines of an engine.

    :param selector: where channels are registered; the data of a line's key is the line.
    :param address: the Unix socket that library processes connect to.
    :param connected: called when a line is there.
    :param answered: called with each answer.
    :raises OSError: if the socket cannot be made.
    :ivar acceptor: of the connections.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: str,
        connected: Callable[[Line], None],
        answered: Answered,
    ) -> None:
        self.address = address
        self._selector = selector
        self._connected = connected
        self._answered = answered
        self._expected: dict[str, Line] = {}  # Those that are not there yet, by key.
        self._strangers: set[Channel] = set()  # Connections that did not say yet whose line they are.
        self.acceptor = Acceptor(selector, listen(address), self._accepted, logger.warning)

    def expect(self, worker: Worker, context: str) -> Line:
        """The line to a library process that is about to start, in place of an earlier one."""
        self.drop(worker, context)
        line = Line(worker, context)
        worker.lines[context] = self._expected[line.key] = line
        return line

    def _accepted(self, connection: socket.socket, address: Any) -> None:
        """A library process connects: find out which."""
        channel = Channel(connection)
        self._strangers.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._introduced(channel))

    def _introduced(self, channel: Channel) -> None:
        for head, _ in channel.receive():
            line = self._expected.pop(str(head.get("key")), None)
            if line is not None:
                self._strangers.discard(channel)
                line.channel = channel
                self._selector.modify(channel, selectors.EVENT_READ, line)
                self._connected(line)
                return
            channel.closed = True
        if channel.closed:
            self._strangers.discard(channel)
            self._selector.unregister(channel)
            channel.close()

    def send(self, line: Line, head: Head, body: bytes = b"") -> None:
        """Send a message on a line that is there."""
        if line.channel is not None:
            line.channel.send(head, body)
            if line.channel.pending:
                self._watch(line, line.channel)

    def _watch(self, line: Line, channel: Channel) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        self._selector.modify(channel, wanted, line)

    def serve(self, line: Line, mask: int = selectors.EVENT_READ) -> None:
        """Read the answers that have come; a line whose process ended is of no more use, and its host says why."""
        channel = line.channel
        if channel is None:
            return
        if mask & selectors.EVENT_WRITE:
            channel.flush()
            self._watch(line, channel)
        for head, body in channel.receive():
            if head["is"] != "part":
                line.ended(head["call"])
            self._answered(line, head, body)
        if channel.closed:
            self._selector.unregister(channel)
            channel.close()
            line.channel = None

    def drop(self, worker: Worker, context: str) -> None:
        """Give up the line to a library process, if there is one."""
        line = worker.lines.pop(context, None)
        if line is None:
            return
        self._expected.pop(line.key, None)
        if line.channel is not None:
            self._selector.unregister(line.channel)
            line.channel.close()
            line.channel = None

    def close(self) -> None:
        """Let nobody connect any more; lines are dropped with their workers."""
        for stranger in self._strangers:
            stranger.close()
        self.acceptor.close()
