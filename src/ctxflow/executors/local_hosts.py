"""What the embedded engine's workers are told, what their library processes answer, and whether they are alive.

Commands go to their hosts as messages; calls go to the library processes past these, on lines of their own. Not
thread-safe: the engine locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.executors.channel_host import SharedDisk
from ctxflow.executors.contract import CallPayload, Payloads, RunServices
from ctxflow.executors.local_workers import LibraryLine, LocalWorker
from ctxflow.executors.protocol import Heartbeats, Patience, call_message, events_of, plain_message
from ctxflow.host.library_messages import (
    ANSWERS,
    FROM_LIBRARY,
    BuildFailed,
    CallFinished,
    ContextAsleep,
    ContextAwake,
    ContextBuilt,
    ForgetParts,
    GivePart,
    LineOpened,
    ParkRaised,
)
from ctxflow.host.linux import Acceptor, activity
from ctxflow.host.messages import EndLibrary, EndOverdue, LeaveWorker, LibraryDied, Ping, ToHost
from ctxflow.host.wire import Channel, Head, listen, pack
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

logger = logging.getLogger("ctxflow")
AboutLoad: TypeAlias = ContextBuilt | BuildFailed | ContextAsleep | ContextAwake | ParkRaised | LibraryDied


class LibraryLines:
    """All lines of an engine, whose answers are added to `events`; the data of a line's key is the line.

    :raises OSError: if the socket at `address` cannot be made.
    """

    def __init__(
        self, run: RunServices, selector: selectors.BaseSelector, address: str, events: list[ev.Event]
    ) -> None:
        self.address = address
        self._run = run
        self._selector = selector
        self._events = events
        self._expected: dict[str, LibraryLine] = {}  # By key.
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
            line = self._expected.get(_key_of(head, body))
            if line is not None and (line.ready is not None or not line.built):
                self._strangers.discard(channel)
                if line.channel is not None:  # Of a process that has failed: its host tries another.
                    self._selector.unregister(line.channel)
                    line.channel.close()
                line.channel, line.ended_at = channel, math.inf
                self._selector.modify(channel, selectors.EVENT_READ, line)
                self._events += self._now_ready(line)
                return
            channel.closed = True
        if channel.closed:
            self._strangers.discard(channel)
            self._selector.unregister(channel)
            channel.close()

    def send(self, line: LibraryLine, message: GivePart | ForgetParts) -> None:
        """Send a message on a line that is there."""
        if line.channel is not None and not line.channel.send_frame(pack(message)):
            self.watch(line, line.channel)

    def watch(self, line: LibraryLine, channel: Channel) -> None:
        """Go on with a message when there is room for the rest."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        self._selector.modify(channel, wanted, line)

    def serve(self, line: LibraryLine, mask: int = selectors.EVENT_READ) -> None:
        """Read the answers that have come; a line whose process ended is of no more use, and its host says why."""
        channel = line.channel
        if channel is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                channel.flush()
                self.watch(line, channel)
            for head, body in channel.receive():
                report = ANSWERS.open(head, body)
                if isinstance(report, CallFinished):
                    line.calls.pop(report.call, None)
                self._events += events_of(self._run.clock(), line.worker.name, report)
            if channel.closed:
                self._selector.unregister(channel)
                channel.close()
                line.channel, line.ended_at = None, time.monotonic()
        except Exception as error:
            line.worker.give_up(error)

    def reported(self, worker: LocalWorker, report: AboutLoad) -> Sequence[ev.Event]:
        """Return the events of a host's report: a context is built once its line is there too, and ends once."""
        line, now = worker.lines.get(report.context), self._run.clock()
        if line is None or line.key != report.key:
            return ()  # About an earlier load of the context.
        if isinstance(report, ContextBuilt):
            [line.ready] = events_of(now, worker.name, report)
            line.built = True
            return self._now_ready(line) if line.channel is not None else ()
        if isinstance(report, (ContextAsleep, ContextAwake)):
            return events_of(now, worker.name, report)
        if isinstance(report, (BuildFailed, ParkRaised)):
            self.drop(worker, line.context)
            return events_of(now, worker.name, report)
        self.serve(line)  # What it answered before still counts; what it ran is lost.
        blamed = [call for call in report.calls if call in line.calls]  # First, since the others go with it.
        died = dataclasses.replace(report, calls=[*blamed, *(call for call in line.calls if call not in blamed)])
        self.drop(worker, line.context)
        # One that never took calls was built all the same, for the scheduler to undo.
        return [*self._now_ready(line), *events_of(now, worker.name, died)]

    @staticmethod
    def _now_ready(line: LibraryLine) -> list[ev.Event]:
        """Return the host's report that a context is built, once its line is there to take calls."""
        ready, line.ready = line.ready, None
        return [] if ready is None else [ready]

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


