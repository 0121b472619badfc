"""An engine whose workers are plain subprocesses of this machine: to be read by whoever writes an engine.

Each worker is a context host of ctxflow's (`python -m ctxflow.host`), spoken to over a socket pair: it starts library
processes, builds contexts, runs calls and says what became of them. An engine only has to start hosts somewhere,
pass messages on, and notice when a worker is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pydantic

from ctxflow.executors.contract import NO_PAYLOADS, ContextPayload, EngineFailed, Payloads, RunServices
from ctxflow.executors.protocol import call_message, events_of, plain_message
from ctxflow.host import library_messages
from ctxflow.host import messages as msg
from ctxflow.host.call_surroundings import state_path
from ctxflow.host.linux import kill_session, kill_tree
from ctxflow.host.local_files import cached
from ctxflow.host.wire import Channel, pack
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import Capabilities, EngineOptions

TIER = "local"
_MOST_STILLBORN = 5  # Workers in a row that end before they have started.


class Options(EngineOptions):
    """The table `[subprocesses]` of a site file."""

    nice: int = pydantic.Field(0, ge=0, le=19, description="How much the workers give way to other processes.")


class Worker:
    """A context host, and what the engine knows of it."""

    def __init__(self, name: str, folder: str, nice: int) -> None:
        self.name, self.folder = name, folder
        self.joined = self.leaves = self.noticed = False
        self.parts: set[str] = set()  # The functions and constants that it has.
        self.loads: dict[str, str] = {}  # Context -> the key of its latest load.
        self.calls: set[int] = set()
        near, far = socket.socketpair()
        self.log = Path(f"{folder}.log")
        with far, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", str(nice), sys.executable, "-m", "ctxflow.host", str(far.fileno()), folder,
                 f"{folder}.logs", str(os.getpid())],  # `nice` becomes the host, whose parent this process has to be.
                pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.channel = Channel(near)

    def end(self) -> None:
        """Leave nothing of it."""
        self.channel.close()
        kill_tree(self.process.pid)
        kill_session(self.process.pid)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class SubprocessEngine:
    """Runs workers as subprocesses of this machine.

    :param workers: how many at most.
    :param nice: how much they give way to other processes.
    """

    Options = Options
    capabilities = Capabilities()  # Workers see this machine's disk, and nobody acquires them.

    @classmethod
    def from_site(cls, site: Site) -> SubprocessEngine:
        """Return the engine of a site."""
        return cls(site.workers or 2, site.options.nice)

    def __init__(self, workers: int = 2, nice: int = 0) -> None:
        self._most, self._nice = workers, nice
        self._workers: dict[str, Worker] = {}
        self._wanted = self._begun = self._keys = self._stillborn = 0
        self._events: list[ev.Event] = []  # Noticed while a command was carried out.
        self._lock = threading.RLock()  # `wake` may be called on a thread that is inside the engine.
        self._stopped = False

    def tiers(self) -> list[ev.TierSpec]:
        """Return the one kind of worker that there is."""
        return [ev.TierSpec(TIER, minimum=0, maximum=self._most)]

    def start(self, run: RunServices) -> None:
        """Get ready; calls run where this is called."""
        self._run, self._directory = run, os.getcwd()
        self._folder = tempfile.mkdtemp(prefix="subprocess-engine-")
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    # --- commands

    def execute(self, commands: Sequence[cmd.Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands, without waiting for them to take effect."""
        with self._lock:
            for command in () if self._stopped else commands:
                if isinstance(command, cmd.Acquire):
                    self._wanted = command.workers
                    self._spawn()
                elif (worker := self._workers.get(getattr(command, "worker", ""))) is not None:
                    self._tell(worker, command, payloads)

    def _spawn(self) -> None:
        """Start workers until there are as many as are wanted."""
        while len(self._workers) < self._wanted:
            self._begun += 1
            name = f"subprocess-{self._begun}"
            worker = self._workers[name] = Worker(name, os.path.join(self._folder, name), self._nice)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _tell(self, worker: Worker, command: cmd.Command, payloads: Payloads) -> None:
        if isinstance(command, cmd.Run):
            payload = payloads.calls[command.attempt]
            for part in payload.new_parts(worker.parts):
                worker.parts.add(part.name)
                self._send(worker, library_messages.GivePart(part.name, part.body))
            worker.calls.add(command.attempt)
            self._send(worker, call_message(command, payload, worker.loads.get(command.context)))
        elif isinstance(command, cmd.Load):
            self._send(worker, self._load(worker, payloads.contexts[command.context]))
        elif isinstance(command, cmd.Stage):
            context = payloads.contexts[command.context]
            whole = context.level == ev.NONE  # Nothing is shared with others, so that it can be removed.
            self._send(worker, msg.StageFiles(context.id, context.files, self._cache(worker, context), not whole))
        elif isinstance(command, cmd.Carry):
            self._events.append(self._carry(worker, command))
            self.wake()
        elif (message := plain_message(command)) is not None:
            if isinstance(message, msg.EndLibrary):
                worker.loads.pop(message.context, None)
                if isinstance(command, cmd.Unload) and command.files:
                    files = self._cache(worker, payloads.contexts[command.context])
                    message = msg.EndLibrary(message.context, files)
            worker.leaves |= isinstance(message, msg.LeaveWorker)
            self._send(worker, message)

    def _load(self, worker: Worker, context: ContextPayload) -> library_messages.BuildContext:
        self._keys += 1
        key = worker.loads[context.id] = str(self._keys)
        cache = self._cache(worker, context)
        return library_messages.BuildContext(
            context.id, key, context.name,
            files={name: cached(digest, path, cache) for name, (path, digest) in context.files.items()},
            environment=context.environment, timeout=context.timeout, memory=context.memory,
            directory=self._directory, path=[path or self._directory for path in sys.path],
            states=os.path.join(worker.folder, "states"), body=context.recipe,
        )  # fmt: skip

    def _carry(self, worker: Worker, command: cmd.Carry) -> ev.Event:
        """Bring a session's state from another worker, which has the same disk."""
        now, moved = self._run.clock(), (command.worker, command.session, command.made)
        try:
            folders = [os.path.join(each.folder, "states") for each in (self._workers[command.source], worker)]
            source, target = (state_path(folder, command.session, command.made) for folder in folders)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(source, target)
        except (KeyError, OSError) as error:
            return ev.StateLost(now, *moved, f"the state of a session cannot be brought to its worker: {error}")
        return ev.StateArrived(now, *moved)

    def _cache(self, worker: Worker, context: ContextPayload) -> str:
        """Where a context's files are: with those of all, unless nothing of it is to be kept."""
        own = os.path.join(worker.folder, "files", context.id)
        return own if context.level == ev.NONE else os.path.join(self._folder, "cache")

    def _send(self, worker: Worker, message: msg.ToHost) -> None:
        whole = worker.channel.send_frame(pack(message))
        if not whole:  # `poll` sends the rest when there is room.
            self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def forget(self, functions: Collection[str]) -> None:
        """Have workers keep these functions and constants no more."""
        with self._lock:
            for worker in self._workers.values():
                if known := worker.parts.intersection(functions):
                    worker.parts -= known
                    self._send(worker, library_messages.ForgetParts(sorted(known)))

    # --- events

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happened; waits up to `timeout` seconds for something to."""
        with self._lock:
            for worker in self._workers.values():  # Those with notice: what they had to do was told since.
                if worker.noticed and not worker.calls and not worker.leaves:
                    worker.leaves = True
                    self._send(worker, msg.LeaveWorker())
        ready = [] if self._stopped else self._selector.select(0 if self._events else timeout)
        with self._lock:
            for key, _ in [] if self._stopped else ready:
                if key.data is None:
                    self._bell.recv(4096)
                else:
                    self._hear(key.data)
            happened, self._events = self._events, []
            return happened

    def _hear(self, worker: Worker) -> None:
        worker.channel.flush()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.pending else 0)
        self._selector.modify(worker.channel, wanted, worker)
        for head, body in worker.channel.receive():
            self._report(worker, msg.FROM_HOST.open(head, body))
        if worker.channel.closed:
            self._lost(worker)

    def _report(self, worker: Worker, report: msg.FromHost) -> None:
        key = getattr(report, "key", None)
        if key is not None and worker.loads.get(report.context) != key:  # type: ignore[union-attr]
            return  # About an earlier load of the context.
        now = self._run.clock()
        if isinstance(report, msg.HostStarted):
            worker.joined, self._stillborn = True, 0
            self._events.append(ev.WorkerJoined(now, ev.WorkerSpec(worker.name, socket.gethostname(), TIER)))
        elif isinstance(report, (library_messages.CallFinished, library_messages.CallRaised)):
            worker.calls.discard(report.call)
        elif isinstance(report, msg.LibraryDied):
            worker.calls.difference_update(report.calls)
        worker.noticed |= isinstance(report, msg.NoticeGiven)
        self._events += events_of(now, worker.name, report)

    def _lost(self, worker: Worker) -> None:
        """Say that a worker is gone, and have another take its place."""
        self._selector.unregister(worker.channel)
        worker.end()
        del self._workers[worker.name]
        self._stillborn += not worker.joined
        if self._stillborn > _MOST_STILLBORN:
            last = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineFailed(f"workers end before they have started: {' '.join(last) or 'they say nothing'}")
        if worker.joined:
            expected = worker.leaves or worker.noticed
            self._events.append(ev.WorkerLost(self._run.clock(), worker.name, evicted=expected))
        self._spawn()

    def evict(self, name: str) -> None:
        """Take a worker away at once, as a resource manager would."""
        with self._lock:
            self._workers[name].noticed = True
            kill_tree(self._workers[name].process.pid)

    def processes(self) -> dict[str, int]:
        """Return the process of each worker."""
        return {worker.name: worker.process.pid for worker in self._workers.values()}

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        with contextlib.suppress(OSError):  # Full: then `poll` returns anyway.
            self._ringer.send(b".")

    def stop(self) -> None:
        """End all workers, and free all that they had."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for worker in self._workers.values():
                worker.end()
            self._selector.close()
            self._bell.close()
            self._ringer.close()
            shutil.rmtree(self._folder, ignore_errors=True)
