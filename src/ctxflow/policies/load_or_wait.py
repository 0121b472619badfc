"""Whether to load a context on one more worker, or to wait for those that hold it: for `context-affinity`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from ctxflow.policies.helpers import forget, paces, sample
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, WorkerView

LOOK_SECONDS = 1.0  # How long it is used again what workers were seen to be at.
SAMPLE = 32  # Of so many workers at most the mean is taken.
LOADING = "staging", "loading"
LASTING = 0.25  # Of a load: where a queue was not empty for longer, more comes than its holders get done.


def begun(seconds: float, free_in: Iterable[float]) -> float:
    """Return how much work is begun within some seconds by workers that come free in so many seconds each.

    >>> begun(20.0, [5.0, 10.0, 90.0])
    25.0
    """
    return sum(seconds - each if each > 0 else seconds for each in free_in if each < seconds)


@dataclasses.dataclass(slots=True)
class _Holders:
    """What the workers that hold a context get done, as they were seen last.

    :ivar count: how many they are; `added`: those of them that began to load it since they were looked at.
    :ivar some: a sample of those looked at, and their slots.
    :ivar checked: the decision in which those lost were subtracted last.
    :ivar free_in: in how many seconds each slot of the sample takes a call; None before that was needed.
    :ivar done: seconds of a load -> seconds of work that those looked at begin in that time.
    """

    count: int
    some: list[WorkerView]
    slots: int
    checked: int
    added: int = 0
    free_in: list[float] | None = None
    done: dict[float, float] = dataclasses.field(default_factory=dict)


class LoadOrWait:
    """Weighs what waits for a context against what the workers that hold it get done while it is loaded on another.

    A load pays if they have not begun all of it by then, or if the queue was not empty for a quarter of that time: more
    comes than they get done. It takes what it was measured to take, and as much more as contexts take that give way to
    it and have apps. What was not measured is tried, and a context that no worker keeps is built for each call.

    So nobody idles beside an item that has waited for longer than these loads take, unless a load was begun since.

    What workers are at is looked at once a second, or after as many questions as there are workers. Seconds of items
    and of loads are means of a sample of 32 workers. Of more holders than that, a sample tells what all get done, and
    those lost since are subtracted as if each did the same; of fewer, all are looked at again once one is lost.
    """

    def __init__(self) -> None:
        self._at, self._uses, self._decision = -math.inf, 0, 0
        self._wanted: frozenset[str] = frozenset()  # Contexts that have apps.
        self._items: dict[str, float] = {}  # App -> seconds of an item; infinite where nobody measured.
        self._usual: dict[str, float] = {}  # Context -> the mean of its apps; likewise.
        self._loads: dict[str, float] = {}  # Context -> seconds of a load; likewise.
        self._holders: dict[str, _Holders] = {}
        self._begun: dict[str, float] = {}  # Context -> when it was last loaded on one more worker.

    def look(self, view: View) -> bool:
        """Forget what is too old; to be called in each decision, before others are. Return whether it was."""
        self._uses += 1
        self._decision += 1
        if self._at <= view.now < self._at + LOOK_SECONDS and self._uses <= len(view.workers):
            return False
        self._at, self._uses = view.now, 0
        self._wanted = frozenset(app.context for app in view.apps.values())
        for table in (self._items, self._usual, self._loads, self._holders):
            table.clear()
        forget(self._begun, self._wanted)
        return True

    def item_seconds(self, view: View, app: AppView) -> float:
        """Return the mean seconds of an item over workers, infinite if nobody measured it.

        An app that was not measured is taken for one like the others of its context: one more priority or deadline is
        another app, and no reason for loads.
        """
        own = self._measured(view, app)
        if own < math.inf or not app.context:
            return own
        if app.context not in self._usual:
            others = (self._measured(view, each) for each in view.apps.values() if each.context == app.context)
            self._usual[app.context] = _mean([seconds for seconds in others if seconds < math.inf])
        return self._usual[app.context]

    def _measured(self, view: View, app: AppView) -> float:
        name = app.id
        if name not in self._items:
            workers = sample(view.measured_on(name), SAMPLE)
            if app.overlaps or (app.concurrency or 1) > 1:
                each = [seconds for _, seconds in paces(workers, name)]
            else:
                each = [seconds for worker in workers if (seconds := worker.seconds_per_item(name)) is not None]
            self._items[name] = _mean(each)
        return self._items[name]

    def pays(self, view: View, app: AppView, work: float, displaced: Iterable[str] = ()) -> bool:
        """Return whether it pays to load an app's context on one more worker.

        :param work: seconds of a worker's time that wait for the context, infinite if nobody knows.
        :param displaced: the contexts that give way.
        """
        seconds = self._load_seconds(view, app.context)
        if seconds == math.inf or not app.keeps_context:
            return True
        others = [self._load_seconds(view, each) for each in displaced if each in self._wanted]
        seconds += sum(each for each in others if each < math.inf)
        known = self._look_at_holders(view, app.context)
        # No slot begins more than it could if all were free now.
        if work * len(known.some) > seconds * known.slots * known.count:
            return True
        if work > self._done(view, app.context, known, seconds):
            return True
        since = view.now if app.waiting_since is None else app.waiting_since
        return view.now - max(since, self._begun.get(app.context, since)) > LASTING * seconds

    def begins(self, view: View, context: str) -> None:
        """Learn that a context is loaded on one more worker."""
        self._begun[context] = view.now
        known = self._holders.get(context)
        if known is not None:
            known.count += 1
            known.added += 1

    def _load_seconds(self, view: View, context: str) -> float:
        """Return the mean seconds from a decision to load a context until it is ready, infinite if nobody measured."""
        if context not in self._loads:
            workers = sample(view.built_on(context), SAMPLE)
            known = ((worker.load_seconds(context), worker.stage_seconds(context)) for worker in workers)
            self._loads[context] = _mean([load + (stage or 0.0) for load, stage in known if load is not None])
        return self._loads[context]

    def _done(self, view: View, context: str, known: _Holders, seconds: float) -> float:
        """Return the seconds of work that the workers that hold a context begin in so many seconds."""
        if known.free_in is None:
            known.free_in = [each for worker in known.some for each in self._free_in(view, worker, context)]
        if seconds not in known.done:
            seen = known.count - known.added
            known.done[seconds] = begun(seconds, known.free_in) * seen / max(1, len(known.some))
        return known.done[seconds] + known.added * begun(seconds, [self._load_seconds(view, context)])

    def _look_at_holders(self, view: View, context: str) -> _Holders:
        known = self._holders.get(context)
        if known is not None and known.checked != self._decision:
            known.checked, there = self._decision, view.holders(context)
            if there < known.count <= SAMPLE:
                known = None
            elif there < known.count:
                known.done = {seconds: work * there / known.count for seconds, work in known.done.items()}
                known.added = known.added * there // known.count
                known.count = there
        if known is None:
            holders = view.holding(context)
            some = sample(holders, SAMPLE)
            slots = sum([worker.slots for worker in some])
            known = self._holders[context] = _Holders(len(holders), some, slots, self._decision)
        return known

    def _free_in(self, view: View, worker: WorkerView, context: str) -> Iterator[float]:
        """Yield in how many seconds each slot of a worker that holds a context, or loads it, takes a call.

        Calls that overlap leave theirs free; a worker that is to go has no slots.
        """
        held = worker.contexts.get(context)
        if held is None or worker.noticed is not None or worker.draining:
            return
        busy = [*self._loading(view, worker), *self._running(view, worker)]
        built = self._left(view, held.since, self._load_seconds(view, context)) if held.state in LOADING else 0.0
        for each in (*busy, *[0.0] * (worker.slots - len(busy))):
            yield max(built, each)

    def _loading(self, view: View, worker: WorkerView) -> Iterator[float]:
        for held in worker.contexts.values():
            if held.state in LOADING:
                yield self._left(view, held.since, self._load_seconds(view, held.context))

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


def _mean(each: list[float]) -> float:
    """Return the mean of some numbers, infinite if there are none."""
    return sum(each) / len(each) if each else math.inf
