"""Steps: one call in which a worker makes the chunks of several sessions, and what becomes of them.

A step collects the sessions of an app that are ready on a worker, up to K; what else is to be done with the states that
the worker carries travels along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.scheduler import context_moves, faults
from ctxflow.scheduler.app_state import App
from ctxflow.scheduler.commands import Command, DeliverChunk, EndTurn, Order, Step
from ctxflow.scheduler.eligibility import cache_only, can_be_kept, elsewhere
from ctxflow.scheduler.events import Failure, StepFinished
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.session_moves import (
    aim,
    bury_broken,
    can_carry,
    end,
    expected,
    follow,
    give_up_targets,
    homeless,
    place,
    prepare,
    unload,
)
from ctxflow.scheduler.worker_state import MIGRATING, PLACED, WAITING, Attempt, Frozen, SessionState, Worker

KEPT_AT_ONCE = 16  # States that a step brings out of a cache: they come in one answer.


def serve(state: RunState, worker: str | None, out: list[Command]) -> None:
    """Follow the policy, and give workers their next steps.

    :param worker: the one that the event was about; None for all.
    """
    streams = state.streams
    touched = [worker] if worker is not None else []
    if worker is None and any(streams.open[n].failed_on for waiting in streams.waiting.values() for n in waiting):
        streams.unsettled = True  # Who would not do a moment ago may be the last one by now.
    if streams.unsettled and streams.open and not state.awaiting:
        streams.unsettled = False
        bury_broken(state, out)
        give_up_targets(state)
        for number, worker_id in state.policies.sessions.place(state.view).items():
            session = streams.open.get(number)
            if session is not None:
                follow(state, session, worker_id, out)
                touched.append(session.worker or "")
        touched += [each.id for each in sorted(streams.leaving.values(), key=_order)]
        if worker is None:
            for session in list(streams.open.values()):
                if session.target in state.workers:
                    prepare(state, state.workers[session.target], session.app, out)
    if worker is None:  # All that have something to do with sessions.
        names = {*touched, *streams.leaving, *(name for name, _ in streams.drops)}
        names.update(session.worker for session in streams.open.values() if session.worker is not None)
        touched = [each.id for each in sorted((state.workers[n] for n in names if n in state.workers), key=_order)]
    for name in dict.fromkeys(touched):  # Each once, in an order that a replay has too.
        if name in state.workers:
            _advance(state, state.workers[name], out)


def _order(worker: Worker) -> int:
    return worker.order


# --- what a step is made of


def _advance(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Give a worker the next step of each app whose sessions it carries; load what it needs for that."""
    if worker.released:
        for session in list(worker.sessions.values()):
            homeless(state, session)
        for key in [key for key in state.streams.drops if key[0] == worker.id]:
            del state.streams.drops[key]
        return
    apps = dict.fromkeys(session.app for session in worker.sessions.values())
    apps.update(dict.fromkeys(app for name, app in state.streams.drops if name == worker.id))
    unkept = []
    if worker.leaving:
        unkept = cache_only(state, worker)
    apps.update(dict.fromkeys(session.app for session in unkept))
    for app_id in apps:
        app = state.apps[app_id]
        held = worker.contexts.get(app.context)
        _let_go(state, worker, app_id, out)
        if held is None:
            _forget_drops(state, worker, app)
            wanting = [s for s in worker.sessions.values() if s.app == app_id and not s.idle]
            if wanting:
                prepare(state, worker, app_id, out)
            elif (
                worker.unused_slots > 0
                and _turn_of(state, worker, app_id, unkept)
                and context_moves.begin(state, worker, app, out)
            ):
                worker.rebuilt.add(app.context)
        elif held.state == "ready" and not state.awaiting:
            busy = any(attempt.context == app.context for attempt in worker.running.values())
            if worker.unused_slots > 0 and not busy:
                _step(state, worker, app_id, out)
            elif worker.in_flight and any(s.ready for s in worker.sessions.values() if s.app == app_id):
                state.turn(worker, worker.in_flight)


