"""Dispatch: what the policies' choices lead to: batches for free workers, contexts ahead of demand, plans.

What does not live here: which workers are free (run_state.py), the items' transitions (items.py), the building of
contexts for what waits (context_moves.py), and where a plan is computed (executors/).
"""

from __future__ import annotations

from ctxflow.policies.protocols import Planning
from ctxflow.scheduler import context_moves, items
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, Group
from ctxflow.scheduler.commands import Command, MakePlan, Note, Place, Run
from ctxflow.scheduler.eligibility import group_for
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Attempt, Worker

HELD_SECONDS = 0.1  # How long work waits that a batching policy holds back beyond its linger.


def serve(state: RunState, out: list[Command]) -> None:
    """Ask the routing policy who gets what, as long as that leads to anything."""
    while state.free and state.ready:
        ready = state.ready.offered(state.now, len(state.free))
        if not ready:
            break
        chosen = state.policies.routing.assign(state.view, [app.shown for app in ready])
        given = [give(state, a.worker, a.app, out) for a in chosen]
        if not any(given):
            break


def give(state: RunState, worker_id: str, app_id: str, out: list[Command]) -> bool:
    """Follow an assignment of the routing policy, if it is possible."""
    worker, app = state.free.get(worker_id), state.ready.get(app_id)
    if worker is None or app is None:
        return False
    held = worker.contexts.get(app.context)
    if held is not None:
        return held.state == "ready" and run(state, worker, app, out)
    return context_moves.admissible(state, worker, app) and context_moves.begin(state, worker, app, out)


def run(state: RunState, worker: Worker, app: App, out: list[Command]) -> bool:
    """Give a worker that holds the app's context a batch.

    False if the batching policy holds the work back, or all that waits failed there and is to run elsewhere.
    """
    group = group_for(state, app, worker) if app.isolated.items else None
    if group is not None:
        _start(state, worker, app, items.take_group(state, app, group), group, out)
        return True
    if app.isolated.items and len(app.queue) <= app.cancelled:
        return False
    size = state.view.batch_size(app.shown, worker.shown)
    if size < 1:
        since = state.now if app.waiting_since is None else app.waiting_since
        until = since + state.policies.batching.linger
        # Never now: a policy that says 0 beyond its linger would be asked without end.
        until = until if until > state.now else state.now + HELD_SECONDS
        state.ready.hold(app, until)
        state.wake(until)
        return False
    _start(state, worker, app, items.take(state, app, size), None, out)
    return True


def _start(
    state: RunState, worker: Worker, app: App, batch: tuple[int, ...], group: Group | None, out: list[Command]
) -> None:
    number = state.next_attempt
    state.next_attempt = number + 1
    attempt = Attempt(number, app.id, app.context, worker.id, batch, state.now, group, worker.place)
    state.attempts[number] = worker.running[number] = attempt
    app.attempts += 1
    if state.contexts[app.context].spec.level != ev.PERVASIVE:
        worker.contexts[app.context].state = "spent"
    state.counters.batches += 1
    state.update_free(worker)
    out.append(Run(worker.id, number, app.id, app.context, batch))


def duplicate(state: RunState, event: ev.Event, out: list[Command]) -> None:
    """Let workers that have nothing to do run straggling batches a second time, where the policy says so.

    Asked are all of them on ticks, and else the one that has just come free: to ask all of them each time would
    make the end of a run on n workers take n * n steps.
    """
    freed = getattr(event, "worker", None)
    if isinstance(freed, ev.WorkerSpec):
        freed = freed.id
    idle = list(state.free.values()) if type(event) is ev.Tick else [state.free.get(freed)] if freed else []
    for worker in idle:
        if worker is None:
            continue
        number = state.policies.batching.duplicate(state.view, worker.shown)
        attempt = state.attempts.get(number) if number is not None else None
        if attempt is None or attempt.worker == worker.id or attempt.context not in worker.contexts:
            continue
        if attempt.group is not None and worker.place in attempt.group.failed_on:
            continue
        left = tuple([item for item in attempt.items if item in state.open])
        if not left or worker.contexts[attempt.context].state != "ready":
            continue
        for item in left:
            state.copies[item] = state.copies.get(item, 1) + 1
        state.counters.duplicates += 1
        _start(state, worker, state.apps[attempt.app], left, attempt.group, out)


# --- contexts ahead of demand


def warm(state: RunState, out: list[Command]) -> None:
    """Load what the routing policy wants ahead of demand, on free workers that run nothing."""
    if state.awaiting or state.policies.warming is None:
        return
    for assignment in state.policies.warming.warm(state.view):
        worker, app = state.free.get(assignment.worker), state.apps.get(assignment.app)
        if worker is None or app is None or worker.running or app.context in worker.contexts:
            continue
        context = state.contexts[app.context]
        # What ends with its call is not built before there is one.
        if context.spec.level != ev.PERVASIVE or context.broken is not None:
            continue
        if context_moves.loadable(state, worker, context):
            context_moves.begin(state, worker, app, out, ahead=True)


# --- plans


def place(state: RunState, out: list[Command]) -> None:
    """Place anew: on ticks, when a tier, a context or a worker is new, and when a plan was made."""
    plan = state.policies.placement.plan(state.view)
    if plan != state.plan:
        state.plan = plan
        out.append(Place.of(plan))
        items.divide(state, out)
    context_moves.follow(state, out)
    if state.planning is None and state.policies.planning is not None:
        state.planning = state.policies.planning.planning(state.view)
        if state.planning is not None:
            out.append(MakePlan(state.planning))


def made(state: RunState, event: ev.PlanMade, out: list[Command]) -> None:
    """Follow a plan that was computed; where it could not be, the one in place stays."""
    planning, state.planning = state.planning, None
    policy = state.policies.planning
    if planning is None or policy is None:
        return
    if event.failure is None:
        policy.planned(planning() if event.results is None else event.results)
    elif event.failure != state.planning_failure:  # It may fail again each time: who reads it knows already.
        text = f"placement: no new plan could be made ({event.failure}), and the one in place stays: please report it"
        out.append(Note(text, trouble=True))
    state.planning_failure = event.failure
    place(state, out)


def computed(planning: Planning, time: float = 0.0) -> ev.PlanMade:
    """Compute a plan, wherever that is: the event that tells of it.

    >>> computed(lambda: 1 / 0).failure
    'ZeroDivisionError: division by zero'
    """
    try:
        return ev.PlanMade(time, planning())
    except Exception as error:
        return ev.PlanMade(time, failure=f"{type(error).__name__}: {error}")
