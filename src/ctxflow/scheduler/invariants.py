"""The invariants of a run's state, checked from scratch: for tests, and for whoever suspects the scheduler."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.residency import fit_beside
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import (
    MIGRATING,
    MOST_CHARGES,
    PLACED,
    SUSPENDED,
    WAITING,
    SessionState,
    Worker,
    going,
)


def check(state: RunState) -> None:
    """Check every invariant.

    :raises AssertionError: naming the one that does not hold.
    """
    _check_items(state)
    _check_workers(state)
    _check_contexts(state)
    _check_quarantine(state)
    _check_reservations(state)
    _check_sessions(state)


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
        overlapping = [a.context for a in worker.running.values() if state.apps[a.app].overlaps]
        assert worker.in_flight == Counter(overlapping), f"{worker.id}: its calls in flight are miscounted"
        assert worker.windows.keys() == worker.in_flight.keys(), f"{worker.id}: a window is open, and nothing in flight"
        assert worker.overlapping == len(overlapping), f"{worker.id}: its calls in flight are miscounted"
        drained = not worker.turning or worker.turning & worker.in_flight.keys()
        assert drained, f"{worker.id} is drained, and has nothing in flight"
        unused = worker.slots - (len(worker.running) - len(overlapping)) - len(worker.in_flight) - worker.loading
        assert worker.unused_slots == unused >= 0, f"{worker.id}: its slots are miscounted, or too few"
        room = [context for context, count in worker.in_flight.items() if count < worker.windows[context]]
        free_slots = unused + len(set(room) - worker.turning)
        assert worker.free_slots == free_slots, f"{worker.id}: its free slots are miscounted"
        loading = sum(held.building for held in worker.contexts.values())
        assert worker.loading == loading, f"{worker.id}: loads are miscounted"
        waits = state.awaiting and any(held.state == "ready" for held in worker.contexts.values())
        takes_more = free_slots > 0 and not worker.leaving and not waits
        assert (worker.id in state.free) == takes_more, f"{worker.id}: wrongly (not) free"
        assert worker.offered == (free_slots if takes_more else 0), f"{worker.id}: its free slots are wrongly offered"
        for number, attempt in worker.running.items():
            assert state.attempts.get(number) is attempt, f"{worker.id} runs an attempt that is not known"
            held = worker.contexts.get(attempt.context)
            assert held is not None and not held.building, f"{worker.id} runs a call without its context"
    in_all = sum(worker.overlapping for worker in state.workers.values())
    assert state.flights.overlapping == in_all, "calls that overlap are miscounted"
    flying = [attempt for attempt in state.attempts.values() if state.apps[attempt.app].windowed]
    assert state.flights.attempts == len(flying), "attempts in flight are miscounted"
    pairs = sorted((item, attempt.id) for attempt in flying for item in attempt.items)
    known = sorted((item, number) for item, numbers in state.flights.of.items() for number in numbers)
    assert pairs == known, "items in flight are not known"
    assert not (state.awaiting and state.attempts), "a call was given before enough workers were there"
    for attempt in state.attempts.values():
        assert attempt.id in state.workers[attempt.worker].running, f"attempt {attempt.id} runs nowhere"
    for name, tier in state.tiers.items():
        here = sum(worker.tier == name and worker.acquired for worker in state.workers.values())
        assert tier.connected == here, f"{name}: workers are miscounted"

    hosts: dict[tuple[str, str | None], Counter[str]] = {}
    for worker in state.workers.values():
        for model in (worker.spec.gpu_model, "*"):
            hosts.setdefault((worker.tier, model), Counter())[worker.host] += 1
    assert {key: count for key, count in state.hosts.items() if count} == hosts, "hosts are miscounted"


def _check_quarantine(state: RunState) -> None:
    for worker in state.workers.values():
        if worker.id in state.wards.held:
            assert worker.draining and state.wards.of(worker) is not None, f"{worker.id} is held, and not in quarantine"
    leaving = {worker.id for worker in state.workers.values() if worker.leaving}
    assert state.streams.leaving.keys() == leaving, "it is not known who is about to go"
    assert state.wards.held.keys() <= state.workers.keys(), "a lost worker is in quarantine"
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
        _check_parked(state, worker)
    tiers = Counter((context, worker.tier) for worker in state.workers.values() for context in worker.contexts)
    for context in state.contexts.values():
        name = context.spec.id
        there = {worker.id for worker in state.workers.values() if name in worker.contexts}
        assert context.holders.keys() == there, f"{name}: holders are miscounted"
        built = {worker.id for worker in state.workers.values() if name in worker.context_seconds}
        assert context.built_on.keys() == built, f"{name}: it is wrongly (not) known where it was built"
        held = ((worker.id, worker.contexts.get(name)) for worker in state.free.values())
        ready = {worker for worker, each in held if each is not None and each.state == "ready"}
        assert state.free_tables.ready.get(name, {}).keys() == ready, f"{name}: its free holders are miscounted"
        parked = {each.id for each in state.free.values() if name in each.parked}
        assert state.free_tables.parked.get(name, {}).keys() == parked, f"{name}: it is not known where it is parked"
        by_tier = {tier: count for (name, tier), count in tiers.items() if name == context.spec.id}
        assert +context.on_tier == by_tier, f"{context.spec.id}: holders are miscounted by tier"
        assert context.suspects.keys() <= state.workers.keys(), f"{context.spec.id}: a lost worker is suspect"


def _check_parked(state: RunState, worker: Worker) -> None:
    running = {attempt.context for attempt in worker.running.values()}
    for name, parked in worker.parked.items():
        assert parked.context == name and name not in worker.contexts, f"{worker.id} has {name} parked, and holds it"
        assert name not in running, f"{worker.id} runs a call on {name}, which is parked"
        assert state.contexts[name].spec.level == ev.PERVASIVE, f"{worker.id} has {name} parked, which it may not keep"
        states = [session.id for session in worker.sessions.values() if session.loaded and session.context == name]
        assert not states, f"states of the sessions {states} are in {name}, which is parked"
    staying = [state.contexts[name] for name in worker.contexts]
    enough = fit_beside(worker, staying, list(worker.parked.values()))
    assert enough, f"{worker.id} has not the memory for what is parked there"


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
            assert all(worker.draining for worker in left), f"a worker preempted for place {pin} is not draining"
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
