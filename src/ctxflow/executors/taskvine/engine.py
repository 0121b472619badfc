"""The TaskVine engine: commands become calls that are pinned to workers, and their answers become events.

What does not live here: the ndcctools manager (manager.py), how commands are put (vine_hosts.py), how files get to
workers (stagings.py), what is known of one (vine_workers.py), and acquiring workers (factory/).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ctxflow.executors.contract import NO_PAYLOADS, EngineFailed, Payloads, RunServices
from ctxflow.executors.protocol import Patience, events_of
from ctxflow.executors.taskvine.link import ManagerLink, require_ndcctools
from ctxflow.executors.taskvine.losses import Losses, events_of_job
from ctxflow.executors.taskvine.manager_messages import (
    CallAnswered,
    CallUnanswered,
    FromManager,
    GateTrouble,
    ManagerStarted,
    StrangerConnected,
    WorkerConnected,
    WorkerGone,
)
from ctxflow.executors.taskvine.setup import Setup, acquirer_of, tiers_of
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.states import StateTransfers
from ctxflow.executors.taskvine.vine_hosts import Rests, VineHosts
from ctxflow.executors.taskvine.vine_workers import Reports, VineCalls, VineWorker, Watch, refusal
from ctxflow.factory.condor_machines import pinned
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.limits import limits_of, standing
from ctxflow.factory.provider import Provider, tail, why_gone
from ctxflow.factory.run_files import worker_job
from ctxflow.host.library_messages import CallFinished
from ctxflow.host.machine_errors import advice
from ctxflow.host.messages import LeaveWorker, NoticeGiven, WorkerStuck
from ctxflow.host.vine_messages import AskFacts, CallRefused, Listen, ModulesLacking, ToWorker, WorkerFacts
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import OWN, TaskVineOptions

logger = logging.getLogger("ctxflow")
_END_SECONDS = 5.0
_MOST_LOST = 100  # Workers that are gone, and whose jobs are still known.
_MOST_MANAGERS, _MANAGERS_SECONDS = 3, 600.0  # So many may have to be replaced in so short a time.


class TaskVineEngine:
    """Runs calls on TaskVine workers, which a site's providers lend.

    :param site: its tiers, its environment, and how its network is to be used.
    :param patience: how long what says nothing is waited for.
    """

    Options = TaskVineOptions
    capabilities = OWN["taskvine"].capabilities

    def __init__(self, site: Site, patience: Patience | None = None) -> None:
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
        self._given_up: dict[str, VineWorker] = {}  # Lost, and perhaps still there: what they say does not count.
        self._managers: list[float] = []  # When one had to take another's place.
        self._noticed: list[VineWorker] = []  # That are to leave as soon as they run nothing.
        self._failed: EngineFailed | None = None
        self._refused: set[str] = set()
        self._rests = Rests()
        self._started = self._stopped = self._up = False

    @classmethod
    def from_site(cls, site: Site) -> TaskVineEngine:
        """Return the engine of a site."""
        return cls(site)

    def tiers(self) -> list[ev.TierSpec]:
        """Return what the site offers."""
        return tiers_of(self._site)

    def start(self, run: RunServices) -> None:
        """Start the manager's process and the providers; workers come with `Acquire`.

        :raises CtxflowError: if TaskVine or a batch system cannot be used here, or there is no place for files.
        """
        require_ndcctools()
        self._run = run
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._setup = Setup(self._site, run)
        try:
            log = self._setup.path("manager.log")
            self._link = ManagerLink(self._setup.manager_settings(), log)
        except OSError:
            self._setup.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._started = True
        try:
            self._port, self._up = self._link.started(self._patience.start), True
            self._connection = self._setup.connection(self._port)
            self._calls = VineCalls(self._link, self._setup.key, self._forged)
            self._watch = Watch(self._patience, self._calls, self._heard)
            self._stagings = Stagings(run, self._calls, self._setup, self._events.append, self._ring)
            self._states = StateTransfers(run, self._calls, self._report)
            self._messages = VineHosts(
                run, self._calls, self._stagings, self._states, self._workers, self._heard, self._report
            )
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
                    self._acquire(command)
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
        """Have workers keep functions no more that no call will need."""
        with self._lock:
            if self._started and not self._stopped:
                for worker in self._workers.values():
                    self._messages.forget(worker, functions)

    def _acquire(self, command: cmd.Command) -> None:
        """Have other workers than there are."""
        if isinstance(command, cmd.Acquire):
            self._acquirer.hold(command.tier, command.workers)
        elif isinstance(command, cmd.Exclude):
            self._acquirer.exclude(command.tier, command.hosts)
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

    def _release(self, worker: VineWorker) -> None:
        """Have a worker end by itself, and its job with it."""
        self._dismiss(worker)
        if worker.job is not None and not worker.noticed:  # A job that is evicted comes back by itself.
            self._acquirer.remove(worker.tier, worker.job)

    def _dismiss(self, worker: VineWorker) -> None:
        worker.leaving = True
        self._watch.dismissed(worker)
        self._calls.make(worker, [LeaveWorker()], self._heard)

    # --- events

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happened."""
        if self._stopped:
            return []
        if self._failed is not None:
            raise self._failed
        with self._lock:
            if self._noticed:
                self._release_noticed()
            self._link.ring()
            look = self._watch.look_at - time.monotonic()
            wait = 0.0 if self._events else min(timeout, self._losses.due(), look)
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
        for said in self._link.received():
            if isinstance(said, WorkerGone):
                self._gone(said.worker)
                continue
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
            self._look(now)
        self._stagings.serve()
        self._hear_of_jobs()
        for tier, machines, reason in self._acquirer.surveyed():
            self._events.append(ev.MachinesFound(self._run.clock(), tier, machines, reason))
        if self._acquirer.failure is not None and not any(w.joined for w in self._workers.values()):
            self._failed = EngineFailed(self._acquirer.failure)
        if self._failed is not None:
            raise self._failed

    def _hear_of_jobs(self) -> None:
        """News of jobs, and the losses that they explain."""
        for tier, change in self._acquirer.take():
            self._losses.heard(tier, change)
            pin = self._acquirer.pin_of(tier, change.job)
            self._events += events_of_job(self._run.clock(), tier, change, pin)
        for worker, evicted in self._losses.explained():
            self._lost_for_good(worker, evicted)

    def _look(self, now: float) -> None:
        """What is to be seen to once a second."""
        for worker, reason in self._watch.look(now, self._link.hearing):
            self._give_up(worker, reason)
        if self._link.idle() > (self._patience.manager if self._up else self._patience.start):
            self._replace_manager("has hung")

    def _do_without(self, worker: VineWorker, error: Exception) -> None:
        """Something about a worker failed, and who knows what it was told: go on without it."""
        logger.warning("the worker on %s is given up: %s: %s", worker.host, type(error).__name__, error)
        self._end(worker)

    def _told(self, said: FromManager) -> None:
        """Something that the manager's process says."""
        if isinstance(said, CallAnswered):
            self._watch.heard(said.worker)
            self._calls.answered(said.number, said.body)
        elif isinstance(said, WorkerConnected):
            worker = VineWorker(said.worker, said.host, said.address, self._run.clock(), ip=said.ip)
            self._workers[said.worker] = worker
            self._calls.make(worker, [AskFacts()], self._greeted)
        elif isinstance(said, ManagerStarted):
            self._up = True
        elif isinstance(said, StrangerConnected) and (told := f"{said.host} {said.reason}") not in self._refused:
            self._refused.add(told)
            logger.warning(
                "who is connected from %s is no worker of this run (%s): it gets no work", said.host, said.reason
            )
        elif isinstance(said, GateTrouble):
            logger.warning("%s", said.text)
        elif isinstance(said, CallUnanswered):
            self._unanswered(said)

    def _unanswered(self, call: CallUnanswered) -> None:
        """TaskVine could not make a call: whatever is wrong there, that worker is of no more use."""
        worker = self._workers.get(call.worker)
        self._calls.drop(call.number)
        if worker is not None and not worker.leaving:
            logger.warning("the worker on %s does not answer (%s): it is given up", worker.host, call.reason)
            self._end(worker)

    def _forged(self, worker: VineWorker) -> None:
        """Nothing that it says can be believed, and it gets nothing more."""
        if not worker.leaving:
            logger.warning("who claims to be a worker on %s has not this run's key: it gets no work", worker.host)
            self._end(worker)

    def _greeted(self, worker: VineWorker, reports: Reports) -> None:
        """A new worker has told what it is: it may stay, or not."""
        facts = next((report for report in reports if isinstance(report, WorkerFacts)), None)
        if facts is None:
            self._end(worker)
            return
        worker.learn(facts, self._site.tiers)
        self._watch.greeted(worker)
        self._listen(worker)
        packed = self._setup.packed
        reason = refusal(facts, packed.python if packed else None)
        if reason is not None:
            self._refuse(worker, reason)
        elif packed is None:
            self._join(worker, facts)
        else:
            self._stagings.open_environment(worker, packed, lambda problem: self._opened(worker, facts, problem))

    def _opened(self, worker: VineWorker, facts: WorkerFacts, problem: str | None) -> None:
        if problem is not None:
            self._refuse(worker, f"the environment cannot be used on {worker.host}: {problem}")
        else:
            self._join(worker, facts)

    def _join(self, worker: VineWorker, facts: WorkerFacts) -> None:
        worker.joined = True
        if worker.job is not None:
            self._acquirer.joined(worker.tier, worker.job)
        self._stagings.joined(worker)
        self._hear_of_jobs()  # Before it joins, whose place it takes is lost: else there are too many, and it must go.
        spec = worker.spec(facts, self._site)
        self._events.append(ev.WorkerJoined(self._run.clock(), spec))

    def _refuse(self, worker: VineWorker, reason: str) -> None:
        """A worker that cannot be used is ended; said once. If it is the environment's fault, all are like it."""
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("%s", reason)
        if worker.job is not None:
            self._acquirer.refused(worker.tier, worker.job, reason)
        self._end(worker)

    def _end(self, worker: VineWorker) -> None:
        """End a worker that is of no use."""
        self._dismiss(worker)
        if worker.job is not None and not worker.joined:
            self._acquirer.remove(worker.tier, worker.job)

    def _listen(self, worker: VineWorker) -> None:
        self._calls.make(worker, [Listen()], self._overheard)

    def _overheard(self, worker: VineWorker, reports: Reports) -> None:
        self._heard(worker, reports)
        self._listen(worker)

    def _heard(self, worker: VineWorker, reports: Reports) -> None:
        """The events that a host's reports stand for."""
        now = self._run.clock()
        for report in reports:
            if isinstance(report, CallFinished):
                if report.rest:
                    self._rests.tell(report.app, report.rest)
            elif isinstance(report, NoticeGiven):
                if not worker.noticed:
                    self._noticed.append(worker)
                worker.noticed = worker.leaving = True
            elif isinstance(report, ModulesLacking):
                self._stagings.bring_rest(worker)
            elif isinstance(report, WorkerStuck):
                self._give_up(worker, report.reason)
            elif isinstance(report, CallRefused):
                logger.warning("the worker on %s: %s", worker.host, report.message)
                self._end(worker)
            if not worker.is_late(report):
                self._events += events_of(now, worker.name, report, worker.host)

    # --- losses

    def _gone(self, name: str) -> None:
        """TaskVine has lost a worker, which may have been given up before."""
        if name in self._workers:
            self._lost(self._workers.pop(name))
        else:
            self._calls.lost(self._given_up.pop(name))

    def _give_up(self, worker: VineWorker, reason: str) -> None:
        """A worker is of no use, and does not go: it is as good as gone, and its batch system removes it."""
        if self._workers.get(worker.name) is not worker:
            return
        told = "" if worker.leaving or not worker.joined else "; what it ran is tried again elsewhere"
        logger.warning("the worker %s on %s is lost: %s%s", worker.name, worker.host, reason, told)
        worker.reason = reason
        self._given_up[worker.name] = self._workers.pop(worker.name)
        self._lost(worker)
        self._calls.make(worker, [LeaveWorker()], self._heard)  # Should it come back.
        if worker.job is not None and not worker.noticed:
            self._acquirer.remove(worker.tier, worker.job)

    def _replace_manager(self, reason: str) -> None:
        """Its workers end with it, for no fault of what they ran; another takes its place, and workers come anew."""
        now = time.monotonic()
        self._managers = [at for at in self._managers if at > now - _MANAGERS_SECONDS] + [now]
        words = f"TaskVine's manager {reason}"
        for worker in list(self._workers.values()):
            worker.leaving, worker.reason = True, words
            self._lost(worker)
            if worker.job is not None:
                self._acquirer.remove(worker.tier, worker.job)
        for worker in self._given_up.values():
            self._calls.lost(worker)
        self._workers.clear()
        self._given_up.clear()
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._link.channel.fileno())
        self._up = False
        try:
            again = len(self._managers) <= _MOST_MANAGERS and self._link.again(self._port)
        except OSError as error:
            raise EngineFailed(f"{words}, and another cannot be started: {error}{advice(error)}") from error
        if not again:
            self._failed = EngineFailed(f"{words}, so that nothing can run")
        else:
            logger.warning("%s: another takes its place, and workers are asked for anew", words)

    def _lost(self, worker: VineWorker) -> None:
        """A worker is gone: find out whether it was taken back, for a moment, before that is told."""
        self._lost_last[worker.name] = worker
        if len(self._lost_last) > _MOST_LOST:
            del self._lost_last[next(iter(self._lost_last))]
        self._watch.lost(worker)
        self._calls.lost(worker)
        self._stagings.lost(worker)
        self._states.lost(worker.name)
        self._messages.lost(worker)
        if worker in self._noticed:
            self._noticed.remove(worker)
        if worker.joined:
            self._losses.add(worker)

    def _lost_for_good(self, worker: VineWorker, evicted: bool) -> None:
        if not evicted and not worker.reason:
            whose = f"tier {worker.tier}, " + (f"job {worker.job}" if worker.job is not None else "started by hand")
            words = tail(self._acquirer.output(worker.tier, worker.job)) if worker.job is not None else ""
            why = f": {said}" if (said := why_gone(words)) else ", and nobody says why"
            logger.warning("the worker on %s (%s) is gone%s; what it ran is tried again", worker.host, whose, why)
        self._events.append(ev.WorkerLost(self._run.clock(), worker.name, evicted, worker.reason))

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
        """Return the tier and the job of each worker that has one, by the worker's name."""
        with self._lock:
            return {w.name: (w.tier, w.job) for w in self._workers.values() if w.joined and w.job is not None}

    def provider(self, tier: str) -> Provider:
        """Return who lends a tier's workers."""
        return self._acquirer.provider(tier)

    def counts(self) -> dict[str, dict[str, int]]:
        """Each tier's jobs by state, and what was done to have them (see `Acquirer.counts`)."""
        return self._acquirer.counts()

    def job_of(self, worker: str) -> tuple[str | None, str]:
        """Return the job of a worker, and where what it writes is kept."""
        known = self._workers.get(worker) or self._lost_last.get(worker)
        if known is None or known.job is None:
            return None, ""
        return known.job, self._acquirer.output(known.tier, known.job)

    def reasons(self) -> dict[str, str]:
        """Tier -> why it has fewer workers than were asked for (see `Acquirer.reasons`)."""
        return {} if self._stopped else self._acquirer.reasons()

    def maxima(self) -> dict[str, int]:
        """Tier -> how many workers a factory would lend now."""
        return {} if self._stopped else self._acquirer.maxima()

    def limits(self) -> list[dict[str, Any]]:
        """Return what is used of the run's limits, and of those beyond it that a factory counts."""
        limits = limits_of(self._site, "run")
        own = standing("run", self._acquirer.spent(), limits) if limits else []
        return own + self._acquirer.limits_beyond()

    def __repr__(self) -> str:
        return f"TaskVineEngine(site={self._site.name!r})"
