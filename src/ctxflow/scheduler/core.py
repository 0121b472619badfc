"""The scheduler: one deterministic state machine, `handle(event) -> commands`.

Here is which transition each event leads to, what is done after every event, and the invariants of the state. There is
no I/O, no clock, no thread and no randomness of its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from ctxflow.errors import counted
from ctxflow.policies.helpers import urgency
from ctxflow.scheduler import context_moves, dispatch, faults, items, reservations, session_moves, steps
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, ContextState
from ctxflow.scheduler.commands import Command, Interrupt
from ctxflow.scheduler.run_state import Limits, Policies, RunState
from ctxflow.scheduler.view import RunView, ShownApp, ShownWorker, shown_region
from ctxflow.scheduler.worker_state import (
    MIGRATING,
    MOST_CHARGES,
    PLACED,
    SUSPENDED,
    WAITING,
    SessionState,
    Worker,
    going,
    hide,
    show,
)

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
        self.view = self.state.view = RunView(self.state, context_moves.could_load, session_moves.can_carry)

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
        for check in _CHECKS:
            check(self.state)


# --- room


def _make_room(state: RunState, out: list[Command]) -> None:
    """Ask for workers for contexts that need one of their own, and have others give way."""
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
    app.shown = ShownApp(app)
    app.urgency = urgency(app.shown)
    state.apps[app.id] = app
    show(state.apps_shown, app.id, app.shown)
    if spec.alternative_of:
        state.apps[spec.alternative_of].alternatives.append(spec.id)
        dispatch.place(state, out)  # So that the first items are divided too.


# --- items


def _items_submitted(state: RunState, event: ev.ItemsSubmitted, out: list[Command]) -> None:
    first = not state.ready and not state.free and state.now >= state.scaled_at + SCALE_SECONDS
    items.submit(state, state.apps[event.app], event.items, out)
    if first and state.ready:
        _scale(state, out)


def _items_cancelled(state: RunState, event: ev.ItemsCancelled, out: list[Command]) -> None:
    items.cancel(state, event.items, out)
    if not event.stop:
        return
    gone = set(event.items)
    for number, attempt in state.attempts.items():
        # Only what was cancelled is interrupted: a duplicate that lost its race is left to finish.
        left = attempt.items[state.answered.get(number, 0) :]
        if number in state.interrupted or gone.isdisjoint(left) or any(item in state.open for item in left):
            continue
        state.interrupted.add(number)
        out.append(Interrupt(attempt.worker, number, attempt.context))


# --- workers


def _worker_joined(state: RunState, event: ev.WorkerJoined, out: list[Command]) -> None:
    if event.worker.id in state.workers:
        return
    worker = Worker(event.worker, joined=state.now)
    worker.shown = ShownWorker(worker)
    state.workers[worker.id] = worker
    show(state.workers_shown, worker.id, worker.shown)
    state.counters.joined += 1
    dispatch.worker_joined(state, worker)
    if worker.pin is not None:
        reservations.joined(state, worker, out)
    state.streams.unsettled = True
    state.update_free(worker)
    if state.wards.units:
        faults.worker_joined(state, worker, out)
    dispatch.place(state, out)
    _scale(state, out)


def _worker_lost(state: RunState, event: ev.WorkerLost, out: list[Command]) -> None:
    worker = state.workers.pop(event.worker, None)
    if worker is None:
        return
    hide(state.workers_shown, worker.id)
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
    for name in (*worker.paces, *worker.steps):
        state.apps[name].measured_on.discard(worker.id)
    reservations.lost(state, worker, out)
    state.update_free(worker)
    for attempt in list(worker.running.values()):
        dispatch.end(state, attempt.id, worker)
        left = items.unanswered(state, attempt)
        if attempt is charged:
            faults.charge(state, attempt, worker, left, crash)
        if evicted:
            for item in left:  # Whose losses in a row no longer count.
                state.losses.pop(item, None)
            items.requeue(state, attempt, left, out)
        else:
            message = (
                f"the workers that ran it were lost {counted(state.limits.losses, 'time')} running, without notice: "
                "the call may exhaust the machine's memory or end the worker"
            ) + (f"; the last time, {event.reason}" if event.reason else "")
            failure = ev.Failure("lost", "WorkerLost", message, worker=worker.id, host=worker.host)
            items.lost(state, attempt, left, failure, out)


def _eviction_notice(state: RunState, event: ev.EvictionNotice, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    if worker is not None and worker.noticed is None:
        worker.noticed = state.now
        state.streams.unsettled = True
        state.update_free(worker)


def _plan_made(state: RunState, event: ev.PlanMade, out: list[Command]) -> None:
    dispatch.plan_made(state, event, out)
    _scale(state, out)


# --- contexts


def _context_ready(state: RunState, event: ev.ContextReady, out: list[Command]) -> None:
    worker = state.workers.get(event.worker)
    app = context_moves.ready(state, worker, event) if worker is not None else None
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
    held = worker.contexts.get(event.context) if worker is not None else None
    if worker is not None and held is not None and not held.building:
        dispatch.lose_context(state, worker, event.context, out)


# --- time


def _tick(state: RunState, event: ev.Tick, out: list[Command]) -> None:
    state.wake_at = None
    dispatch.stop(state, faults.judge(state, out), out)
    state.arrivals.note(state.now, state.apps.values())
    state.streams.unsettled = True
    dispatch.place(state, out)
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
    ev.MachinesFound: reservations.machines_found,
    ev.PlanMade: _plan_made,
    ev.ContextStaged: context_moves.staged,
    ev.ContextReady: _context_ready,
    ev.ContextFailed: _context_failed,
    ev.ContextUnloaded: _context_unloaded,
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


# --- invariants


def _check_items(state: RunState) -> None:
    # Of a long queue, this is most of what validating takes: loops over its items are the interpreter's own.
    waiting = {app.id: list(filter(state.open.__contains__, app.queue)) for app in state.apps.values()}
    groups = [group.items for app in state.apps.values() for group in app.isolated]
    places = [*chain.from_iterable(waiting.values()), *chain.from_iterable(groups)]
    queued = set(places)
    assigned = Counter(item for attempt in state.attempts.values() for item in attempt.items if item in state.open)
    assert len(queued) == len(places), "an item is queued twice"
    for app in state.apps.values():
        noted = set(map(id, map(state.open.__getitem__, waiting[app.id])))
        assert noted <= {id(app)}, "an item is queued for an app that it is not noted for"
    assert queued.isdisjoint(assigned), "an item is both queued and assigned"
    assert queued | assigned.keys() == state.open.keys(), "an open item is neither queued nor assigned"
    assert {item: n for item, n in assigned.items() if n > 1} == state.copies, "the copies of items are miscounted"
    totals = state.counters
    settled = totals.done + totals.dead + totals.cancelled
    assert totals.submitted == settled + len(state.open), "an item is lost, or settled twice"
    for attempt in state.attempts.values():
        wanted = attempt.id in state.interrupted and any(item in state.open for item in attempt.items)
        assert not wanted, f"attempt {attempt.id} is interrupted, but somebody waits for it"
    for table in (state.losses, state.crashes, state.raised):
        assert table.keys() <= state.open.keys(), "a settled item is remembered"
    charges = state.charges
    assert charges.of.keys() <= state.open.keys(), "a settled item is part of a charge"
    against = Counter(charge.worker.place for charge in charges.open)
    assert against == charges.against, "charges against a place are miscounted"
    assert max(against.values(), default=0) <= MOST_CHARGES, "there are more charges against a place than there may be"
    kept = Counter(charge for each in charges.of.values() for charge in each)
    assert kept == {charge: len(charge.items) for charge in charges.open}, "items of charges are miscounted"
    for app in state.apps.values():
        assert all(group.items for group in app.isolated), f"{app.id}: a group without items waits"
        assert app.isolated.items == sum(len(group.items) for group in app.isolated), f"{app.id}: groups are miscounted"
        assert app.cancelled == len(app.queue) - len(waiting[app.id]), f"{app.id}: cancelled items are miscounted"
        claims = [held.claim for w in state.workers.values() for held in w.contexts.values() if held.claim]
        claims = [claim for claim in claims if claim.app == app.id]
        assert (app.claimed, app.claims) == (sum(c.items for c in claims), len(claims)), f"{app.id}: wrong claims"
        running = sum(attempt.app == app.id for attempt in state.attempts.values())
        assert app.attempts == running, f"{app.id}: its attempts are miscounted"
        open_sessions = sum(session.app == app.id for session in state.sessions.values())
        assert app.open_sessions == open_sessions, f"{app.id}: its sessions are miscounted"
        assert app.id in state.contexts[app.context].apps, f"{app.id} is not an app of its context"
        backlog = len(app.queue) - app.cancelled + app.isolated.items
        assert app.backlog == backlog, f"{app.id}: its backlog is miscounted"
        broken = state.contexts[app.context].broken is not None
        assert (app.id in state.ready) == (app.backlog > 0 and not broken), f"{app.id}: wrongly (not) ready"
        assert not (broken and app.backlog), f"{app.id}: items wait for a broken context"


def _check_workers(state: RunState) -> None:
    for worker in state.workers.values():
        free_slots = worker.slots - len(worker.running) - worker.loading
        assert worker.free_slots == free_slots >= 0, f"{worker.id}: its free slots are miscounted, or too few"
        loading = sum(held.building for held in worker.contexts.values())
        assert worker.loading == loading, f"{worker.id}: loads are miscounted"
        waits = state.awaiting and any(held.state == "ready" for held in worker.contexts.values())
        takes_more = free_slots > 0 and not worker.leaving and not waits
        assert (worker.id in state.free) == takes_more, f"{worker.id}: wrongly (not) free"
        for number, attempt in worker.running.items():
            assert state.attempts.get(number) is attempt, f"{worker.id} runs an attempt that is not known"
            held = worker.contexts.get(attempt.context)
            assert held is not None and not held.building, f"{worker.id} runs a call without its context"
    assert not (state.awaiting and state.attempts), "a call was given before enough workers were there"
    for attempt in state.attempts.values():
        assert attempt.id in state.workers[attempt.worker].running, f"attempt {attempt.id} runs nowhere"
    for name, tier in state.tiers.items():
        here = sum(worker.tier == name and worker.acquired for worker in state.workers.values())
        assert tier.connected == here, f"{name}: workers are miscounted"


def _check_quarantine(state: RunState) -> None:
    for worker in state.workers.values():
        if worker.held:
            assert worker.draining and state.wards.of(worker) is not None, f"{worker.id} is held, and not in quarantine"
    for tier, hosts in state.wards.excluded.items():
        known = {unit.machine for unit in state.wards.units if not unit.worker}
        assert set(hosts) <= known, f"{tier}: a host is excluded that is not in quarantine"


def _check_contexts(state: RunState) -> None:
    for worker in state.workers.values():
        calls = Counter(attempt.context for attempt in worker.running.values())
        for held_there in worker.contexts.values():
            spent = held_there.state == "spent"
            if state.contexts[held_there.context].spec.level == ev.PERVASIVE:
                assert not spent, f"{worker.id} will not keep {held_there.context}, which is to be kept"
            else:
                assert calls[held_there.context] == spent, f"{worker.id} runs two calls on one {held_there.context}"
        levels = {state.contexts[context].spec.level for context in worker.staged}
        assert levels <= {ev.PARTIAL}, f"{worker.id} is thought to keep files that it does not"
    held = Counter(context for worker in state.workers.values() for context in worker.contexts)
    tiers = Counter((context, worker.tier) for worker in state.workers.values() for context in worker.contexts)
    for context in state.contexts.values():
        assert context.holders == held[context.spec.id], f"{context.spec.id}: holders are miscounted"
        by_tier = {tier: count for (name, tier), count in tiers.items() if name == context.spec.id}
        assert +context.on_tier == by_tier, f"{context.spec.id}: holders are miscounted by tier"
        assert context.suspects.keys() <= state.workers.keys(), f"{context.spec.id}: a lost worker is suspect"


def _check_reservations(state: RunState) -> None:
    every = state.reservations.all
    holders = [each.worker for each in every.values() if each.worker is not None]
    assert len(holders) == len(set(holders)), "two places have one worker"
    contexts = [each.context for each in every.values()]
    assert len(contexts) == len(set(contexts)), "two places are kept for one context"
    for pin, each in every.items():
        assert each.pin == pin and each.context in state.reservations.wants, f"place {pin} is kept for nobody"
        holds = each.state in ("held", "leaving")
        assert holds == (each.worker is not None), f"place {pin} is wrongly (not) held"
        if each.worker is not None:
            assert state.workers[each.worker].pin == pin, f"place {pin} is held by a worker of another"
        if each.state == "clearing":
            left = [state.workers[name] for name in each.room.victims if name in state.workers]
            assert all(worker.draining for worker in left), f"a worker that gives way for place {pin} goes on"
            assert all(not state.workers[name].running for name in each.released if name in state.workers)
    for worker in state.workers.values():
        if worker.pin is not None:
            assert worker.id in holders or worker.draining, f"{worker.id} was asked for, and has no place"


def _check_sessions(state: RunState) -> None:
    streams = state.streams
    owners = [number for worker in state.workers.values() for number in worker.sessions]
    assert len(owners) == len(set(owners)), "a session has two owners"
    waiting: dict[str, set[int]] = {}
    for session in streams.open.values():
        _check_session(state, session)
        if session.state == WAITING and not session.idle:
            waiting.setdefault(session.app, set()).add(session.id)
    assert streams.waiting == waiting, f"these wait: {waiting}, and not {streams.waiting}"
    bound = {session.id: where for session in streams.open.values() if (where := going(session)) is not None}
    assert streams.bound == bound, f"these are to go elsewhere: {bound}, and not {streams.bound}"
    assert streams.awaited == Counter(bound.values()), "sessions that are awaited are miscounted"
    assert set(owners) <= streams.open.keys(), "a worker carries a session that is over"
    for number in streams.steps:
        assert number in state.attempts, f"step {number} is not running"
    for worker in state.workers.values():
        steps = [a.context for n, a in worker.running.items() if n in streams.steps]
        assert len(steps) == len(set(steps)), f"{worker.id} has two steps of a context at a time"


def _check_session(state: RunState, session: SessionState) -> None:
    name = f"session {session.id}"
    placed = session.state == PLACED
    owner = state.workers.get(session.worker or "")
    assert placed == (owner is not None and session.id in owner.sessions), f"{name}: wrongly (not) placed"
    assert (session.worker is None) == (session.state in (WAITING, SUSPENDED)), f"{name}: {session.state} at a worker"
    assert placed or not (session.loaded or session.target), f"{name} is on a worker that is not its"
    assert session.kept <= session.made <= session.chunks, f"{name}: its state, its chunks and what is kept disagree"
    assert session.state != MIGRATING or session.frozen is not None, f"{name} migrates without a state"
    assert session.state != SUSPENDED or session.suspending, f"{name} is suspended for nobody"
    if session.frozen is not None:
        assert session.frozen.worker in state.workers, f"{name}: its frozen state is on a worker that is gone"
        assert not session.loaded and session.made == session.frozen.made, f"{name} has two states"
    if session.step is not None:
        orders = state.streams.steps.get(session.step, ())
        assert sum(order.session == session.id for order in orders) == 1, f"{name} is not in its step"
        where = session.frozen.worker if session.worker is None and session.frozen is not None else session.worker
        assert state.attempts[session.step].worker == where, f"{name}: its step is on another worker"
    elif placed and session.loaded and owner is not None:
        held = owner.contexts.get(session.context)
        assert held is not None and held.state == "ready", f"{name}: its state is in no library process"


_CHECKS = (
    _check_items,
    _check_workers,
    _check_contexts,
    _check_quarantine,
    _check_reservations,
    _check_sessions,
)
