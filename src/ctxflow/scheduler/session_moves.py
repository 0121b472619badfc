"""Transitions of sessions: waiting, placed, migrating, suspended, over.

A session's *state* (what the app keeps for it) is in at most one library process, whose worker owns the session. It
changes hands at chunk boundaries only: frozen to the worker's cache, carried, thawed elsewhere. What is kept of it
beside its worker, every few chunks, is what it goes back to when its worker is lost; chunks that are then made again
were delivered before, and are not delivered twice.
"""

from __future__ import annotations

import dataclasses

from ctxflow.scheduler import context_moves
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Carry, Command, EndSession
from ctxflow.scheduler.eligibility import PATIENCE, able, elsewhere
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.view import ShownSession
from ctxflow.scheduler.worker_state import MIGRATING, PLACED, SUSPENDED, WAITING, SessionState, Worker, hide, show

# --- what its user does


def opened(state: RunState, event: ev.SessionOpened, out: list[Command]) -> None:
    """Open a session."""
    app = state.apps[event.app]
    session = SessionState(event.session, app.id, app.context, state.now, app.spec.keep_every, event.wanted)
    session.prompts = event.prompts
    session.shown = ShownSession(session)
    state.streams.open[session.id] = session
    show(state.streams.shown, session.id, session.shown)
    app.open_sessions += 1
    state.streams.note(session)
    state.streams.unsettled = True


def user_event(
    state: RunState,
    event: ev.SessionPrompted | ev.ChunksWanted | ev.SessionSuspended | ev.SessionResumed | ev.SessionClosed,
    out: list[Command],
) -> None:
    """Handle what a session's user does with it."""
    session = state.streams.open.get(event.session)
    if session is None:
        return
    if isinstance(event, ev.SessionClosed):
        end(state, session, None, out)
    elif isinstance(event, ev.SessionSuspended):
        session.by_user = True
        _suspend(state, session)
    elif isinstance(event, ev.SessionResumed):
        session.by_user = session.suspending = False
        if session.state == SUSPENDED:
            session.state = WAITING
        state.streams.note(session)
        state.streams.unsettled = True
    else:
        if isinstance(event, ev.SessionPrompted):
            session.prompts += 1
            session.turn_over = False
        else:
            session.wanted = max(session.wanted, event.wanted)
        if not session.by_user and session.state == PLACED:
            session.suspending = False  # It was to leave since it had nothing to do.
        state.streams.note(session)
        if session.state == WAITING or (session.state == SUSPENDED and not session.by_user):
            state.streams.unsettled = True


def _suspend(state: RunState, session: SessionState) -> None:
    session.suspending, session.target = True, None
    if session.state == WAITING:
        session.state = SUSPENDED
    state.streams.note(session)


def end(
    state: RunState, session: SessionState, failure: ev.Failure | None, out: list[Command], context: str | None = None
) -> None:
    """End a session; a step that it is in goes on for the others."""
    del state.streams.open[session.id]
    hide(state.streams.shown, session.id)
    state.streams.charges.settle([session.id])
    state.apps[session.app].open_sessions -= 1
    state.streams.note(session)
    place = session.worker if session.state == PLACED else session.frozen.worker if session.frozen else None
    if place in state.workers and (session.loaded or session.step is not None or session.frozen):
        state.streams.drops.setdefault((place, session.app), []).append(session.id)
    if session.worker in state.workers:
        state.workers[session.worker].leave(session.id)
    state.streams.unsettled = True
    out.append(EndSession(session.id, failure, context))


# --- where sessions are


def bury_broken(state: RunState, out: list[Command]) -> None:
    """End sessions whose context is broken."""
    for session in list(state.streams.open.values()):
        broken = state.contexts[session.context].broken
        if broken is not None:
            end(state, session, broken, out, session.context)


def owner(state: RunState, event: ev.Event) -> str | None:
    """Return the worker whose sessions an event may have given something to do; None for all, "" for none."""
    if type(event) is ev.Tick:
        return None
    worker = getattr(event, "worker", None)
    if worker is None and (session := state.streams.open.get(getattr(event, "session", -1))) is not None:
        worker = session.worker
    return worker if isinstance(worker, str) else getattr(worker, "id", "")


def follow(state: RunState, session: SessionState, worker_id: str | None, out: list[Command]) -> None:
    """Do with a session what the policy says, if that is possible."""
    if session.by_user or session.state == MIGRATING or (session.worker is None and session.step is not None):
        return
    if worker_id is None:
        _suspend(state, session)
        return
    worker = state.workers.get(worker_id)
    if worker is None or not can_carry(state, session, worker):
        return
    session.suspending = False
    if session.state == PLACED:
        aim(state, session, worker_id if worker_id != session.worker else None)
        prepare(state, worker, session.app, out)
    else:
        place(state, session, worker, out)


def aim(state: RunState, session: SessionState, worker_id: str | None) -> None:
    """Set where a session goes at its next chunk boundary; None for nowhere."""
    session.target = worker_id
    state.streams.note(session)


