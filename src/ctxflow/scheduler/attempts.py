"""Attempts: how they begin and end, and what overlaps: windows kept full, workers drained, library processes that died.

The calls of an app that overlaps take one slot of their worker together, per context. A worker is drained, so that its
slot comes free for other work, when a routing policy gives it other work than what its window holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ctxflow.scheduler import context_moves, faults, items, prefixes, session_moves
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, Group
from ctxflow.scheduler.commands import Command, Run
from ctxflow.scheduler.eligibility import group_for
from ctxflow.scheduler.events import Failure
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Attempt, Worker

DEATHS = 2  # Times that a library process may die under an item and others before the item is a suspect.
FEW = 8  # Suspects that run alone, each by itself; of more, the square root of their number runs at a time.


def start(
    state: RunState, worker: Worker, app: App, batch: tuple[int, ...], group: Group | None, out: list[Command]
) -> None:
    """Run these items on a worker that has a slot, or room in a window, for them; `RunState.update_free` follows."""
    number = state.next_attempt
    state.next_attempt = number + 1
    context = app.context
    attempt = Attempt(number, app.id, context, worker.id, batch, state.now, group, worker.place)
    state.attempts[number] = worker.running[number] = attempt
    app.attempts += 1
    if app.windowed:
        state.flights.begin(number, batch)
    if app.overlaps:
        worker.in_flight[context] = worker.in_flight.get(context, 0) + 1
        worker.overlapping += 1
        state.flights.overlapping += 1
        worker.windows.setdefault(context, 1)
    elif state.contexts[context].spec.level != ev.PERVASIVE:
        worker.contexts[context].state = "spent"
    state.counters.batches += 1
    out.append(Run(worker.id, number, app.id, context, batch))


def end(state: RunState, number: int, worker: Worker | None) -> Attempt | None:
    """Take an attempt off its worker and return it; None if it does not run there."""
    attempt = worker.running.pop(number, None) if worker is not None else None
    if worker is None or attempt is None:
        return None
    del state.attempts[number]
    state.streams.steps.pop(number, None)
    if state.answered or state.interrupted:
        state.answered.pop(number, None)
        state.interrupted.discard(number)
    app, context = state.apps[attempt.app], attempt.context
    app.attempts -= 1
    if app.windowed:
        state.flights.end(number, attempt.items)
    if app.overlaps:
        worker.overlapping -= 1
        state.flights.overlapping -= 1
        worker.in_flight[context] -= 1
        if not worker.in_flight[context]:
            del worker.in_flight[context], worker.windows[context]
    held = worker.contexts.get(context)
    if held is not None:
        held.last_used = state.now
    state.update_free(worker)
    return attempt


def has_room(worker: Worker, app: App) -> bool:
    """Return whether a worker that holds the app's context could take one more of its calls now."""
    return worker.has_room(app.context) if app.overlaps else worker.unused_slots > 0


def next_group(state: RunState, worker: Worker, app: App) -> tuple[Group | None, bool]:
    """Return the group that a worker is to run next, if there is one, and whether it may run anything of the app now.

    What has to run alone waits until nothing overlaps on one worker; one at a time is drained for that.
    """
    apart = runs_apart(state, worker, app.context)
    group = group_for(state, app, worker) if app.isolated.items else None
    if apart:
        flying = worker.in_flight[app.context]
        if group is not None and group.apart == apart > flying:
            return group, True
        worker.windows[app.context] = flying
        state.update_free(worker)
        return None, False
    if group is None or not (group.alone and app.context in worker.in_flight):
        return group, True
    for each in state.workers.values():
        drained = app.context in each.turning and each.promised == app.id
        if drained or runs_apart(state, each, app.context):
            return None, True
    state.turn(worker, (app.context,), app.id)
    return None, False


def runs_apart(state: RunState, worker: Worker, context: str) -> int:
    """Return how many a worker may have in flight of what it runs apart from all others; 0 if it runs nothing so."""
    if context not in worker.in_flight:
        return 0
    there = (each for each in worker.running.values() if each.context == context and state.apps[each.app].overlaps)
    return next(there).apart


def window_for(state: RunState, worker: Worker, app: App) -> int:
    """Return how many calls of an app a worker may have in flight, and note how many if more were queued."""
    view, full = state.view, worker.full.get(app.context)
    window = view.batch_size(app.shown, worker.shown) if app.windowed else app.concurrency or 1
    if window != full:
        worker.full[app.context] = view.full_window(app.shown, worker.shown)
    return window


