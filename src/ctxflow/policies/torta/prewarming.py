"""Loads ahead of demand: which idle workers load which context, for the routing policy `torta`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from ctxflow.policies.protocols import Assignment, View
from ctxflow.policies.torta.quantities import Outlook, amounts
from ctxflow.policies.torta.scaling import target
from ctxflow.policies.views import AppView, WorkerView


def warmings(
    view: View, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], slot_seconds: float
) -> Iterator[Assignment]:
    """Yield loads ahead of demand, the context that lacks most workers first.

    A context is wanted on as many workers as Eq. 6 says for what is queued and forecast, the capacity being the items
    of a slot, once its speed was measured. It is loaded on workers that run nothing, and whose contexts have more
    headroom without them than it has with one worker more, by more than forecasts deviate by chance. Where several
    contexts are in use and none of its items wait, one free worker is left as it is.

    :param recent: worker -> context -> when a call of it was last given there: such workers come first.
    """
    needs = _needs(view, outlook, slot_seconds)
    holders = {context: view.holders(context) for context in needs}
    spare = {context: holders[context] - need.workers for context, need in needs.items()}
    lacking = sorted((c for c, need in needs.items() if spare[c] < 0 and need.app is not None), key=lambda c: spare[c])
    if not lacking:
        return
    several = len({app.context for app in view.apps.values() if app.arrived}) > 1
    idle = [worker for worker in view.free.values() if not worker.running and not worker.sessions]
    for context in lacking:
        need = needs[context]
        assert need.app is not None
        kept = several and need.queued <= 0
        for _, worker in sorted([(_rank(w, context, outlook, recent), w) for w in idle], key=lambda pair: pair[0]):
            if holders[context] >= need.workers or len(view.free) <= kept:
                break
            held = [c for c in worker.contexts if c]  # "" is no context.
            after = min(SPARE, need.headroom(holders[context] + 1))
            if context in held or any(
                c in needs and needs[c].headroom(holders[c] - 1) < after + _chance(need, needs[c]) for c in held
            ):
                continue
            yield Assignment(worker.id, need.app.id)
            if context in worker.contexts:  # The load was possible.
                idle.remove(worker)
                for changed, by in [(context, 1), *((c, -1) for c in held if c not in worker.contexts)]:
                    if changed in holders:
                        holders[changed] += by


SPARE = 3.0  # Deviations of the calls that run at once: with so much headroom a context can always give a worker.
SEEN = 30.0  # Seconds of arrivals that a forecast is about as good as: slots of 10 s, the newest of which counts half.
SURE = 2.5  # Deviations of the difference of two contexts' forecasts that are not taken for chance.


@dataclasses.dataclass
class _Need:
    """What a context's apps ask for in a slot, and by how many workers that is served.

    :ivar workers: Eq. 6's; infinite where a speed is unknown: holders keep it, and no other worker loads it.
    :ivar app: the one of which most is forecast, None if none is, or one was not measured.
    """

    queued: float = 0.0
    expected: float = 0.0
    busy: float = 0.0  # Workers that the work of a slot keeps busy.
    workers: float = 0.0
    seconds: float = 0.0  # Of an item.
    app: AppView | None = None

    def headroom(self, holders: int) -> float:
        """Return by how many deviations of the calls that run at once so many workers are beyond those at work."""
        return (holders - self.busy) / math.sqrt(max(self.busy, 0.25)) if math.isfinite(self.workers) else -math.inf


def _chance(one: _Need, other: _Need) -> float:
    """Return by how much two contexts' headroom differs by chance: of long items only few arrive in SEEN."""
    return SURE * math.sqrt((one.seconds + other.seconds) / SEEN)


def _needs(view: View, outlook: Outlook, slot_seconds: float) -> dict[str, _Need]:
    """Return the needs by context, of the apps that are queued or forecast."""
    forecast = view.forecast or {}
    needs: dict[str, _Need] = {}
    for app in view.apps.values():
        expected = float(amounts(forecast.get(app.id, 0.0))) * slot_seconds
        if app.backlog <= 0 and expected <= 0:
            continue
        need, seconds = needs.setdefault(app.context, _Need()), outlook.item_seconds(app)
        if not seconds:
            need.workers = math.inf
            continue
        if need.app is None or expected > forecast.get(need.app.id, 0.0) * slot_seconds:
            need.app = app
        need.queued += app.backlog
        need.expected += expected
        need.busy += (app.backlog + expected) * seconds / slot_seconds
    for need in needs.values():
        if math.isinf(need.workers) or need.expected < 1:
            need.app = None
        if math.isfinite(need.workers) and need.busy > 0:
            capacity = (need.queued + need.expected) / need.busy
            need.seconds = slot_seconds / capacity
            need.workers = float(target([need.queued], [need.expected], [capacity], [len(view.workers)])[0])
    return needs


def _rank(
    worker: WorkerView, context: str, outlook: Outlook, recent: Mapping[str, Mapping[str, float]]
) -> tuple[float, float, int]:
    """Return a key: workers that had the context last come first, then the fastest, then those that hold least."""
    had = recent.get(worker.id, {}).get(context, -math.inf)
    return -had, -outlook.speed(worker.gpu_model), len(worker.contexts)