def give_up_targets(state: RunState) -> None:
    """Have sessions stay where they are whose target does not stay, or cannot hold their context."""
    for number in list(state.streams.bound):
        session = state.streams.open[number]
        target = state.workers.get(session.target or "")
        if session.target is not None and (target is None or not can_carry(state, session, target)):
            aim(state, session, None)


def prepare(state: RunState, worker: Worker, app_id: str, out: list[Command]) -> None:
    """Have a worker build the context of sessions that it carries or will, if it does not have it."""
    app = state.apps[app_id]
    missing = app.context not in worker.contexts and worker.id in state.free
    if missing and able(state, worker, state.contexts[app.context].spec):
        context_moves.begin(state, worker, app, out)


def expected(state: RunState, session: SessionState) -> bool:
    """Return whether a session's target could give it its next chunk at once."""
    target = state.workers.get(session.target or "")
    held = target.contexts.get(session.context) if target is not None else None
    return held is not None and held.state == "ready"


def place(state: RunState, session: SessionState, worker: Worker, out: list[Command]) -> None:
    """Give a session without an owner one; a frozen state that another worker has is carried there first."""
    session.target, session.worker = None, worker.id
    frozen = session.frozen
    if frozen is not None and frozen.worker != worker.id:
        session.state = MIGRATING
        out.append(Carry(worker.id, frozen.worker, session.id, frozen.made, frozen.digest, frozen.bytes))
    else:
        session.state = PLACED
        worker.carry(session)
    state.streams.note(session)


def arrived(state: RunState, event: ev.StateArrived, out: list[Command]) -> None:
    """Place a session whose frozen state was carried to its new worker."""
    session = _carried(state, event)
    if session is None or session.frozen is None:
        return
    session.frozen = dataclasses.replace(session.frozen, worker=event.worker)
    worker = state.workers.get(event.worker)
    if worker is None:
        homeless(state, session)
    elif session.suspending:
        session.worker, session.state = None, SUSPENDED
    else:
        session.state = PLACED
        worker.carry(session)
    state.streams.note(session)


def not_arrived(state: RunState, event: ev.StateLost, out: list[Command]) -> None:
    """Have a session whose frozen state is gone go back to what is kept."""
    session = _carried(state, event)
    if session is not None:
        session.frozen = None
        homeless(state, session)


def _carried(state: RunState, event: ev.StateArrived | ev.StateLost) -> SessionState | None:
    session = state.streams.open.get(event.session)
    if session is None or session.state != MIGRATING or session.worker != event.worker:
        return None
    return session if session.frozen is not None and session.frozen.made == event.made else None


def homeless(state: RunState, session: SessionState) -> None:
    """Take a session off its owner; it goes on from what there is of its state."""
    if session.worker in state.workers:
        state.workers[session.worker].leave(session.id)
    session.worker = session.target = session.step = None
    session.state = SUSPENDED if session.suspending else WAITING
    unload(session)
    state.streams.note(session)
    state.streams.unsettled = True


def unload(session: SessionState) -> None:
    """Note that a session's state is in no library process any more."""
    session.loaded = False
    session.made = session.frozen.made if session.frozen is not None else session.kept


def can_carry(state: RunState, session: SessionState, worker: Worker) -> bool:
    """Return whether a worker stays, and holds or could load a session's context where the plan wants it."""
    context = state.contexts[session.context]
    if context.broken is not None or (session.failed_on and _shuns(state, session, worker)):
        return False
    if session.context in worker.contexts:
        return able(state, worker, context.spec) and not context_moves.surplus(state, worker, context)
    return context_moves.loadable(state, worker, context)


def _shuns(state: RunState, session: SessionState, worker: Worker) -> bool:
    """Return whether a session goes on elsewhere than on a worker's host, since a step of its failed there."""
    if all(host != worker.host for host, _ in session.failed_on):
        return False
    until = session.failed_at + PATIENCE
    if state.now >= until or not elsewhere(state, state.apps[session.app], session.failed_on, worker):
        return False
    state.wake(until)
    return True


# --- losses


def context_gone(state: RunState, worker: Worker, context: str) -> None:
    """Have the sessions of a library process that is gone go on from what is kept."""
    for session in worker.sessions.values():
        if session.context == context:
            session.step = None
            unload(session)
    for session in state.streams.open.values():
        if session.frozen is not None and session.frozen.worker == worker.id and session.context == context:
            session.step = None  # Its state is still there.
    for key in [key for key in state.streams.drops if key[0] == worker.id and state.apps[key[1]].context == context]:
        del state.streams.drops[key]  # What is frozen stays until the worker goes.


def context_failed(state: RunState, worker: Worker, context: str) -> None:
    """Have sessions leave a worker on which their context could not be built."""
    for session in state.streams.open.values():
        if session.context == context and session.target == worker.id:
            aim(state, session, None)
    for session in list(worker.sessions.values()):
        if session.context == context:
            homeless(state, session)
