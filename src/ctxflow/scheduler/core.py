"""The scheduler: one deterministic state machine, `handle(event) -> commands`.

Which transition each event leads to, and what is done after every event. There is no I/O, no clock, no thread and no
randomness of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ctxflow.errors import counted
from ctxflow.policies.helpers import urgency
from ctxflow.scheduler import (
    attempts,
    context_moves,
    dispatch,
    faults,
    invariants,
    items,
    prefixes,
    reservations,
    residency,
    session_moves,
    steps,
)
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, ContextState
from ctxflow.scheduler.commands import Command, Interrupt
from ctxflow.scheduler.run_state import Limits, Policies, RunState
from ctxflow.scheduler.view import EndlessApp, RunView, ShownApp, ShownWorker, shown_region
from ctxflow.scheduler.worker_state import (
    Worker,
    hide,
    show,
)

SCALE_SECONDS = 0.1  # Work that finds nobody free has the scaling asked at once, but not more often than this.
JOINED_SECONDS = 1.0  # Nor when a worker joins, unless its tier exceeds its target: a target looks at the whole pool.


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
        self.view = self.state.view = RunView(self.state, context_moves.gives_way, session_moves.can_carry)

    next_wake: float | None = property(operator.attrgetter("state.wake_at"))  # type: ignore[assignment]
    """When a Tick is wanted, at the latest."""

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
        _HANDLERS[type(event)](state, event, out)
        if state.undecided:
            context_moves.settle_undecided(state, out)
        if state.reservations.wants:
            _make_room(state, out)
        if open_sessions or state.streams.drops:
            steps.serve(state, owner, out)
        if state.ready:
            dispatch.widen(state, event)
            dispatch.serve(state, out)
        elif state.free and state.attempts:
            dispatch.duplicate(state, event, out)
        if type(event) is ev.Tick and state.free:
            dispatch.warm(state, out)
        return out

    def validate(self) -> None:
        """Check every invariant of the state from scratch: for tests, and for whoever suspects the scheduler.

        :raises AssertionError: naming the one that does not hold.
        """
        invariants.check(self.state)


# --- room


def _make_room(state: RunState, out: list[Command]) -> None:
    """Ask for workers for contexts that need one of their own, preempting others."""
    dispatch.stop(state, list(reservations.overdue(state)), out)
    while reservations.follow(state, out):
        _scale(state, out)


def _scale(state: RunState, out: list[Command]) -> None:
    """Follow the scaling policy; give the first calls if the workers that they wait for are there."""
    dispatch.scale(state, out)
    if not state.awaiting or len(state.workers) < dispatch.first_needed(state):
        return
    state.awaiting = False
    for worker in state.workers.values():  # Each runs what it has built its context for.
        state.update_free(worker)
        built = [held.context for held in worker.contexts.values() if held.state == "ready"]
        apps = [app for app in state.ready.values() if app.context in built]
        if apps and worker.id in state.free:
            dispatch.give(state, worker.id, min(apps, key=lambda app: app.urgency).id, out)


# --- declarations


def _region_offered(state: RunState, event: ev.RegionOffered, out: list[Command]) -> None:
    state.regions[event.region.name] = shown_region(event.region)


def _tier_offered(state: RunState, event: ev.TierOffered, out: list[Command]) -> None:
    dispatch.tier_offered(state, event.tier, out)
    dispatch.place(state, out)
    _scale(state, out)


def _context_declared(state: RunState, event: ev.ContextDeclared, out: list[Command]) -> None:
    if event.context.id not in state.contexts:
        state.contexts[event.context.id] = ContextState(event.context)
        reservations.declared(state, event.context)
        dispatch.place(state, out)


def _app_declared(state: RunState, event: ev.AppDeclared, out: list[Command]) -> None:
    spec = event.app
    if spec.id in state.apps:
        return
    state.contexts[spec.context].apps[spec.id] = None
    app = App(spec, order=state.next_order)
    state.next_order += 1
    context = state.contexts[spec.context].spec
    app.concurrency = context.concurrency
    app.keeps_context = context.level == ev.PERVASIVE
    if app.keeps_context:  # Else each call has a context of its own.
        app.windowed = spec.overlaps
        app.overlaps = not spec.sessions and (spec.overlaps or (context.concurrency or 1) > 1)
    app.shown, app.endless = ShownApp(app), EndlessApp(app)
    app.urgency = urgency(app.shown)
    state.apps[app.id] = app
    show(state.apps_shown, app.id, app.shown)
    if spec.alternative_of:
        state.apps[spec.alternative_of].alternatives.append(spec.id)
        dispatch.place(state, out)  # So that the first items are divided too.


# --- items


def _items_submitted(state: RunState, event: ev.ItemsSubmitted, out: list[Command]) -> None:
    first = not state.ready and not state.free and state.now >= state.scaled_at + SCALE_SECONDS
    prefixes.note(state, state.apps[event.app], event.items, event.prefixes)
    items.submit(state, state.apps[event.app], event.items, out)
    faults.relieve(state, out, state.apps[event.app])
    if first and state.ready:
        _scale(state, out)


def _items_cancelled(state: RunState, event: ev.ItemsCancelled, out: list[Command]) -> None:
    items.cancel(state, event.items, out)
    if not event.stop:
        return
    gone = set(event.items)
    for attempt in items.holding(state, gone):
        # Only what was cancelled is interrupted: a duplicate that lost its race is left to finish.
        number = attempt.id
        left = attempt.items[state.answered.get(number, 0) :]
        if number in state.interrupted or gone.isdisjoint(left) or any(item in state.open for item in left):
            continue
        state.interrupted.add(number)
        out.append(Interrupt(attempt.worker, number, attempt.context))


# --- workers


def _worker_joined(state: RunState, event: ev.WorkerJoined, out: list[Command]) -> None:
    if event.worker.id in state.workers:
        return
    worker = Worker(event.worker, joined=state.now, order=state.counters.joined)
    worker.shown = ShownWorker(worker)
    state.workers[worker.id] = worker
    show(state.workers_shown, worker.id, worker.shown)
    state.counters.joined += 1
    dispatch.worker_joined(state, worker)
    if worker.pin is not None:
        reservations.joined(state, worker, out)
    state.streams.unsettled = True
    state.update_free(worker)
    faults.worker_joined(state, worker, out)
    dispatch.place(state, out)
    if state.awaiting or state.now >= state.scaled_at + JOINED_SECONDS or dispatch.exceeds_target(state, worker):
        _scale(state, out)


def _worker_lost(state: RunState, event: ev.WorkerLost, out: list[Command]) -> None:
    worker = state.workers.pop(event.worker, None)
    if worker is None:
        return
    hide(state.workers_shown, worker.id)
    for table in (state.wards.held, state.streams.leaving):
        table.pop(worker.id, None)
    evicted = event.evicted or worker.noticed is not None
    steps.worker_lost(state, worker, evicted, out)
    dispatch.worker_lost(state, worker, evicted and not worker.released)  # One that was given back was not taken.
    crash = ev.Failure("lost", "WorkerLost", event.reason or "it was lost without notice", worker=worker.id)
    charged = None if evicted else faults.worker_lost(state, worker, crash)
    if evicted:
        for context in list(worker.contexts):
            context_moves.drop(state, worker, context)
    else:
        context_moves.lost(state, worker, out)
    for context_state in state.contexts.values():
        context_state.suspects.pop(worker.id, None)
    _forget_measured(state, worker)
    reservations.lost(state, worker, out)
    state.update_free(worker)
    message = (
        f"the workers that ran it were lost {counted(state.limits.losses, 'time')} running, without notice: "
        "the call may exhaust the machine's memory or end the worker"
    ) + (f"; the last time, {event.reason}" if event.reason else "")
    failure = ev.Failure("lost", "WorkerLost", message, worker=worker.id, host=worker.host)
    if charged is not None:
        only = [item for item in charged.items if item in state.open and item not in state.copies]
        faults.charge(state, charged, worker, only, crash)
    if not evicted:
        attempts.lost_together(state, worker, failure, out)
    for attempt in attempts.in_order(state, worker.running.values()):
        attempts.end(state, attempt.id, worker)
        left = items.unanswered(state, attempt)
        if evicted:
            for item in left:  # Whose losses in a row no longer count.
                state.losses.pop(item, None)
            items.requeue(state, attempt, left, out)
        else:
            items.lost(state, attempt, left, failure, out)


def _forget_measured(state: RunState, worker: Worker) -> None:
    for name in (*worker.paces, *worker.steps):
        state.apps[name].measured_on.pop(worker.id, None)
    for name in worker.context_seconds:
        state.contexts[name].built_on.pop(worker.id, None)


def _eviction_notice(state: RunState, event: ev.EvictionNotice, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    if worker is not None and worker.noticed is None:
        worker.noticed = state.now
        state.streams.leaving[worker.id] = worker
        state.streams.unsettled = True
        state.update_free(worker)


def _plan_made(state: RunState, event: ev.PlanMade, out: list[Command]) -> None:
    dispatch.plan_made(state, event, out)
    _scale(state, out)


# --- contexts


def _context_ready(state: RunState, event: ev.ContextReady | ev.ContextWoken, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    app = context_moves.ready(state, worker, event, out) if worker is not None else None
    # What it was built for goes first: a policy that thinks again could build and unload for ever.
    if worker is not None and app is not None and app.backlog and worker.id in state.free:
        dispatch.run(state, worker, app, out)


def _context_failed(state: RunState, event: ev.ContextFailed, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    if worker is not None:
        context_moves.failed(state, worker, event.context, event.failure, out)
        session_moves.context_failed(state, worker, event.context)
        state.streams.unsettled = True


def _context_unloaded(state: RunState, event: ev.ContextUnloaded, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    if worker is None or state.free_tables.unpark(worker, event.context):
        return
    held = worker.contexts.get(event.context)
    if held is not None and held.state not in ("staging", "loading"):  # Else it is about an earlier process.
        attempts.lose_context(state, worker, event.context, out)


# --- time


def _tick(state: RunState, event: ev.Tick, out: list[Command]) -> None:
    state.wake_at = None
    dispatch.stop(state, faults.judge(state, out), out)
    state.arrivals.note(state.now, state.apps.values())
    state.streams.unsettled = True
    dispatch.place(state, out, tick=True)
    _scale(state, out)


_HANDLERS: dict[type[ev.Event], Callable[[RunState, Any, list[Command]], None]] = {
    ev.RegionOffered: _region_offered,
    ev.TierOffered: _tier_offered,
    ev.ContextDeclared: _context_declared,
    ev.AppDeclared: _app_declared,
    ev.Retired: context_moves.retired,
    ev.ItemsSubmitted: _items_submitted,
    ev.ItemsCancelled: _items_cancelled,
    ev.WorkerJoined: _worker_joined,
    ev.WorkerLost: _worker_lost,
    ev.EvictionNotice: _eviction_notice,
    ev.HostDrained: faults.host_drained,
    ev.JobStarted: dispatch.job_changed,
    ev.JobEvicted: dispatch.job_changed,
    ev.JobHeld: dispatch.job_changed,
    ev.JobFailed: faults.job_failed,
    ev.MachinesFound: reservations.machines_found,
    ev.PlanMade: _plan_made,
    ev.ContextStaged: context_moves.staged,
    ev.ContextReady: _context_ready,
    ev.ContextFailed: _context_failed,
    ev.ContextUnloaded: _context_unloaded,
    ev.ContextParked: residency.parked,
    ev.ContextWoken: _context_ready,
    ev.ParkFailed: context_moves.not_parked,
    ev.BatchFinished: dispatch.batch_finished,
    ev.ItemsFinished: dispatch.items_finished,
    ev.BatchEnded: dispatch.batch_ended,
    ev.BatchFailed: dispatch.batch_failed,
    ev.SessionOpened: session_moves.opened,
    ev.SessionPrompted: session_moves.user_event,
    ev.ChunksWanted: session_moves.user_event,
    ev.SessionSuspended: session_moves.user_event,
    ev.SessionResumed: session_moves.user_event,
    ev.SessionClosed: session_moves.user_event,
    ev.StepFinished: dispatch.step_finished,
    ev.StateArrived: session_moves.arrived,
    ev.StateLost: session_moves.not_arrived,
    ev.Tick: _tick,
}
"""What each event leads to."""
