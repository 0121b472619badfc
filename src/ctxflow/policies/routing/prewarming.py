"""Contexts loaded ahead of demand, on workers that idle and hold nothing that is wanted.

What does not live here: the forecast (forecast.py), and how a context is loaded (the scheduler).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.routing.activation import target
from ctxflow.policies.routing.arrays import amounts
from ctxflow.policies.routing.outlook import Outlook
from ctxflow.policies.views import AppView, WorkerView


def warmings(
    view: View, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], slot_seconds: float
) -> Iterator[Assignment]:
    """Loads without work, the context that lacks most workers first.

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
    """By context, of the apps that are queued or forecast."""
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
    """Those that had it last come first, then the fastest, then those that hold least."""
    had = recent.get(worker.id, {}).get(context, -math.inf)
    return -had, -outlook.speed(worker.gpu_model), len(worker.contexts)
