"""Transitions of items: queued, assigned, answered, requeued, bisected, dead.

An item is open (in `RunState.open`) from its submission until it is done, dead or cancelled; an open item is
either queued once, or held by at least one attempt. What does not live here: which worker runs what (dispatch.py).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ctxflow.scheduler.commands import Bury, Command, Deliver
from ctxflow.scheduler.events import Failure
from ctxflow.scheduler.state import App, Attempt

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


def submit(state: RunState, app: App, items: Sequence[int], out: list[Command]) -> None:
    """New items wait for the app; they die at once if its context is broken."""
    app.arrived += len(items)
    state.counters.submitted += len(items)
    state.open.update(dict.fromkeys(items, app))
    app.queue.extend(items)
    app.held_until = None  # What was held back may be enough for a batch now.
    _queued(state, app, out)


def requeue_all(state: RunState, app: App, items: Sequence[int], out: list[Command]) -> None:
    """These open items, and what must run alone, are all that an app has queued from now on."""
    state.open.update(dict.fromkeys(items, app))
    app.queue = collections.deque(items)
    app.cancelled = 0
    app.held_until = None
    _taken(state, app)
    _queued(state, app, out)


def _queued(state: RunState, app: App, out: list[Command]) -> None:
    """Note that an app has work, or bury the work if its context is broken."""
    broken = state.contexts[app.context].broken
    if broken is not None:
        bury_backlog(state, app, broken, out)
    elif app.backlog and app.id not in state.ready:
        state.ready[app.id] = app
        app.waiting_since = state.now


def take(state: RunState, app: App, count: int) -> tuple[Sequence[int], bool]:
    """The items of the app's next batch, and whether they form an isolated group that must stay as it is."""
    isolated = bool(app.isolated)
    items: Sequence[int]
    if isolated:
        items = app.isolated.popleft()
        app.isolated_items -= len(items)
    elif app.cancelled:
        items = list(itertools.islice(_open_ones(state, app), count))
    elif count >= len(app.queue):
        items = tuple(app.queue)
        app.queue.clear()
    else:
        pop = app.queue.popleft
        items = [pop() for _ in range(count)]
    _taken(state, app)
    return items, isolated


def _open_ones(state: RunState, app: App) -> Iterator[int]:
    """Take items off the queue, leaving out those that were cancelled there."""
    while app.queue:
        item = app.queue.popleft()
        if item in state.open:
            yield item
        else:
            app.cancelled -= 1


def _taken(state: RunState, app: App) -> None:
    if not app.backlog:
        app.queue.clear()  # Of cancelled items.
        app.cancelled = 0
        state.ready.pop(app.id, None)
        app.waiting_since = app.held_until = None


def answer(state: RunState, attempt: Attempt, items: Sequence[int], out: list[Command]) -> None:
    """An attempt answers those of these items that nobody answered before."""
    opened = state.open
    positions = [n for n, item in enumerate(items) if item in opened]
    if not positions:
        return
    won, part = items, len(positions) < len(items)
    if part:
        won = [won[n] for n in positions]
    _close(state, won)
    state.counters.done += len(won)
    out.append(Deliver(attempt.id, won, positions if part else None))


def _bury(
    state: RunState, items: Sequence[int], failure: Failure, out: list[Command], context: str | None = None
) -> None:
    """These items are dead."""
    _close(state, items)
    state.counters.dead += len(items)
    out.append(Bury(items, failure, context))


def _close(state: RunState, items: Iterable[int]) -> None:
    for item in items:
        del state.open[item]
    for table in (state.copies, state.losses, state.crashes, state.raised):
        if table:
            for item in items:
                table.pop(item, None)


def bury_backlog(state: RunState, app: App, failure: Failure, out: list[Command]) -> None:
    """All that is queued for an app whose context is broken dies; of an alternative, it goes to whose it is."""
    waiting = [*_open_ones(state, app), *(item for group in app.isolated for item in group)]
    app.isolated.clear()
    app.isolated_items = 0
    _taken(state, app)
    own = state.apps.get(app.spec.alternative_of)
    if own is not None:  # Which its items can do without.
        own.queue.extendleft(reversed(waiting))
        state.open.update(dict.fromkeys(waiting, own))
        _queued(state, own, out)
    elif waiting:
        _bury(state, waiting, failure, out, app.context)


def cancel(state: RunState, items: Sequence[int]) -> None:
    """Nobody waits for these any more: queued ones go, running ones will not be delivered."""
    gone = {item for item in items if item in state.open}
    apps = {state.open[item].id: state.open[item] for item in gone}
    running: set[int] = set()
    for attempt in state.attempts.values():
        if attempt.app in apps:
            running |= gone.intersection(attempt.items)
    for item in gone - running:
        state.open[item].cancelled += 1
    _close(state, gone)
    state.counters.cancelled += len(gone)
    for app in apps.values():
        _forget_cancelled(state, app)


