"""How many items arrived of each app, slot by slot, and what that forecasts.

What does not live here: the forecasting itself (policies/routing/forecast.py).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping

from ctxflow.scheduler.state import App

SLOT_SECONDS = 10.0
"""How long arrivals are counted together."""
SLOTS = 5
"""How many slots count, as in TORTA (section V-B2)."""


class Arrivals:
    """Counts of the last slots.

    >>> from ctxflow.scheduler.events import AppSpec
    >>> arrivals, app = Arrivals(), App(AppSpec("a", "a"), 0, id="a")
    >>> for time in (0, 10, 20):
    ...     arrivals.note(time, [app])
    ...     app.arrived += 50
    >>> arrivals.forecast()
    {'a': 5.0}
    """

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, dict[str, int]]] = collections.deque(maxlen=SLOTS + 1)
        self._forecast: Mapping[str, float] | None = None

    def note(self, now: float, apps: Iterable[App]) -> None:
        """Count, if a slot is over; to be called on ticks."""
        if not self._seen or now >= self._seen[-1][0] + SLOT_SECONDS:
            self._seen.append((now, {app.id: app.arrived for app in apps}))
            self._forecast = None

    def forecast(self) -> Mapping[str, float] | None:
        """Items a second by app, None before a slot is over; apps of which nothing comes are left out."""
        if self._forecast is None and len(self._seen) > 1:
            # Numpy is imported where somebody asks: most runs do without.
            from ctxflow.policies.torta.forecast import forecast

            names = list(self._seen[-1][1])
            slots = list(self._seen)
            rates = [
                # An app that was forgotten in between counts anew.
                [max(0, after.get(name, 0) - before.get(name, 0)) / (end - begin) for name in names]
                for (begin, before), (end, after) in itertools.pairwise(slots)
            ]
            expected = forecast(rates)[0] if names else ()
            self._forecast = {name: float(rate) for name, rate in zip(names, expected, strict=True) if rate > 0}
        return self._forecast
