"""Which queued item a worker gets next where items begin alike: those whose beginning its engine has read before.

Engines keep what they have computed of a prompt's beginning, so that items that begin alike cost less one after the
other on one worker. An item's beginning is known by numbers, those of longer ones after those of shorter ones: what
shares the last shares all. Whoever was given a beginning last is its home.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

from ctxflow.scheduler.app_state import App
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Worker

LOOK_AHEAD = 128  # Items of a queue that are looked at; and how many that came later an item may wait for.
MOST_HOMES = 4096  # Beginnings of an app whose homes are known.


def note(state: RunState, app: App, items: Sequence[int], prefixes: Sequence[Sequence[int]]) -> None:
    """Note how items begin that were submitted."""
    if prefixes:
        state.prefixes.update((item, tuple(each)) for item, each in zip(items, prefixes, strict=True) if each)
        for each in (app, *(state.apps[name] for name in app.alternatives)):
            each.alike = max(each.alike, *map(len, prefixes))


def take(state: RunState, worker: Worker, app: App, count: int) -> list[int]:
    """Take so many open items, or all there are, off the queue's beginning, in the order in which they are to be given.

    First what begins as what the worker had; then what nobody else had, with what begins alike; then the rest.
    """
    queue = app.queue
    if count == 1 and not app.cancelled:
        place = _nearest(state, worker, app) if app.overtaken < LOOK_AHEAD else 0
        app.overtaken = app.overtaken + 1 if place else 0
        item = queue.pop(place)
        _settle_in(worker, app, state.prefixes.get(item, ()), {})
        return [item]
    seen: list[int] = []
    while queue and len(seen) < max(count, LOOK_AHEAD):
        item = queue.pop()
        if item in state.open:
            seen.append(item)
        else:
            app.cancelled -= 1
    count = min(count, len(seen))
    numbers = [state.prefixes.get(item, ()) for item in seen]
    ranks = [_rank(state, worker, app, each) for each in numbers]
    heap = [(*rank, place) for place, rank in enumerate(ranks)]
    heapq.heapify(heap)
    places: dict[int, list[int]] = {}  # Of the items that begin so.
    for place, each in enumerate(numbers):
        for number in each:
            places.setdefault(number, []).append(place)
    left = dict(enumerate(seen))
    chosen: list[int] = []
    while len(chosen) < count:
        first = place = next(iter(left))
        if app.overtaken < LOOK_AHEAD:
            *rank, place = heapq.heappop(heap)
            while place not in left or tuple(rank) != ranks[place]:
                *rank, place = heapq.heappop(heap)
        app.overtaken = app.overtaken + 1 if place != first else 0
        chosen.append(left.pop(place))
        for other in _settle_in(worker, app, numbers[place], places):
            if other in left:
                ranks[other] = _rank(state, worker, app, numbers[other])
                heapq.heappush(heap, (*ranks[other], other))
    queue.put_back(list(left.values()))
    return chosen


def _rank(state: RunState, worker: Worker, app: App, numbers: Sequence[int]) -> tuple[int, bool]:
    """Return how near a beginning is to a worker, nearer ones less: how much was its own, whether it is another's."""
    home, own, homes = "", 0, app.homes
    for number in numbers:
        home = homes.get(number, "")
        if home == worker.id:
            own -= 1
    return own, home != worker.id and home in state.workers


def _nearest(state: RunState, worker: Worker, app: App) -> int:
    """Return the place in the queue of the first item of those that are nearest to a worker."""
    beginnings, home_of, name = state.prefixes, app.homes.get, worker.id
    best, most, others = 0, -1, False  # How much of the best one was the worker's own; whether it is another's.
    for place, item in enumerate(itertools.islice(app.queue, LOOK_AHEAD)):
        numbers, home, own = beginnings.get(item, ()), None, 0
        for number in numbers:
            home = home_of(number)
            if home == name:
                own += 1
        if own > most or (others and own == most):
            is_others = home is not None and home != name and home in state.workers
            if own > most or not is_others:
                best, most, others = place, own, is_others
                if own == app.alike:  # None can be nearer.
                    break
    return best


def _settle_in(worker: Worker, app: App, numbers: Sequence[int], places: Mapping[int, Sequence[int]]) -> set[int]:
    """Make a worker the home of a beginning; return the places of what begins with what was not its own before."""
    changed: set[int] = set()
    for number in numbers:
        if app.homes.pop(number, None) != worker.id:
            changed.update(places.get(number, ()))
        app.homes[number] = worker.id
    while len(app.homes) > MOST_HOMES:
        del app.homes[next(iter(app.homes))]
    return changed