def _forget_cancelled(state: RunState, app: App) -> None:
    """Take cancelled items out of groups at once, and out of the queue when they are most of it.

    To look through the queue each time would make cancelling n items one by one take n * n steps.
    """
    if app.isolated:
        groups = [tuple(item for item in group if item in state.open) for group in app.isolated]
        app.isolated = collections.deque(group for group in groups if group)
        left = sum(map(len, groups))
        app.cancelled -= app.isolated_items - left
        app.isolated_items = left
    if 2 * app.cancelled > len(app.queue):
        app.queue = collections.deque(item for item in app.queue if item in state.open)
        app.cancelled = 0
    _taken(state, app)


def unanswered(state: RunState, attempt: Attempt) -> list[int]:
    """The items that only this attempt, which has ended, held and that are still open."""
    left = []
    for item in attempt.items:
        if item not in state.open:
            continue
        copies = state.copies.get(item)
        if copies is None:
            left.append(item)
        elif copies == 2:
            del state.copies[item]
        else:
            state.copies[item] = copies - 1
    return left


def requeue(state: RunState, attempt: Attempt, items: Sequence[int], out: list[Command]) -> None:
    """Items of an attempt that came to nothing, for no fault of theirs, go to the front of the queue."""
    if not items:
        return
    app = state.apps[attempt.app]
    state.counters.retried += len(items)
    if attempt.isolated:
        _isolate(app, tuple(items))
    else:
        app.queue.extendleft(reversed(items))
    _queued(state, app, out)


def _isolate(app: App, *groups: tuple[int, ...]) -> None:
    app.isolated.extendleft(reversed(groups))
    app.isolated_items += sum(map(len, groups))


def evicted(state: RunState, attempt: Attempt, items: Sequence[int], out: list[Command]) -> None:
    """The worker of an attempt was taken away: no fault of its items, whose losses no longer run on."""
    if state.losses:
        for item in items:
            state.losses.pop(item, None)
    requeue(state, attempt, items, out)


def lost(state: RunState, attempt: Attempt, items: Sequence[int], failure: Failure, out: list[Command]) -> None:
    """The worker of an attempt was lost for no known reason: too many times running and its items are suspect."""
    worst = 0
    for item in items:
        state.losses[item] = times = state.losses.get(item, 0) + 1
        worst = max(worst, times)
    if worst < state.limits.losses:
        requeue(state, attempt, items, out)
    else:
        failed(state, attempt, items, failure, out)


def failed(state: RunState, attempt: Attempt, items: Sequence[int], failure: Failure, out: list[Command]) -> None:
    """An attempt failed because of one of its items: halve it until the bad item stands alone, which then dies.

    Where the app did not give one result for each item, that is no item's fault, and nobody can tell whose the results
    are: all of them die at once. Halved down to single items, it would pass.
    """
    if not items:
        return
    if failure.kind == "contract":
        _bury(state, items, failure, out)
        return
    app = state.apps[attempt.app]
    if len(items) > 1:
        middle = len(items) // 2
        _isolate(app, tuple(items[:middle]), tuple(items[middle:]))
    elif _is_dead(state, app, items[0], failure):
        _bury(state, items, failure, out)
        return
    else:
        _isolate(app, tuple(items))
    state.counters.retried += len(items)
    _queued(state, app, out)


def raised(
    state: RunState, attempt: Attempt, items: Sequence[int], at: int, failure: Failure, out: list[Command]
) -> None:
    """An attempt that answers its items one by one raised where the answer to one of them should have come.

    That item is tried alone, since the app may have been at work on several at once; those after it go on. If it
    happens at the first item of what is left of such a batch, it is not that item: then it is halved as any other.
    """
    blamed, app = attempt.items[at], state.apps[attempt.app]
    rest = [item for item in items if item != blamed]
    if len(rest) == len(items):  # Another attempt holds it, or has answered it.
        requeue(state, attempt, rest, out)
    elif not rest or (attempt.isolated and not at):
        failed(state, attempt, items, failure, out)
    else:
        if at:
            requeue(state, attempt, rest, out)
        else:
            _isolate(app, tuple(rest))
            state.counters.retried += len(rest)
        _isolate(app, (blamed,))
        state.counters.retried += 1
        _queued(state, app, out)


def _is_dead(state: RunState, app: App, item: int, failure: Failure) -> bool:
    """Count a failure of an item that stood alone, and say whether it was the last one it may have."""
    if failure.kind == "input":
        return True
    crashed = failure.kind in ("crash", "lost")
    table, allowed = (state.crashes, state.limits.crashes) if crashed else (state.raised, app.spec.retries + 1)
    table[item] = times = table.get(item, 0) + 1
    return times >= allowed
