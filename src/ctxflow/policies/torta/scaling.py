"""How many workers are active: TORTA's Eq. 6, and the scaling policy `activation` of a live run.

In the policy, tasks are items, and a worker's capacity is what it does in a slot at its measured speed. Unlike in the
paper, a region without work needs no worker, running items count as queued, and the cheapest tiers are asked first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from ctxflow.policies.helpers import (
    SESSIONS,
    Peak,
    active,
    divided,
    outstanding,
    serving,
    sessions_of_worker,
    slot_items,
    tier_costs,
    tiers_for,
)
from ctxflow.policies.protocols import View
from ctxflow.policies.torta.quantities import Ints, Outlook, amounts
from ctxflow.policies.torta.quantities import forecast as forecasts
from ctxflow.policies.views import AppView, WorkerView

SAFETY = 1.0
"""Eq. 6's sigma, standard deviations of the predicted demand; the paper prints no value."""


def target(
    queue: npt.ArrayLike,
    predicted: npt.ArrayLike,
    capacity: npt.ArrayLike,
    servers: npt.ArrayLike,
    safety: float = SAFETY,
) -> Ints:
    """Compute Eq. 6: min(S_r, ceil((Q + F + sigma * sqrt(F)) / C_avg)) servers of each region.

    Guarantees: (R,) at most all of a region's servers, and at least one of them where there are any (1 <= N_active).
    A region whose servers' capacity is zero or unknown has all of them active while there is work. A prediction that
    is not a number counts as none.

    :param queue: (R,) tasks that wait. :param predicted: (R,) tasks that are expected in the next slot.
    :param capacity: (R,) tasks that a server does in a slot, on average.
    :param servers: (R,) S_r, how many there are.

    >>> target([4, 0, 0], [16, 0, float("nan")], [5, 5, 5], [9, 9, 0]).tolist()
    [5, 1, 0]
    """
    expected, there = amounts(predicted), amounts(servers)
    work = amounts(queue) + expected + amounts(safety) * np.sqrt(expected)
    each = amounts(capacity)
    unknown = np.where(work > 0, np.inf, 0.0)
    needed = np.divide(work, each, out=unknown, where=each > 0)
    return np.asarray(np.minimum(np.maximum(np.ceil(needed - 1e-9), 1), there), dtype=np.int64)


def for_buffer(waiting: int, limit: int, capacity: float, share: float = 0.8) -> int:
    """Return how many servers more a buffer asks for: none until it is nearly full, then enough for all that waits.

    :param waiting: tasks without a server. :param limit: tasks that the buffer is made for.
    :param capacity: tasks that a server does in a slot; one server is requested if that is unknown.
    :param share: the share of the limit from which on it asks.

    >>> for_buffer(7, 10, 4.0), for_buffer(8, 10, 4.0)
    (0, 2)
    """
    if waiting <= 0 or waiting < share * limit:
        return 0
    each = float(amounts(capacity))
    return int(np.ceil(waiting / each)) if each > 0 else 1


