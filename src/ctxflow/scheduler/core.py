"""The scheduler: one deterministic state machine, `handle(event) -> commands`.

What lives here: what each event leads to, and workers joining and leaving. Free workers get what is queued in
dispatch.py; items' transitions are in items.py, contexts' in contexts.py, the tables in run_state.py, the invariants
in validate.py. There is no I/O, no clock, no thread and no randomness of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctxflow.errors import counted
from ctxflow.policies.helpers import urgency
from ctxflow.scheduler import (
    attempts,
    breaking,
    context_moves,
    dispatch,
    evidence,
    items,
    quarantine,
    reservations,
    session_moves,
    steps,
    tiers,
)
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, ContextState
from ctxflow.scheduler.commands import Command, Interrupt
from ctxflow.scheduler.proxies import ShownApp, ShownWorker, shown_region
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.run_view import RunView
from ctxflow.scheduler.settings import Limits, Policies
from ctxflow.scheduler.validate import validate
from ctxflow.scheduler.worker_state import Worker, hide, show

SCALE_SECONDS = 0.1  # Work that finds nobody free has the scaling asked at once, but not more often than this.


class Scheduler:
    """Decides what runs where: feed it events, carry out the commands it gives back.

    :param policies: who decides what is open to choice.
    :param limits: the failure thresholds of items and contexts.
    :param seed: of the generator that policies may use.
    :param start_when: the share of the workers asked for that must be connected, once, before the first call is
        given; those started by hand count as connected. Until then each worker builds one context at most: a second
        one could take the first one's place before it was of any use.
    :raises ValueError: for a share below 0 or above 1.

    >>> from ctxflow.policies.registry import make
    >>> scheduler = Scheduler(Policies(make("routing", "context-affinity"), make("batching", "fixed"),
    ...     make("placement", "everywhere"), make("preemption", "none"), make("scaling", "fixed")))
    >>> scheduler.handle(ev.ContextDeclared(0.0, ev.ContextSpec("c", "model")))
    []
    >>> scheduler.handle(ev.AppDeclared(0.0, ev.AppSpec("a", "verify", context="c")))
    []
    >>> scheduler.handle(ev.ItemsSubmitted(0.0, "a", range(2)))
    []
    >>> scheduler.handle(ev.WorkerJoined(1.0, ev.WorkerSpec("w1")))
    [Load(worker='w1', context='c')]
    >>> scheduler.handle(ev.ContextReady(3.0, "w1", "c", seconds=2.0))
    [Run(worker='w1', attempt=1, app='a', context='c', items=(0, 1))]
    >>> scheduler.handle(ev.BatchFinished(4.0, "w1", 1, seconds=1.0))
    [Deliver(attempt=1, items=(0, 1), positions=None)]
    """

    def __init__(
        self, policies: Policies, limits: Limits | None = None, seed: int = 0, start_when: float = 0.0
    ) -> None:
        self.state = RunState(policies, limits or Limits(), seed, start_when)
        self.view = self.state.view = RunView(self.state)
        self._handlers: dict[type[ev.Event], Callable[[Any, list[Command]], None]] = {
            ev.RegionOffered: self._region_offered,
            ev.TierOffered: self._tier_offered,
            ev.ContextDeclared: self._context_declared,
            ev.AppDeclared: self._app_declared,
            ev.Retired: lambda e, out: context_moves.retired(self.state, e, out),
            ev.ItemsSubmitted: self._items_submitted,
            ev.ItemsCancelled: self._items_cancelled,
            ev.WorkerJoined: self._worker_joined,
            ev.WorkerLost: self._worker_lost,
            ev.EvictionNotice: self._eviction_notice,
            ev.HostDrained: self._host_drained,
            ev.JobStarted: self._job_changed,
            ev.JobEvicted: self._job_changed,
            ev.JobHeld: self._job_changed,
            ev.MachinesFound: lambda e, out: reservations.machines_found(self.state, e, out),
            ev.PlanMade: self._plan_made,
            ev.ContextStaged: self._context_staged,
            ev.ContextReady: self._context_ready,
            ev.ContextFailed: self._context_failed,
            ev.ContextUnloaded: self._context_unloaded,
            ev.BatchFinished: lambda e, out: attempts.batch_finished(self.state, e, out),
            ev.ItemsFinished: lambda e, out: attempts.items_finished(self.state, e, out),
            ev.BatchEnded: lambda e, out: attempts.batch_ended(self.state, e, out),
            ev.BatchFailed: lambda e, out: attempts.batch_failed(self.state, e, out),
            ev.SessionOpened: lambda e, out: session_moves.opened(self.state, e),
            ev.SessionPrompted: lambda e, out: session_moves.prompted(self.state, e.session),
            ev.ChunksWanted: lambda e, out: session_moves.wanted(self.state, e.session, e.wanted),
            ev.SessionSuspended: lambda e, out: session_moves.suspended(self.state, e.session),
            ev.SessionResumed: lambda e, out: session_moves.resumed(self.state, e.session),
            ev.SessionClosed: lambda e, out: session_moves.closed(self.state, e.session, out),
            ev.StepFinished: lambda e, out: attempts.step_finished(self.state, e, out),
            ev.StateArrived: lambda e, out: session_moves.arrived(self.state, e),
            ev.StateLost: lambda e, out: session_moves.not_arrived(self.state, e),
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event) -> list[Command]:
        """Take one event in and say what is to be done.

        Events about workers, batches or contexts that are no longer there are without effect.

        :raises KeyError: for an app or context that was never declared.
        """
        state = self.state
        if event.time > state.now:
            state.now = event.time
            object.__setattr__(self.view, "now", event.time)
        out: list[Command] = []
        open_sessions = state.streams.open
        owner = session_moves.owner(state, event) if open_sessions else None
        self._handlers[type(event)](event, out)
        if state.undecided:
            breaking.follow(state, out)
        if state.reservations.wants:
            self._make_room(out)
        if open_sessions or state.streams.drops:
            steps.serve(state, owner, out)
        if state.ready:
            dispatch.serve(state, out)
        elif state.free and state.attempts:
            dispatch.duplicate(state, event, out)
        if type(event) is ev.Tick and state.free:
            dispatch.warm(state, out)
        return out

    def validate(self) -> None:
        """Check every invariant.

        :raises AssertionError: naming the one that does not hold.
        """
        validate(self.state)

    @property
    def next_wake(self) -> float | None:
        """When a Tick is wanted, at the latest."""
        return self.state.wake_at

    # --- room

    def _make_room(self, out: list[Command]) -> None:
        """Ask for workers for contexts that need one of their own, and have others give way."""
        attempts.stop(self.state, list(reservations.overdue(self.state)), out)
        while reservations.follow(self.state, out):
            self._scale(out)

    def _scale(self, out: list[Command]) -> None:
        tiers.scale(self.state, out)
        if self.state.awaiting and tiers.enough(self.state):
            self._begin(out)

    def _begin(self, out: list[Command]) -> None:
        """Give the first calls: each worker runs what it has built its context for."""
        state = self.state
        state.awaiting = False
        for worker in state.workers.values():
            state.update_free(worker)
            built = [held.context for held in worker.contexts.values() if held.state == "ready"]
            apps = [app for app in state.ready.values() if app.context in built]
            if apps and worker.id in state.free:
                dispatch.give(state, worker.id, min(apps, key=urgency).id, out)

    # --- declarations

    def _region_offered(self, event: ev.RegionOffered, out: list[Command]) -> None:
        self.state.regions[event.region.name] = shown_region(event.region)

    def _tier_offered(self, event: ev.TierOffered, out: list[Command]) -> None:
        tiers.offered(self.state, event.tier, out)
        dispatch.place(self.state, out)
        self._scale(out)

    def _context_declared(self, event: ev.ContextDeclared, out: list[Command]) -> None:
        if event.context.id not in self.state.contexts:
            self.state.contexts[event.context.id] = ContextState(event.context)
            reservations.declared(self.state, event.context)
            dispatch.place(self.state, out)

    def _app_declared(self, event: ev.AppDeclared, out: list[Command]) -> None:
        spec = event.app
        if spec.id not in self.state.apps:
            self.state.contexts[spec.context].apps[spec.id] = None
            app = App(spec, order=self.state.next_order)
            app.shown = ShownApp(app)
            self.state.apps[app.id] = app
            show(self.state.apps_shown, app.id, app.shown)
            self.state.next_order += 1
            if spec.alternative_of:
                self.state.apps[spec.alternative_of].alternatives.append(spec.id)
                dispatch.place(self.state, out)  # So that the first items are divided too.

    # --- items

    def _items_submitted(self, event: ev.ItemsSubmitted, out: list[Command]) -> None:
        state = self.state
        first = not state.ready and not state.free and state.now >= state.scaled_at + SCALE_SECONDS
        items.submit(state, state.apps[event.app], event.items, out)
        if first and state.ready:
            self._scale(out)

    def _items_cancelled(self, event: ev.ItemsCancelled, out: list[Command]) -> None:
        items.cancel(self.state, event.items)
        if not event.stop:
            return
        opened, gone = self.state.open, set(event.items)
        for number, attempt in self.state.attempts.items():
            # Only what was cancelled is interrupted: a duplicate that lost its race is left to finish.
            left = attempt.items[self.state.answered.get(number, 0) :]
            if number in self.state.interrupted or gone.isdisjoint(left) or any(item in opened for item in left):
                continue
            self.state.interrupted.add(number)
            out.append(Interrupt(attempt.worker, number, attempt.context))

    # --- workers

    def _worker_joined(self, event: ev.WorkerJoined, out: list[Command]) -> None:
        state = self.state
        if event.worker.id in state.workers:
            return
        worker = Worker(event.worker, joined=state.now)
        worker.shown = ShownWorker(worker)
        state.workers[worker.id] = worker
        show(state.workers_shown, worker.id, worker.shown)
        state.counters.joined += 1
        tiers.joined(state, worker)
        if worker.pin is not None:
            reservations.joined(state, worker, out)
        state.streams.unsettled = True
        state.update_free(worker)
        if state.wards.units:
            quarantine.joined(state, worker, out)
        dispatch.place(self.state, out)
        self._scale(out)

    def _worker_lost(self, event: ev.WorkerLost, out: list[Command]) -> None:
        state = self.state
        worker = state.workers.pop(event.worker, None)
        if worker is None:
            return
        hide(state.workers_shown, worker.id)
        evicted = event.evicted or worker.noticed is not None
        taken = evicted and not worker.released  # One that was given back was not taken.
        steps.worker_lost(state, worker, evicted, out)
        state.counters.lost += 1
        state.counters.evicted += taken
        tiers.gone(state, worker, taken)
        crash = ev.Failure("lost", "WorkerLost", event.reason or "it was lost without notice", worker=worker.id)
        counted_for = None if evicted else evidence.lost(state, worker, crash)
        if evicted:
            for context in list(worker.contexts):
                context_moves.drop(state, worker, context)
        else:
            context_moves.lost(state, worker, out)
        for context_state in state.contexts.values():
            context_state.suspects.pop(worker.id, None)
        for name in (*worker.paces, *worker.steps):
            state.apps[name].measured_on.discard(worker.id)
        reservations.lost(state, worker, out)
        state.update_free(worker)
        for attempt in list(worker.running.values()):
            attempts.end(self.state, attempt, worker)
            left = items.unanswered(state, attempt)
            if attempt is counted_for:
                evidence.failed(state, attempt, worker, left, crash)
            if evicted:
                items.evicted(state, attempt, left, out)
            else:
                failure = ev.Failure(
                    "lost",
                    "WorkerLost",
                    f"the workers that ran it were lost {counted(state.limits.losses, 'time')} running, without "
                    "notice: the call may exhaust the machine's memory or end the worker"
                    + (f"; the last time, {event.reason}" if event.reason else ""),
                    worker=worker.id,
                    host=worker.host,
                )
                items.lost(state, attempt, left, failure, out)

    def _host_drained(self, event: ev.HostDrained, out: list[Command]) -> None:
        (quarantine.drain if event.drained else quarantine.use_again)(self.state, event.host, out)

    def _eviction_notice(self, event: ev.EvictionNotice, out: list[Command]) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None and worker.noticed is None:
            worker.noticed = self.state.now
            self.state.streams.unsettled = True
            self.state.update_free(worker)

    def _job_changed(self, event: ev.JobStarted | ev.JobEvicted | ev.JobHeld, out: list[Command]) -> None:
        tiers.job_changed(self.state, event)
        if isinstance(event, ev.JobStarted) and event.pin is not None:
            reservations.started(self.state, event.pin)

    def _plan_made(self, event: ev.PlanMade, out: list[Command]) -> None:
        dispatch.made(self.state, event, out)
        self._scale(out)

    # --- contexts

    def _context_staged(self, event: ev.ContextStaged, out: list[Command]) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            context_moves.staged(self.state, worker, event.context, out)

    def _context_ready(self, event: ev.ContextReady, out: list[Command]) -> None:
        worker = self.state.workers.get(event.worker)
        app = context_moves.ready(self.state, worker, event) if worker is not None else None
        # What it was built for goes first: a policy that thinks again could build and unload for ever.
        if worker is not None and app is not None and app.backlog and worker.id in self.state.free:
            dispatch.run(self.state, worker, app, out)

    def _context_failed(self, event: ev.ContextFailed, out: list[Command]) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            context_moves.failed(self.state, worker, event.context, event.failure, out)
            session_moves.context_failed(self.state, worker, event.context)
            self.state.streams.unsettled = True

    def _context_unloaded(self, event: ev.ContextUnloaded, out: list[Command]) -> None:
        worker = self.state.workers.get(event.worker)
        held = worker.contexts.get(event.context) if worker is not None else None
        if worker is not None and held is not None and not held.building:
            attempts.lose_context(self.state, worker, event.context, out)

    # --- time

    def _tick(self, event: ev.Tick, out: list[Command]) -> None:
        self.state.wake_at = None
        attempts.stop(self.state, quarantine.follow(self.state, out), out)
        self.state.arrivals.note(self.state.now, self.state.apps.values())
        self.state.streams.unsettled = True
        dispatch.place(self.state, out)
        self._scale(out)
