"""Items of an app divided among its own context and the alternatives that it names, as the plan divides them.

To the scheduler each alternative is an app of its own, with its context, its queue and its measured times. Items are
submitted to the app that names it, and dealt to the queues of all; when the plan changes, what is queued is dealt
anew. What does not live here: how much each should get (policies/placement), and anything else about items (items.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxflow.scheduler import items
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.state import App

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


class Deal:
    """Says whose each next item is, so that shares hold.

    Of the first n items, however many they are, no more than their shares of n go to the worst one, the worst two, ...:
    so no beginning has a higher mean error than all of it is to have.

    :param shares: app -> its share, the one with the most errors first; they sum up to 1.

    >>> deal = Deal({"small": 0.25, "large": 0.75})
    >>> [deal.next() for _ in range(8)]
    ['large', 'large', 'large', 'small', 'large', 'large', 'large', 'small']
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares = shares
        self._apps = list(shares)
        self._bounds = [*itertools.accumulate(shares.values())]
        self._bounds[-1] = 1.0
        self._given = [0] * len(shares)  # To the worst one, the worst two, ...
        self._dealt = 0

    def next(self) -> str:
        """The app of the next item."""
        self._dealt += 1
        n = len(self._apps) - 1
        while n and self._given[n - 1] + 1 <= self._bounds[n - 1] * self._dealt + 1e-9:
            n -= 1
        for wider in range(n, len(self._apps)):
            self._given[wider] += 1
        return self._apps[n]


def submit(state: RunState, app: App, new: Sequence[int], out: list[Command]) -> None:
    """New items wait for an app, or for its alternatives."""
    deal = state.deals.get(app.id)
    if deal is None:
        items.submit(state, app, new, out)
        return
    for name, those in _dealt(deal, new).items():
        items.submit(state, state.apps[name], those, out)


def follow(state: RunState, out: list[Command]) -> None:
    """There is a new plan: where it has other shares, deal what is queued by them."""
    for app in state.apps.values():
        if app.alternatives and state.contexts[app.context].broken is None:
            shares, deal = _shares(state, app), state.deals.get(app.id)
            if shares != (deal.shares if deal is not None else {}):
                _deal_anew(state, app, shares, out)


def stop(state: RunState, app: App, out: list[Command]) -> None:
    """The context of an alternative is broken: its share goes to others.

    Where the context of the app that names it is broken too, what waits for the others stays with them.
    """
    own = state.apps.get(app.spec.alternative_of)
    if own is not None and state.contexts[own.context].broken is None:
        _deal_anew(state, own, _shares(state, own), out)


def _shares(state: RunState, app: App) -> dict[str, float]:
    """The shares of an app and its alternatives, most errors first; none if it is not divided.

    What the plan gives to one that is broken is divided among those that are wrong no more often, as the plan divides
    among them; the app itself gets it where there are none, and all where else too much would be wrong.
    """
    family = [app, *(state.apps[name] for name in app.alternatives)]
    family.sort(key=lambda each: -each.error)
    shares = state.plan.shares
    planned = {each.id: share for each in family if (share := shares.get((app.id, each.context), 0.0)) > 0}
    sound = [each for each in family if each.id in planned and state.contexts[each.context].broken is None]
    found = dict.fromkeys((each.id for each in family), 0.0)
    for each in family:
        heirs = [each] if each in sound else [other for other in sound if other.error <= each.error]
        weights = {heir.id: planned[heir.id] for heir in heirs} or {app.id: 1.0}
        for name, weight in weights.items():
            found[name] += planned.get(each.id, 0.0) * weight / sum(weights.values())
    total = sum(found.values())
    divided = {name: share / total for name, share in found.items() if share > 0}
    wrong = sum(state.apps[name].error * share for name, share in divided.items())
    too_much = len(sound) < len(planned) and app.max_error is not None and wrong > app.max_error + 1e-9
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
        items.requeue_all(state, app, queues.get(app.id, ()), out)


def _dealt(deal: Deal, those: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for item in those:
        found.setdefault(deal.next(), []).append(item)
    return found
