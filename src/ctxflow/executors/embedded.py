"""The embedded engine: workers on this machine, each a context host process that is spoken to over a socket.

For a laptop, one GPU server, and tests. CUDA devices, or CPU threads, are dealt out to the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ctxflow.errors import CtxflowError, counted
from ctxflow.executors.channel_host import SharedDisk
from ctxflow.executors.contract import NO_PAYLOADS, Payloads, RunServices, current_directory
from ctxflow.executors.local_hosts import LibraryLines, LocalHosts, LocalWatch
from ctxflow.executors.local_workers import LibraryLine, LocalWorker, LocalWorkers
from ctxflow.executors.protocol import ABOUT_LOADS, Patience, events_of
from ctxflow.host.forking import IMPORT_SECONDS, Zygote
from ctxflow.host.library_messages import CallRaised, ContextBuilt
from ctxflow.host.linux import kill_tree, machine_memory, readable
from ctxflow.host.local_files import Scratch, sweep
from ctxflow.host.messages import FROM_HOST, FromHost, HostStarted, LibraryDied, NoticeGiven, WorkerStuck
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import OWN, EmbeddedOptions
from ctxflow.topology.machine import cuda_devices

logger = logging.getLogger("ctxflow")
TIER = "local"
_END_SECONDS = 5.0  # How long workers may take to end by themselves.


def default_workers(devices: int) -> int:
    """Return how many workers a machine gets if nobody says: one a GPU, else one for every two cores (2 to 8)."""
    return devices or max(2, min(8, (os.cpu_count() or 2) // 2))


@dataclasses.dataclass
class _Held:
    """What a worker is to be told once its zygote has imported, or has taken `seconds` for it without an end."""

    since: float  # By the monotonic clock.
    seconds: float
    commands: list[tuple[cmd.Command, Payloads]] = dataclasses.field(default_factory=list)


class EmbeddedEngine:
    """Runs workers as processes of this machine.

    :param workers: how many, None for `default_workers`.
    :param gpus_per_worker: None to deal out all GPUs evenly.
    :param slots: calls that a worker runs at a time; those on one context take turns.
    :param scratch: where workers keep what they need while they live; by default below the temporary directory.
    :param rejoin_seconds: how long after the loss of a worker another takes its place.
    :param slowdowns: factor by which the first, second, ... worker is slower (see ctxflow.testing).
    :param patience: how long workers that say nothing are waited for.
    """

    Options = EmbeddedOptions
    capabilities = OWN["embedded"].capabilities

    def __init__(
        self,
        workers: int | None = None,
        gpus_per_worker: int | None = None,
        slots: int = 1,
        scratch: str | None = None,
        rejoin_seconds: float = 0.2,
        slowdowns: Sequence[float] = (),
        *,
        patience: Patience | None = None,
    ) -> None:
        self._devices = cuda_devices()
        self.workers = default_workers(len(self._devices)) if workers is None else workers
        if self.workers < 1:
            raise ValueError("workers is how many processes run calls on this machine: give 1 or more")
        each = len(self._devices) // self.workers if gpus_per_worker is None else gpus_per_worker
        if each * self.workers > len(self._devices):
            raise ValueError(
                f"{counted(self.workers, 'worker')} with {counted(each, 'GPU')} each: this takes "
                f"{each * self.workers}, but the machine has {len(self._devices)}: ask for fewer workers, or "
                "fewer GPUs a worker"
            )
        self.gpus_per_worker = each
        self._local = LocalWorkers(self.workers, self._devices, each, rejoin_seconds, slowdowns)
        self._slots = slots
        self._scratch_parent = scratch
        self._patience = patience or Patience()
        self._lock = threading.RLock()  # A finalizer may wake the engine on a thread that is inside it.
        self._events: list[ev.Event] = []
        self._noticed: list[LocalWorker] = []  # Told that they will be taken back.
        self._kill_at: list[tuple[float, LocalWorker]] = []  # When that will be done by force.
        self._held: dict[str, _Held] = {}  # Workers that wait for the zygote's imports.
        self._stopped = False

    @classmethod
    def from_site(cls, site: Site) -> EmbeddedEngine:
        """Return the engine of a site."""
        options = site.embedded
        return cls(site.workers, options.gpus_per_worker, site.slots, site.scratch, slowdowns=options.slowdowns)

    def tiers(self) -> list[ev.TierSpec]:
        """Return what this machine offers."""
        most = len(self._local.shares.devices)
        return [ev.TierSpec(TIER, minimum=0, maximum=self.workers, gpus=self.gpus_per_worker, machine_gpus=most)]

    def start(self, run: RunServices) -> None:
        """Make the directories; workers come with `Acquire`. Calls and contexts' builds run where this is called.

        :raises CtxflowError: if there is no place for the workers' files, or the current directory is not there.
        """
        self._run = run
        directory = current_directory()
        self._selector = selectors.DefaultSelector()
        try:
            if self._scratch_parent is not None:
                os.makedirs(self._scratch_parent, exist_ok=True)
            sweep(self._scratch_parent)
            self._folder = Scratch(self._scratch_parent)
            self._scratch = self._folder.path
            # The folder is this user's alone (0700), so only this user's processes can connect.
            address = os.path.join(self._scratch, "driver.sock")
            self._lines = LibraryLines(run, self._selector, address, self._events)
        except OSError as error:
            self._selector.close()
            raise CtxflowError(
                f"workers have no place for their files ({error}): put scratch= of the site where there is one"
            ) from error
        disk = SharedDisk(os.path.join(self._scratch, "cache"), directory)
        self._learned = disk.learned
        there = self._local.there
        self._hosts = LocalHosts(run, self._selector, self._lines, there, disk, self._event)
        self._watch = LocalWatch(self._patience, there, self._hosts)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        logs = os.path.join(run.directory, "workers")
        self._local.open(self._scratch, logs, run.clock, self._begun, self._watch_zygote)

    def _begun(self, worker: LocalWorker) -> None:
        self._watch.begun(worker.name)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    # --- commands

    def execute(self, commands: Sequence[cmd.Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands."""
        with self._lock:
            if self._stopped:
                return
            for command in commands:
                if isinstance(command, (cmd.Acquire, cmd.AcquireAt, cmd.Forgo, cmd.Exclude, cmd.Survey)):
                    self._acquire(command)
                    continue
                worker = self._local.there.get(command.worker)  # type: ignore[attr-defined]
                if worker is None:
                    continue
                if worker.name not in self._held:
                    self._hold_for_imports(worker, command, payloads)
                if worker.name in self._held:
                    self._held[worker.name].commands.append((command, payloads))
                else:
                    self._tell(worker, command, payloads)
            self._release_held()

    def _tell(self, worker: LocalWorker, command: cmd.Command, payloads: Payloads, since: float | None = None) -> None:
        try:
            self._hosts.tell(worker, command, payloads, since)
        except Exception as error:
            worker.give_up(error)

    def _hold_for_imports(self, worker: LocalWorker, command: cmd.Command, payloads: Payloads) -> None:
        """Have a worker's first build wait until its packages are imported, once for all workers."""
        if isinstance(command, (cmd.Stage, cmd.Load)):
            context = payloads.contexts[command.context]
            if self._local.imports_for(worker, self._learned.of(context), context.environment):
                self._held[worker.name] = _Held(time.monotonic(), context.timeout or IMPORT_SECONDS)

    def _release_held(self) -> None:
        """Tell those that need not wait what they were to be told, with hosts that have the imports if possible."""
        began = self._local.imports_since
        if began is not None and self._held:
            if time.monotonic() < began + min(held.seconds for held in self._held.values()):
                return
            self._local.give_up_imports()
        for name, held in list(self._held.items()):
            del self._held[name]
            worker = self._local.there.get(name)
            if worker is None:
                continue
            before = worker.channel
            if not (worker.evicted or worker.released) and self._local.renew(worker):
                self._selector.unregister(before)
                before.close()
                self._watch.left(worker)
                self._begun(worker)
            for command, payloads in held.commands:
                self._tell(worker, command, payloads, held.since)

    def forget(self, functions: Collection[str]) -> None:
        """Have workers keep functions no more that no call will need."""
        with self._lock:
            for worker in self._local.there.values() if not self._stopped else ():
                self._hosts.forget(worker, functions)

    def _acquire(self, command: cmd.Command) -> None:
        """Have other workers than there are."""
        if isinstance(command, cmd.Acquire):
            self._local.want(command.workers)
        elif isinstance(command, cmd.AcquireAt):
            self._local.ask(command.pin, command.devices)
        elif isinstance(command, cmd.Forgo):
            for worker in self._local.forgo(command.pin):
                self._hosts.release(worker)
        elif isinstance(command, cmd.Survey):
            machine = self._local.machine()
            found = {socket.gethostname(): machine} if machine is not None else {}
            self._event(ev.MachinesFound(self._run.clock(), command.tier, found))

    # --- events

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happened."""
        if self._stopped:
            return []
        if self._local.failure is not None:
            raise self._local.failure
        timeout = min(timeout, self._watch.look_at - time.monotonic()) if not self._events else 0.0
        if self._lines.acceptor.paused or self._local.next_at is not None or self._kill_at:
            timeout = min(timeout, self._seconds_left())
        if self._noticed:
            with self._lock:
                self._release_noticed()
        ready = self._selector.select(max(0.0, timeout))
        with self._lock:
            if self._stopped:
                return []
            for key, mask in ready:
                if isinstance(key.data, LibraryLine):
                    self._lines.serve(key.data, mask)
                else:
                    self._serve(key.data, mask)
            if (now := time.monotonic()) >= self._watch.look_at:
                for worker, reason in self._watch.look(now):
                    self._gone(worker, reason)
            if self._kill_at or self._local.next_at is not None:
                self._kill_overdue()
                self._local.start_due()
            if self._held:
                self._release_held()
            happened = self._events[:]
            self._events.clear()
        return happened

    def _seconds_left(self) -> float:
        """Return for how long there is nothing to do, but for what workers say and the once-a-second look."""
        times = [at for at, _ in self._kill_at]
        if self._local.next_at is not None:
            times.append(self._local.next_at)
        left = min(times) - self._run.clock() if times else math.inf
        return min(left, self._lines.acceptor.resume())

    def _serve(self, whose: Any, mask: int) -> None:
        """Read what a host says, or do what is registered for a descriptor."""
        if not isinstance(whose, LocalWorker):
            whose()
        elif whose.name in self._local.there:
            try:
                self._heard(whose, mask)
            except Exception as error:
                whose.give_up(error)

    def _release_noticed(self) -> None:
        """Workers with notice leave when they run nothing: the scheduler has had its turn since it heard of it."""
        for worker in self._noticed:
            if not worker.released and not any(line.calls for line in worker.lines.values()):
                self._hosts.release(worker)

    def _event(self, event: ev.Event) -> None:
        """Report something that was noticed while executing a command."""
        self._events.append(event)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _heard(self, worker: LocalWorker, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._hosts.flush(worker)
        for head, body in worker.channel.receive():
            self._watch.heard(worker.name)
            report = FROM_HOST.open(head, body)
            if isinstance(report, WorkerStuck):
                self._gone(worker, report.reason)
                return
            self._events.extend(self._translate(worker, report))
        if worker.channel.closed:
            self._gone(worker)

    def _translate(self, worker: LocalWorker, report: FromHost) -> Iterable[ev.Event]:
        """Return the events that a host's report stands for, and what else follows from it."""
        if isinstance(report, HostStarted):
            if worker.joined:  # Its first host said so.
                return []
            self._local.joined(worker)
            return [ev.WorkerJoined(self._run.clock(), self._spec(worker))]
        if isinstance(report, ContextBuilt):
            self._learned.learn(report)
        if isinstance(report, (*ABOUT_LOADS, LibraryDied)):
            return self._lines.reported(worker, report)
        if isinstance(report, CallRaised) and (line := worker.lines.get(report.context)) is not None:
            self._lines.serve(line)  # What it answered before still counts.
            line.calls.pop(report.call, None)
        elif isinstance(report, NoticeGiven):
            worker.evicted = True
            if worker not in self._noticed:
                self._noticed.append(worker)
        return events_of(self._run.clock(), worker.name, report)

    def _spec(self, worker: LocalWorker) -> ev.WorkerSpec:
        first = worker.devices[0] if worker.devices else None
        return ev.WorkerSpec(
            worker.name,
            host=socket.gethostname(),
            tier=TIER,
            slots=self._slots,
            gpus=len(worker.devices),
            gpu_model=first.model if first else None,
            memory=machine_memory() // self.workers * max(1, len(worker.shares)),
            gpu_memory=first.memory if first else None,
            topology=self._local.shares.machine() if worker.devices else None,
            devices=tuple(device.id for device in worker.devices),
            pin=worker.pin,
        )

    # --- workers

    def _gone(self, worker: LocalWorker, reason: str = "") -> None:
        """A worker has ended, or is to end: make sure of it, say so, and see to its successor.

        :param reason: why it is ended, if it has not ended by itself.
        """
        if reason:
            logger.warning("the worker %s is lost: %s; what it ran is tried again elsewhere", worker.name, reason)
        self._watch.left(worker)
        self._held.pop(worker.name, None)
        for line in list(worker.lines.values()):
            self._lines.serve(line)
        self._end(worker)
        if worker in self._noticed:
            self._noticed.remove(worker)
        if worker.joined:
            known = worker.evicted or worker.released
            self._events.append(ev.WorkerLost(self._run.clock(), worker.name, evicted=known, reason=reason))
            if modules := self._learned.all(self._local.serves):  # The next worker need not import them.
                self._local.preload(modules)
        self._local.left(worker)

    def _watch_zygote(self, zygote: Zygote, watch: bool) -> None:
        def heard() -> None:
            if not readable(zygote.line.fileno(), 0):  # A fork on another thread took its answer since it was selected.
                return
            try:
                zygote.heard()
            except (EOFError, OSError):
                self._local.end_zygote()

        if watch:
            self._selector.register(zygote.line, selectors.EVENT_READ, heard)
        else:
            self._selector.unregister(zygote.line)

    def _end(self, worker: LocalWorker) -> None:
        for context in list(worker.lines):
            self._lines.drop(worker, context)
        self._selector.unregister(worker.channel)
        worker.channel.close()  # First, for to look for its processes takes descriptors.
        worker.end()

    def worker_pids(self) -> dict[str, int]:
        """Return the process of each worker's host, by the worker's name."""
        with self._lock:
            return {worker.name: worker.process.pid for worker in self._local.there.values() if worker.joined}

    def evict(self, name: str | None = None, seconds: float | None = None, notice: float | None = None) -> str | None:
        """Take a worker away, as a resource manager would; another joins later.

        :param name: which; by default the one that has been there longest.
        :param seconds: how long its place stays empty once it is gone, `rejoin_seconds` by default.
        :param notice: seconds that it has to leave by itself; None to take it at once, without a word.
        :returns: the worker's name, None if there is none, or it has had notice.
        """
        with self._lock:
            joined = [w for w in self._local.there.values() if w.joined and not w.evicted]
            worker = self._local.there.get(name) if name is not None else next(iter(joined), None)
            if worker is None or self._stopped or (worker.evicted and notice is not None):
                return None
            worker.evicted = True
            if notice is None:
                kill_tree(worker.process.pid)
            else:
                worker.process.send_signal(signal.SIGTERM)
                self._kill_at.append((self._run.clock() + notice, worker))
            worker.pause = seconds
            self._ring()
            return worker.name

    def _kill_overdue(self) -> None:
        """End the workers whose notice has run out; those that have left by then are gone already."""
        now = self._run.clock()
        for due, worker in self._kill_at:
            if due <= now and self._local.there.get(worker.name) is worker:
                kill_tree(worker.process.pid)
        self._kill_at = [(due, worker) for due, worker in self._kill_at if due > now]

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        with self._lock:
            if not self._stopped:
                self._ring()

    def stop(self) -> None:
        """End all workers, and free all descriptors. No other thread is in `poll`, or will call it."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            # All end themselves at the same time, also if this is interrupted.
            for worker in self._local.there.values():
                with contextlib.suppress(OSError):
                    worker.channel.socket.shutdown(socket.SHUT_RDWR)
            deadline = time.monotonic() + _END_SECONDS
            for worker in self._local.there.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
                self._end(worker)
            self._local.there.clear()
            self._local.end_zygote()
            self._lines.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._folder.close()
        self._local.end_guard()

    def job_of(self, worker: str) -> tuple[None, str]:
        """Return no job, and the folder of what a worker and its processes write."""
        return None, os.path.join(self._run.directory, "workers", worker)

    def __repr__(self) -> str:
        return f"EmbeddedEngine(workers={self.workers}, gpus_per_worker={self.gpus_per_worker})"
