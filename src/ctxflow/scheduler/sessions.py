"""Transitions of sessions: waiting, placed, migrating, suspended; and the steps in which their chunks are made.

A session's *state* (what the app keeps for it) is in at most one library process, whose worker owns the session. It
changes hands at chunk boundaries only: frozen to the worker's cache, carried, thawed elsewhere. What is kept of it
beside its worker, every few chunks, is what it goes back to when its worker is lost; chunks that are then made again
were delivered before, and are not delivered twice. What does not live here: which worker carries which session
(policies), what is in a state (host/sessions.py), and chunks themselves (executors/sessions.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.policies.batching.coalescing import Coalescing
from ctxflow.scheduler import residency
from ctxflow.scheduler.commands import Carry, Command, DeliverChunk, EndSession, EndTurn, Order, Step
from ctxflow.scheduler.events import Event, Failure, SessionOpened, StateArrived, StateLost, StepFinished, Tick
from ctxflow.scheduler.state import Attempt, Frozen, Session, Worker

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState

WAITING, PLACED, MIGRATING, SUSPENDED = "waiting", "placed", "migrating", "suspended"
_COALESCING = Coalescing()


@dataclasses.dataclass(slots=True)
class Sessions:
    """All that is known of a run's sessions.

    :ivar open: those that are not over, by number.
    :ivar steps: attempt -> the orders of that step.
    :ivar drops: (worker, app) -> sessions whose states are there and wanted by nobody.
    :ivar unsettled: whether the policy is to be asked again.
    :ivar groups: numbers for sessions that must be in a step by themselves, after a step failed.
    """

    open: dict[int, Session] = dataclasses.field(default_factory=dict)
    steps: dict[int, Sequence[Order]] = dataclasses.field(default_factory=dict)
    drops: dict[tuple[str, str], list[int]] = dataclasses.field(default_factory=dict)
    unsettled: bool = False
    groups: int = 0


# --- what its user does


def opened(state: RunState, event: SessionOpened) -> None:
    """A session begins."""
    app = state.apps[event.app]
    session = Session(event.session, app.id, app.context, state.now, app.spec.keep_every, event.wanted)
    session.prompts = event.prompts
    state.streams.open[session.id] = session
    state.streams.unsettled = True


def prompted(state: RunState, number: int) -> None:
    """A session has got something to do."""
    session = state.streams.open.get(number)
    if session is not None:
        session.prompts += 1
        session.turn_over = False
        _wake(state, session)


def wanted(state: RunState, number: int, until: int) -> None:
    """More chunks of a session are wanted."""
    session = state.streams.open.get(number)
    if session is not None:
        session.wanted = max(session.wanted, until)
        _wake(state, session)


def _wake(state: RunState, session: Session) -> None:
    if session.state == WAITING or (session.state == SUSPENDED and not session.by_user):
        state.streams.unsettled = True


def suspended(state: RunState, number: int) -> None:
    """Its user wants a session to make no chunks for now."""
    session = state.streams.open.get(number)
    if session is not None:
        session.by_user = True
        _suspend(session)


def _suspend(session: Session) -> None:
    session.suspending, session.target = True, None
    if session.state == WAITING:
        session.state = SUSPENDED


def resumed(state: RunState, number: int) -> None:
    """Its user wants a session to go on."""
    session = state.streams.open.get(number)
    if session is not None:
        session.by_user = session.suspending = False
        if session.state == SUSPENDED:
            session.state = WAITING
        state.streams.unsettled = True


def closed(state: RunState, number: int, out: list[Command]) -> None:
    """Nobody wants a session any more."""
    session = state.streams.open.get(number)
    if session is not None:
        _end(state, session, None, out)


def _end(
    state: RunState, session: Session, failure: Failure | None, out: list[Command], context: str | None = None
) -> None:
    """A session is over; a step that it is in goes on for the others."""
    del state.streams.open[session.id]
    place = session.worker if session.state == PLACED else session.frozen.worker if session.frozen else None
    if place in state.workers and (session.loaded or session.step is not None or session.frozen):
        state.streams.drops.setdefault((place, session.app), []).append(session.id)
    if session.worker in state.workers:
        state.workers[session.worker].sessions.pop(session.id, None)
    state.streams.unsettled = True
    out.append(EndSession(session.id, failure, context))


# --- where sessions are


def serve(state: RunState, worker: str | None, out: list[Command]) -> None:
    """Follow the policy, and give workers their next steps.

    :param worker: the one that the event was about; None for all.
    """
    streams = state.streams
    touched = {worker} if worker is not None else set(state.workers)
    if streams.unsettled and streams.open and not state.awaiting:
        streams.unsettled = False
        _bury_broken(state, out)
        for number, place in state.policies.sessions.place(state).items():
            session = streams.open.get(number)
            if session is not None:
                _follow(state, session, place, out)
                touched.add(session.worker or "")
        if worker is None:
            for session in list(streams.open.values()):
                if session.target in state.workers:
                    _prepare(state, state.workers[session.target], session.app, out)
    for name in touched:
        if name in state.workers:
            _advance(state, state.workers[name], out)


def _bury_broken(state: RunState, out: list[Command]) -> None:
    """Sessions whose context no worker can build are over."""
    for session in list(state.streams.open.values()):
        broken = state.contexts[session.context].broken
        if broken is not None:
            _end(state, session, broken, out, session.context)


def owner(state: RunState, event: Event) -> str | None:
    """The worker whose sessions an event may have given something to do; None for all, "" for none."""
    if type(event) is Tick:
        return None
    worker = getattr(event, "worker", None)
    if worker is None and (session := state.streams.open.get(getattr(event, "session", -1))) is not None:
        worker = session.worker
    return worker if isinstance(worker, str) else getattr(worker, "id", "")


def _follow(state: RunState, session: Session, place: str | None, out: list[Command]) -> None:
    """Do with a session what the policy says, if that is possible."""
    if session.by_user or session.state == MIGRATING:
        return
    if place is None:
        _suspend(session)
        return
    worker = state.workers.get(place)
    if worker is None or not can_carry(state, session, worker):
        return
    session.suspending = False
    if session.state == PLACED:
        session.target = place if place != session.worker else None
        _prepare(state, worker, session.app, out)
    else:
        _place(state, session, worker, out)


def _prepare(state: RunState, worker: Worker, app_id: str, out: list[Command]) -> None:
    """Have a worker build the context of sessions that it carries or will, if it does not have it."""
    app = state.apps[app_id]
    missing = app.context not in worker.contexts and worker.id in state.free
    if missing and residency.able(state, worker, state.contexts[app.context].spec):
        residency.begin(state, worker, app, out)


def _expected(state: RunState, session: Session) -> bool:
    """Whether a session's target could give it its next chunk at once: until then it stays where it is."""
    target = state.workers.get(session.target or "")
    held = target.contexts.get(session.context) if target is not None else None
    return held is not None and held.state == "ready"


