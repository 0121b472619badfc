"""An engine whose workers are plain subprocesses of this machine: to be read by whoever writes an engine.

Each worker is a context host of ctxflow's (`python -m ctxflow.host`), which starts library processes, builds contexts,
runs calls and says what became of them. An engine starts hosts somewhere, passes commands and reports on, and notices
when a worker is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pydantic

from ctxflow.executors.channel_host import ChannelHost, SharedDisk, start_host
from ctxflow.executors.contract import NO_PAYLOADS, EngineFailed, Payloads, RunServices
from ctxflow.host.linux import kill_session, kill_tree
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import Capabilities, EngineOptions

TIER = "local"
_MOST_STILLBORN = 5  # Workers in a row that end before they have started.


class Options(EngineOptions):
    """The table `[subprocesses]` of a site file."""

    nice: int = pydantic.Field(0, ge=0, le=19, description="How much the workers give way to other processes.")


class Worker(ChannelHost):
    """A context host that is a child of this process."""

    def __init__(self, name: str, folder: str, nice: int, selector: selectors.BaseSelector, disk: SharedDisk) -> None:
        self.log = Path(f"{folder}.log")
        with self.log.open("wb") as log:
            self.process, channel = start_host(folder, f"{folder}.logs", log, prefix=["nice", "-n", str(nice)])
        super().__init__(ev.WorkerSpec(name, socket.gethostname(), TIER), folder, channel, selector, disk)

    def end(self) -> None:
        """Leave nothing of it."""
        self.close()
        kill_tree(self.process.pid)
        kill_session(self.process.pid)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class SubprocessEngine:
    """Runs workers as subprocesses of this machine: so many at most, with that niceness."""

    Options = Options
    capabilities = Capabilities()  # Workers see this machine's disk, and nobody acquires them.

    @classmethod
    def from_site(cls, site: Site) -> SubprocessEngine:
        """Return the engine of a site."""
        return cls(site.workers or 2, site.options.nice)

    def __init__(self, workers: int = 2, nice: int = 0) -> None:
        self._most, self._nice = workers, nice
        self._workers: dict[str, Worker] = {}
        self._wanted = self._begun = self._stillborn = 0
        self._events: list[ev.Event] = []  # Noticed while a command was carried out.
        self._lock = threading.RLock()  # `wake` may be called on a thread that is inside the engine.
        self._stopped = False

    def tiers(self) -> list[ev.TierSpec]:
        """Return the one kind of worker that there is."""
        return [ev.TierSpec(TIER, minimum=0, maximum=self._most)]

    def start(self, run: RunServices) -> None:
        """Get ready; calls run where this is called."""
        self._run = run
        self._folder = tempfile.mkdtemp(prefix="subprocess-engine-")
        self._disk = SharedDisk(os.path.join(self._folder, "cache"), os.getcwd())
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def execute(self, commands: Sequence[cmd.Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands, without waiting for them to take effect."""
        with self._lock:
            for command in () if self._stopped else commands:
                worker = self._workers.get(getattr(command, "worker", ""))
                if isinstance(command, cmd.Acquire):
                    self._wanted = command.workers
                    self._spawn()
                elif worker is not None and isinstance(command, cmd.Carry):
                    source = self._workers.get(command.source)
                    self._events.append(worker.carry(command, self._run.clock(), source))
                    self.wake()
                elif worker is not None:
                    worker.tell(command, payloads)

    def _spawn(self) -> None:
        """Start workers until there are as many as are wanted."""
        while len(self._workers) < self._wanted:
            self._begun += 1
            name = f"subprocess-{self._begun}"
            folder = os.path.join(self._folder, name)
            self._workers[name] = Worker(name, folder, self._nice, self._selector, self._disk)

    def forget(self, functions: Collection[str]) -> None:
        """Have workers keep these functions and constants no more."""
        with self._lock:
            for worker in self._workers.values():
                worker.forget(functions)

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happened; waits up to `timeout` seconds for something to."""
        with self._lock:
            for worker in self._workers.values():
                worker.release_idle()
        ready = [] if self._stopped else self._selector.select(0 if self._events else timeout)
        with self._lock:
            for key, _ in [] if self._stopped else ready:
                if key.data is None:
                    self._bell.recv(4096)
                    continue
                self._events += key.data.hear(self._run.clock())
                if key.data.gone:
                    self._lost(key.data)
            happened, self._events = self._events, []
            return happened

    def _lost(self, worker: Worker) -> None:
        """Say that a worker is gone, and have another take its place."""
        worker.end()
        del self._workers[worker.spec.id]
        self._stillborn = 0 if worker.joined else self._stillborn + 1
        if self._stillborn > _MOST_STILLBORN:
            last = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineFailed(f"workers end before they have started: {' '.join(last) or 'they say nothing'}")
        if worker.joined:
            expected = worker.released or worker.noticed
            lost = ev.WorkerLost(self._run.clock(), worker.spec.id, evicted=expected, reason=worker.stuck)
            self._events.append(lost)
        self._spawn()

    def evict(self, name: str) -> None:
        """Take a worker away at once, as a resource manager would."""
        with self._lock:
            self._workers[name].noticed = True
            kill_tree(self._workers[name].process.pid)

    def processes(self) -> dict[str, int]:
        """Return the process of each worker."""
        return {name: worker.process.pid for name, worker in self._workers.items()}

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
