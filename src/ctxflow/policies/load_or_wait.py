"""Whether to load a context on one more worker, or to wait for those that hold it: for `context-affinity`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from ctxflow.policies.helpers import forget, paces
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, WorkerView

LOOK_SECONDS = 1.0  # How long it is used again what workers were seen to be at.
SAMPLE = 64  # Of so many workers at most the mean is taken.
LOADING = "staging", "loading"
LASTING = 0.25  # Of a load: where a queue was not empty for longer, more comes than its holders get done.


def begun(seconds: float, free_in: Iterable[float]) -> float:
    """Return how much work is begun within some seconds by workers that come free in so many seconds each.

    >>> begun(20.0, [5.0, 10.0, 90.0])
    25.0
    """
    return sum(seconds - each if each > 0 else seconds for each in free_in if each < seconds)


class LoadOrWait:
    """Weighs what waits for a context against what the workers that hold it get done while it is loaded on another.

    A load pays if they have not begun all of it by then, or if the queue was not empty for a quarter of that time: more
    comes than they get done. It takes what it was measured to take, and as much more as contexts take that give way to
    it and have apps. What was not measured is tried, and a context that no worker keeps is built for each call.

    So nobody idles beside an item that has waited for longer than these loads take, unless a load was begun since.

    What workers are at is looked at once a second, or after as many questions as there are workers, or once some that
    hold a context are gone.
    """

    def __init__(self) -> None:
        self._at, self._uses = -math.inf, 0
        self._staying: Sequence[WorkerView] = ()
        self._wanted: frozenset[str] = frozenset()  # Contexts that have apps.
        self._items: dict[str, float] = {}  # App -> seconds of an item; infinite where nobody measured.
        self._usual: dict[str, float] = {}  # Context -> the mean of its apps; likewise.
        self._loads: dict[str, float] = {}  # Context -> seconds of a load; likewise.
        # Context -> seconds of a load -> seconds of work that its holders begin in that time.
        self._done: dict[str, dict[float, float]] = {}
        self._held: dict[str, int] = {}  # Context -> how many workers these holders are.
        self._begun: dict[str, float] = {}  # Context -> when it was last loaded on one more worker.

    def look(self, view: View) -> None:
        """Forget what is too old; to be called in each decision, before others are."""
        self._uses += 1
        fresh = self._at <= view.now < self._at + LOOK_SECONDS and self._uses <= len(view.workers)
        if fresh and all(view.holders(context) >= count for context, count in self._held.items()):
            return
        self._at, self._uses = view.now, 0
        self._staying = [w for w in view.workers.values() if w.noticed is None and not w.draining]
        self._wanted = frozenset(app.context for app in view.apps.values())
        for table in (self._items, self._usual, self._loads, self._done, self._held):
            table.clear()
        forget(self._begun, self._wanted)

    def item_seconds(self, view: View, app: AppView) -> float:
        """Return the mean seconds of an item over workers, infinite if nobody measured it.

        An app that was not measured is taken for one like the others of its context: one more priority or deadline is
        another app, and no reason for loads.
        """
        own = self._measured(app.id)
        if own < math.inf or not app.context:
            return own
        if app.context not in self._usual:
            others = (self._measured(each.id) for each in view.apps.values() if each.context == app.context)
            self._usual[app.context] = _mean(seconds for seconds in others if seconds < math.inf)
        return self._usual[app.context]

    def _measured(self, app: str) -> float:
        if app not in self._items:
            self._items[app] = _mean(seconds for _, seconds in paces(self._staying, app))
        return self._items[app]

    def pays(self, view: View, app: AppView, work: float, displaced: Iterable[str] = ()) -> bool:
        """Return whether it pays to load an app's context on one more worker.

        :param work: seconds of a worker's time that wait for the context, infinite if nobody knows.
        :param displaced: the contexts that give way.
        """
        seconds = self._load_seconds(app.context)
        if seconds == math.inf or not app.keeps_context:
            return True
        others = [self._load_seconds(each) for each in displaced if each in self._wanted]
        seconds += sum(each for each in others if each < math.inf)
        done = self._done.setdefault(app.context, {})
        self._held.setdefault(app.context, view.holders(app.context))
        if seconds not in done:
            done[seconds] = begun(seconds, self._free_in(view, app.context))
        if work > done[seconds]:
            return True
        since = view.now if app.waiting_since is None else app.waiting_since
        return view.now - max(since, self._begun.get(app.context, since)) > LASTING * seconds

    def begins(self, view: View, context: str) -> None:
        """Learn that a context is loaded on one more worker."""
        self._begun[context] = view.now
        done = self._done.get(context, {})
        self._held[context] = 1 + self._held.get(context, view.holders(context))
        for seconds in done:
            done[seconds] += begun(seconds, [self._load_seconds(context)])

    def _load_seconds(self, context: str) -> float:
        """Return the mean seconds from a decision to load a context until it is ready, infinite if nobody measured."""
        if context not in self._loads:
            known = ((w.load_seconds(context), w.stage_seconds(context)) for w in self._staying)
            self._loads[context] = _mean(load + (stage or 0.0) for load, stage in known if load is not None)
        return self._loads[context]

    def _free_in(self, view: View, context: str) -> Iterator[float]:
        """Yield in how many seconds each slot of the workers that stay and hold a context, or load it, takes a call.

        Calls that overlap leave theirs free.
        """
        for worker in self._staying:
            held = worker.contexts.get(context)
            if held is None:
                continue
            busy = [*self._loading(view, worker), *self._running(view, worker)]
            built = self._left(view, held.since, self._load_seconds(context)) if held.state in LOADING else 0.0
            for each in (*busy, *[0.0] * (worker.slots - len(busy))):
                yield max(built, each)

    def _loading(self, view: View, worker: WorkerView) -> Iterator[float]:
        for held in worker.contexts.values():
            if held.state in LOADING:
                yield self._left(view, held.since, self._load_seconds(held.context))

    def _running(self, view: View, worker: WorkerView) -> Iterator[float]:
        for attempt in worker.running.values():
            app = view.apps[attempt.app]
            if not worker.in_flight(app.context):
                own = worker.seconds_per_item(app.id)
                each = self.item_seconds(view, app) if own is None else own
                yield self._left(view, attempt.started, (app.call_seconds or 0.0) + len(attempt.items) * each)

    @staticmethod
    def _left(view: View, since: float, seconds: float) -> float:
        """Return what is left of so many seconds; what is overdue is given as long again as it is overdue."""
        return abs(since + seconds - view.now)


def _mean(each: Iterable[float]) -> float:
    """Return the mean of the first of some numbers, infinite if there are none."""
    some = list(itertools.islice(each, SAMPLE))
    return sum(some) / len(some) if some else math.inf
