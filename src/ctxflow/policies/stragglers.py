"""Batches that idle workers run once more, since they will take longest where they are (speculative execution)."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, AttemptView, WorkerView

RANK_SECONDS = 0.1  # How long the list of the batches that will take longest is used again.
MOST = 8  # Of them are in it.

FAR = 2.0  # How many times slower a worker is far slower.
MANY = 10  # Items that do not all take long by chance.

Seconds = Callable[[View, AttemptView, WorkerView], "float | None"]
May = Callable[[View, AttemptView, WorkerView], bool]


class Stragglers:
    """The few batches that will take longest of those that nobody runs a second time.

    :param seconds: what a batch is expected to take a worker in all, None if that is not known.
    :param may: whether a worker may run a batch of another one again; by default any.
    """

    def __init__(self, seconds: Seconds, may: May = lambda view, attempt, worker: True) -> None:
        self._seconds, self._may = seconds, may
        self._ranked: list[tuple[float, AttemptView]] = []
        self._ranked_at = -math.inf

    def for_worker(self, view: View, worker: WorkerView) -> int | None:
        """Return the batch that will take longest, if an idle worker would be done with it sooner."""
        # Beside a call in flight it would be slower.
        idle = {name for name, held in worker.contexts.items() if held.state == "ready" and not worker.in_flight(name)}
        if not idle:
            return None
        if view.now >= self._ranked_at + RANK_SECONDS:
            self._ranked, self._ranked_at = self._rank(view), view.now
        for number, (left, attempt) in enumerate(self._ranked):
            if attempt.id not in view.attempts or attempt.worker == worker.id:
                continue
            if view.apps[attempt.app].context not in idle:
                continue
            seconds = self._seconds(view, attempt, worker)
            if seconds is not None and seconds < left and self._may(view, attempt, worker):
                del self._ranked[number]
                return attempt.id
        return None

    def _rank(self, view: View) -> list[tuple[float, AttemptView]]:
        """Return these batches with their seconds that are left."""
        batches = [each for each in view.attempts.values() if each.items]  # No steps of sessions.
        copies = collections.Counter((attempt.app, attempt.items[-1]) for attempt in batches)
        found: list[tuple[float, AttemptView]] = []
        for attempt in batches:
            whole = self._seconds(view, attempt, view.workers[attempt.worker])
            if whole is not None and copies[attempt.app, attempt.items[-1]] == 1:
                # One that is overdue is given as long again as it is overdue.
                found.append((abs(whole - (view.now - attempt.started)), attempt))
        found.sort(key=lambda each: (-each[0], each[1].id))
        return found[:MOST]


def expected_seconds(view: View, attempt: AttemptView, worker: WorkerView) -> float | None:
    """Return what a batch is expected to take a worker, by its own speed or, until that is known, another one's."""
    app = view.apps[attempt.app]
    each = worker.seconds_per_item(app.id) or _usual(view, app)
    if each is None:
        return None
    return (app.call_seconds or 0.0) + len(attempt.items) * each * beside(view, attempt, worker)


def is_far_slower(view: View, attempt: AttemptView, worker: WorkerView) -> bool:
    """Return whether a batch is on a worker that is far slower than another one: else it takes long by its nature.

    A worker that has answered nothing yet is, once a batch of many items has taken far longer than it would there.
    """
    app, holder = view.apps[attempt.app], view.workers[attempt.worker]
    here, there = worker.seconds_per_item(app.id), holder.seconds_per_item(app.id)
    if here is None:
        return False
    if there is None:
        there = (view.now - attempt.started) / len(attempt.items) / FAR if len(attempt.items) >= MANY else 0.0
    return there >= FAR * here


def beside(view: View, attempt: AttemptView, worker: WorkerView) -> float:
    """Return how many calls share a worker's time with an item: as many as usual, since with fewer it is no faster."""
    name = view.apps[attempt.app].id
    return worker.calls_beside(name) or view.workers[attempt.worker].calls_beside(name) or 1.0


def _usual(view: View, app: AppView) -> float | None:
    known = (each.seconds_per_item(app.id) for each in view.measured_on(app.id))
    return next((seconds for seconds in known if seconds), None)
