"""Transitions of items: queued, assigned, answered, requeued, bisected, dead.

An item is open (in `RunState.open`) from its submission until it is done, dead or cancelled; an open item is
either queued once, or held by at least one attempt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from ctxflow.scheduler import faults
from ctxflow.scheduler.app_state import App, Deal, Group
from ctxflow.scheduler.commands import Bury, Command, Deliver
from ctxflow.scheduler.eligibility import awaited, elsewhere
from ctxflow.scheduler.events import Failure
from ctxflow.scheduler.faults import CRASHES
from ctxflow.scheduler.open_items import ItemQueue
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Attempt

OPINIONS = 3  # How often an item is tried elsewhere since the place where it failed was in doubt.


def submit(state: RunState, app: App, new: Sequence[int], out: list[Command]) -> None:
    """Queue new items for an app, or divided among its alternatives; they die at once if the context is broken."""
    deal = state.deals.get(app.id)
    for name, those in {app.id: new}.items() if deal is None else _dealt(deal, new).items():
        app = state.apps[name]
        app.arrived += len(those)
        state.counters.submitted += len(those)
        state.open.add(those, app)
        app.queue.extend(those)
        if app.held_until is not None:  # What was held back may be enough for a batch now.
            state.ready.release(app)
        settle(state, app, out)


def settle(state: RunState, app: App, out: list[Command]) -> None:
    """Note whether an app has work, after its queue has changed; bury the work if its context is broken."""
    app.backlog = len(app.queue) - app.cancelled + app.isolated.items
    if not app.backlog:
        app.queue.clear()  # Of cancelled items.
        app.cancelled = 0
        state.ready.drop(app)
        app.waiting_since = app.held_until = None
    elif app.id not in state.ready:
        broken = state.contexts[app.context].broken
        if broken is not None:
            bury_backlog(state, app, broken, out)
        else:
            state.ready.add(app)
            app.waiting_since = state.now


def take(state: RunState, app: App, group: Group | None, count: int, out: list[Command]) -> tuple[int, ...]:
    """Take the items of the app's next batch: a group's, which must stay together, or so many off the queue."""
    items: tuple[int, ...]
    if group is not None:
        items = app.isolated.pop(group).items
    elif app.cancelled:
        items = tuple(itertools.islice(_open_ones(state, app), count))
    else:
        items = app.queue.take(count)
    settle(state, app, out)
    return items


def _open_ones(state: RunState, app: App) -> Iterator[int]:
    """Take items off the queue, leaving out those that were cancelled there."""
    while app.queue:
        item = app.queue.pop()
        if item in state.open:
            yield item
        else:
            app.cancelled -= 1


def answer(state: RunState, attempt: Attempt, items: Sequence[int], out: list[Command]) -> None:
    """Deliver those of these items that nobody answered before."""
    won, positions = items, None
    if not state.open.has_all(items):
        positions = [n for n, item in enumerate(items) if item in state.open]
        won = [items[n] for n in positions]
    if not won:
        return
    if state.charges.of:
        faults.answered(state, attempt, won)
    _close(state, won)
    state.counters.done += len(won)
    out.append(Deliver(attempt.id, won, positions))


def _bury(
    state: RunState, items: Sequence[int], failure: Failure, out: list[Command], context: str | None = None
) -> None:
    """Declare items dead."""
    _close(state, items)
    state.counters.dead += len(items)
    out.append(Bury(items, failure, context))


def _close(state: RunState, items: Collection[int]) -> None:
    state.open.close(items)
    if state.charges.of:
        state.charges.settle(items)
    for table in (state.copies, state.losses, state.crashes, state.raised, state.deaths, state.prefixes):
        if table:
            for item in items:
                table.pop(item, None)


def bury_backlog(state: RunState, app: App, failure: Failure, out: list[Command]) -> None:
    """Bury what is queued for an app whose context is broken; an alternative's goes back to the app that names it."""
    waiting = [*_open_ones(state, app), *(item for group in app.isolated.clear() for item in group.items)]
    settle(state, app, out)
    own = state.apps.get(app.spec.alternative_of)
    if own is not None:  # Which its items can do without.
        own.queue.put_back(waiting)
        state.open.add(waiting, own)
        settle(state, own, out)
    elif waiting:
        _bury(state, waiting, failure, out, app.context)


def cancel(state: RunState, items: Sequence[int], out: list[Command]) -> None:
    """Cancel items: queued ones go, running ones will not be delivered."""
    gone = {item for item in items if item in state.open}
    apps = {state.open[item].id: state.open[item] for item in gone}
    running = {item for attempt in holding(state, gone) for item in attempt.items}
    for item in gone - running:
        state.open[item].cancelled += 1
    _close(state, sorted(gone))
    state.counters.cancelled += len(gone)
    for app in apps.values():
        _forget_cancelled(state, app)
        settle(state, app, out)


