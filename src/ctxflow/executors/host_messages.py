"""What the embedded engine's workers are told: commands as messages to their hosts, calls on the lines past these.

What does not live here: which workers there are (local_workers.py), what they answer (embedded.py), and how messages
are written (host/wire.py). Not thread-safe: the engine locks.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable, Collection, Mapping

from ctxflow.executors.engine import NO_PAYLOADS, CallPayload, ContextPayload, Payloads, RunServices
from ctxflow.executors.lines import Line, Lines
from ctxflow.executors.workers import Worker
from ctxflow.host.sessions import state_path
from ctxflow.host.staging import cached
from ctxflow.host.wire import Head
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


class HostMessages:
    """Tells workers what to do, without waiting for it.

    :param run: has what calls and contexts are made of.
    :param selector: where the hosts' channels are registered; the data of a channel's key is its worker.
    :param lines: to library processes.
    :param there: the workers, by name.
    :param cache: the folder of the files that all workers share.
    :param directory: where calls and contexts' builds run.
    :param happened: called with what is noticed while a command is carried out.
    """

    def __init__(
        self,
        run: RunServices,
        selector: selectors.BaseSelector,
        lines: Lines,
        there: Mapping[str, Worker],
        cache: str,
        directory: str,
        happened: Callable[[ev.Event], None],
    ) -> None:
        self._run = run
        self._selector = selector
        self._lines = lines
        self._there = there
        self._cache = cache
        self._directory = directory
        self._happened = happened

    def tell(self, worker: Worker, command: cmd.Command, payloads: Payloads = NO_PAYLOADS) -> None:
        """Have a worker carry out a command that names it."""
        if isinstance(command, cmd.Run):
            self._send_call(worker, command, payloads.calls[command.attempt])
        elif isinstance(command, cmd.Load):
            self._send_load(worker, payloads.contexts[command.context])
        elif isinstance(command, cmd.Carry):
            self._carry(worker, command)
        elif isinstance(command, cmd.Stage):
            context = payloads.contexts[command.context]
            head: Head = {"do": "stage", "context": context.id, "files": context.files}
            self._send(worker, {**head, "cache": self._cache_of(worker, context), "link": context.level != ev.NONE})
        elif isinstance(command, (cmd.Unload, cmd.Abandon)):
            # The host does not hear of calls that go over the line: it ends the library process either way.
            self._lines.drop(worker, command.context)
            head = {"do": "unload", "context": command.context}
            if isinstance(command, cmd.Unload) and command.files:
                head["files"] = self._cache_of(worker, payloads.contexts[command.context])
            self._send(worker, head)
        elif isinstance(command, cmd.Interrupt):
            self._send(worker, {"do": "interrupt", "context": command.context, "call": command.attempt})
        elif isinstance(command, cmd.Drain):
            self._send(worker, {"do": "drain"})
        elif isinstance(command, cmd.Release):
            self.release(worker)

    def ask(self, worker: Worker) -> None:
        """Have a worker's host say that it is there."""
        self._send(worker, {"do": "ping"})

    def end_overdue(self, line: Line, call: int, timeout: float) -> None:
        """Have a host end a library process whose call is overdue: it may never have heard of that call."""
        about = {"context": line.context, "key": line.key, "call": call, "timeout": timeout}
        self._send(line.worker, {"do": "overdue", **about})

    def release(self, worker: Worker) -> None:
        """Have a worker end by itself."""
        worker.released = True
        self._send(worker, {"do": "release"})

    def forget(self, worker: Worker, functions: Collection[str]) -> None:
        """Have a worker's library processes keep functions no more."""
        for line in worker.lines.values():
            known = [name for name in functions if name in line.functions]
            if known:
                line.functions.difference_update(known)
                self._lines.send(line, {"do": "forget_functions", "functions": known})

    def flush(self, worker: Worker) -> None:
        """Go on with a message for which there was no room in the socket."""
        worker.channel.flush()
        self._watch(worker)

    def _cache_of(self, worker: Worker, context: ContextPayload) -> str:
        """Where a context's files go: to the cache that all workers share, unless nothing of it is to be kept."""
        return os.path.join(worker.scratch, "files", context.id) if context.level == ev.NONE else self._cache

    def _send_call(self, worker: Worker, command: cmd.Run, payload: CallPayload) -> None:
        line = worker.lines.get(command.context)
        if line is None or line.channel is None:  # It died meanwhile, which the scheduler is about to hear.
            self._happened(ev.ContextUnloaded(self._run.clock(), worker.name, command.context))
            return
        for part in payload.new_parts(line.functions):
            line.functions.add(part.name)
            self._lines.send(line, {"do": "function", "function": part.name}, part.body)
        head: Head = {
            "do": "call",
            "call": command.attempt,
            "context": command.context,
            "function": payload.function.name if payload.function is not None else "",
            "style": payload.style,
            "insert": payload.insert,
        }
        if payload.constants is not None:
            head["constants"] = payload.constants.name
        if payload.timeout is not None:
            head["timeout"] = payload.timeout
        if payload.style == "step":
            head["states"] = self._states_of(worker)
        line.begin(command.attempt, payload.timeout)
        self._lines.send(line, head, payload.body)

    @staticmethod
    def _states_of(worker: Worker) -> str:
        """The folder of a worker's cache where frozen states of sessions are."""
        return os.path.join(worker.scratch, "sessions")

    def _carry(self, worker: Worker, command: cmd.Carry) -> None:
        """Workers of one machine share its disk: a state goes from one to another by its name alone."""
        now, source = self._run.clock(), self._there.get(command.source)
        places = (command.worker, command.session, command.made)
        try:
            if source is None:
                raise OSError(f"the worker {command.source} is gone")
            paths = [state_path(self._states_of(each), command.session, command.made) for each in (source, worker)]
            os.makedirs(os.path.dirname(paths[1]), exist_ok=True)
            os.rename(*paths)
        except OSError as error:
            self._happened(
                ev.StateLost(now, *places, f"the state of a session cannot be brought to its worker: {error}")
            )
        else:
            self._happened(ev.StateArrived(now, *places))

    def _send_load(self, worker: Worker, context: ContextPayload) -> None:
        line, cache = self._lines.expect(worker, context.id), self._cache_of(worker, context)
        head = {
            "do": "load",
            "line": self._lines.address,
            "key": line.key,
            "context": context.id,
            "name": context.name,
            "files": {name: cached(digest, path, cache) for name, (path, digest) in context.files.items()},
            "environment": dict(context.environment),
            "timeout": context.timeout,
            "memory": context.memory,
            "directory": self._directory,
            "path": [p or self._here() for p in sys.path],
        }
        self._send(worker, head, context.recipe)

    def _here(self) -> str:
        """The driver's current directory, from which it imports in a notebook; it may have been removed."""
        try:
            return os.getcwd()
        except OSError:
            return self._directory

    def _send(self, worker: Worker, head: Head, body: bytes = b"") -> None:
        worker.channel.send(head, body)
        if worker.channel.pending:
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.pending else 0)
        self._selector.modify(worker.channel, wanted, worker)