class Activation:
    """As many workers as Eq. 6 says: for what is queued, what is forecast, and its deviation.

    More are asked for at once, from the cheapest tiers: by the price of a worker, or else of its region's power, then
    by the way from the home region. A tier that does not give what it is asked for counts for what it gives after three
    of its boots, so that the next tiers are asked. Fewer are held once fewer were enough for as long as a worker takes
    to warm up: to boot, and to load. While no item was measured, each call has a worker. When more items wait than the
    buffer is made for, as many more as they would fill are requested. Active sessions get workers besides, by what a
    worker was measured to serve. Where no tier and no region has a price, all tiers are asked for what lacks.

    :param slot_seconds: the slot in which the work is to be done.
    :param safety: Eq. 6's sigma, standard deviations of the forecast; what runs counts as queued then. Or "measured":
        what runs does not count, but by how many deviations of the calls that run at once the forecast was wrong
        lately, from 1 to 3: more workers and shorter waits, for items that arrive steadily.
    :param buffer: items that may wait; from four fifths of it on it asks for workers.
    :param boot_seconds: what a worker takes from its request to joining, for tiers of which the site does not
        say it.
    :param patience: for how many warm-ups fewer workers must be enough before any is released.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there to size one for.
    :raises ValueError: for a number that makes no sense.
    """

    releases_idle = True

    def __init__(
        self,
        slot_seconds: float = 45.0,
        safety: float | Literal["measured"] = SAFETY,
        buffer: int = 1000,
        boot_seconds: float = 30.0,
        patience: float = 1.0,
        batch_size: int = 100,
    ) -> None:
        if not (math.isfinite(slot_seconds) and slot_seconds > 0):
            raise ValueError("slot_seconds is the time in which the work is to be done: give more than 0")
        for name, count in (("buffer", buffer), ("batch_size", batch_size)):
            if count < 1:
                raise ValueError(f"{name} is a number of items: give 1 or more")
        sigma = 0.0 if safety == "measured" else safety
        if isinstance(sigma, str):
            raise ValueError(f'safety cannot be {safety!r}: give a number, or "measured"')
        for name, value in (("safety", sigma), ("boot_seconds", boot_seconds), ("patience", patience)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} cannot be {value:g}: give 0 or more")
        self._slot_seconds, self._safety, self._buffer = slot_seconds, safety, buffer
        self._boot_seconds, self._patience = boot_seconds, patience
        self._batch_size = batch_size
        self._outlook = Outlook()
        self._demands: dict[frozenset[str], _Demand] = {}
        self._offers = _Offers()

    def target(self, view: View) -> Mapping[str, int]:
        """Return the workers to hold of each tier."""
        self._outlook.look(view)
        works: dict[frozenset[str], _Work] = {}
        calls, sessions = outstanding(view, self._batch_size), active(view)
        running = dict.fromkeys(view.apps, 0)
        for attempt in view.attempts.values():
            running[attempt.app] += len(attempt.items)
        groups: dict[str, frozenset[str]] = {}
        for app in view.apps.values():
            group = groups.get(app.context) or groups.setdefault(app.context, tiers_for(view, app))
            work = works.setdefault(group, _Work())
            expected = float(amounts((view.forecast or {}).get(app.id, 0.0))) * self._slot_seconds
            items = slot_items(view, app, self._batch_size) if app.overlaps else 1.0
            work.add(app, running[app.id], calls[app.id], expected / items, self._outlook)
            if app.id in sessions:
                work.carriers += len(sessions[app.id]) / sessions_of_worker(view, app, SESSIONS)
        # What other tiers may run since there is another plan is counted there.
        self._demands = {group: self._demands.get(group) or _Demand(self._slot_seconds) for group in works}
        wanted = {}
        for group, work in works.items():
            demand, warm_up = self._demands[group], self._warm_up(view, group, work)
            demand.look(view.now, work, warm_up, view.forecast or {})
            wanted[group] = demand.peak.over(
                self._workers(view, group, work, demand), view.now, self._patience * warm_up
            )
        costs = tier_costs(view)
        if not costs or view.preferred:  # A plan's order takes the place of the costs.
            return divided(view, wanted)
        return self._offers.divided(view, wanted, costs, self._boot_seconds)

    def _workers(self, view: View, tiers: frozenset[str], work: _Work, demand: _Demand) -> int:
        """Return how many workers of some tiers their work needs now."""
        seconds = work.item_seconds
        capacity = self._slot_seconds / seconds if seconds else 0.0
        most = sum(view.tiers[name].maximum for name in tiers)
        number, queued, expected, safety = 0, work.waiting + work.items, demand.rate * self._slot_seconds, self._safety
        if safety == "measured":
            # The calls that run at once deviate by the root of their number, which is F / C.
            queued, expected, safety = work.waiting, demand.expected, demand.safety * math.sqrt(capacity)
        if work.waiting + work.items + expected > 0:
            number = int(target([queued], [expected], [capacity], [most], safety)[0])
            number += for_buffer(int(work.waiting), self._buffer, capacity)
            # As long as no speed is known, what is expected comes in full windows.
            number = min(number, math.ceil(work.calls + (expected if capacity else work.new_calls)))
        return min(most, number + math.ceil(work.carriers))

    def _warm_up(self, view: View, tiers: frozenset[str], work: _Work) -> float:
        boots = [view.tiers[name].boot_seconds for name in tiers]
        boot = max((self._boot_seconds if each is None else each for each in boots), default=0.0)
        return boot + max((self._outlook.longest_load(context) for context in work.contexts), default=0.0)


