"""The apps with work; and, where many have some, the most urgent ones, found without a look at all the others.

What does not live here: when an app has work (items.py), and who gets it (policies).
"""

from __future__ import annotations

import bisect
import heapq

from ctxflow.policies.helpers import urgency
from ctxflow.scheduler.state import App

MANY = 64
"""How many apps with work a routing policy is shown, whatever their contexts."""
SPARE = 2  # Apps that it is shown beside one for each free worker, of each context, where there are more.

Entry = tuple[float, float, int, App]  # Its urgency, and it.


class Ready(dict[str, App]):
    """Apps with a backlog and a context that is not broken, by id, in the order in which they came to have one.

    As soon as there are many, those of each context are kept in the order of urgency: thousands of apps with a call
    each then cost what one with thousands of calls does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ordered: dict[str, list[Entry]] | None = None  # By context, without those that are held back.
        self._held: list[tuple[float, int, App]] = []

    def add(self, app: App) -> None:
        """An app has work."""
        self[app.id] = app
        if self._ordered is not None:
            self._insert(app, self._ordered)
        elif len(self) > MANY:
            self._ordered = {}
            for each in self.values():
                self._insert(each, self._ordered)

    def drop(self, app: App) -> None:
        """An app has none any more, if it had some."""
        if self.pop(app.id, None) is None or self._ordered is None:
            return
        self._remove(app, self._ordered)
        if len(self) <= MANY // 2:
            self._ordered = None
            self._held.clear()

    def hold(self, app: App, until: float) -> None:
        """An app's work is not given before then."""
        app.held_until = until
        if self._ordered is not None:
            self._remove(app, self._ordered)
            self._insert(app, self._ordered)

    def release(self, app: App) -> None:
        """It may be given now."""
        app.held_until = None
        if self._ordered is not None and app.id in self:
            self._insert(app, self._ordered)

    def offered(self, now: float, free: int) -> list[App]:
        """The apps that a policy may choose from for so many free workers: all, or the most urgent of each context."""
        if self._ordered is None:
            return [app for app in self.values() if app.held_until is None or app.held_until <= now]
        while self._held and self._held[0][0] <= now:
            until, _, app = heapq.heappop(self._held)
            if self.get(app.id) is app and app.held_until == until:
                app.held_until = None
                self._insert(app, self._ordered)
        found: list[App] = []
        for entries in self._ordered.values():
            left = free + SPARE
            for _, _, _, app in entries:
                found.append(app)
                # Workers load the context already for others, and what failed may have to go elsewhere.
                left -= app.unclaimed > 0 and not app.isolated.items
                if not left:
                    break
        return found

    def waiting_for(self, context: str) -> list[App]:
        """Apps that wait for a context, the most urgent one among them."""
        if self._ordered is None:
            return [app for app in self.values() if app.context == context]
        first = [entry[3] for entry in self._ordered.get(context, [])[:1]]
        return first + [app for _, _, app in self._held if app.context == context and self.get(app.id) is app]

    def _insert(self, app: App, ordered: dict[str, list[Entry]]) -> None:
        if app.held_until is not None:
            heapq.heappush(self._held, (app.held_until, app.order, app))
            return
        entries = ordered.setdefault(app.context, [])
        key = urgency(app)
        place = bisect.bisect_left(entries, key)
        if place == len(entries) or entries[place][3] is not app:
            entries.insert(place, (*key, app))

    @staticmethod
    def _remove(app: App, ordered: dict[str, list[Entry]]) -> None:
        entries = ordered.get(app.context, [])
        place = bisect.bisect_left(entries, urgency(app))
        if place < len(entries) and entries[place][3] is app:
            del entries[place]
            if not entries:
                del ordered[app.context]
