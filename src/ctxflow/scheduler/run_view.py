"""The view of a run that policies get, read-only in fact (`ctxflow.policies.protocols.View`).

Rows are shown by proxies (proxies.py), tables by mappings that refuse to be written; both are made once. What only a
transition can tell, such as whether a worker may run an app, is asked of it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ctxflow.policies.views import (
    AppView,
    AttemptView,
    MachineView,
    RegionView,
    SessionView,
    TierView,
    WorkerView,
)
from ctxflow.scheduler import context_moves, session_moves
from ctxflow.scheduler.proxies import ReadOnly
from ctxflow.scheduler.run_state import RunState


class RunView(ReadOnly):
    """What policies may know of a run.

    >>> from ctxflow.scheduler import Policies, Scheduler
    >>> view = Scheduler(Policies.chosen({})).view
    >>> view.now = 1.0
    Traceback (most recent call last):
        ...
    AttributeError: a policy may only read what it is shown: 'now' cannot be set
    """

    __slots__ = ("_state", "apps", "attempts", "free", "now", "random", "regions", "sessions", "tiers", "workers")

    _state: RunState
    now: float
    random: random.Random
    workers: Mapping[str, WorkerView]
    free: Mapping[str, WorkerView]
    apps: Mapping[str, AppView]
    attempts: Mapping[int, AttemptView]
    tiers: Mapping[str, TierView]
    regions: Mapping[str, RegionView]
    sessions: Mapping[int, SessionView]

    def __init__(self, state: RunState) -> None:
        put = object.__setattr__
        put(self, "_state", state)
        put(self, "now", state.now)  # Each event's, set by the scheduler: policies read it all the time.
        put(self, "random", state.random)
        put(self, "workers", state.workers_shown)
        put(self, "free", state.free_shown)
        put(self, "apps", state.apps_shown)
        put(self, "attempts", MappingProxyType(state.attempts))
        put(self, "tiers", state.tiers_shown)
        put(self, "regions", MappingProxyType(state.regions))
        put(self, "sessions", state.streams.shown)

    @property
    def contexts(self) -> Collection[str]:
        """The ids of all declared contexts."""
        return tuple(self._state.contexts)

    @property
    def machines(self) -> Mapping[str, MachineView]:
        """The machines as they were surveyed last."""
        return MappingProxyType(self._state.surveys.machines)

    @property
    def reserved(self) -> Mapping[str, Sequence[str]]:
        """The GPUs that are kept for workers that have not joined yet, by machine."""
        return self._state.reservations.reserved

    @property
    def forecast(self) -> Mapping[str, float] | None:
        """The items expected per second by app; worked out when somebody asks."""
        return self._state.arrivals.forecast()

    def batch_size(self, app: AppView, worker: WorkerView) -> int:
        """Return what the batching policy would give this worker's next batch of the app."""
        return self._state.policies.batching.size(self, app, worker)

    def can_run(self, app: AppView, worker: WorkerView) -> bool:
        """Return whether a free worker could run the app now, or load its context for it."""
        return context_moves.can_run(self._state, self._state.workers[worker.id], self._state.apps[app.id])

    def permits(self, app: AppView, tier: TierView) -> bool:
        """Return whether workers of the tier could run the app at all, as far as the plan allows it.

        Not if only a worker with a place of its own may hold the context.
        """
        state = self._state
        wanted = state.contexts[app.context].spec
        own = wanted.affinity == "guaranteed" and wanted.id in state.reservations.wants
        return not own and self.able(app, tier) and state.plan.permits(app.context, tier.name)

    def able(self, app: AppView, tier: TierView) -> bool:
        """Return whether workers of the tier have the GPUs, and the memory on each, that the app's context declares.

        Not if it is broken. What it took where it was built does not count: some take what there is.
        """
        context, offered = self._state.contexts[app.context], self._state.tiers[tier.name]
        if context.broken is not None or context.spec.gpus > offered.spec.gpus:
            return False
        needed = context.spec.gpu_memory if context.spec.gpus else None
        return needed is None or offered.gpu_memory is None or needed <= offered.gpu_memory

    def holders(self, context: str) -> int:
        """Return how many workers hold or load the context."""
        known = self._state.contexts.get(context)
        return known.holders if known is not None else 0

    def free_holders(self, context: str) -> Iterable[WorkerView]:
        """Return the free workers that hold the context ready, longest known as such first."""
        return [worker.shown for worker in self._state.free_holders(context)]

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        """Return whether a worker may carry a session."""
        state = self._state
        return session_moves.can_carry(state, state.streams.open[session.id], state.workers[worker.id])

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        """Return K, the most sessions whose chunks a step of the worker makes within the app's chunk target."""
        return self._state.policies.coalescing.coalesced(self, app, worker)
