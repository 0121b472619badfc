"""The TaskVine engine: commands become calls that are pinned to workers, and their answers become events."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from ctxflow.causes import ShortfallCause
from ctxflow.executors.contract import NO_PAYLOADS, EngineFailed, Payloads, RunServices
from ctxflow.executors.protocol import Patience, events_of, is_late
from ctxflow.executors.taskvine import manager_messages as msg
from ctxflow.executors.taskvine.manager_process import (
    ManagerLink,
    Setup,
    acquire,
    acquirer_of,
    require_ndcctools,
    require_port,
    tiers_of,
)
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.vine_hosts import UnkeptFiles, VineHosts
from ctxflow.executors.taskvine.vine_workers import Losses, Reports, VineCalls, VineWorker, Watch, refusal
from ctxflow.executors.taskvine.worker_artifacts import ArtifactTransfers
from ctxflow.executors.taskvine.worker_transfers import StateTransfers
from ctxflow.factory.limits import limits_of, standing
from ctxflow.host.library_messages import CallFinished, ContextBuilt
from ctxflow.host.linux import advice
from ctxflow.host.messages import (
    ArtifactsFailed,
    ArtifactsMade,
    AskFacts,
    CallRefused,
    LeaveWorker,
    Listen,
    ModulesLacking,
    NoticeGiven,
    ToWorker,
    WorkerFacts,
    WorkerStuck,
)
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import OWN, TaskVineOptions

logger = logging.getLogger("ctxflow")
_END_SECONDS = 5.0
_MOST_LOST = 100  # Workers that are gone, and whose jobs are still known.


class TaskVineEngine:
    """Runs calls on TaskVine workers, which a site's providers lend; `patience`: how long silence is waited out."""

    Options = TaskVineOptions
    capabilities = OWN["taskvine"].capabilities

    def __init__(self, site: Site, *, patience: Patience | None = None) -> None:
        if not site.tiers:
            raise ValueError(
                'a site with engine = "taskvine" needs at least one [[tiers]]: see site-configs/testbed.toml'
            )
        self._site = site
        self._patience = patience or Patience()
        self._lock = threading.RLock()  # A finalizer may wake the engine on a thread that is inside it.
        self._workers: dict[str, VineWorker] = {}
        self._events: list[ev.Event] = []
        self._lost_last: dict[str, VineWorker] = {}
        self._given_up: dict[str, VineWorker] = {}  # Lost, and perhaps still connected: what they say does not count.
        self._noticed: list[VineWorker] = []  # To be released as soon as they run nothing.
        # How many workers of a job are connected: before an evicted one is missed, the next may be there.
        self._connected: Counter[tuple[str, str]] = Counter()
        self._failed: EngineFailed | None = None
        self._warned: set[str] = set()
        self._unkept = UnkeptFiles()
        self._started = self._stopped = False

    @classmethod
    def from_site(cls, site: Site) -> TaskVineEngine:
        """Return the engine of a site."""
        return cls(site)

    def tiers(self) -> list[ev.TierSpec]:
        """Return what the site offers."""
        return tiers_of(self._site)

    def start(self, run: RunServices) -> None:
        """Start the manager's process and the providers; workers come with `Acquire`.

        :raises CtxflowError: if TaskVine or a batch system cannot be used here, its port is taken, or there is no place
            for files.
        """
        require_ndcctools()
        require_port(self._site)
        self._run = run
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._setup = Setup(self._site, run)
        try:
            self._link = ManagerLink(self._setup.manager_settings(), self._setup.path("manager.log"))
        except OSError:
            self._setup.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._started = True
        try:
            try:
                self._port = self._link.started(self._patience.start)
            except EngineFailed:
                if self._link.channel.closed:  # Else it may listen there itself.
                    require_port(self._site)
                raise
            self._connection = self._setup.connection(self._port)
            self._calls = VineCalls(self._link, self._setup.key, self._forged)
            self._watch = Watch(self._patience, self._calls, self._heard)
            peers = self._site.taskvine.worker_transfers
            self._stagings = Stagings(run, self._calls, self._setup, self._events.append, self._ring, peers)
            self._artifacts = ArtifactTransfers(run, self._calls, self._setup, self._stagings, self._ring)
            self._states = StateTransfers(run, self._calls, self._report, self._stagings.reach)
            parts = (self._calls, self._stagings, self._artifacts, self._states, self._workers)
            self._messages = VineHosts(run, *parts, self._heard, self._report)
            self._acquirer = acquirer_of(self._site, self._setup, self._port, self._ring)
            self._losses = Losses(self._acquirer, run.clock)
            self._acquirer.start()
        except BaseException:
            self._stopped = True
            self._clean_up()
            raise

    # --- commands

    def execute(self, commands: Sequence[cmd.Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands."""
        with self._lock:
            if self._stopped or not self._started:
                return
            before: dict[str, list[ToWorker]] = {}  # What ends at once goes along with what comes after it.
            for command in commands:
                if isinstance(command, (cmd.Acquire, cmd.AcquireAt, cmd.Forgo, cmd.Exclude, cmd.Survey)):
                    acquire(self._acquirer, command, self._setup, self._port)
                    continue
                worker = self._workers.get(command.worker)  # type: ignore[attr-defined]
                if worker is None or not worker.joined:
                    continue
                try:
                    if isinstance(command, cmd.Release):
                        self._release(worker)
                    else:
                        self._messages.tell(worker, command, payloads, before.setdefault(worker.name, []))
                except Exception as error:
                    self._do_without(worker, error)
            for name, messages in before.items():
                try:
                    self._messages.send(self._workers[name], messages)
                except Exception as error:
                    self._do_without(self._workers[name], error)
            self._link.ring()

    def forget(self, functions: Collection[str]) -> None:
        """Have workers forget functions that no call will need."""
        with self._lock:
            if self._started and not self._stopped:
                for worker in self._workers.values():
                    self._messages.forget(worker, functions)

    def _report(self, event: ev.Event) -> None:
        self._events.append(event)
        self._ring()

    def _release(self, worker: VineWorker) -> None:
        """Have a worker end by itself, and its job with it."""
        self._dismiss(worker)
        if not worker.noticed:  # A job that is evicted comes back by itself.
            self._remove_job(worker)

    def _dismiss(self, worker: VineWorker) -> None:
        worker.leaving = True
        self._watch.dismissed(worker)
        self._calls.make(worker, [LeaveWorker()], self._heard)

    def _remove_job(self, worker: VineWorker) -> None:
        if worker.job is not None:
            self._acquirer.remove(worker.tier, worker.job)

    # --- events

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happened."""
        if self._stopped:
            return []
        if self._failed is not None:
            raise self._failed
        with self._lock:
            # The scheduler has had its turn since their notice was reported.
            for worker in [each for each in self._noticed if not each.running and not each.items]:
                self._noticed.remove(worker)
                self._release(worker)
            self._link.ring()
            look = self._watch.look_at - time.monotonic()
            wait = 0.0 if self._events else min(timeout, self._losses.due(), look)
            interest = select.POLLIN | (select.POLLOUT if self._link.channel.pending else 0)
            self._poll.register(self._link.channel.fileno(), interest)
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

    def _serve(self) -> None:
        channel = self._link.channel
        channel.flush()
        for said in self._link.received():
            try:
                self._told(said)
            except Exception as error:
                worker = self._workers.get(getattr(said, "worker", ""))
                if worker is None:
                    raise
                self._do_without(worker, error)
        if channel.closed:
            self._replace_manager(f"ended ({self._link.last_words()})")
        elif (now := time.monotonic()) >= self._watch.look_at:
            for silent, reason in self._watch.look(now, self._link.hearing):
                self._give_up(silent, reason)
            if self._link.idle() > (self._patience.manager if self._link.up else self._patience.start):
                self._replace_manager("has hung")
        self._stagings.serve()
        self._artifacts.serve()
        self._events += self._losses.events()
        for tier, machines, reason in self._acquirer.surveyed():
            self._events.append(ev.MachinesFound(self._run.clock(), tier, machines, reason))
        if self._acquirer.failure is not None and not any(w.joined for w in self._workers.values()):
            self._failed = EngineFailed(self._acquirer.failure)
        if self._failed is not None:
            raise self._failed

    def _do_without(self, worker: VineWorker, error: Exception) -> None:
        """End a worker with which something failed: nobody knows what it was told."""
        logger.warning("the worker on %s is given up: %s: %s", worker.host, type(error).__name__, error)
        self._end(worker)

    def _told(self, said: msg.FromManager) -> None:
        """Take a message of the manager's process."""
        if isinstance(said, msg.CallAnswered):
            self._watch.heard(said.worker)
            self._calls.answered(said.number, said.body)
        elif isinstance(said, msg.WorkerConnected):
            worker = VineWorker(said.worker, said.host, said.address, self._run.clock(), ip=said.ip)
            self._workers[said.worker] = worker
            # A packed environment's modules come with it.
            first = None if self._setup.packed else self._messages.learned.latest()
            self._calls.make(worker, [*([] if first is None else [first]), AskFacts()], self._greeted)
        elif isinstance(said, msg.WorkerGone):
            if said.worker in self._workers:
                self._lost(self._workers.pop(said.worker))
            else:
                self._calls.lost(self._given_up.pop(said.worker))
        elif isinstance(said, msg.StrangerConnected):
            what = f"is no worker of this run ({said.reason}): it gets no work"
            self._warn_once(f"who is connected from {said.host} {what}")
        elif isinstance(said, msg.GateTrouble):
            logger.warning("%s", said.text)
        elif isinstance(said, msg.CallUnanswered):
            self._calls.drop(said.number)
            silent = self._workers.get(said.worker)
            if silent is not None and not silent.leaving:
                logger.warning("the worker on %s does not answer (%s): it is given up", silent.host, said.reason)
                self._end(silent)

    def _forged(self, worker: VineWorker) -> None:
        """End a worker whose answer has no seal: nothing that it says can be believed."""
        if not worker.leaving:
            logger.warning("who claims to be a worker on %s has not this run's key: it gets no work", worker.host)
            self._end(worker)

    def _greeted(self, worker: VineWorker, reports: Reports) -> None:
        """Take a new worker's facts: it may stay, or not."""
        facts = next((report for report in reports if isinstance(report, WorkerFacts)), None)
        if facts is None:
            self._end(worker)
            return
        worker.learn(facts, self._site.tiers)
        if facts.kept_problem:
            self._warn_once(f"workers on {facts.host} do without a cache: {facts.kept_problem}")
        self._watch.greeted(worker)
        self._listen(worker)
        packed = self._setup.packed
        reason = refusal(facts, packed.python if packed else None)
        if reason is not None:
            self._refuse(worker, reason)
            return
        self._connect(worker)
        if packed is None:
            self._join(worker, facts)
        else:

            def opened(problem: str | None) -> None:
                if problem is not None:
                    self._refuse(worker, f"the environment cannot be used on {worker.host}: {problem}")
                else:
                    self._join(worker, facts)

            self._stagings.open_environment(worker, packed, opened)

    def _connect(self, worker: VineWorker) -> None:
        worker.answers = True
        if worker.job is not None:
            self._connected[worker.tier, worker.job] += 1
            self._acquirer.connected(worker.tier, worker.job)

    def _disconnect(self, worker: VineWorker) -> None:
        answered, worker.answers = worker.answers, False
        if answered and worker.job is not None:
            self._connected[worker.tier, worker.job] -= 1
            if not self._connected[worker.tier, worker.job]:
                del self._connected[worker.tier, worker.job]
                self._acquirer.disconnected(worker.tier, worker.job)

    def _join(self, worker: VineWorker, facts: WorkerFacts) -> None:
        worker.joined = True
        if worker.job is not None:
            self._acquirer.joined(worker.tier, worker.job)
        self._stagings.joined(worker)
        # First the loss of the one that it replaces: else there are too many, and one must leave.
        self._events += self._losses.events()
        self._events.append(ev.WorkerJoined(self._run.clock(), worker.spec(facts, self._site)))

    def _refuse(self, worker: VineWorker, reason: str) -> None:
        """End a worker that cannot be used."""
        self._warn_once(reason)
        if worker.job is not None:
            self._acquirer.refused(worker.tier, worker.job, reason)
        self._end(worker)

    def _warn_once(self, text: str) -> None:
        """Log a warning that may be the same for all workers."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _end(self, worker: VineWorker) -> None:
        """End a worker, and its job if it has not joined."""
        self._dismiss(worker)
        if not worker.joined:
            self._remove_job(worker)

    def _listen(self, worker: VineWorker, reports: Reports = ()) -> None:
        """Keep a call standing that a host answers when it has something to report."""
        self._heard(worker, reports)
        self._calls.make(worker, [Listen()], self._listen)

    def _heard(self, worker: VineWorker, reports: Reports) -> None:
        """Take a host's reports, and note the events that they stand for."""
        now = self._run.clock()
        for report in reports:
            if worker.items:
                worker.answered(report)
            if isinstance(report, CallFinished):
                if report.rest:
                    self._unkept.tell(report.app, report.rest)
            elif isinstance(report, NoticeGiven):
                if not worker.noticed:
                    self._noticed.append(worker)
                worker.noticed = worker.leaving = True
            elif isinstance(report, ContextBuilt):
                self._messages.learned.learn(report)
            elif isinstance(report, (ArtifactsMade, ArtifactsFailed)):
                self._artifacts.heard(worker, report)
            elif isinstance(report, ModulesLacking):
                self._stagings.bring_rest(worker)
            elif isinstance(report, WorkerStuck):
                self._give_up(worker, report.reason)
            elif isinstance(report, CallRefused):
                logger.warning("the worker on %s: %s", worker.host, report.message)
                self._end(worker)
            if not is_late(report, worker.keys):
                self._events += events_of(now, worker.name, report, worker.host)

    # --- losses

    def _give_up(self, worker: VineWorker, reason: str) -> None:
        """Count a worker that does not answer, or does not leave, as lost, and have its batch system remove it."""
        if self._workers.get(worker.name) is not worker:
            return
        told = "" if worker.leaving or not worker.joined else "; what it ran is tried again elsewhere"
        logger.warning("the worker %s on %s is lost: %s%s", worker.name, worker.host, reason, told)
        worker.reason = reason
        self._given_up[worker.name] = self._workers.pop(worker.name)
        self._lost(worker)
        self._calls.make(worker, [LeaveWorker()], self._heard)  # Should it come back.
        if not worker.noticed:
            self._remove_job(worker)

    def _replace_manager(self, reason: str) -> None:
        """Start another manager's process; workers end with the old one, for no fault of what they ran."""
        words = f"TaskVine's manager {reason}"
        for worker in list(self._workers.values()):
            worker.leaving, worker.reason = True, words
            self._lost(worker)
            self._remove_job(worker)
        for worker in self._given_up.values():
            self._calls.lost(worker)
        self._workers.clear()
        self._given_up.clear()
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._link.channel.fileno())
        try:
            replaced = self._link.replace(self._port)
        except OSError as error:
            raise EngineFailed(f"{words}, and another cannot be started: {error}{advice(error)}") from error
        if not replaced:
            self._failed = EngineFailed(f"{words}, so that nothing can run")
        else:
            logger.warning("%s: another takes its place, and workers are asked for anew", words)

    def _lost(self, worker: VineWorker) -> None:
        """Forget a worker that is gone; it is reported once it is known whether it was evicted, or soon."""
        self._lost_last[worker.name] = worker
        if len(self._lost_last) > _MOST_LOST:
            del self._lost_last[next(iter(self._lost_last))]
        self._disconnect(worker)
        self._watch.lost(worker)
        self._calls.lost(worker)
        self._stagings.lost(worker)
        self._artifacts.lost(worker)
        self._states.lost(worker.name)
        self._messages.lost(worker)
        if worker in self._noticed:
            self._noticed.remove(worker)
        if worker.joined:
            self._losses.add(worker)

    # --- the end

    def _ring(self) -> None:
        """Make `poll` look, from any thread."""
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
            last.callback(os.close, self._wake_write)
            last.callback(os.close, self._wake_read)
            last.callback(self._setup.close)
            for name in ("_connection", "_stagings", "_artifacts"):
                if hasattr(self, name):
                    last.callback(getattr(self, name).close)
            if hasattr(self, "_acquirer"):
                # Workers that the manager tells to end do so at once; their jobs need not be killed.
                last.callback(self._acquirer.stop)
                self._acquirer.hold_none()
            last.callback(self._link.end, _END_SECONDS)

    def worker_jobs(self) -> dict[str, tuple[str, str]]:
        """Return the tier and the job of each worker that has one, by the worker's name."""
        with self._lock:
            return {w.name: (w.tier, w.job) for w in self._workers.values() if w.joined and w.job is not None}

    def job_of(self, worker: str) -> tuple[str | None, str]:
        """Return the job of a worker, and where what it writes is kept."""
        known = self._workers.get(worker) or self._lost_last.get(worker)
        if known is None or known.job is None:
            return None, ""
        return known.job, self._acquirer.output(known.tier, known.job)

    def causes(self) -> list[ShortfallCause]:
        """Return why tiers have fewer workers than requested."""
        return [] if self._stopped else self._acquirer.causes()

    def maxima(self) -> dict[str, int]:
        """Return how many workers of each tier a factory would lend now."""
        return {} if self._stopped else self._acquirer.maxima()

    def limits(self) -> list[dict[str, Any]]:
        """Return what is used of the run's limits, and of those beyond it that a factory counts."""
        limits = limits_of(self._site, "run")
        own = standing("run", self._acquirer.spent(), limits) if limits else []
        return own + self._acquirer.limits_beyond()

    def __repr__(self) -> str:
        return f"TaskVineEngine(site={self._site.name!r})"