def _forget_drops(state: RunState, worker: Worker, app: App) -> None:
    """Forget which states are to be dropped in a library process that is gone; one that is parked still has them."""
    if app.context not in worker.parked:
        state.streams.drops.pop((worker.id, app.id), None)


def _turn_of(state: RunState, worker: Worker, app: str, unkept: Sequence[SessionState]) -> bool:
    """Return whether to build an app's context to bring its states out: those that do not fit together take turns."""
    if any(session.context in worker.contexts for session in unkept):
        return False
    return any(session.app == app and can_be_kept(state, session, worker) for session in unkept)


def _let_go(state: RunState, worker: Worker, app: str, out: list[Command]) -> None:
    """Let sessions leave without a step whose state is not in the library process."""
    for session in [s for s in worker.sessions.values() if s.app == app and not s.loaded and s.step is None]:
        if session.suspending or expected(state, session) or worker.leaving:
            _left(state, session, out)


def _left(state: RunState, session: SessionState, out: list[Command]) -> None:
    """Handle a session that left its worker; it goes on at once where it was to go."""
    target = session.target
    homeless(state, session)
    there = state.workers.get(target or "")
    if session.state == WAITING and there is not None and can_carry(state, session, there):
        place(state, session, there, out)
        if session.state == PLACED:
            _advance(state, there, out)


def _step(state: RunState, worker: Worker, app_id: str, out: list[Command]) -> None:
    app = state.apps[app_id]
    mine = [s for s in worker.sessions.values() if s.app == app_id]
    chosen = {s.id for s in _chosen([s for s in mine if s.ready], state.view.capacity(app.shown, worker.shown))}
    orders = [Order(number, then="drop") for number in state.streams.drops.pop((worker.id, app_id), ())]
    for session in mine:
        then = _then(state, session, worker, session.id in chosen)
        if session.id in chosen:
            thaw = "" if session.loaded else "frozen" if session.frozen else "kept" if session.kept else "anew"
            orders.append(Order(session.id, thaw, session.made, session.made, then))
        elif then:
            orders.append(Order(session.id, "", session.made, None, then))
    if worker.leaving and not chosen:  # No other session's chunk is to be what they are lost for.
        unkept = [s for s in cache_only(state, worker) if s.app == app_id]
        orders += [Order(s.id, "frozen", s.made, None, "leave") for s in unkept[:KEPT_AT_ONCE]]
    if not orders:
        return
    still = [order for order in orders if order.chunk is None]
    if any(order.then == "freeze" for order in still):
        orders = still  # Whoever gets a prompt meanwhile does not wait for the chunks of others.
    number = state.next_attempt
    state.next_attempt = number + 1
    attempt = Attempt(number, app_id, app.context, worker.id, (), state.now, place=worker.place)
    state.attempts[number] = worker.running[number] = attempt
    app.attempts += 1
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


def _chosen(ready: list[SessionState], most: int) -> list[SessionState]:
    """Return the sessions whose chunks a step makes: the longest unserved, and with it all of its group."""
    ready.sort(key=lambda s: (-1.0 if s.last_chunk_at is None else s.last_chunk_at, s.id))
    return [s for s in ready if s.group == ready[0].group][: max(1, most)]


def _then(state: RunState, session: SessionState, worker: Worker, makes_chunk: bool) -> str:
    """Return what a step does with a session's state after the chunk."""
    if not session.loaded and not makes_chunk:
        return ""
    if worker.leaving and not _in_no_hurry(state, session, worker):
        return "leave"  # The worker may be gone before its cache could be read.
    if session.suspending or expected(state, session):
        return "freeze"
    made = session.made + makes_chunk
    every = session.keep_every
    return "keep" if makes_chunk and every is not None and made % every == 0 and made > session.kept else ""