def holding(state: RunState, items: Collection[int]) -> list[Attempt]:
    """Return the attempts that hold any of these items, in the order of their numbers."""
    found = {number for item in items for number in state.flights.of.get(item, ())}
    if len(state.attempts) > state.flights.attempts:
        those = set(items)
        for number, attempt in state.attempts.items():
            if not state.apps[attempt.app].windowed and not those.isdisjoint(attempt.items):
                found.add(number)
    return [state.attempts[number] for number in sorted(found)]


def _forget_cancelled(state: RunState, app: App) -> None:
    """Take cancelled items out of groups at once, and out of the queue when they are most of it, which is linear."""
    if app.isolated.items:
        app.cancelled -= app.isolated.items
        for group in reversed(app.isolated.clear()):
            left = tuple(item for item in group.items if item in state.open)
            if left:
                app.isolated.push(dataclasses.replace(group, items=left))
        app.cancelled += app.isolated.items
    if 2 * app.cancelled > len(app.queue):
        app.queue = ItemQueue(item for item in app.queue if item in state.open)
        app.cancelled = 0


def unanswered(state: RunState, attempt: Attempt) -> list[int]:
    """Return the items that only this attempt, which has ended, held and that are still open."""
    if not state.copies and state.open.has_all(attempt.items):
        return list(attempt.items)
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
    """Put unanswered items of an attempt, which are not to blame, at the front of the queue."""
    if not items:
        return
    app = state.apps[attempt.app]
    state.counters.retried += len(items)
    if attempt.group is not None:
        app.isolated.push(dataclasses.replace(attempt.group, items=tuple(items), since=state.now))
    else:
        app.queue.put_back(items)
    settle(state, app, out)


def lost(state: RunState, attempt: Attempt, items: Sequence[int], failure: Failure, out: list[Command]) -> None:
    """Requeue the items of a lost worker's attempt; after too many losses in a row they are suspect."""
    worst = 0
    for item in items:
        state.losses[item] = times = state.losses.get(item, 0) + 1
        worst = max(worst, times)
    if worst < state.limits.losses:
        requeue(state, attempt, items, out)
    else:
        failed(state, attempt, items, failure, out)


def failed(state: RunState, attempt: Attempt, items: Sequence[int], failure: Failure, out: list[Command]) -> None:
    """Bisect a failed attempt until the bad item stands alone, which then dies.

    Where it looks like the machine's fault, all of it is tried on another one first. Where the app did not give one
    result for each item, that is no item's fault, and nobody can tell whose the results are: all of them die at once.
    Halved down to single items, it would pass.
    """
    if not items:
        return
    if failure.kind == "contract":
        _bury(state, items, failure, out)
        return
    app = state.apps[attempt.app]
    if _moves(state, attempt, failure, len(items) == 1):
        app.isolated.append(_group(state, attempt, items, failure, moves=1))
    elif len(items) > 1:
        middle = len(items) // 2
        app.isolated.append(*(_group(state, attempt, half, failure) for half in (items[:middle], items[middle:])))
    elif _is_dead(state, app, items[0], failure):
        _bury(state, items, failure, out)
        return
    elif app.overlaps and failure.kind not in CRASHES:  # None of those beside it can be meant.
        app.queue.put_back(items)
    else:
        app.isolated.append(_group(state, attempt, items, failure))
    state.counters.retried += len(items)
    settle(state, app, out)


def isolate(
    state: RunState, attempt: Attempt, items: Sequence[int], together: int, failure: Failure, out: list[Command]
) -> None:
    """Have items of an attempt run apart from others from now on, so many at a time: in a batch, or each by itself."""
    if not items:
        return
    app = state.apps[attempt.app]
    size, beside = (1, together) if app.windowed or app.batch_size == 1 else (together, 1)
    parts = [items[first : first + size] for first in range(0, len(items), size)]
    groups = [_group(state, attempt, part, failure) for part in parts]
    app.isolated.append(*(dataclasses.replace(group, beside=beside) for group in groups))
    state.counters.retried += len(items)
    settle(state, app, out)


def _group(state: RunState, attempt: Attempt, items: Sequence[int], failure: Failure, moves: int = 0) -> Group:
    """Return items that failed in an attempt as a group, to be tried elsewhere and apart from all others."""
    before, here = attempt.group or Group(()), {attempt.place}
    machines = before.machines | here if failure.machine else before.machines
    alone = failure.kind in CRASHES or not state.apps[attempt.app].overlaps
    return Group(tuple(items), before.failed_on | here, machines, before.moves + moves, state.now, alone)