def widen(state: RunState, app: App, most: int) -> None:
    """Ask again how many calls of an app workers may have in flight whose windows are full.

    A window that was a share of a short queue would stay so until one of its calls ends, whatever is queued meanwhile.

    :param most: workers that are asked.
    """
    for worker in state.flights.take_full(app.context, most):
        if worker.leaving or app.context in worker.turning or runs_apart(state, worker, app.context):
            continue
        window = window_for(state, worker, app)
        if window > worker.windows[app.context]:
            worker.windows[app.context] = window
            state.update_free(worker)


def fill(state: RunState, worker: Worker, app: App, out: list[Command]) -> bool:
    """Give a worker queued items of an app, until its window is full or nothing is left; whether it got any."""
    context, window = app.context, window_for(state, worker, app)
    room = min(window - worker.in_flight.get(context, 0), len(app.queue) - app.cancelled)
    if room > 0:
        for item in prefixes.take(state, worker, app, room) if app.alike else items.take(state, app, None, room, out):
            start(state, worker, app, (item,), None, out)
        if app.alike:
            items.settle(state, app, out)
    if context in worker.in_flight:
        worker.windows[context] = window
    state.update_free(worker)
    return room > 0


def in_order(state: RunState, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return attempts that end together so that what they requeue, each to the front, keeps its order."""
    whole: list[Attempt] = []
    each: list[Attempt] = []
    for attempt in attempts:
        (each if state.apps[attempt.app].overlaps else whole).append(attempt)
    return whole + each[::-1]


def lose_context(state: RunState, worker: Worker, context: str, out: list[Command]) -> None:
    """Handle the end of a library process: requeue what else it ran, which is not to blame."""
    session_moves.context_gone(state, worker, context)
    for attempt in in_order(state, [a for a in worker.running.values() if a.context == context]):
        end(state, attempt.id, worker)
        items.requeue(state, attempt, items.unanswered(state, attempt), out)
    context_moves.gone(state, worker, context, out)


def died_together(state: RunState, attempt: Attempt, worker: Worker, failure: Failure, out: list[Command]) -> bool:
    """Handle a library process that died with several calls in flight, of which `attempt` has been ended already.

    None of them is accused. Those that were there when it died before run apart from all others from now on: many so
    many at a time that there are as many such groups, few alone, which shows who does it.

    :returns: False if there was only this one.
    """
    beside = [a for a in worker.running.values() if a.context == attempt.context and state.apps[a.app].overlaps]
    if not beside:
        return False
    every = [(each, items.unanswered(state, each)) for each in (attempt, *beside)]
    faults.charge(state, attempt, worker, [item for _, left in every for item in left], failure)
    for each in beside:
        end(state, each.id, worker)
    counts = (state.losses, state.limits.losses) if failure.kind == "lost" else (state.deaths, DEATHS)
    _set_apart(state, every, *counts, failure, out)
    lose_context(state, worker, attempt.context, out)
    return True


def lost_together(state: RunState, worker: Worker, failure: Failure, out: list[Command]) -> None:
    """Handle the loss of a worker, without notice, for what overlapped on it: as the death of a library process."""
    for context in list(worker.in_flight):
        there = [a for a in worker.running.values() if a.context == context and state.apps[a.app].overlaps]
        if len(there) > 1:
            every = [(each, items.unanswered(state, each)) for each in there]
            for each in there:
                end(state, each.id, worker)
            _set_apart(state, every, state.losses, state.limits.losses, failure, out)


def _set_apart(
    state: RunState,
    every: Sequence[tuple[Attempt, list[int]]],
    table: dict[int, int],
    limit: int,
    failure: Failure,
    out: list[Command],
) -> None:
    """Requeue what ended together; items to which that has happened so often, as `table` counts, run apart."""
    suspects: dict[int, list[int]] = {}
    for each, left in every:
        for item in left:
            table[item] = table.get(item, 0) + 1
        suspects[each.id] = [item for item in left if table[item] >= limit]
    found = Counter(each.app for each, _ in every for _ in suspects[each.id])
    for each, left in reversed(every):
        together = math.isqrt(found[each.app]) if found[each.app] > FEW else 1
        items.isolate(state, each, suspects[each.id], together, failure, out)
        items.requeue(state, each, [item for item in left if item not in suspects[each.id]], out)