def _place(state: RunState, session: Session, worker: Worker, out: list[Command]) -> None:
    """A session without an owner gets one; its frozen state is carried there first, if another worker has it."""
    session.target, session.worker = None, worker.id
    frozen = session.frozen
    if frozen is not None and frozen.worker != worker.id:
        session.state = MIGRATING
        out.append(Carry(worker.id, frozen.worker, session.id, frozen.made, frozen.digest, frozen.bytes))
        return
    session.state = PLACED
    worker.sessions[session.id] = session


def arrived(state: RunState, event: StateArrived) -> None:
    """A frozen state is where its session is to go on."""
    session = _carried(state, event)
    if session is None or session.frozen is None:
        return
    session.frozen = dataclasses.replace(session.frozen, worker=event.worker)
    worker = state.workers.get(event.worker)
    if worker is None:
        _homeless(state, session)
    elif session.suspending:
        session.worker, session.state = None, SUSPENDED
    else:
        session.state = PLACED
        worker.sessions[session.id] = session


def not_arrived(state: RunState, event: StateLost) -> None:
    """A frozen state is gone: the session goes back to what is kept."""
    session = _carried(state, event)
    if session is not None:
        session.frozen = None
        _homeless(state, session)


def _carried(state: RunState, event: StateArrived | StateLost) -> Session | None:
    session = state.streams.open.get(event.session)
    if session is None or session.state != MIGRATING or session.worker != event.worker:
        return None
    return session if session.frozen is not None and session.frozen.made == event.made else None