def _moves(state: RunState, attempt: Attempt, failure: Failure, alone: bool) -> bool:
    """Return whether what failed is to be tried elsewhere as it is before anything is said of its items.

    Once if it looks like the machine's fault; a lone item several times, if the places are in doubt where it failed.
    """
    before, app = attempt.group or Group(()), state.apps[attempt.app]
    tried = before.failed_on | {attempt.place}
    if failure.machine and not before.moves:  # Where it failed with others, that may have been their fault.
        return elsewhere(state, app, before.machines | {attempt.place}) or awaited(state)
    worker = state.workers.get(attempt.worker)
    if not alone or before.moves >= OPINIONS or failure.kind == "input" or worker is None:
        return False
    return state.policies.health.doubts(state.view, worker.shown, app.shown) and (
        elsewhere(state, app, tried) or awaited(state)
    )


def raised(
    state: RunState, attempt: Attempt, items: Sequence[int], at: int, failure: Failure, out: list[Command]
) -> None:
    """Handle an attempt that answers its items one by one and raised in place of one of the answers.

    That item is tried alone, since the app may have been at work on several at once; those after it go on. If it
    happens at the first item of what is left of such a batch, it is not that item: then it is halved as any other.
    """
    blamed, app = attempt.items[at], state.apps[attempt.app]
    rest = [item for item in items if item != blamed]
    if len(rest) == len(items):  # Another attempt holds it, or has answered it.
        requeue(state, attempt, rest, out)
    elif not rest or (attempt.group is not None and not at) or _moves(state, attempt, failure, alone=False):
        failed(state, attempt, items, failure, out)
    else:
        if at:
            requeue(state, attempt, rest, out)
        else:
            app.isolated.push(_group(state, attempt, rest, failure))
            state.counters.retried += len(rest)
        app.isolated.push(_group(state, attempt, (blamed,), failure))
        state.counters.retried += 1
        settle(state, app, out)


def _is_dead(state: RunState, app: App, item: int, failure: Failure) -> bool:
    """Count a failure of an item that stood alone, and say whether it was the last one it may have."""
    if failure.kind == "input":
        return True
    crashed = failure.kind in ("crash", "lost")
    table, allowed = (state.crashes, state.limits.crashes) if crashed else (state.raised, app.spec.retries + 1)
    table[item] = times = table.get(item, 0) + 1
    return times >= allowed


# --- items divided among alternatives


def divide(state: RunState, out: list[Command]) -> None:
    """Deal what is queued anew, where a new plan has other shares."""
    for app in state.apps.values():
        if app.alternatives and state.contexts[app.context].broken is None:
            shares, deal = _shares(state, app), state.deals.get(app.id)
            if shares != (deal.shares if deal is not None else {}):
                _deal_anew(state, app, shares, out)


def redistribute(state: RunState, app: App, out: list[Command]) -> None:
    """Give the share of an alternative whose context is broken to others, unless that of the app itself is too."""
    own = state.apps.get(app.spec.alternative_of)
    if own is not None and state.contexts[own.context].broken is None:
        _deal_anew(state, own, _shares(state, own), out)


def _shares(state: RunState, app: App) -> dict[str, float]:
    """Return the shares of an app and its alternatives, most errors first; none if it is not divided.

    What the plan gives to one that is broken is divided among those that are wrong no more often, as the plan divides
    among them; the app itself gets it where there are none, and all where else too much would be wrong.
    """
    family = [app, *(state.apps[name] for name in app.alternatives)]
    family.sort(key=lambda each: -each.spec.error)
    shares = state.plan.shares
    planned = {each.id: share for each in family if (share := shares.get((app.id, each.context), 0.0)) > 0}
    sound = [each for each in family if each.id in planned and state.contexts[each.context].broken is None]
    found = dict.fromkeys((each.id for each in family), 0.0)
    for each in family:
        heirs = [each] if each in sound else [other for other in sound if other.spec.error <= each.spec.error]
        weights = {heir.id: planned[heir.id] for heir in heirs} or {app.id: 1.0}
        for name, weight in weights.items():
            found[name] += planned.get(each.id, 0.0) * weight / sum(weights.values())
    total = sum(found.values())
    divided = {name: share / total for name, share in found.items() if share > 0}
    wrong = sum(state.apps[name].spec.error * share for name, share in divided.items())
    too_much = len(sound) < len(planned) and app.spec.max_error is not None and wrong > app.spec.max_error + 1e-9
    return {} if too_much else divided


def _deal_anew(state: RunState, own: App, shares: dict[str, float], out: list[Command]) -> None:
    family = [own, *(state.apps[name] for name in own.alternatives)]
    waiting = sorted(item for app in family for item in app.queue if item in state.open)
    if shares:
        state.deals[own.id] = Deal(shares)
        queues = _dealt(state.deals[own.id], waiting)
    else:
        state.deals.pop(own.id, None)
        queues = {own.id: waiting}
    for app in family:
        queued = queues.get(app.id, ())
        state.open.add(queued, app)
        app.queue = ItemQueue(queued)
        app.cancelled = 0
        state.ready.release(app)
        settle(state, app, out)


def _dealt(deal: Deal, those: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for item in those:
        found.setdefault(deal.next(), []).append(item)
    return found
