"""TORTA on a live run: the routing policy `torta`, whose macro layer divides work among regions once a slot (`macro`).

Its micro layer (`micro`) assigns calls to free workers by urgency: Eq. 8 sees the measured speed of a worker's GPU
model, Eq. 9 what it runs, Eq. 10 what it ran lately, so that work gathers on few workers, and others may go.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ctxflow.policies.helpers import forget, with_room
from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.torta.holding import Holding
from ctxflow.policies.torta.macro import Allocate, Macro, form
from ctxflow.policies.torta.micro import NOWHERE, Weights, fit, improve, match
from ctxflow.policies.torta.prewarming import warmings
from ctxflow.policies.torta.quantities import Floats, Outlook, Recent, Servers, Tasks
from ctxflow.policies.views import AppView, WorkerView

THRIFT = 0.05
HOLD = 4.0
MOST_CALLS = 256  # In one matching.

Key = tuple[int, int, float, float, int]
URGENT, HELD, COLD = range(3)


class Torta:
    """Calls go by urgency to the workers that suit them, and contexts are loaded only where that pays.

    In the order of priorities: first an app whose deadline is at risk, or that got no worker for `longest_wait`
    seconds; then work for workers that hold its context; then loads, the longest queue per holder first. Of workers
    that can take a call, the fastest, cheapest and nearest to where it comes from is taken. A context is loaded on one
    more worker if its queue, shared by its holders, lasts longer than the load takes there, if that was measured. Where
    the macro layer divides calls among regions, one waits `patience` seconds for a worker of its region; where it does
    not, and power has a price, one may wait for a cheaper worker that is busy (`holding`).

    Guarantees: only free workers are given what they can run, none more than it has slots; of apps of one priority,
    none waits for ever while a worker could run it.

    :param macro: "transport", "lookahead", or an object of the protocol `macro.Allocate`; None for transport where no
        tier has a price, and else no division among regions: the micro layer weighs each tier's price itself.
    :param slot_seconds: how long shares of regions hold, and how far ahead contexts are loaded.
    :param patience: seconds that work waits for its region.
    :param longest_wait: seconds, or four times its load if that is longer.
    :param search: rounds of local search over a matching.
    :param prewarm: whether idle workers load what the forecast says will be wanted.
    :param thrift: what the price of the dearest tier counts against its workers; 1 is what the fastest GPU counts for.
    :param hold: how many times its own time a call may wait for a cheaper worker, to save what the dearest tier costs;
        twice at most.
    :raises ValueError: for a form that is not known, or a number that makes no sense.
    :raises ModuleNotFoundError: for the look-ahead without SciPy.
    """

    def __init__(
        self,
        macro: str | Allocate | None = None,
        slot_seconds: float = 45.0,
        patience: float = 10.0,
        longest_wait: float = 60.0,
        search: int = 4,
        prewarm: bool = True,
        thrift: float = THRIFT,
        hold: float = HOLD,
    ) -> None:
        if not (math.isfinite(slot_seconds) and slot_seconds > 0):
            raise ValueError("slot_seconds is how long shares of regions hold: give more than 0")
        if not (patience >= 0 and longest_wait >= 0 and search >= 0 and thrift >= 0 and hold >= 0):
            raise ValueError("patience, longest_wait, search, thrift and hold cannot be negative: give 0 or more")
        chosen = macro or "transport"
        self._macro = Macro(form(chosen) if isinstance(chosen, str) else chosen, slot_seconds)
        self._divides = macro is not None
        self._slot_seconds, self._patience, self._longest_wait = slot_seconds, patience, longest_wait
        self._search, self._prewarm, self._thrift = search, prewarm, thrift
        self._outlook, self._holding = Outlook(), Holding(hold)
        # App -> when a call of it was last given; worker -> context -> the same there.
        self._served: dict[str, float] = {}
        self._recent: dict[str, dict[str, float]] = {}
        # Context -> seconds of work that wait, infinite where unknown; region -> on how many more workers a load pays.
        self._queued: dict[str, float] = {}
        self._worth: dict[str, dict[str, float]] = {}
        self._cold: Counter[str] = Counter()  # Context -> calls that may load it, in this decision.

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose; one free slot is filled without a matching."""
        self._look(view)
        if self._divides or not self._outlook.priced:
            self._macro.divide(view, self._outlook)
        self._queued, self._worth, self._cold = {}, {}, Counter()
        for app in ready:
            seconds = self._outlook.item_seconds(app)
            work = math.inf if seconds is None else app.backlog * seconds
            self._queued[app.context] = self._queued.get(app.context, 0.0) + work
        if len(view.free) == 1:
            (worker,) = view.free.values()
            if worker.free_slots == 1:
                return self._for_one(view, worker, ready)
        return self._for_many(view, ready)

    def warm(self, view: View) -> Iterator[Assignment]:
        """Yield what idle workers should load ahead of demand."""
        if self._prewarm:
            self._look(view)
            yield from warmings(view, self._outlook, self._recent, self._slot_seconds)

    def _look(self, view: View) -> None:
        if self._outlook.look(view):
            self._holding.look(view, self._outlook)
            self._recent = {worker: held for worker, held in self._recent.items() if worker in view.workers}
            contexts = {app.context for app in view.apps.values()}
            for held in self._recent.values():
                forget(held, contexts)
            forget(self._served, view.apps)

    def _for_one(self, view: View, worker: WorkerView, ready: Sequence[AppView]) -> list[Assignment]:
        found: list[tuple[Key, AppView]] = []
        for app in ready:
            held = worker.contexts.get(app.context)
            if held is not None and held.state != "ready":
                continue
            urgent = self._urgent(view, app)
            if held is None and not urgent and self._loads_worth(view, app.context).get(worker.region, math.inf) < 1:
                continue
            if held is not None and not urgent and not self._affordable(view, app, [worker]):
                continue
            if not self._macro.divides or self._region_for(view, app, (worker.region,)) in (None, worker.region):
                found.append((self._key(view, app, URGENT if urgent else COLD if held is None else HELD), app))
        for _, app in sorted(found, key=lambda pair: pair[0]):
            if view.can_run(app, worker):
                return [self._gave(view, worker, app)]
        return []

    def _for_many(self, view: View, ready: Sequence[AppView]) -> list[Assignment]:
        wishes = [pair for app in ready for pair in self._wishes(view, app)]
        wishes.sort(key=lambda pair: pair[0])
        ordered = [wish for _, wish in wishes[:MOST_CALLS]]
        prices = CallPrices(view, self._outlook, self._thrift)
        pairs = given_out(ordered, view.now, self._outlook, self._recent, self._search, prices)
        once = set()  # A window is filled at once, and a context loaded once, whatever slots are free beside.
        chosen = []
        for wish, worker in pairs:
            if wish.app.overlaps or wish.app.context not in worker.contexts:
                if (worker.id, wish.app.context) in once:
                    continue
                once.add((worker.id, wish.app.context))
            chosen.append(self._gave(view, worker, wish.app))
        return chosen

    def _wishes(self, view: View, app: AppView) -> Iterator[tuple[Key, Wish]]:
        """Yield an app's calls for the free workers, each with the workers that may take it."""
        able = (worker for worker in view.free_holders(app.context) if view.can_run(app, worker))
        holders = with_room(view, app, itertools.islice(able, MOST_CALLS))
        urgent = self._urgent(view, app)
        size, calls, held = _calls(view, app, holders)
        taken = holders if urgent else self._affordable(view, app, holders)
        for number in range(held):
            if where := self._in_region(view, app, taken):
                yield self._key(view, app, URGENT if urgent and not number else HELD), Wish(app, where, size)
        if calls <= held:
            return
        worth = self._loads_worth(view, app.context)
        first = urgent and not held
        if not (first or any(count >= 1 for count in worth.values())):
            return
        able = (w for w in view.free.values() if first or worth.get(w.region, math.inf) >= 1)
        cold = with_room(view, app, (w for w in able if app.context not in w.contexts))
        for number in range(min(calls - held, sum(worker.free_slots for worker in cold))):
            urged, before = first and not number, self._cold[app.context]
            paying = [w for w in cold if urged or before < worth.get(w.region, math.inf)]
            if not (where := self._in_region(view, app, paying)):
                return
            self._cold[app.context] += 1
            yield self._key(view, app, URGENT if urged else COLD), Wish(app, where, size)

    def _affordable(self, view: View, app: AppView, holders: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Return the free holders that an app's calls take rather than wait for cheaper ones."""
        if self._macro.divides:
            return holders
        return self._holding.affordable(app, holders, self._outlook, self._queued, self._waited(view, app))

    def _waited(self, view: View, app: AppView) -> float:
        """Return the seconds since the app was given a worker, or something was queued."""
        since = view.now if app.waiting_since is None else app.waiting_since
        return view.now - max(since, self._served.get(app.id, -math.inf))

    def _in_region(self, view: View, app: AppView, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Return the workers in the region of the app's next call."""
        if not self._macro.divides:
            return workers
        region = self._region_for(view, app, {worker.region for worker in workers})
        return workers if region is None else [worker for worker in workers if worker.region == region]

    def _key(self, view: View, app: AppView, level: int) -> Key:
        """Return where a call stands in the order of urgency."""
        deadline = math.inf if app.deadline is None or math.isnan(app.deadline) else app.deadline
        return (-app.priority, level, deadline, -app.backlog / (view.holders(app.context) + 1), app.order)

    def _urgent(self, view: View, app: AppView) -> bool:
        """Return whether the app's deadline is at risk, or it was left without a worker for too long."""
        load = self._outlook.longest_load(app.context)
        if self._waited(view, app) > max(self._longest_wait, 4 * load):
            return True
        seconds = self._outlook.item_seconds(app)
        if app.deadline is None or seconds is None:
            return False
        holders = view.holders(app.context)
        return view.now + app.backlog * seconds / max(1, holders) + (0 if holders else load) > app.deadline

    def _loads_worth(self, view: View, context: str) -> Mapping[str, float]:
        """Return on how many more workers of each region a load of a context pays; infinite if not measured."""
        if context not in self._worth:
            holders, queued = view.holders(context), self._queued[context]
            loads = {region: self._outlook.load_seconds(context, region) for region in self._outlook.slots}
            self._worth[context] = {
                region: max(0, math.ceil(queued / load) - 1 - holders)
                if load and holders and queued < math.inf
                else math.inf
                for region, load in loads.items()
            }
        return self._worth[context]

    def _region_for(self, view: View, app: AppView, regions: Iterable[str]) -> str | None:
        """Return the region of the app's next call; None for any: it waited long enough, or no load pays there."""
        region = self._macro.next_region(app.region)
        if region is None or region in regions:
            return region
        if app.waiting_since is None or view.now >= app.waiting_since + self._patience:
            return None
        if self._outlook.holders[app.context, region]:
            return region
        seconds, load = self._outlook.item_seconds(app), self._outlook.load_seconds(app.context, region)
        pays = seconds is not None and load is not None and app.backlog * seconds > load
        return region if pays else None

    def _gave(self, view: View, worker: WorkerView, app: AppView) -> Assignment:
        self._macro.gave(app.region, worker.region)
        self._served[app.id] = view.now
        self._recent.setdefault(worker.id, {})[app.context] = view.now
        return Assignment(worker.id, app.id)


def _calls(view: View, app: AppView, holders: Sequence[WorkerView]) -> tuple[int, int, int]:
    """Return the items of a call, the calls of an app's queue, and how many of them free holders take now."""
    some = holders[0] if holders else next(iter(view.free.values()))
    size, left = max(1, view.batch_size(app, some)), app.backlog
    if app.overlaps and holders:  # A call of a holder is what its window has room for.
        places = sum(view.room(app, worker) for worker in holders) or size * len(holders)
        held = min(MOST_CALLS, -(-left * len(holders) // places), len(holders))
        return size, min(MOST_CALLS, held + max(0, -(-(left - places) // size))), held
    calls = min(MOST_CALLS, -(-left // size))
    return size, calls, min(calls, sum(worker.free_slots for worker in holders))


CROWDED = 0.1  # What each context that a worker holds counts against loading another there.
HELD_AGES = 0.05  # How much slower what a worker still holds ages than what it held.
WEIGHTS = Weights()


class CallPrices:
    """What speaks against workers: their price, and the way of a call, as a share of the call's own seconds."""

    def __init__(self, view: View, outlook: Outlook, thrift: float) -> None:
        self._view, self._outlook, self._thrift = view, outlook, thrift

    def __call__(self, wish: Wish, worker: WorkerView) -> float:
        """Return it, in the unit of the score."""
        price = self._thrift * self._outlook.price(worker.tier)
        ways = self._outlook.ways(self._view, wish.app.region)
        return price + ways.get(worker.region, 0.0) / self._seconds(wish) if ways else price

    def table(self, wishes: Sequence[Wish], workers: Sequence[WorkerView]) -> Floats:
        """Return (N, S) all of them."""
        found = self._thrift * np.array([[self._outlook.price(worker.tier) for worker in workers]])
        if not self._view.regions:
            return np.repeat(found, len(wishes), axis=0)
        rows = {}
        for origin in {wish.app.region for wish in wishes}:
            ways = self._outlook.ways(self._view, origin)
            rows[origin] = np.array([ways.get(worker.region, 0.0) for worker in workers])
        added = np.array([rows[wish.app.region] / self._seconds(wish) for wish in wishes])
        return np.asarray(found + added, dtype=np.float64)

    def _seconds(self, wish: Wish) -> float:
        seconds = self._outlook.item_seconds(wish.app)
        return max(1e-3, seconds * wish.items) if seconds else math.inf


@dataclasses.dataclass(frozen=True)
class Wish:
    """A call that waits, and the workers that may take it, at least one."""

    app: AppView
    where: Sequence[WorkerView]
    items: int = 1


def given_out(
    wishes: Sequence[Wish],
    now: float,
    outlook: Outlook,
    recent: Mapping[str, Mapping[str, float]],
    search: int,
    prices: CallPrices,
) -> list[tuple[Wish, WorkerView]]:
    """Return which worker takes which call, without the calls that still wait.


    :param wishes: in the order of urgency.
    :param recent: worker -> context -> when a call of it was last given there.
    :param search: rounds of local search.
    """
    if len(wishes) == 1:
        return [(wishes[0], _best(wishes[0], now, outlook, recent, prices))]
    groups = {id(wish.where): wish.where for wish in wishes}
    workers = list({worker.id: worker for where in groups.values() for worker in where}.values())
    if not workers:
        return []
    column = {worker.id: number for number, worker in enumerate(workers)}
    contexts = {context: number for number, context in enumerate({wish.app.context: None for wish in wishes})}
    allowed = np.zeros((len(wishes), len(workers)), dtype=bool)
    columns = {key: [column[worker.id] for worker in where] for key, where in groups.items()}
    for row, wish in enumerate(wishes):
        allowed[row, columns[id(wish.where)]] = True
    tasks, servers = _tasks(wishes, contexts), _servers(workers, outlook)
    score = fit(tasks, servers, _recent(workers, contexts, recent, now), now, WEIGHTS)
    held = np.array([[context in worker.contexts for worker in workers] for context in contexts])[tasks.model]
    score -= CROWDED * np.where(held, 0, np.array([[len(worker.contexts) for worker in workers]]))
    score -= prices.table(wishes, workers)
    where = match(score, tasks, servers, allowed=allowed)
    where = improve(score, where, tasks, servers, allowed=allowed, rounds=search)
    return [(wish, workers[number]) for wish, number in zip(wishes, where.tolist(), strict=True) if number != NOWHERE]


def _best(
    wish: Wish, now: float, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], prices: CallPrices
) -> WorkerView:
    """Return the worker of one call alone: the same scores, without the arrays."""
    weights, context = WEIGHTS, wish.app.context

    def score(worker: WorkerView) -> float:
        held, had = worker.contexts.get(context), recent.get(worker.id, {}).get(context, -math.inf)
        had = had if held is None else _aged(max(had, held.last_used), now)
        locality = weights.same_model * math.exp(-weights.forgetting * max(0.0, now - had))
        free = math.exp(-worker.slots_used / worker.slots)
        hardware = weights.hardware * outlook.speed(worker.gpu_model)
        crowded = 0.0 if held is not None else CROWDED * len(worker.contexts)
        return hardware + weights.load * free + weights.locality * locality - crowded - prices(wish, worker)

    return max(wish.where, key=score)


def _aged(used: float, now: float) -> float:
    """Return when what a worker holds counts as used last."""
    return now - HELD_AGES * (now - used)


def _tasks(wishes: Sequence[Wish], contexts: Mapping[str, int]) -> Tasks:
    count = len(wishes)
    model = np.array([contexts[wish.app.context] for wish in wishes], dtype=np.int64)
    # Each asks for the fastest GPU; how urgent it is, is its place.
    nothing, place = np.zeros(count), np.arange(count, dtype=np.float64)
    return Tasks(np.ones(count), nothing, np.zeros(count, dtype=np.int64), model, place, nothing)


def _servers(workers: Sequence[WorkerView], outlook: Outlook) -> Servers:
    nothing, slots = np.zeros(len(workers)), np.array([worker.slots for worker in workers], dtype=np.float64)
    speeds = np.array([outlook.speed(worker.gpu_model) for worker in workers], dtype=np.float64)
    used = np.array([worker.slots_used for worker in workers], dtype=np.float64)
    free = np.array([worker.free_slots for worker in workers], dtype=np.int64)
    return Servers(speeds, nothing, slots, used, nothing, free, np.ones((len(workers), 1), dtype=bool))


def _recent(
    workers: Sequence[WorkerView], contexts: Mapping[str, int], recent: Mapping[str, Mapping[str, float]], now: float
) -> Recent:
    """Return what each worker holds or had, by when it was used."""
    ran: list[tuple[int, int, float]] = []
    for number, worker in enumerate(workers):
        times = {**recent.get(worker.id, {})}
        for context, held in worker.contexts.items():
            times[context] = _aged(max(held.last_used, times.get(context, -math.inf)), now)
        ran += [(number, contexts[context], time) for context, time in times.items() if context in contexts]
    server, model, time = zip(*ran, strict=True) if ran else ((), (), ())
    return Recent(np.array(server, dtype=np.int64), np.array(model, dtype=np.int64), np.array(time, dtype=np.float64))
