"""One worker of the embedded engine: its context host process, and the lines to its library processes.

A line is the driver's own connection to a library process, past its host. Calls go there and results come back;
whatever else there is to say of a library process, its host says. What does not live here: which workers there are
(local_workers.py), what is sent (local_hosts.py), and what an answer means to the run (engine.py). Not thread-safe: the
engine locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ctxflow.factory.provider import tail
from ctxflow.host.library_messages import ANSWERS, FROM_LIBRARY, Answer, CallFinished, LineOpened, ToLibrary
from ctxflow.host.linux import Acceptor, ended_within, kill_session, kill_tree, python_path, session_members
from ctxflow.host.wire import Channel, Head, listen, pack
from ctxflow.scheduler import events as ev
from ctxflow.topology.machine import Device

_KILL_SECONDS = 2.0  # How long what was killed is waited for; what hangs in the kernel ends later, or never.
_ALL_THREADS = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (_ALL_THREADS, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")


class LocalWorker:
    """A context host process as the engine sees it.

    :param name: what the scheduler knows it by.
    :param parent: the directory in which it gets one of its own.
    :param logs: where its output and its library processes' is kept.
    :raises OSError: if the machine has no room for it (disk, processes, descriptors); nothing is left then.
    """

    def __init__(self, name: str, devices: list[Device], parent: str, logs: str, share: dict[str, str]) -> None:
        self.name = name
        self.devices = devices
        self.scratch = os.path.join(parent, name)
        self.joined = False
        self.evicted = False  # Known to be taken away, or about to be.
        self.released = False
        self.shares = [devices]  # What it holds of the machine's devices, as they are dealt out.
        self.pin: int | None = None  # The number by which it was asked for, with devices of its own.
        self.pause: float | None = None  # Seconds for which its place stays empty, if that was said.
        self.lines: dict[str, LibraryLine] = {}
        os.makedirs(logs, exist_ok=True)
        self._log = os.path.join(logs, "host.log")
        with contextlib.ExitStack() as ours, open(self._log, "wb") as output:
            near, far = socket.socketpair()
            ours.callback(near.close)
            with far:
                arguments = [str(far.fileno()), self.scratch, logs, str(os.getpid())]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "ctxflow.host", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[far.fileno()],
                    env={**os.environ, **share},
                    cwd=parent,  # Where no module of the user's hides one that the host needs.
                    start_new_session=True,  # Ctrl-C is the driver's; and the worker can be ended as a whole.
                )
            ours.pop_all()
        self.channel = Channel(near)

    def end(self) -> None:
        """Kill what is left of it, wait for that, and remove its files."""
        kill_tree(self.process.pid)  # Also what left the worker's session.
        kill_session(self.process.pid)  # Also what lost its parents.
        ended_within(self.process, _KILL_SECONDS)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remains(self) -> list[int]:
        """Return its processes that have not ended though they were killed: they may hold its GPUs."""
        self.process.poll()
        return session_members(self.process.pid)

    def last_words(self) -> str:
        """Return how it ended: the last line of its output, or its exit status."""
        status = f"a worker ended with status {self.process.returncode}"
        return (tail(self._log).splitlines() or [status])[-1].strip()


def share(devices: list[Device], dealt: bool, workers: int, shares: int = 1) -> dict[str, str]:
    """Return the environment that keeps a worker to its share of the machine.

    :param devices: its GPUs.
    :param dealt: whether the machine has GPUs at all.
    :param workers: how many share the machine.
    :param shares: how many of those shares it has.
    """
    threads = str(max(1, (os.cpu_count() or 1) * shares // workers))
    variables = {}
    if _ALL_THREADS not in os.environ:  # The others follow that one where they are not set.
        variables = {name: threads for name in _THREAD_VARIABLES if name not in os.environ}
    if dealt:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(device.id for device in devices)
    return {**variables, **python_path()}


logger = logging.getLogger("ctxflow")
Answered = Callable[["LibraryLine", Answer], None]


class LibraryLine:
    """One line: to the library process of a context on a worker."""

    def __init__(self, worker: LocalWorker, context: str) -> None:
        self.worker = worker
        self.context = context
        self.key = secrets.token_hex(8)  # What its library process will name.
        self.channel: Channel | None = None
        self.ready: ev.Event | None = None  # Reported by the host; waits for the line to be there.
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
        """Return the call that runs, and its timeout, if it has taken so many seconds longer than that."""
        call, timeout = next(iter(self.calls.items()), (0, float("inf")))
        return (call, timeout) if now >= self._first_since + timeout + grace else None

    def put_off(self, now: float) -> None:
        """Somebody was told of it: what is overdue is so anew, later."""
        self._first_since = now


class LibraryLines:
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
        connected: Callable[[LibraryLine], None],
        answered: Answered,
    ) -> None:
        self.address = address
        self._selector = selector
        self._connected = connected
        self._answered = answered
        self._expected: dict[str, LibraryLine] = {}  # Those that are not there yet, by key.
        self._strangers: set[Channel] = set()  # Connections that did not say yet whose line they are.
        self.acceptor = Acceptor(selector, listen(address), self._accepted, logger.warning)

    def expect(self, worker: LocalWorker, context: str) -> LibraryLine:
        """Make the line to a library process that is about to start, in place of an earlier one."""
        self.drop(worker, context)
        line = LibraryLine(worker, context)
        worker.lines[context] = self._expected[line.key] = line
        return line

    def _accepted(self, connection: socket.socket, address: Any) -> None:
        """A library process connects: find out which."""
        channel = Channel(connection)
        self._strangers.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._introduced(channel))

    def _introduced(self, channel: Channel) -> None:
        for head, body in channel.receive():
            line = self._expected.pop(_key_of(head, body), None)
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

    def send(self, line: LibraryLine, message: ToLibrary) -> None:
        """Send a message on a line that is there."""
        if line.channel is not None and not line.channel.send_frame(pack(message)):
            self._watch(line, line.channel)

    def _watch(self, line: LibraryLine, channel: Channel) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        self._selector.modify(channel, wanted, line)

    def serve(self, line: LibraryLine, mask: int = selectors.EVENT_READ) -> None:
        """Read the answers that have come; a line whose process ended is of no more use, and its host says why."""
        channel = line.channel
        if channel is None:
            return
        if mask & selectors.EVENT_WRITE:
            channel.flush()
            self._watch(line, channel)
        for head, body in channel.receive():
            report = ANSWERS.open(head, body)
            if isinstance(report, CallFinished):
                line.ended(report.call)
            self._answered(line, report)
        if channel.closed:
            self._selector.unregister(channel)
            channel.close()
            line.channel = None

    def drop(self, worker: LocalWorker, context: str) -> None:
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


def _key_of(head: Head, body: bytes) -> str:
    """Whose line a connection says to be, "" if it says something else."""
    with contextlib.suppress(ValueError):
        said = FROM_LIBRARY.open(head, body)
        if isinstance(said, LineOpened):
            return str(said.key)
    return ""