class LocalHosts:
    """Tells workers what to do, without waiting for it; the data of a host channel's key is its worker.

    :param happened: called with what is noticed while a command is carried out.
    """

    def __init__(
        self,
        run: RunServices,
        selector: selectors.BaseSelector,
        lines: LibraryLines,
        there: Mapping[str, LocalWorker],
        disk: SharedDisk,
        happened: Callable[[ev.Event], None],
    ) -> None:
        self._run = run
        self._selector = selector
        self._lines = lines
        self._there = there
        self._disk = disk
        self._happened = happened

    def tell(self, worker: LocalWorker, command: cmd.Command, payloads: Payloads, since: float | None = None) -> None:
        """Have a worker carry out a command that names it.

        :param since: when it was to, if it had to wait, by the monotonic clock.
        """
        worker.fresh = False
        if isinstance(command, cmd.Run):
            self._run_call(worker, command, payloads.calls[command.attempt])
        elif isinstance(command, cmd.Load):
            context = payloads.contexts[command.context]
            line = self._lines.expect(worker, context.id)
            build = self._disk.build(context, worker.scratch, line.key, self._lines.address)
            self._send(worker, build if since is None else dataclasses.replace(build, began=since))
        elif isinstance(command, cmd.Carry):
            source = self._there.get(command.source)
            scratch = None if source is None else source.scratch
            self._happened(self._disk.carry(command, self._run.clock(), scratch, worker.scratch))
        elif isinstance(command, cmd.Stage):
            if (preload := self._disk.learned.message(payloads.contexts[command.context])) is not None:
                self._send(worker, preload)
            self._send(worker, self._disk.stage(payloads.contexts[command.context], worker.scratch))
        elif (message := plain_message(command)) is not None:
            if isinstance(message, EndLibrary):
                # The host is not told of calls that go directly to the library process: it ends this either way.
                self._lines.drop(worker, message.context)
                if isinstance(command, cmd.Unload) and command.files:
                    message = self._disk.remove(payloads.contexts[command.context], worker.scratch)
            elif isinstance(message, LeaveWorker):
                worker.released = True
            self._send(worker, message)

    def _run_call(self, worker: LocalWorker, command: cmd.Run, payload: CallPayload) -> None:
        line = worker.lines.get(command.context)
        if line is None:
            self._happened(ev.ContextUnloaded(self._run.clock(), worker.name, command.context))
            return
        if (channel := line.channel) is None:  # Its host will say why, and for whom, which ends this call too.
            return
        function = payload.function
        if payload.constants is not None or (function is not None and function.name not in line.functions):
            for part in payload.new_parts(line.functions):
                line.functions.add(part.name)
                self._lines.send(line, GivePart(part.name, part.body))
        # Of calls that overlap, the library process sees to the timeouts, and its host to its own.
        line.calls[command.attempt] = (not payload.overlaps and payload.timeout) or math.inf
        if not channel.send_frame(pack(call_message(command, payload))):
            self._lines.watch(line, channel)

    def ask(self, worker: LocalWorker) -> None:
        """Have a worker's host say that it is there."""
        self._send(worker, Ping())

    def end_overdue(self, line: LibraryLine, call: int, timeout: float) -> None:
        """Have a host end a library process whose call is overdue: it may never have heard of that call."""
        self._send(line.worker, EndOverdue(line.context, line.key, call, timeout))

    def give_up(self, line: LibraryLine) -> None:
        """Take for gone what is behind a line that ended, of which its host says nothing."""
        self._lines.drop(line.worker, line.context)
        unloaded = ev.ContextUnloaded(self._run.clock(), line.worker.name, line.context)
        for event in filter(None, (line.ready, unloaded)):
            self._happened(event)

    def release(self, worker: LocalWorker) -> None:
        """Have a worker end by itself."""
        worker.released = True
        self._send(worker, LeaveWorker())

    def forget(self, worker: LocalWorker, functions: Collection[str]) -> None:
        """Have a worker's library processes keep functions no more."""
        for line in worker.lines.values():
            known = [name for name in functions if name in line.functions]
            if known:
                line.functions.difference_update(known)
                self._lines.send(line, ForgetParts(known))

    def flush(self, worker: LocalWorker) -> None:
        """Go on with a message for which there was no room in the socket."""
        worker.channel.flush()
        self._watch(worker)

    def _send(self, worker: LocalWorker, message: ToHost) -> None:
        if not worker.channel.send_frame(pack(message)):
            self._watch(worker)

    def _watch(self, worker: LocalWorker) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.pending else 0)
        self._selector.modify(worker.channel, wanted, worker)


class LocalWatch:
    """Looks once a second, from `look_at` on by the monotonic clock, for overdue calls and silent workers."""

    def __init__(self, patience: Patience, there: Mapping[str, LocalWorker], messages: LocalHosts) -> None:
        self._patience = patience
        self._there = there
        self._messages = messages
        self._beats = Heartbeats(patience, self._ask)
        self._activity: dict[str, tuple[str, ...]] = {}  # Of the hosts that were asked.
        self.look_at = 0.0
        self.begun, self.heard = self._beats.watch, self._beats.heard

    def _ask(self, name: str) -> None:
        worker = self._there[name]
        self._activity[name] = activity(worker.process.pid)
        self._messages.ask(worker)

    def left(self, worker: LocalWorker) -> None:
        """A worker is gone, or was told to go."""
        self._beats.forget(worker.name)
        self._activity.pop(worker.name, None)

    def look(self, now: float) -> list[tuple[LocalWorker, str]]:
        """See to calls that are overdue; gives the workers that are lost, each with the reason."""
        self.look_at = now + self._patience.look
        for worker in self._there.values():
            for line in list(worker.lines.values()):
                # The user's code closed it, or all of them.
                if line.built and now > line.ended_at + self._patience.report:
                    self._messages.give_up(line)
                elif (late := line.overdue(now, self._patience.overdue)) is not None:
                    self._messages.end_overdue(line, *late)
                    self._beats.urge(worker.name)
        return list(self._silent(now))

    def _silent(self, now: float) -> Iterator[tuple[LocalWorker, str]]:
        for name in self._beats.look(now):
            worker, seconds = self._there[name], self._beats.silent_for(name)
            seen = activity(worker.process.pid)
            # One that is swapped out, or waits for a slow disk, gets on all the same.
            if seen and seen != self._activity[name] and seconds < self._patience.longest:
                self._activity[name] = seen
                self._beats.spare(name)
            else:
                yield worker, f"its host, process {worker.process.pid}, has not answered for {seconds:.0f} s"