def _homeless(state: RunState, session: Session) -> None:
    """A session has no owner any more, and goes on from what there is of it."""
    if session.worker in state.workers:
        state.workers[session.worker].sessions.pop(session.id, None)
    session.worker = session.target = session.step = None
    session.state = SUSPENDED if session.suspending else WAITING
    _unload(session)
    state.streams.unsettled = True


def _unload(session: Session) -> None:
    """Its state is in no library process any more."""
    session.loaded = False
    session.made = session.frozen.made if session.frozen is not None else session.kept


def can_carry(state: RunState, session: Session, worker: Worker) -> bool:
    """Whether a worker stays, and holds a session's context or could load it."""
    context = state.contexts[session.context]
    return (
        context.broken is None
        and residency.able(state, worker, context.spec)
        and (session.context in worker.contexts or worker.id not in context.suspects)
    )


# --- steps


def _advance(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Give a worker the next step of each app whose sessions it carries; load what it needs for that."""
    apps = dict.fromkeys(session.app for session in worker.sessions.values())
    apps.update(dict.fromkeys(app for name, app in state.streams.drops if name == worker.id))
    for app_id in apps:
        app = state.apps[app_id]
        held = worker.contexts.get(app.context)
        _let_go(state, worker, app_id, out)
        if held is None:
            state.streams.drops.pop((worker.id, app_id), None)
            wanting = [s for s in worker.sessions.values() if s.app == app_id and not s.idle]
            if wanting:
                _prepare(state, worker, app_id, out)
        elif held.state == "ready" and worker.free_slots > 0 and not state.awaiting:
            busy = any(attempt.context == app.context for attempt in worker.running.values())
            if not busy:
                _step(state, worker, app_id, out)


def _let_go(state: RunState, worker: Worker, app: str, out: list[Command]) -> None:
    """Sessions that are to leave, and of whom the library process has nothing, need no step for it."""
    leaving = [s for s in worker.sessions.values() if s.app == app and not s.loaded and s.step is None]
    for session in leaving:
        if session.suspending or _expected(state, session) or worker.noticed is not None or worker.draining:
            _left(state, session, out)


def _left(state: RunState, session: Session, out: list[Command]) -> None:
    """A session has left its worker; it goes on at once where it was to go."""
    target = session.target
    _homeless(state, session)
    there = state.workers.get(target or "")
    if session.state == WAITING and there is not None and can_carry(state, session, there):
        _place(state, session, there, out)
        if session.state == PLACED:
            _advance(state, there, out)


def _step(state: RunState, worker: Worker, app_id: str, out: list[Command]) -> None:
    app = state.apps[app_id]
    mine = [s for s in worker.sessions.values() if s.app == app_id]
    chosen = {s.id for s in _chosen([s for s in mine if s.ready], state.capacity(app, worker))}
    orders = [Order(number, then="drop") for number in state.streams.drops.pop((worker.id, app_id), ())]
    for session in mine:
        then = _then(state, session, worker, session.id in chosen)
        if session.id in chosen:
            thaw = "" if session.loaded else "frozen" if session.frozen else "kept" if session.kept else "anew"
            orders.append(Order(session.id, thaw, session.made, session.made, then))
        elif then:
            orders.append(Order(session.id, "", session.made, None, then))
    if not orders:
        return
    number = state.next_attempt
    state.next_attempt = number + 1
    attempt = Attempt(number, app_id, app.context, worker.id, (), state.now)
    state.attempts[number] = worker.running[number] = attempt
    state.streams.steps[number] = orders
    for order in orders:
        begun = state.streams.open.get(order.session)
        if begun is not None:
            begun.step = number
            if order.chunk is not None and order.chunk >= begun.begun:
                begun.begun, begun.prompts_begun = order.chunk + 1, begun.prompts
    state.counters.steps += 1
    state.update_free(worker)
    out.append(Step(worker.id, number, app_id, app.context, (), orders))


def _chosen(ready: list[Session], most: int) -> list[Session]:
    """The sessions whose chunks a step makes: the longest unserved, and with it all of its group."""
    ready.sort(key=lambda s: (-1.0 if s.last_chunk_at is None else s.last_chunk_at, s.id))
    return [s for s in ready if s.group == ready[0].group][: max(1, most)]


def _then(state: RunState, session: Session, worker: Worker, makes_chunk: bool) -> str:
    """What a step does with a session's state after the chunk."""
    if not session.loaded and not makes_chunk:
        return ""
    if worker.noticed is not None or worker.draining:
        return "leave"  # The worker may be gone before its cache could be read.
    if session.suspending or _expected(state, session):
        return "freeze"
    made = session.made + makes_chunk
    every = session.keep_every
    return "keep" if makes_chunk and every is not None and made % every == 0 and made > session.kept else ""


def capacity(state: RunState, app: Any, worker: Any) -> int:
    """K of an app on a worker."""
    batching = state.policies.batching
    coalescing = batching if isinstance(batching, Coalescing) else _COALESCING
    return coalescing.coalesced(state, app, worker)


# --- what became of steps


def finished(
    state: RunState, attempt: Attempt, worker: Worker, orders: Sequence[Order], event: StepFinished, out: list[Command]
) -> None:
    """A step has ended: its chunks are delivered, and its sessions go on."""
    made = 0
    for position, (order, outcome) in enumerate(zip(orders, event.outcomes, strict=True)):
        session = state.streams.open.get(order.session)
        if session is None or session.step != attempt.id:
            continue
        session.step = None
        made += "made" in outcome
        _take(state, session, worker, position, order, outcome, event.seconds, out)
    if made:
        worker.learn_step(attempt.app, made, event.seconds, state.now)


def _take(
    state: RunState,
    session: Session,
    worker: Worker,
    position: int,
    order: Order,
    outcome: Any,
    seconds: float,
    out: list[Command],
) -> None:
    """What came of one order."""
    if "failure" in outcome:
        _end(state, session, Failure(**outcome["failure"], worker=worker.id, host=worker.host), out)
        return
    if "lost" in outcome:
        if order.thaw == "kept":
            _end(state, session, Failure("exception", "StateLost", outcome["lost"], worker=worker.id), out)
        else:
            session.frozen = None
            _unload(session)
        return
    if order.thaw:
        session.loaded, session.frozen = True, None
    if "made" in outcome and _made(state, session, position, outcome, seconds, out):
        return
    if "kept" in outcome:
        session.kept, session.state_bytes = session.made, outcome["kept"]
    if "frozen" in outcome:
        digest, size = outcome["frozen"]
        session.frozen, session.state_bytes = Frozen(worker.id, session.made, digest, size), size
    if order.then in ("freeze", "leave"):
        state.counters.migrations += session.target is not None
        state.counters.suspensions += session.suspending
        session.loaded = False
        _left(state, session, out)


def _made(state: RunState, session: Session, position: int, outcome: Any, seconds: float, out: list[Command]) -> bool:
    """A session has made a chunk; say whether that was its last."""
    session.made += 1
    session.chunk_seconds, session.last_chunk_at = seconds, state.now
    session.losses = 0
    if session.made >= session.doubtful:
        session.group, session.crashes = 0, 0
    if session.made <= session.chunks:  # It was delivered before.
        return False
    session.chunks = session.made
    state.counters.chunks += 1
    out.append(DeliverChunk(session.id, session.made - 1, position))
    if outcome.get("last"):
        _end(state, session, None, out)
        return True
    if outcome.get("idle") and session.prompts == session.prompts_begun:
        session.turn_over = True
        out.append(EndTurn(session.id, session.prompts))
    return False


def failed(state: RunState, attempt: Attempt, orders: Sequence[Order], failure: Failure, out: list[Command]) -> None:
    """A step failed: one of the sessions whose chunks it made is to blame, and the half that has it is tried again."""
    blamed = []
    for order in orders:
        session = state.streams.open.get(order.session)
        if session is None:
            if order.then == "drop":  # It may still be there.
                state.streams.drops.setdefault((attempt.worker, attempt.app), []).append(order.session)
            continue
        session.step = None
        if order.chunk is not None:
            session.doubtful = max(session.doubtful, order.made + 1)
            _unload(session)  # The app may have left its state half changed.
            blamed.append(session)
    _blame(state, blamed, failure, out)


def _blame(state: RunState, blamed: list[Session], failure: Failure, out: list[Command]) -> None:
    if len(blamed) == 1 and _is_over(state, blamed[0], failure):
        _end(state, blamed[0], failure, out)
        return
    middle = len(blamed) // 2
    for half in (blamed[:middle], blamed[middle:]):
        state.streams.groups += 1
        for session in half:
            session.group = state.streams.groups


def _is_over(state: RunState, session: Session, failure: Failure) -> bool:
    """Count a failure of a session that was alone in its step, and say whether it was the last one it may have."""
    session.crashes += 1
    if failure.kind == "input":
        return True
    if failure.kind in ("crash", "lost"):
        return session.crashes >= state.limits.crashes
    return session.crashes > state.apps[session.app].spec.retries


# --- losses


def context_gone(state: RunState, worker: Worker, context: str) -> None:
    """A library process is gone with the states in it; its sessions go on from what is kept."""
    for session in worker.sessions.values():
        if session.context == context:
            session.step = None
            _unload(session)
    for key in [key for key in state.streams.drops if key[0] == worker.id and state.apps[key[1]].context == context]:
        del state.streams.drops[key]  # What is frozen stays until the worker goes.


def context_failed(state: RunState, worker: Worker, context: str) -> None:
    """A context could not be built on a worker: its sessions look for another."""
    for session in state.streams.open.values():
        if session.context == context and session.target == worker.id:
            session.target = None
    for session in list(worker.sessions.values()):
        if session.context == context:
            _homeless(state, session)


def worker_lost(state: RunState, worker: Worker, evicted: bool, out: list[Command]) -> None:
    """A worker is gone with all states that were on it."""
    streams = state.streams
    blamed = []
    for session in list(streams.open.values()):
        if session.frozen is not None and session.frozen.worker == worker.id:
            session.frozen = None
            if session.state == MIGRATING:
                _homeless(state, session)
            else:
                _unload(session)
        if session.worker != worker.id:
            if session.target == worker.id:
                session.target = None
            continue
        stepped = session.step is not None
        _homeless(state, session)
        if stepped and not evicted:
            session.losses += 1
            blamed += [session] if session.losses >= state.limits.losses else []
    for key in [key for key in streams.drops if key[0] == worker.id]:
        del streams.drops[key]
    for attempt in worker.running:
        streams.steps.pop(attempt, None)
    if blamed:
        message = (
            f"the workers that made its chunks were lost {state.limits.losses} times running, without notice: its "
            "state may exhaust the machine's memory"
        )
        _blame(state, blamed, Failure("lost", "WorkerLost", message, worker=worker.id), out)
    streams.unsettled = True


# --- invariants


def validate(state: RunState) -> None:
    """Check what always holds of sessions.

    :raises AssertionError: naming what does not.
    """
    streams = state.streams
    owners = [number for worker in state.workers.values() for number in worker.sessions]
    assert len(owners) == len(set(owners)), "a session has two owners"
    for session in streams.open.values():
        _check(state, session)
    assert set(owners) <= streams.open.keys(), "a worker carries a session that is over"
    for number in streams.steps:
        assert number in state.attempts, f"step {number} is not running"
    for worker in state.workers.values():
        steps = [a.context for n, a in worker.running.items() if n in streams.steps]
        assert len(steps) == len(set(steps)), f"{worker.id} has two steps of a context at a time"


def _check(state: RunState, session: Session) -> None:
    name = f"session {session.id}"
    placed = session.state == PLACED
    owner = state.workers.get(session.worker or "")
    assert placed == (owner is not None and session.id in owner.sessions), f"{name}: wrongly (not) placed"
    assert (session.worker is None) == (session.state in (WAITING, SUSPENDED)), f"{name}: {session.state} at a worker"
    assert placed or not (session.loaded or session.step or session.target), f"{name} is on a worker that is not its"
    assert session.kept <= session.made <= session.chunks, f"{name}: its state, its chunks and what is kept disagree"
    assert session.state != MIGRATING or session.frozen is not None, f"{name} migrates without a state"
    assert session.state != SUSPENDED or session.suspending, f"{name} is suspended for nobody"
    if session.frozen is not None:
        assert session.frozen.worker in state.workers, f"{name}: its frozen state is on a worker that is gone"
        assert not session.loaded and session.made == session.frozen.made, f"{name} has two states"
    if session.step is not None:
        orders = state.streams.steps.get(session.step, ())
        assert sum(order.session == session.id for order in orders) == 1, f"{name} is not in its step"
        assert state.attempts[session.step].worker == session.worker, f"{name}: its step is on another worker"
    elif placed and session.loaded and owner is not None:
        held = owner.contexts.get(session.context)
        assert held is not None and held.state == "ready", f"{name}: its state is in no library process"