class _Offers:
    """Which tiers give what they are asked for, and the division of workers that follows."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._lacking: dict[str, float] = {}  # Tier -> since when it has given less than it was asked for.

    def divided(
        self,
        view: View,
        wanted: Mapping[frozenset[str], float],
        costs: Mapping[str, tuple[float, float]],
        boot_seconds: float,
    ) -> dict[str, int]:
        """Return what each tier is asked for: the cheapest first, those with fewest tiers to choose from first."""
        staying: dict[str, list[WorkerView]] = {name: [] for name in view.tiers}
        for worker in serving(view.workers.values(), staying):
            staying[worker.tier].append(worker)
        by_hand = {name: sum(not worker.acquired for worker in there) for name, there in staying.items()}
        room = {name: tier.maximum + by_hand[name] for name, tier in view.tiers.items()}
        offers = {name: self._offer(view, name, len(staying[name]) - by_hand[name], boot_seconds) for name in staying}
        order = sorted(view.tiers, key=lambda name: costs[name])
        asked, counted = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
        for group in sorted(wanted, key=len):
            left = wanted[group]
            for name in (name for name in order if name in group):
                asked[name] = max(asked[name], counted[name] + min(left, room[name] - counted[name]))
                taken = min(left, max(0.0, offers[name] + by_hand[name] - counted[name]))
                counted[name] += taken
                left -= taken
        for name, tier in view.tiers.items():
            # Sums of shares of workers may be a trifle above a whole number.
            ask = math.ceil(asked[name] - 1e-9) - by_hand[name]
            self._asked[name] = max(tier.minimum, min(tier.maximum, ask))
        return {name: self._asked[name] for name in view.tiers}

    def _offer(self, view: View, name: str, connected: int, boot_seconds: float) -> int:
        """Return how many workers of a tier can be counted on."""
        tier = view.tiers[name]
        if connected >= self._asked.get(name, 0):
            self._lacking.pop(name, None)
            return tier.maximum
        since = self._lacking.setdefault(name, view.now)
        boot = boot_seconds if tier.boot_seconds is None else tier.boot_seconds
        return connected if view.now - since > PATIENT_BOOTS * boot else tier.maximum


PATIENT_BOOTS = 3.0  # After so many boots a tier counts for the workers that it gave.


@dataclasses.dataclass
class _Work:
    """What some tiers may do: items that wait, and their seconds.

    :ivar items: those that run. :ivar calls: what these and the waiting ones make; more workers would be idle.
    :ivar new_calls: that those make that are expected in a slot, of apps with items in flight in full windows.
    :ivar carriers: workers for the active sessions. :ivar arrived: app -> items submitted so far.
    """

    waiting: float = 0.0
    items: int = 0
    calls: float = 0.0
    new_calls: float = 0.0
    carriers: float = 0.0
    arrived: dict[str, int] = dataclasses.field(default_factory=dict)
    contexts: set[str] = dataclasses.field(default_factory=set)
    _seconds: float = 0.0
    _counted: float = 0.0
    _known: bool = True

    def add(self, app: AppView, running: int, calls: int, new: float, outlook: Outlook) -> None:
        """Add the work of an app, that makes so many calls, and new ones."""
        self.contexts.add(app.context)
        self.arrived[app.id] = app.arrived
        self.waiting += app.backlog
        self.items += running
        self.calls += calls
        self.new_calls += new
        if not app.arrived:
            return
        seconds = outlook.item_seconds(app)
        if seconds is None:
            self._known = self._known and not app.backlog and not running
            return
        self._counted += app.arrived
        self._seconds += app.arrived * seconds

    @property
    def item_seconds(self) -> float | None:
        """Return the mean seconds of an item, None where that of one that waits or runs is unknown."""
        return self._seconds / self._counted if self._known and self._seconds else None


HISTORY = 10  # Slots of which a forecast is made.
ERRORS = 400  # How many errors of the forecast are remembered, nine in a slot.
FEW = 40  # With fewer of them the tail is not known.
TAIL = 0.98  # The share of errors that are to be covered.
LEAST_SAFETY, MOST_SAFETY = 1.0, 3.0


class _Demand:
    """What comes to some tiers, slot by slot, and by how much what ran or waited was beyond what had been forecast.

    :ivar rate: items a second that the run's forecast says.
    :ivar expected: items of a slot, at its most until a worker that is asked for now is warm.
    :ivar safety: of the calls that run at once, the standard deviations that the errors' tail is beyond the forecast.
    """

    def __init__(self, slot_seconds: float) -> None:
        self.peak = Peak()
        self.rate = self.expected = 0.0
        self.safety = (LEAST_SAFETY + MOST_SAFETY) / 2
        self._slot_seconds = slot_seconds
        self._slots: deque[tuple[float, dict[str, int]]] = deque(maxlen=HISTORY + 1)
        self._said: deque[tuple[float, float]] = deque()  # When, and how many calls were forecast to run at once.
        self._errors: deque[float] = deque(maxlen=ERRORS)

    def look(self, now: float, work: _Work, warm_up: float, forecast: Mapping[str, float]) -> None:
        """Count what came, forecast what will, and note how wrong the forecast of a warm-up ago was."""
        if not self._slots or now >= self._slots[-1][0] + self._slot_seconds:
            self._slots.append((now, dict(work.arrived)))
            if len(self._slots) > 2:
                idle = not work.calls and self._slots[-1][1] == self._slots[-2][1]
                self.expected = 0.0 if idle else self._forecast(1 + math.ceil(warm_up / self._slot_seconds))
        self.rate = sum(float(amounts(forecast.get(app, 0.0))) for app in work.arrived)
        if len(self._slots) <= 2:
            self.expected = self.rate * self._slot_seconds
        seconds = work.item_seconds
        if seconds is None or (self._said and now < self._said[-1][0] + self._slot_seconds / 9):
            return
        self._said.append((now, self.expected * seconds / self._slot_seconds))
        while len(self._said) > 1 and self._said[1][0] <= now - warm_up:
            self._said.popleft()
        time, said = self._said[0]
        if time <= now - warm_up and said >= 1:
            self._errors.append((work.calls - said) / math.sqrt(said))
            if len(self._errors) >= FEW:
                self.safety = min(MOST_SAFETY, max(LEAST_SAFETY, float(np.quantile(self._errors, TAIL))))

    def _forecast(self, horizon: int) -> float:
        """Return the most items of a slot until then."""
        counts = []
        for (begin, before), (end, after) in itertools.pairwise(self._slots):
            # An app that was forgotten in between, or belonged elsewhere, is not counted.
            came = sum(max(0, after[app] - before[app]) for app in after if app in before)
            counts.append([came * self._slot_seconds / (end - begin)])
        return float(forecasts(counts, horizon).max())
