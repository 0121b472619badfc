"""What several policies need, and those of others may use: urgency, outstanding work, workers divided among tiers."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import importlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ctxflow.installing import how_to_install
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, SessionView, TierView, WorkerView

SHARE_SECONDS = 1.0  # How long what is left of a queue is used again.
SESSIONS = 4  # Sessions of a worker, as long as nothing was measured.

Key = TypeVar("Key")


def urgency(app: AppView) -> tuple[float, float, int]:
    """Return the order in which apps are served: priority, then deadline, then age."""
    return (-app.priority, math.inf if app.deadline is None else app.deadline, app.order)


def with_room(view: View, app: AppView, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Return those of some free workers that could run an app now; those that are drained for it, if no other could."""
    able = [worker for worker in workers if view.can_run(app, worker)]
    return [worker for worker in able if not view.drains(app, worker)] or able


def sample(workers: Collection[WorkerView], most: int) -> list[WorkerView]:
    """Return so many workers at most, spread evenly over all of them.

    >>> sample(range(10), 4)
    [0, 3, 6, 9]
    """
    return list(itertools.islice(workers, 0, None, -(-len(workers) // most) or 1))


class _Left(dict[str, int]):
    """Worker -> assignments that it could still take, looked up when they are asked for."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __missing__(self, worker: str) -> int:
        known = self._view.free.get(worker)
        left = self[worker] = known.free_slots if known is not None else 0
        return left


class FreeSlots:
    """The free slots that a routing policy gives out, as what it has chosen so far leaves them.

    :ivar view: where nothing was given out yet, when it was made.
    :ivar left: worker -> assignments that it could still take; `total`: of all.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.left: dict[str, int] = _Left(view)
        self.total = view.free_slots
        self._used: dict[str, float] = {}

    @property
    def used(self) -> dict[str, float]:
        """Return worker -> slots in use (`WorkerView.slots_used`); added up for those who ask."""
        if not self._used:
            self._used = {name: worker.slots_used for name, worker in self.view.free.items()}
        return self._used

    def able(self, app: AppView, workers: Iterable[WorkerView] | None = None) -> list[WorkerView]:
        """Return the free workers, or some of them, that could take a call of an app; who must be drained, in need."""
        some = self.view.free.values() if workers is None else workers
        return with_room(self.view, app, (worker for worker in some if self.left[worker.id]))

    def rest(
        self, app: AppView, able: list[WorkerView], last: WorkerView, among: Iterable[WorkerView] | None = None
    ) -> list[WorkerView]:
        """Return who could take the next call, of those that could take one before the last was given, or refused.

        :param among: who is asked once none of them is left; all free workers by default.
        """
        if self.left[last.id] and self.view.can_run(app, last):
            return able
        able.remove(last)
        return able or self.able(app, among)

    def least_first(
        self, app: AppView, key: Callable[[WorkerView], Any], workers: list[WorkerView] | None = None
    ) -> Iterator[WorkerView]:
        """Yield the worker for each next call of an app: the one with the lowest key that can still take a call.

        :param key: of a worker; computed again after each call that it takes.
        :param workers: the candidates; by default all free workers, those that must be drained for the app last.
        """
        able = self.able(app) if workers is None else workers
        while able:
            order = [(key(worker), place, worker) for place, worker in enumerate(able)]
            heapq.heapify(order)
            while order:
                _, place, worker = order[0]
                if self.left[worker.id] and self.view.can_run(app, worker):
                    yield worker
                    heapq.heapreplace(order, (key(worker), place, worker))
                else:
                    heapq.heappop(order)
            able = self.able(app) if workers is None else []

    def take(self, app: AppView, worker: WorkerView) -> int:
        """Give a slot, or the places left in a window, to an app; return the items that this is for.

        None are where a window has become smaller than what is in flight; of others 1 or more.
        """
        view, name = self.view, worker.id
        places = app.overlaps and not view.drains(app, worker)
        items = view.room(app, worker) if places else max(1, view.batch_size(app, worker))
        self.left[name] -= 1
        self.total -= 1
        if self._used:
            share = (items if app.overlaps else 1) / view.full_window(app, worker)
            self._used[name] = min(float(worker.slots), self._used[name] + share)
        return items


def slot_items(view: View, app: AppView, batch_size: int) -> float:
    """Return the items of an app that a slot has at a time while enough is queued: a window, or batches.

    Where workers differ, the mean of those that hold the app's context.

    :param batch_size: items of a batch, or a window, that nobody states: of an app that does not, and while no worker
        is there to ask for.
    """
    each = 1 if app.overlaps else app.batch_size or batch_size
    holders = [worker for worker in view.workers.values() if app.context in worker.contexts]
    holders = holders or list(itertools.islice(view.workers.values(), 1))
    if not holders:
        return float(min(batch_size, app.concurrency or batch_size) if app.overlaps else each * (app.concurrency or 1))
    some = {(worker.tier, worker.gpu_model): worker for worker in holders}
    kinds = collections.Counter((worker.tier, worker.gpu_model) for worker in holders)
    windows = sum(count * view.full_window(app, some[kind]) for kind, count in kinds.items())
    return each * windows / len(holders)


def outstanding(view: View, batch_size: int) -> dict[str, int]:
    """Return calls of each app: its running batches, and its queue in batches of the size that it would get now.

    What overlaps on a worker is counted in full windows, which take a slot each: of an app of items, all that is queued
    and in flight, wherever that is.

    :param batch_size: items of a call of an app that states none, while no worker is there to size one for.
    """
    first = next(iter(view.workers.values()), None)  # The one that is connected longest.
    running = collections.Counter(each.app for each in view.attempts.values() if each.items)  # No steps of sessions.
    calls = {}
    for app in view.apps.values():
        if app.overlaps:
            count = app.backlog + running[app.id]
            calls[app.id] = math.ceil(count / slot_items(view, app, batch_size)) if count else 0
            continue
        size = app.batch_size or batch_size
        if first is not None and app.backlog:
            size = view.batch_size(app, first) or app.backlog  # 0: it waits to become one batch.
        count = math.ceil(app.backlog / size) + running[app.id]
        beside = (app.concurrency or 1) if first is None else view.full_window(app, first)
        calls[app.id] = math.ceil(count / beside)
    return calls


AS_FULL = 0.5  # With so much in flight as others of its kind, a worker's speed was measured as theirs was.


def paces(workers: Iterable[WorkerView], app: str) -> list[tuple[WorkerView, float]]:
    """Return the workers on which an app was measured, each with the seconds of an item.

    Where calls overlap, those are left out that never had half as many in flight as others of their GPU model: an
    item's share of their time says how little they had to do.
    """
    known = [(worker, each) for worker in workers if (each := worker.seconds_per_item(app)) is not None]
    most: dict[str | None, float] = {}
    for worker, _ in known:
        most[worker.gpu_model] = max(worker.calls_beside(app) or 1.0, most.get(worker.gpu_model, 1.0))
    return [pair for pair in known if (pair[0].calls_beside(app) or 1.0) >= AS_FULL * most[pair[0].gpu_model]]


def work_at_stake(view: View, worker: WorkerView) -> float:
    """Return the seconds of a worker's time that are lost if it goes at once: those spent on what it runs.

    Calls that overlap with a context share a slot, so each has had its part of the time since it began.
    """
    each = (view.now - attempt.started for attempt in worker.running.values())
    beside = (max(1, worker.in_flight(view.apps[attempt.app].context)) for attempt in worker.running.values())
    return sum(seconds / count for seconds, count in zip(each, beside, strict=True))


def active(view: View) -> dict[str, list[SessionView]]:
    """Return the sessions of each app that have something to do, wherever they are."""
    found: dict[str, list[SessionView]] = {}
    for session in view.sessions.values():
        if not session.idle and not session.by_user:
            found.setdefault(session.app, []).append(session)
    return found


def idle(view: View) -> dict[str, int]:
    """Return the number of sessions of each app that have nothing to do, and may at any time."""
    waiting = (session for session in view.sessions.values() if session.idle and not session.by_user)
    return collections.Counter(session.app for session in waiting)


def sessions_of_worker(view: View, app: AppView, unmeasured: int) -> int:
    """Return K as it was measured: the most sessions of an app that any worker serves within the app's chunk target.

    It is no more than those whose states a worker has memory for, as far as both are known.

    :param unmeasured: what it is as long as nothing was measured.
    """
    known = [view.capacity(app, worker) for worker in view.workers.values() if worker.step_seconds(app.id)]
    rooms = [room for worker in view.workers.values() if (room := view.state_room(app, worker)) is not None]
    found = max(known, default=unmeasured)
    if rooms:
        sizes = [s.state_bytes for s in view.sessions.values() if s.app == app.id and s.state_bytes]
        found = min(found, max(1, int(max(rooms) * len(sizes) / sum(sizes)))) if sizes else found
    return found


def seekers(view: View) -> list[SessionView]:
    """Return the sessions that need a worker now, longest open first: they have something to do, or must leave theirs.

    One whose next worker is named already is none of them.
    """
    found = []
    stays: dict[tuple[object, ...], bool] = {}  # Sessions may be many: each worker is looked at once.
    for session in view.sessions.values():
        if session.state == "waiting" or (session.state == "suspended" and not session.by_user):
            if not session.idle:
                found.append(session)
        elif session.state == "placed" and session.target is None:
            worker = view.workers.get(session.worker or "")
            key = (session.worker, session.context, session.failed_on)
            if worker is not None and key not in stays:
                stays[key] = view.can_carry(session, worker)
            if worker is not None and not stays[key]:
                found.append(session)
    return found


def loads(view: View) -> dict[str, int]:
    """Return worker -> its sessions that have something to do, those included that are on their way to it."""
    counts = {worker.id: 0 for worker in view.workers.values() if worker.noticed is None and not worker.draining}
    for session in view.sessions.values():
        place = session.target or session.worker
        if place in counts and not session.idle:
            counts[place] += 1
    return counts


def is_ready(worker: WorkerView, context: str) -> bool:
    """Return whether a worker has a context that is built."""
    held = worker.contexts.get(context)
    return held is not None and held.state == "ready"


def tiers_for(view: View, app: AppView) -> frozenset[str]:
    """Return the names of the tiers whose workers could run an app now."""
    return frozenset(name for name, tier in view.tiers.items() if view.permits(app, tier))


class QueueShares:
    """What each worker should have in flight of an app whose calls overlap, where too little is left for full windows.

    What is queued and in flight is divided by the workers that have the app's context, or are about to. These are added
    up once a second, or after as many questions as there are workers; what is left is always known.
    """

    def __init__(self) -> None:
        # App -> when it was added up, its calls that do not count or others' that do, and the speeds of all workers.
        self._known: dict[str, tuple[float, int, float]] = {}
        self._uses: dict[str, int] = {}

    def share(
        self, view: View, app: AppView, worker: WorkerView, speed: Callable[[WorkerView], float] = lambda worker: 1.0
    ) -> int:
        """Return the items that a worker should have in flight, 1 or more.

        :param speed: of a worker, by which it gets more than others; more than 0.
        """
        at, beside, speeds = self._known.get(app.id, (-math.inf, 0, 0.0))
        uses = self._uses.get(app.id, 0)
        if view.now >= at + SHARE_SECONDS or uses >= len(view.workers):
            staying = [w for w in view.workers.values() if w.noticed is None and not w.draining]
            beside = sum(w.in_flight(app.context) for w in staying) - app.running
            speeds = sum(speed(w) for w in staying if app.context in w.contexts)
            self._known[app.id], uses = (view.now, beside, speeds), 0
            forget(self._known, view.apps)
            forget(self._uses, view.apps)
        self._uses[app.id] = uses + 1
        own = speed(worker)
        return max(1, math.ceil((app.backlog + app.running + beside) * own / max(speeds, own)))


def serving(workers: Iterable[WorkerView], tiers: Collection[str] | None = None) -> list[WorkerView]:
    """Return the workers that stay and serve whoever needs them: those with a place of their own do not.

    :param tiers: only those of these, where given.
    """
    staying = (w for w in workers if w.noticed is None and not w.draining and w.pin is None)
    return [w for w in staying if tiers is None or w.tier in tiers]


def divided(view: View, wanted: Mapping[frozenset[str], float]) -> dict[str, int]:
    """Return what each tier is asked for: what is used of its workers, and all that nobody has given yet.

    The most restricted take joined workers first, from the cheapest tier that will do; where tiers overlap only in
    part, that may not be the best division. An opportunistic tier may never give its workers, so every tier that can
    help is asked for all that is lacking. Each tier stays between its minimum and its maximum.

    Where a plan prefers tiers (`View.preferred`) its order takes the place of the price. Each of them is also asked for
    as many as less preferred tiers have in use: as they join, those are released, dearest first.

    :param wanted: workers by the tiers that will do; shares of workers count.
    """
    left = dict(wanted)
    rank = {name: number for number, name in enumerate(view.preferred)}
    order = sorted(
        view.tiers.values(),
        key=lambda tier: (rank.get(tier.name, len(rank)), math.inf if tier.price is None else tier.price),
    )
    staying: dict[str, list[WorkerView]] = {tier.name: [] for tier in order}
    for worker in serving(view.workers.values(), staying):
        staying[worker.tier].append(worker)
    tiers = [_Tier(tier, staying[tier.name]) for tier in order]
    groups = sorted(left, key=lambda group: (len(group), [tier.name in group for tier in tiers]))
    there_anyway = {tier.name: float(tier.by_hand + tier.kept) for tier in tiers}
    _serve(left, groups, tiers, there_anyway)
    spare = {tier.name: float(tier.connected - tier.kept) for tier in tiers}
    used = _serve(left, groups, tiers, spare)
    asked = {}
    for number, tier in enumerate(tiers):
        those = [group for group in groups if tier.name in group]
        after = [each.name for each in tiers[number + 1 :]] if tier.name in rank else []
        held = sum(used.get((group, name), 0.0) for group in those for name in (tier.name, *after))
        asked[tier.name] = tier.bounded(held + sum(left[group] for group in those))
    return asked


class _Tier:
    """A tier with the workers of it that stay."""

    def __init__(self, tier: TierView, staying: Sequence[WorkerView]) -> None:
        self.name, self._minimum, self._maximum = tier.name, tier.minimum, tier.maximum
        self.connected = sum(worker.acquired for worker in staying)  # Those that were asked for.
        self.by_hand = len(staying) - self.connected
        self.kept = min(self.connected, tier.minimum)  # They are there anyway, as are those started by hand.

    def bounded(self, workers: float) -> int:
        """Return what to ask for when so many are wanted beyond those that are there anyway."""
        # Sums of shares of workers may be a trifle above a whole number.
        return max(self._minimum, min(self._maximum, self.kept + math.ceil(workers - 1e-9)))


def _serve(
    wanted: dict[frozenset[str], float],
    groups: Sequence[frozenset[str]],
    tiers: Sequence[_Tier],
    free: dict[str, float],
) -> dict[tuple[frozenset[str], str], float]:
    """Let groups in order take free workers of their tiers in order; lowers `wanted`, and returns who took what."""
    left = dict(free)
    used = {}
    for group in groups:
        for tier in tiers:
            if tier.name in group:
                taken = min(wanted[group], left[tier.name])
                wanted[group] -= taken
                left[tier.name] -= taken
                used[group, tier.name] = taken
    return used


@dataclasses.dataclass
class Peak:
    """The most of a number over some time."""

    # (Since when, the most from then on), ever lower.
    steps: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)

    def over(self, value: float, now: float, seconds: float) -> float:
        """Note the number, and give its most: a lower one counts when it was not exceeded for so many seconds.

        >>> peak = Peak()
        >>> [peak.over(value, now, 60) for value, now in ((9, 0), (2, 1), (3, 30), (0, 50), (0, 60), (0, 61), (0, 110))]
        [9, 9, 9, 9, 9, 3, 0]
        """
        since = now
        while self.steps and self.steps[-1][1] <= value:
            since = self.steps.pop()[0]
        self.steps.append((since, value))
        while len(self.steps) > 1 and self.steps[1][0] + seconds <= now:
            self.steps.popleft()
        return self.steps[0][1]


def forget(table: dict[Key, Any], known: Collection[Any], of: Callable[[Key], Any] = lambda key: key) -> None:
    """Take out of a policy's own table what the run does not know any more, once that is most of it.

    :param of: what an entry's key is about.

    >>> table = dict.fromkeys(range(100), "noted")
    >>> forget(table, {1, 2})
    >>> table
    {1: 'noted', 2: 'noted'}
    """
    if len(table) > 2 * len(known) + 64:
        for key in [key for key in table if of(key) not in known]:
            del table[key]


def scipy_modules(user: str, *names: str) -> list[Any]:
    """Return modules of SciPy, an optional dependency, for those who cannot do without.

    :param user: who needs them, with the verb.
    :raises ModuleNotFoundError: without SciPy, saying what to install.
    """
    try:
        return [importlib.import_module(f"scipy.{name}") for name in names]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{user} SciPy: {how_to_install('scipy', extra='policies')}") from None


def tier_costs(view: View) -> dict[str, tuple[float, float]]:
    """Return what a worker of each tier costs, and the seconds to it, to be compared; empty where no price is known.

    The cost is the tier's price, or else that of its region's power; infinite for a tier with neither.
    """
    home = next((region for region in view.regions.values() if region.home), None)
    places = {name: region for region in view.regions.values() for name in region.tiers}
    found, known = {}, False
    for name, tier in view.tiers.items():
        region = places.get(name, home)
        price = tier.price if tier.price is not None else None if region is None else region.power_price
        known = known or price is not None
        way = 0.0 if home is None or region is None or region is home else home.latency.get(region.name, math.inf)
        found[name] = (math.inf if price is None else price, way)
    return found if known else {}
