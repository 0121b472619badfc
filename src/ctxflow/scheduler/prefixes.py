"""Which queued item a worker gets next where items begin alike: those whose beginning its engine has read before.

Engines keep what they have computed of a prompt's beginning, so that items that begin alike cost less one after the
other on one worker. An item's beginning is known by numbers, those of longer ones after those of shorter ones: what
shares the last shares all. Whoever was given a beginning last is its home.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.scheduler.app_state import App
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Worker

LOOK_AHEAD = 128  # Items of a queue that are looked at; and how many that came later an item may wait for.
MOST_HOMES = 4096  # Beginnings of an app whose homes are known.


def note(state: RunState, items: Sequence[int], prefixes: Sequence[Sequence[int]]) -> None:
    """Note how items begin that were submitted."""
    if prefixes:
        state.prefixes.update((item, tuple(each)) for item, each in zip(items, prefixes, strict=True) if each)


def take(state: RunState, worker: Worker, app: App, count: int) -> list[int]:
    """Take so many open items, or all there are, off the queue's beginning, in the order in which they are to be given.

    First what begins as what the worker had; then what nobody else had, with what begins alike; then the rest.
    """
    queue = app.queue
    seen: list[int] = []
    while queue and len(seen) < max(count, LOOK_AHEAD):
        item = queue.popleft()
        if item in state.open:
            seen.append(item)
        else:
            app.cancelled -= 1
    left, chosen = list(seen), list[int]()
    while left and len(chosen) < count:
        overdue = app.overtaken >= LOOK_AHEAD
        place = 0 if overdue else min(range(len(left)), key=lambda n: (_rank(state, worker, app, left[n]), n))
        app.overtaken = app.overtaken + 1 if place else 0
        item = left.pop(place)
        chosen.append(item)
        _settle_in(state, worker, app, item)
    queue.extendleft(reversed(left))
    return chosen


def _rank(state: RunState, worker: Worker, app: App, item: int) -> tuple[int, bool]:
    numbers = state.prefixes.get(item, ())
    own = sum(app.homes.get(number) == worker.id for number in numbers)
    home = app.homes.get(numbers[-1]) if numbers else None
    return -own, home is not None and home != worker.id and home in state.workers


def _settle_in(state: RunState, worker: Worker, app: App, item: int) -> None:
    for number in state.prefixes.get(item, ()):
        app.homes.pop(number, None)
        app.homes[number] = worker.id
    while len(app.homes) > MOST_HOMES:
        del app.homes[next(iter(app.homes))]
