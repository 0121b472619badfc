"""Contexts loaded ahead of demand, on workers that idle and hold nothing that is wanted.

What does not live here: the forecast (forecast.py), and how a context is loaded (the scheduler).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ctxflow.policies.protocols import AppView, Assignment, View, WorkerView
from ctxflow.policies.routing.activation import target
from ctxflow.policies.routing.arrays import amounts
from ctxflow.policies.routing.outlook import Outlook


def warmings(
    view: View, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], slot_seconds: float
) -> Iterator[Assignment]:
    """Loads without work, the context that lacks most workers first.

    A context is wanted on as many workers as Eq. 6 says for what is queued and what is forecast, with a worker's
    capacity being the items that it does in a slot. Loaded is only what is lacking, and only on workers that run
    nothing and hold nothing that is queued or forecast; and where several contexts are in use, one free worker stays as
    it is, for what nobody foresaw. An app whose speed nobody measured is not loaded ahead.

    :param recent: worker -> context -> when a call of it was last given there: such workers come first.
    """
    forecast = view.forecast or {}
    wanted = {app.context for app in view.apps.values() if app.backlog > 0 or amounts(forecast.get(app.id, 0.0)) > 0}
    lacking = sorted(_lacking(view, outlook, forecast, slot_seconds), key=lambda pair: -pair[0])
    if not lacking:
        return
    idle = [w for w in view.free.values() if not w.running and not wanted & w.contexts.keys()]
    several = len({app.context for app in view.apps.values() if app.arrived}) > 1
    for lack, app in lacking:
        ranks = {worker.id: _rank(worker, app, outlook, recent) for worker in idle}
        left = lack
        for worker in sorted(idle, key=lambda worker: ranks[worker.id]):
            if left <= 0 or len(view.free) <= several:
                break
            yield Assignment(worker.id, app.id)
            if app.context in worker.contexts:  # It was possible.
                left -= 1
                idle.remove(worker)


def _lacking(
    view: View, outlook: Outlook, forecast: Mapping[str, float], slot_seconds: float
) -> Iterator[tuple[int, AppView]]:
    """How many workers more each forecast app's context is wanted on."""
    for app in view.apps.values():
        expected, seconds = float(amounts(forecast.get(app.id, 0.0))) * slot_seconds, outlook.item_seconds(app.id)
        if expected < 1 or not seconds:
            continue
        count = int(target([app.backlog], [expected], [slot_seconds / seconds], [len(view.workers)])[0])
        lack = count - view.holders(app.context)
        if lack > 0:
            yield lack, app


def _rank(
    worker: WorkerView, app: AppView, outlook: Outlook, recent: Mapping[str, Mapping[str, float]]
) -> tuple[float, float, int]:
    """Those that had it last come first, then the fastest, then those that hold least."""
    had = recent.get(worker.id, {}).get(app.context, float("-inf"))
    return -had, -outlook.speed(worker.gpu_model), len(worker.contexts)
