"""Routing that is hard to beat and needs no tuning: context affinity, least-loaded, round-robin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ctxflow.policies.helpers import urgency
from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.views import AppView, WorkerView


class _FreeSlots:
    """The free slots of one round, given out one by one."""

    def __init__(self, view: View) -> None:
        self.left = {worker.id: worker.free_slots for worker in view.free.values()}
        self.total = sum(self.left.values())

    def take(self, worker: WorkerView) -> bool:
        if self.left[worker.id] <= 0:
            return False
        self.left[worker.id] -= 1
        self.total -= 1
        return True

    def workers(self, view: View) -> Iterator[WorkerView]:
        return (worker for worker in view.free.values() if self.left[worker.id] > 0)


class ContextAffinity:
    """Work goes where its context is; what is left over spreads over the other workers.

    A free worker that holds the context of a waiting app takes that app's work. Workers left over are shared
    among the apps with work left, most items per holding worker first; each takes the worker that holds
    least, so that the fewest contexts are built and unloaded.
    """

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose by priority, then by affinity."""
        slots = _FreeSlots(view)
        left = {app.id: app.backlog for app in ready}
        chosen: list[Assignment] = []
        for app in sorted(ready, key=urgency) if len(ready) > 1 else ready:
            if not slots.total:
                break
            for worker in view.free.values():
                if left[app.id] <= 0:
                    break
                held = worker.contexts.get(app.context)
                if held is not None and view.can_run(app, worker) and slots.take(worker):
                    chosen.append(Assignment(worker.id, app.id))
                    left[app.id] -= max(1, view.batch_size(app, worker))
        if not slots.total:
            return chosen
        waiting = {app.id: app for app in ready if left[app.id] > 0 and app.unclaimed > 0}
        return chosen + list(self._spread(view, waiting, left, slots)) if waiting else chosen

    def _spread(
        self, view: View, waiting: dict[str, AppView], left: dict[str, int], slots: _FreeSlots
    ) -> Iterator[Assignment]:
        for app in waiting.values():
            left[app.id] = min(left[app.id], app.unclaimed)
        holders = {app.id: view.holders(app.context) for app in waiting.values()}
        idle = sorted(slots.workers(view), key=lambda worker: len(worker.contexts))
        for worker in idle:
            open_to = [a for a in waiting.values() if left[a.id] > 0 and view.can_run(a, worker)]
            if not open_to:
                continue
            app = min(open_to, key=lambda a: (urgency(a)[:2], -left[a.id] / (holders[a.id] + 1), a.order))
            yield Assignment(worker.id, app.id)
            left[app.id] -= max(1, view.batch_size(app, worker))
            holders[app.id] += 1


class LeastLoaded:
    """The most urgent work goes to the worker that runs the least, whatever it holds."""

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose the worker with the fewest calls, then the longest free."""
        slots = _FreeSlots(view)
        for app in sorted(ready, key=urgency):
            left = app.backlog if slots.total else 0
            while left > 0:
                able = (w for w in slots.workers(view) if view.can_run(app, w))
                worker = min(able, key=lambda w: w.slots - slots.left[w.id], default=None)
                if worker is None:
                    break
                slots.take(worker)
                yield Assignment(worker.id, app.id)
                left -= max(1, view.batch_size(app, worker))


class RoundRobin:
    """Apps in turn, workers in turn: the baseline that knows nothing."""

    def __init__(self) -> None:
        self._turn = 0

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Give each free slot the next app in turn."""
        slots = _FreeSlots(view)
        left = {app.id: app.backlog for app in ready}
        for worker in list(view.free.values()):
            while slots.left[worker.id] > 0:
                apps = [app for app in ready if left[app.id] > 0 and view.can_run(app, worker)]
                if not apps:
                    break
                slots.take(worker)
                app = apps[self._turn % len(apps)]
                self._turn += 1
                yield Assignment(worker.id, app.id)
                left[app.id] -= max(1, view.batch_size(app, worker))