def _in_no_hurry(state: RunState, session: SessionState, worker: Worker) -> bool:
    """Return whether a session stays until another worker takes over: its worker is neither evicted nor in excess."""
    tier = state.tiers.get(worker.tier)
    waits = tier is not None and worker.id in tier.emptying and tier.connected <= tier.spec.maximum
    return waits and worker.noticed is None and not session.idle and not expected(state, session)


# --- what became of steps


def finished(
    state: RunState, attempt: Attempt, worker: Worker, orders: Sequence[Order], event: StepFinished, out: list[Command]
) -> None:
    """Deliver a step's chunks, and have its sessions go on."""
    _pass(state, attempt, worker, orders, event)
    _learn(state, worker, attempt, orders, event)
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
        state.apps[attempt.app].measured_on[worker.id] = worker.shown


def _learn(state: RunState, worker: Worker, attempt: Attempt, orders: Sequence[Order], event: StepFinished) -> None:
    """Learn what each session adds to a step, from one all of whose chunks are those of sessions that are there."""
    numbers = [order.session for order, outcome in zip(orders, event.outcomes, strict=True) if "made" in outcome]
    makers = [session for number in numbers if (session := state.streams.open.get(number)) is not None]
    if not makers or len(makers) < len(numbers):
        return
    shares = state.apps[attempt.app].step_shares
    for session in makers:
        if session.own is None:
            session.own = shares.newcomer(event.seconds, len(makers))
    shares.learn([each.own for each in makers if each.own is not None], event.seconds, worker.spec.gpu_model or "")


def _pass(state: RunState, attempt: Attempt, worker: Worker, orders: Sequence[Order], event: StepFinished) -> None:
    """Count chunks for the worker that made them, and against others where steps for the same chunks failed."""
    pairs = zip(orders, event.outcomes, strict=True)
    makers = [each for order, out in pairs if "made" in out and (each := state.streams.open.get(order.session))]
    if makers:
        faults.passed(state, worker, state.apps[attempt.app])
    charges = state.streams.charges
    if charges.of:
        again = [each.id for each in makers if each.step == attempt.id and each.made + 1 >= each.doubtful]
        faults.answered(state, attempt, again, charges)


def _take(
    state: RunState,
    session: SessionState,
    worker: Worker,
    position: int,
    order: Order,
    outcome: Any,
    seconds: float,
    out: list[Command],
) -> None:
    """Handle the outcome of one order."""
    if "failure" in outcome:
        end(state, session, Failure(**outcome["failure"], worker=worker.id, host=worker.host), out)
        return
    if "lost" in outcome:
        if order.thaw == "kept":
            end(state, session, Failure("exception", "StateLost", outcome["lost"], worker=worker.id), out)
        else:
            _brought_out(state, session, order, outcome)
        return
    if order.thaw and order.chunk is None:
        _brought_out(state, session, order, outcome)
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


def _brought_out(state: RunState, session: SessionState, order: Order, outcome: Any) -> None:
    """Note that a session's state left a worker's cache: it is kept beside it, or lost."""
    if "kept" in outcome:
        session.kept, session.state_bytes = order.made, outcome["kept"]
    session.frozen = None
    unload(session)
    state.streams.unsettled = True


def _made(
    state: RunState, session: SessionState, position: int, outcome: Any, seconds: float, out: list[Command]
) -> bool:
    """Deliver a session's chunk; return whether that was its last."""
    session.made += 1
    session.chunk_seconds, session.last_chunk_at = seconds, state.now
    session.losses = 0
    if session.made >= session.doubtful:
        session.group, session.crashes, session.failed_on = 0, 0, frozenset()
    if session.made <= session.chunks:  # It was delivered before.
        return False
    session.chunks = session.made
    state.counters.chunks += 1
    out.append(DeliverChunk(session.id, session.made - 1, position))
    if outcome.get("last"):
        end(state, session, None, out)
        return True
    if outcome.get("idle") and session.prompts == session.prompts_begun:
        session.turn_over = True
        out.append(EndTurn(session.id, session.prompts))
    return False


