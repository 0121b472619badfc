"""The TaskVine engine: commands become calls that are pinned to workers, and their answers become events.

What does not live here: the ndcctools manager (manager.py), how commands are put (host_messages.py), how files get to
workers (stagings.py), what a worker tells of itself (worker.py), and acquiring workers (factory/).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Sequence

from ctxflow.executors.engine import EngineFailed, RunServices
from ctxflow.executors.taskvine.attachments import Rests
from ctxflow.executors.taskvine.calls import Calls, Reports
from ctxflow.executors.taskvine.host_messages import HostMessages
from ctxflow.executors.taskvine.link import ManagerLink, require_ndcctools
from ctxflow.executors.taskvine.losses import Losses
from ctxflow.executors.taskvine.reports import events_of, events_of_job
from ctxflow.executors.taskvine.setup import Setup, acquirer_of
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.states import StateTransfers
from ctxflow.executors.taskvine.worker import Worker, refusal
from ctxflow.factory.condor_places import pinned
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.provider import Provider
from ctxflow.factory.worker_job import worker_job
from ctxflow.host.wire import Head, frame
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site

logger = logging.getLogger("ctxflow")
_START_SECONDS = 60.0  # How long the manager may take to start.
_END_SECONDS = 5.0


class TaskVineEngine:
    """Runs calls on TaskVine workers, which a site's providers lend.

    :param site: its tiers, its environment, and how its network is to be used.
    """

    remote = True

    def __init__(self, site: Site) -> None:
        if not site.tiers:
            raise ValueError(
                'a site with engine = "taskvine" needs at least one [[tiers]]: see site-configs/testbed.toml'
            )
        self._site = site
        self._lock = threading.RLock()  # A finalizer may wake the engine on a thread that is inside it.
        self._workers: dict[str, Worker] = {}
        self._events: list[ev.Event] = []
        self._noticed: list[Worker] = []  # That are to leave as soon as they run nothing.
        self._failed: EngineFailed | None = None
        self._refused: set[str] = set()
        self._rests = Rests()
        self._started = self._stopped = False

    def tiers(self) -> list[ev.TierSpec]:
        """What the site offers."""
        first, *others = self._site.tiers
        most = first.workers if self._site.workers is None else self._site.workers
        own = self._site.acquire == "run"  # A factory is told of numbers only.
        return [
            ev.TierSpec(
                tier.name,
                min(tier.minimum, maximum),
                maximum,
                tier.gpus,
                tier.price,
                tier.boot_seconds,
                tier.gpu_memory,
                tier.machines or "",
                machine_gpus=tier.machine_gpus if own else 0,
            )
            for tier, maximum in ((first, most), *((other, other.workers) for other in others))
        ]

    def start(self, run: RunServices) -> None:
        """Start the manager's process and the providers; workers come with `Acquire`.

        :raises CtxflowError: if TaskVine or a batch system cannot be used here, or there is no place for files.
        """
        require_ndcctools()
        self._run = run
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._setup = Setup(self._site, run)
        self._link = ManagerLink(self._setup.manager_settings(), self._setup.doorbell, self._setup.path("manager.log"))
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._started = True
        try:
            self._port = self._await_manager()
            self._connection = self._setup.connection(self._port)
            self._calls = Calls(self._link, self._setup.key, self._forged)
            self._stagings = Stagings(run, self._calls, self._setup, self._events.append, self._ring)
            self._states = StateTransfers(run, self._calls, self._report)
            self._messages = HostMessages(
                run, self._calls, self._stagings, self._states, self._workers, self._heard, self._report
            )
            self._acquirer = acquirer_of(self._site, self._setup, self._port, self._ring)
            self._losses = Losses(self._acquirer, run.clock)
            self._acquirer.start()
        except BaseException:
            self._clean_up()
            raise

    def _await_manager(self) -> int:
        """The port that it listens at."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._link.channel.closed and time.monotonic() < deadline:
            select.select([self._link.channel], [], [], 0.5)
            for head, _ in self._link.channel.receive():
                return int(head["port"])
        raise EngineFailed(f"TaskVine's manager does not start: {self._link.last_words()}")

    # --- commands

    def execute(self, commands: Sequence[cmd.Command]) -> None:
        """Carry out commands."""
        with self._lock:
            if self._stopped or not self._started:
                return
            before: dict[str, list[bytes]] = {}  # What ends at once goes along with what comes after it.
            for command in commands:
                if isinstance(command, (cmd.Acquire, cmd.AcquireAt, cmd.Forgo, cmd.Survey)):
                    self._acquire(command)
                    continue
                worker = self._workers.get(command.worker)  # type: ignore[attr-defined]
                if worker is None or not worker.joined:
                    continue
                if isinstance(command, cmd.Release):
                    self._release(worker)
                else:
                    self._messages.tell(worker, command, before.setdefault(worker.name, []))
            for name, messages in before.items():
                self._messages.send(self._workers[name], messages)
            self._link.ring()

    def _acquire(self, command: cmd.Command) -> None:
        """Have other workers than there are."""
        if isinstance(command, cmd.Acquire):
            self._acquirer.hold(command.tier, command.workers)
        elif isinstance(self._acquirer, FactoryClient):  # No tier of this run has `machine_gpus`.
            return
        elif isinstance(command, cmd.AcquireAt):
            tier = next(each for each in self._site.tiers if each.name == command.tier)
            there = pinned(tier, command.pin, command.machine, command.devices)
            self._acquirer.pin(command.tier, command.pin, worker_job(there, self._setup.lead(self._port)))
        elif isinstance(command, cmd.Forgo):
            self._acquirer.forgo(command.tier, command.pin)
        elif isinstance(command, cmd.Survey):
            self._acquirer.survey(command.tier)

    def _report(self, event: ev.Event) -> None:
        self._events.append(event)
        self._ring()

    def _release_noticed(self) -> None:
        """Workers with notice leave when they run nothing: the scheduler has had its turn since it heard of it."""
        for worker in [each for each in self._noticed if not each.running]:
            self._noticed.remove(worker)
            self._release(worker)

    def _release(self, worker: Worker) -> None:
        """Have a worker end by itself, and its job with it."""
        worker.leaving = True
        self._calls.make(worker, frame({"do": "release"}), self._heard)
        if worker.job is not None and not worker.noticed:  # A job that is evicted comes back by itself.
            self._acquirer.remove(worker.tier, worker.job)

    # --- events

    def poll(self, timeout: float) -> list[ev.Event]:
        """What happened."""
        if self._stopped:
            return []
        if self._failed is not None:
            raise self._failed
        with self._lock:
            self._release_noticed()
            self._link.ring()
            wait = 0.0 if self._events else min(timeout, self._losses.due())
            self._poll.register(self._link.channel.fileno(), self._interest())
        self._poll.poll(max(0.0, wait) * 1000)
        with self._lock:
            if self._stopped:
                return []
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._serve()
            happened, self._events[:] = list(self._events), []
            self._link.ring()  # For what was sent meanwhile.
        return happened

    def _interest(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._link.channel.pending else 0)

    def _serve(self) -> None:
        channel = self._link.channel
        channel.flush()
        for head, body in channel.receive():
            self._told(head, body)
        if channel.closed:
            words = self._link.last_words()
            self._failed = EngineFailed(f"TaskVine's manager ended, so that nothing can run: {words}")
        self._stagings.serve()
        for tier, change in self._acquirer.take():
            self._losses.heard(tier, change)
            pin = self._acquirer.pin_of(tier, change.job)
            self._events += events_of_job(self._run.clock(), tier, change, pin)
        for tier, machines, reason in self._acquirer.surveyed():
            self._events.append(ev.MachinesFound(self._run.clock(), tier, machines, reason))
        for worker, evicted in self._losses.explained():
            self._lost_for_good(worker, evicted)
        if self._acquirer.failure is not None and not any(w.joined for w in self._workers.values()):
            self._failed = EngineFailed(self._acquirer.failure)
        if self._failed is not None:
            raise self._failed

    def _told(self, head: Head, body: bytes) -> None:
        """Something that the manager's process says."""
        kind = head["is"]
        if kind == "answer":
            self._calls.answered(head["id"], body)
        elif kind == "joined":
            worker = self._workers[head["worker"]] = Worker(
                head["worker"], head["host"], head["address"], self._run.clock()
            )
            self._calls.make(worker, frame({"do": "hello"}), self._greeted)
        elif kind == "lost":
            self._lost(self._workers.pop(head["worker"]))
        elif kind == "unanswered":
            self._unanswered(head)

    def _unanswered(self, head: Head) -> None:
        """TaskVine could not make a call: whatever is wrong there, that worker is of no more use."""
        worker = self._workers.get(head["worker"])
        self._calls.drop(head["id"])
        if worker is not None and not worker.leaving:
            logger.warning("the worker on %s does not answer (%s): it is given up", worker.host, head["reason"])
            self._end(worker)

    def _forged(self, worker: Worker) -> None:
        """Nothing that it says can be believed, and it gets nothing more."""
        if not worker.leaving:
            logger.warning("who claims to be a worker on %s has not this run's key: it gets no work", worker.host)
            self._end(worker)

    def _greeted(self, worker: Worker, reports: Reports) -> None:
        """A new worker has told what it is: it may stay, or not."""
        hello = next((head for head, _ in reports if head["is"] == "hello"), None)
        if hello is None:
            self._end(worker)
            return
        worker.learn(hello, self._site.tiers)
        self._listen(worker)
        packed = self._setup.packed
        reason = refusal(hello, packed.python if packed else None)
        if reason is not None:
            self._refuse(worker, reason)
        elif packed is None:
            self._join(worker, hello)
        else:
            self._stagings.open_environment(worker, packed, lambda problem: self._opened(worker, hello, problem))

    def _opened(self, worker: Worker, hello: Head, problem: str | None) -> None:
        if problem is not None:
            self._refuse(worker, f"the environment cannot be used on {worker.host}: {problem}")
        else:
            self._join(worker, hello)

    def _join(self, worker: Worker, hello: Head) -> None:
        worker.joined = True
        if worker.job is not None:
            self._acquirer.joined(worker.tier, worker.job)
        self._stagings.joined(worker)
        spec = worker.spec(hello, self._site)
        self._events.append(ev.WorkerJoined(self._run.clock(), spec))

    def _refuse(self, worker: Worker, reason: str) -> None:
        """A worker that cannot be used is ended; said once. If it is the environment's fault, all are like it."""
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("%s", reason)
        if worker.job is not None:
            self._acquirer.refused(worker.tier, worker.job, reason)
        self._end(worker)

    def _end(self, worker: Worker) -> None:
        """End a worker that is of no use."""
        worker.leaving = True
        self._calls.make(worker, frame({"do": "release"}), self._heard)
        if worker.job is not None and not worker.joined:
            self._acquirer.remove(worker.tier, worker.job)

    def _listen(self, worker: Worker) -> None:
        self._calls.make(worker, frame({"do": "listen"}), self._overheard)

    def _overheard(self, worker: Worker, reports: Reports) -> None:
        self._heard(worker, reports)
        self._listen(worker)

    def _heard(self, worker: Worker, reports: Reports) -> None:
        """The events that a host's reports stand for."""
        now, name = self._run.clock(), worker.name
        for head, body in reports:
            kind = head["is"]
            if "rest" in head:
                self._rests.tell(**head["rest"])
            if kind == "notice":
                if not worker.noticed:
                    self._noticed.append(worker)
                worker.noticed = worker.leaving = True
                self._events.append(ev.EvictionNotice(now, name))
            elif kind == "refused":
                logger.warning("the worker on %s: %s", worker.host, head["message"])
                self._end(worker)
            else:
                self._events += events_of(now, worker, head, body)

    # --- losses

    def _lost(self, worker: Worker) -> None:
        """A worker is gone: find out whether it was taken back, for a moment, before that is told."""
        self._calls.lost(worker)
        self._stagings.lost(worker)
        self._states.lost(worker.name)
        self._messages.lost(worker)
        if worker in self._noticed:
            self._noticed.remove(worker)
        if worker.joined:
            self._losses.add(worker)

    def _lost_for_good(self, worker: Worker, evicted: bool) -> None:
        self._events.append(ev.WorkerLost(self._run.clock(), worker.name, evicted=evicted))

    # --- the end

    def _ring(self) -> None:
        """Make `poll` look; from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b".")

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        with self._lock:
            if self._started and not self._stopped:
                self._ring()

    def stop(self) -> None:
        """End all workers. No other thread is in `poll`, or will call it."""
        with self._lock:
            if self._stopped or not self._started:
                self._stopped = True
                return
            self._stopped = True
        self._clean_up()

    def _clean_up(self) -> None:
        """End everything, each part even if another cannot be ended."""
        with contextlib.ExitStack() as last:
            for close in (lambda: os.close(self._wake_write), lambda: os.close(self._wake_read), self._setup.close):
                last.callback(close)
            for name in ("_connection", "_stagings"):
                if hasattr(self, name):
                    last.callback(getattr(self, name).close)
            if hasattr(self, "_acquirer"):
                # Workers that hear from the manager that it is over end at once; their jobs need not be killed.
                last.callback(self._acquirer.stop)
                self._acquirer.hold_none()
            last.callback(self._link.end, _END_SECONDS)

    def worker_jobs(self) -> dict[str, tuple[str, str]]:
        """The tier and the job of each worker that has one, by the worker's name."""
        with self._lock:
            return {w.name: (w.tier, w.job) for w in self._workers.values() if w.joined and w.job is not None}

    def provider(self, tier: str) -> Provider:
        """Who lends a tier's workers."""
        return self._acquirer.provider(tier)

    def counts(self) -> dict[str, dict[str, int]]:
        """Each tier's jobs by state, and what was done to have them (see `Acquirer.counts`)."""
        return self._acquirer.counts()

    def __repr__(self) -> str:
        return f"TaskVineEngine(site={self._site.name!r})"
