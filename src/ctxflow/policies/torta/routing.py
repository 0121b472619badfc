"""TORTA on a live run: the routing policy `torta`.

Two layers. The macro layer says once a slot which share of the work goes to which region (`macro`); with one region
there is nothing to say. The micro layer gives calls to free workers: by urgency, and each to the worker that scores
best by hardware, locality and load (`micro`). A context is loaded on one more worker only if the queue lasts longer
than the load would; and ahead of demand, on workers that idle and hold nothing that is wanted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ctxflow.policies.helpers import forget
from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.torta.macro import Allocate, Macro, form
from ctxflow.policies.torta.micro import Wish, given_out
from ctxflow.policies.torta.outlook import Outlook
from ctxflow.policies.torta.quantities import amounts
from ctxflow.policies.torta.scaling import target
from ctxflow.policies.views import AppView, WorkerView

MOST_CALLS = 256
"""Calls that are given out in one matching; more make another."""

Key = tuple[int, int, float, float, int]
URGENT, HELD, COLD = range(3)


class Torta:
    """Calls go by urgency to the workers that suit them, and contexts are loaded only where that pays.

    In the order of priorities: first an app whose deadline is at risk, or that got no worker for `longest_wait`
    seconds; then work for workers that hold its context; then loads, the longest queue per holder first. A context is
    loaded on one more worker if its queue, shared by those that hold it, lasts longer than the load is known to take
    there; what was never measured is tried. With several regions, a call waits for a worker in the region that the
    macro layer gave it, for `patience` seconds.

    Guarantees: whatever the view holds, only free workers are given what they can run, none more than it has slots;
    of apps of one priority, none waits for ever while a worker could run it.

    :param macro: "transport", "lookahead", or an object of the protocol `allocation.Allocate`.
    :param slot_seconds: how long shares of regions hold, and how far ahead contexts are loaded.
    :param patience: seconds that work waits for its region.
    :param longest_wait: seconds, or four times its load if that is longer.
    :param search: rounds of local search over a matching.
    :param prewarm: whether idle workers load what the forecast says will be wanted.
    :raises ValueError: for a form that is not known, or a number that makes no sense.
    :raises ModuleNotFoundError: for the look-ahead without SciPy.
    """

    def __init__(
        self,
        macro: str | Allocate = "transport",
        slot_seconds: float = 45.0,
        patience: float = 10.0,
        longest_wait: float = 60.0,
        search: int = 4,
        prewarm: bool = True,
    ) -> None:
        if not (math.isfinite(slot_seconds) and slot_seconds > 0):
            raise ValueError("slot_seconds is how long shares of regions hold: give more than 0")
        if not (patience >= 0 and longest_wait >= 0 and search >= 0):
            raise ValueError("patience, longest_wait and search cannot be negative: give 0 or more")
        self._macro = Macro(form(macro) if isinstance(macro, str) else macro, slot_seconds)
        self._slot_seconds, self._patience, self._longest_wait = slot_seconds, patience, longest_wait
        self._search, self._prewarm = search, prewarm
        self._outlook = Outlook()
        # App -> when a call of it was last given; worker -> context -> the same there.
        self._served: dict[str, float] = {}
        self._recent: dict[str, dict[str, float]] = {}

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose; one free slot is filled without a matching, since then there is nothing to match."""
        self._look(view)
        self._macro.shares(view, self._outlook)
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
            self._recent = {worker: held for worker, held in self._recent.items() if worker in view.workers}
            contexts = {app.context for app in view.apps.values()}
            for held in self._recent.values():
                forget(held, contexts)
            forget(self._served, view.apps)

    # --- one free slot

    def _for_one(self, view: View, worker: WorkerView, ready: Sequence[AppView]) -> list[Assignment]:
        found: list[tuple[Key, AppView]] = []
        for app in ready:
            held = worker.contexts.get(app.context)
            if held is not None and held.state != "ready":
                continue
            urgent = self._urgent(view, app)
            if held is None and not urgent and self._loads_worth(view, app, worker.region) < 1:
                continue
            if self._region_for(view, app, (worker.region,)) in (None, worker.region):
                found.append((self._key(view, app, URGENT if urgent else COLD if held is None else HELD), app))
        for _, app in sorted(found, key=lambda pair: pair[0]):
            if view.can_run(app, worker):
                return [self._gave(view, worker, app)]
        return []

    # --- several

    def _for_many(self, view: View, ready: Sequence[AppView]) -> list[Assignment]:
        wishes = [pair for app in ready for pair in self._wishes(view, app)]
        wishes.sort(key=lambda pair: pair[0])
        ordered = [wish for _, wish in wishes[:MOST_CALLS]]
        pairs = given_out(ordered, view.now, self._outlook, self._recent, self._search)
        return [self._gave(view, worker, wish.app) for wish, worker in pairs]

    def _wishes(self, view: View, app: AppView) -> Iterator[tuple[Key, Wish]]:
        """Yield the calls that an app has for the free workers, each with those that may take it."""
        able = (worker for worker in view.free_holders(app.context) if view.can_run(app, worker))
        holders = list(itertools.islice(able, MOST_CALLS))
        urgent, left = self._urgent(view, app), app.backlog
        some = holders[0] if holders else next(iter(view.free.values()))
        calls = min(MOST_CALLS, -(-left // max(1, view.batch_size(app, some))))
        held = min(calls, sum(worker.free_slots for worker in holders))
        for number in range(held):
            if where := self._in_region(view, app, holders):
                yield self._key(view, app, URGENT if urgent and not number else HELD), Wish(app, where)
        worth = {region: self._loads_worth(view, app, region) for region in self._outlook.slots}
        # One that got nobody for long gets one worker, whatever that pays.
        first = urgent and not held
        if calls <= held or not (first or any(count >= 1 for count in worth.values())):
            return
        able = (w for w in view.free.values() if first or worth.get(w.region, math.inf) >= 1)
        cold = [w for w in able if app.context not in w.contexts and view.can_run(app, w)]
        for number in range(min(calls - held, sum(worker.free_slots for worker in cold))):
            paying = [w for w in cold if number < worth.get(w.region, math.inf) or (first and not number)]
            if not (where := self._in_region(view, app, paying)):
                return
            yield self._key(view, app, URGENT if first and not number else COLD), Wish(app, where)

    def _in_region(self, view: View, app: AppView, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Return those of some workers that are in the region of the app's next call."""
        if not self._macro.divides:
            return workers
        region = self._region_for(view, app, {worker.region for worker in workers})
        return workers if region is None else [worker for worker in workers if worker.region == region]

    # --- judgements

    def _key(self, view: View, app: AppView, level: int) -> Key:
        """Return where a call stands in the order of urgency."""
        deadline = math.inf if app.deadline is None or math.isnan(app.deadline) else app.deadline
        return (-app.priority, level, deadline, -app.backlog / (view.holders(app.context) + 1), app.order)

    def _urgent(self, view: View, app: AppView) -> bool:
        """Return whether the app's deadline is at risk, or it was left without a worker for too long."""
        load = self._outlook.longest_load(app.context)
        if app.waiting_since is not None:
            since = max(app.waiting_since, self._served.get(app.id, -math.inf))
            if view.now - since > max(self._longest_wait, 4 * load):
                return True
        seconds = self._outlook.item_seconds(app.id)
        if app.deadline is None or seconds is None:
            return False
        holders = view.holders(app.context)
        return view.now + app.backlog * seconds / max(1, holders) + (0 if holders else load) > app.deadline

    def _loads_worth(self, view: View, app: AppView, region: str) -> float:
        """Return on how many more workers of a region loading the app's context pays, as far as that is known."""
        seconds = self._outlook.item_seconds(app.id)
        load = self._outlook.load_seconds(app.context, region)
        holders = view.holders(app.context)
        if seconds is None or not load or not holders:
            return math.inf
        return max(0, math.ceil(app.backlog * seconds / load) - 1 - holders)

    def _region_for(self, view: View, app: AppView, regions: Iterable[str]) -> str | None:
        """Return the region that the app's next call goes to, None for any.

        Any, where it has waited long enough, and where the region that it is given would not take it at all.
        """
        region = self._macro.next_region()
        if region is None or region in regions:
            return region
        if app.waiting_since is None or view.now >= app.waiting_since + self._patience:
            return None
        if self._outlook.holders[app.context, region]:
            return region
        seconds, load = self._outlook.item_seconds(app.id), self._outlook.load_seconds(app.context, region)
        pays = seconds is not None and load is not None and app.backlog * seconds > load
        return region if pays else None

    def _gave(self, view: View, worker: WorkerView, app: AppView) -> Assignment:
        self._macro.gave(worker.region)
        self._served[app.id] = view.now
        self._recent.setdefault(worker.id, {})[app.context] = view.now
        return Assignment(worker.id, app.id)


def warmings(
    view: View, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], slot_seconds: float
) -> Iterator[Assignment]:
    """Yield loads without work, the context that lacks most workers first.

    A context is wanted on as many workers as Eq. 6 says for what is queued and what is forecast, with a worker's
    capacity being the items that it does in a slot. Loaded is only what is lacking, and only on workers that run
    nothing and hold nothing of which there are too few; and where several contexts are in use, one free worker stays as
    it is, for what nobody foresaw. An app whose speed nobody measured is not loaded ahead.

    :param recent: worker -> context -> when a call of it was last given there: such workers come first.
    """
    needs = _needs(view, outlook, slot_seconds)
    spare = {context: view.holders(context) - need.workers for context, need in needs.items()}
    lacking = sorted((c for c, need in needs.items() if spare[c] < 0 and need.app is not None), key=lambda c: spare[c])
    if not lacking:
        return
    several = len({app.context for app in view.apps.values() if app.arrived}) > 1
    idle = [worker for worker in view.free.values() if not worker.running and not worker.sessions]
    for context in lacking:
        app = needs[context].app
        assert app is not None
        for _, worker in sorted([(_rank(w, context, outlook, recent), w) for w in idle], key=lambda pair: pair[0]):
            if spare[context] >= 0 or len(view.free) <= several:
                break
            held = [c for c in worker.contexts if c]  # What needs no context is in nobody's way.
            if context in held or any(spare.get(c, 1) <= 0 for c in held):
                continue
            yield Assignment(worker.id, app.id)
            if context in worker.contexts:  # It was possible.
                idle.remove(worker)
                for changed, by in [(context, 1), *((c, -1) for c in held if c not in worker.contexts)]:
                    spare[changed] = spare.get(changed, 0) + by


@dataclasses.dataclass
class _Need:
    """How many workers are to hold a context; `app`: one of its apps that is forecast, and was measured."""

    workers: float = 0.0
    app: AppView | None = None


def _needs(view: View, outlook: Outlook, slot_seconds: float) -> dict[str, _Need]:
    """Return the needs by context, of the apps that are queued or forecast."""
    forecast = view.forecast or {}
    needs: dict[str, _Need] = {}
    for app in view.apps.values():
        expected = float(amounts(forecast.get(app.id, 0.0))) * slot_seconds
        if app.backlog <= 0 and expected <= 0:
            continue
        need, seconds = needs.setdefault(app.context, _Need()), outlook.item_seconds(app.id)
        if not seconds:
            need.workers = math.inf  # Nobody knows: who holds it keeps it, and nobody else loads it.
            continue
        need.workers += int(target([app.backlog], [expected], [slot_seconds / seconds], [len(view.workers)])[0])
        if expected >= 1:
            need.app = app
    for need in needs.values():
        if need.workers == math.inf:
            need.app = None
    return needs


def _rank(
    worker: WorkerView, context: str, outlook: Outlook, recent: Mapping[str, Mapping[str, float]]
) -> tuple[float, float, int]:
    """Return those that had it last come first, then the fastest, then those that hold least."""
    had = recent.get(worker.id, {}).get(context, -math.inf)
    return -had, -outlook.speed(worker.gpu_model), len(worker.contexts)