def failed(state: RunState, attempt: Attempt, orders: Sequence[Order], failure: Failure, out: list[Command]) -> None:
    """Handle a failed step: halve the sessions whose chunks it was to make until the bad one stands alone.

    Where it looks like the machine's fault, all of them go on elsewhere first.
    """
    blamed: list[SessionState] = []
    for order in orders:
        session = state.streams.open.get(order.session)
        if session is None:
            if order.then == "drop":  # It may still be there.
                state.streams.drops.setdefault((attempt.worker, attempt.app), []).append(order.session)
            continue
        session.step = None
        if order.thaw and order.chunk is None:
            _brought_out(state, session, order, {})  # To try again could keep its worker for ever.
        elif order.chunk is not None:
            session.doubtful = max(session.doubtful, order.made + 1)
            unload(session)  # The app may have left its state half changed.
            blamed.append(session)
    worker, place = state.workers[attempt.worker], frozenset([attempt.place])
    faults.charge(state, attempt, worker, [each.id for each in blamed], failure, state.streams.charges)
    moved = any(each.failed_on for each in blamed)
    if failure.machine and not moved and elsewhere(state, state.apps[attempt.app], place):
        state.streams.groups += 1
        for session in blamed:
            session.group, session.failed_on, session.failed_at = state.streams.groups, place, state.now
            homeless(state, session)
    else:
        _blame(state, blamed, orders, failure, out)


def _blame(
    state: RunState, blamed: list[SessionState], orders: Sequence[Order], failure: Failure, out: list[Command]
) -> None:
    """Halve those that may be to blame, so that one stands alone at last, and is over."""
    alone = sum(order.chunk is not None for order in orders) == 1  # Else it may be another session's fault.
    if alone and blamed and _is_over(state, blamed[0], failure):
        end(state, blamed[0], failure, out)
        return
    middle = len(blamed) // 2
    for half in (blamed[:middle], blamed[middle:]):
        state.streams.groups += 1
        for session in half:
            session.group = state.streams.groups


def _is_over(state: RunState, session: SessionState, failure: Failure) -> bool:
    """Count a failure of a session that was alone in its step, and say whether it was the last one it may have."""
    session.crashes += 1
    if failure.kind == "input":
        return True
    if failure.kind in ("crash", "lost"):
        return session.crashes >= state.limits.crashes
    return session.crashes > state.apps[session.app].spec.retries


def worker_lost(state: RunState, worker: Worker, evicted: bool, out: list[Command]) -> None:
    """Handle a lost worker: all states that were on it are gone."""
    streams = state.streams
    steps = [streams.steps.pop(number) for number in worker.running if number in streams.steps]
    for session in list(streams.open.values()):
        if session.frozen is not None and session.frozen.worker == worker.id:
            session.frozen = None
            if session.worker is None:
                session.step = None
            if session.state == MIGRATING:
                homeless(state, session)
            else:
                unload(session)
        if session.target == worker.id:
            aim(state, session, None)
        if session.worker == worker.id:
            homeless(state, session)
    for key in [key for key in streams.drops if key[0] == worker.id]:
        del streams.drops[key]
    for orders in steps if not evicted else ():
        _blame_loss(state, worker, orders, out)
    streams.unsettled = True


def _blame_loss(state: RunState, worker: Worker, orders: Sequence[Order], out: list[Command]) -> None:
    """Count a worker that was lost in a step; one of the sessions in too many such steps running may be to blame."""
    blamed = []
    for order in orders:
        session = state.streams.open.get(order.session)
        if session is None or order.chunk is None:
            continue
        session.losses += 1
        if session.losses >= state.limits.losses:
            session.doubtful = max(session.doubtful, order.made + 1)
            blamed.append(session)
    message = (
        f"the workers that made its chunks were lost {counted(state.limits.losses, 'time')} running, without "
        "notice: its state may exhaust the machine's memory"
    )
    failure = Failure("lost", "WorkerLost", message, worker=worker.id, host=worker.host)
    _blame(state, blamed, orders, failure, out)
