"""Batches that idle workers run once more, since they will take longest where they are (speculative execution)."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AttemptView, WorkerView

RANK_SECONDS = 0.1  # How long the list of the batches that will take longest is used again.
MOST = 8  # Of them are in it.
FAR = 2.0  # How many times slower a worker is far slower.
SOME = 16  # Idle workers that stand for all of them.
MANY = 10  # Items that do not all take long by chance.

Seconds = Callable[[View, AttemptView, WorkerView], "float | None"]


class Stragglers:
    """The few batches that will take longest of those that are not run a second time.

    :param seconds: what a batch is expected to take a worker in all, None if that is not known.
    :param every: seconds for which the list of them is used again.
    """

    def __init__(self, seconds: Seconds, every: float = RANK_SECONDS) -> None:
        self._seconds, self._every = seconds, every
        self._ranked: list[tuple[float, AttemptView]] = []
        self._due = -math.inf

    def for_worker(self, view: View, worker: WorkerView) -> int | None:
        """Return the batch that will take longest, if an idle worker would be done with it sooner."""
        if not self._ranked and view.now < self._due:
            return None
        if view.now >= self._due:
            self._ranked, self._due = self._rank(view), view.now + self._every
        # Beside a call in flight it would be slower.
        idle = {name for name, held in worker.contexts.items() if held.state == "ready" and not worker.in_flight(name)}
        for number, (left, attempt) in enumerate(self._ranked):
            if attempt.id not in view.attempts or attempt.worker == worker.id:
                continue
            if view.apps[attempt.app].context not in idle:
                continue
            seconds = self._seconds(view, attempt, worker)
            if seconds is not None and seconds < left and self.may(view, attempt, worker):
                del self._ranked[number]
                return attempt.id
        return None

    def may(self, view: View, attempt: AttemptView, worker: WorkerView) -> bool:
        """Return whether a worker may run a batch of another one again."""
        return True

    def among(self, view: View, batches: Sequence[AttemptView]) -> Sequence[AttemptView]:
        """Return the batches that some worker may run again."""
        return batches

    def _rank(self, view: View) -> list[tuple[float, AttemptView]]:
        """Return these batches with their seconds that are left."""
        batches = [each for each in view.attempts.values() if each.items]  # No steps of sessions.
        copies = collections.Counter((attempt.app, attempt.items[-1]) for attempt in batches)
        found: list[tuple[float, AttemptView]] = []
        for attempt in self.among(view, batches):
            whole = self._seconds(view, attempt, view.workers[attempt.worker])
            if whole is not None and copies[attempt.app, attempt.items[-1]] == 1:
                # One that is overdue is given as long again as it is overdue.
                found.append((abs(whole - (view.now - attempt.started)), attempt))
        found.sort(key=lambda each: (-each[0], each[1].id))
        # Not those that were run a second time already, and run on.
        return list(itertools.islice((each for each in found if not view.answered(each[1])), MOST))


class SlowWorkersBatches(Stragglers):
    """Those of them that are on workers which are far slower than others: an item that takes long by its nature is not.

    Where calls overlap there are none: of such a window an item's time says little.
    """

    def __init__(self) -> None:
        super().__init__(_expected_seconds, every=1.0)

    def may(self, view: View, attempt: AttemptView, worker: WorkerView) -> bool:
        """Return whether a batch is on a worker that is far slower than another one."""
        pace = _measured(worker, attempt.app)
        return pace is not None and _pace_there(view, attempt) >= FAR * pace

    def among(self, view: View, batches: Sequence[AttemptView]) -> Sequence[AttemptView]:
        """Return the batches on workers that are far slower than some that are idle."""
        fastest: dict[str, float] = {}
        idle = list(itertools.islice(view.free.values(), SOME))
        for name in dict.fromkeys(each.app for each in batches):
            app = view.apps[name]
            if not app.overlaps and (app.concurrency or 1) == 1:
                known = (_measured(each, name) for each in idle)
                fastest[name] = min((pace for pace in known if pace), default=math.inf)
        return [each for each in batches if _pace_there(view, each) >= FAR * fastest.get(each.app, math.inf)]


def _measured(worker: WorkerView, app: str) -> float | None:
    """Return a worker's seconds of an item, None while it has not answered many."""
    return worker.seconds_per_item(app) if worker.items_done(app) >= MANY else None


def _pace_there(view: View, attempt: AttemptView) -> float:
    """Return the seconds of an item on the worker that has a batch, 0 if they are not known.

    One that has answered few yet counts as half as slow as the batch that runs shows it to be, if that is of many.
    """
    pace = _measured(view.workers[attempt.worker], attempt.app)
    if pace is None and len(attempt.items) >= MANY:
        pace = (view.now - attempt.started) / len(attempt.items) / FAR
    return pace or 0.0


def _expected_seconds(view: View, attempt: AttemptView, worker: WorkerView) -> float | None:
    """Return what a batch is expected to take a worker."""
    app = view.apps[attempt.app]
    each = _measured(worker, app.id) or _pace_there(view, attempt)
    return (app.call_seconds or 0.0) + len(attempt.items) * each if each else None


def beside(view: View, attempt: AttemptView, worker: WorkerView) -> float:
    """Return how many calls share a worker's time with an item: as many as usual, since with fewer it is no faster."""
    name = view.apps[attempt.app].id
    return worker.calls_beside(name) or view.workers[attempt.worker].calls_beside(name) or 1.0
