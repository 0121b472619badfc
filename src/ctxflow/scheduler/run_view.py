"""What policies see of a run."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence

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
from ctxflow.scheduler.run_state import RunState


class RunView:
    """The read-only view of a run: `ctxflow.policies.protocols.View`."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    @property
    def now(self) -> float:
        """Return the time of the event being handled."""
        return self._state.now

    @property
    def random(self) -> random.Random:
        """Return the run's seeded generator."""
        return self._state.random

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        """Return those connected, by id."""
        return self._state.workers

    @property
    def free(self) -> Mapping[str, WorkerView]:
        """Return those that could take a call now, longest free first."""
        return self._state.free

    @property
    def apps(self) -> Mapping[str, AppView]:
        """Return all declared apps."""
        return self._state.apps

    @property
    def contexts(self) -> Collection[str]:
        """Return the ids of all declared contexts."""
        return tuple(self._state.contexts)

    @property
    def attempts(self) -> Mapping[int, AttemptView]:
        """Return all running batches."""
        return self._state.attempts

    @property
    def tiers(self) -> Mapping[str, TierView]:
        """Return the site's tiers."""
        return self._state.tiers

    @property
    def machines(self) -> Mapping[str, MachineView]:
        """Return the machines as they were surveyed last."""
        return self._state.surveys.machines

    @property
    def reserved(self) -> Mapping[str, Sequence[str]]:
        """Return the GPUs that are kept for workers that have not joined yet, by machine."""
        return self._state.reservations.reserved

    @property
    def regions(self) -> Mapping[str, RegionView]:
        """Return the site's regions."""
        return self._state.regions

    @property
    def forecast(self) -> Mapping[str, float] | None:
        """Return the items expected per second by app; worked out when somebody asks."""
        return self._state.arrivals.forecast()

    @property
    def sessions(self) -> Mapping[int, SessionView]:
        """Return all sessions that are open, oldest first."""
        return self._state.sessions

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
        if context.broken is not None or context.spec.gpus > offered.gpus:
            return False
        needed = context.spec.gpu_memory if context.spec.gpus else None
        return needed is None or offered.gpu_memory is None or needed <= offered.gpu_memory

    def holders(self, context: str) -> int:
        """Return how many workers hold or load the context."""
        known = self._state.contexts.get(context)
        return known.holders if known is not None else 0

    def free_holders(self, context: str) -> Iterable[WorkerView]:
        """Return the free workers that hold the context ready, longest known as such first."""
        return self._state.free_holders(context)

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        """Return whether a worker may carry a session."""
        state = self._state
        return session_moves.can_carry(state, state.streams.open[session.id], state.workers[worker.id])

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        """Return K, the most sessions whose chunks a step of the worker makes within the app's chunk target."""
        return self._state.policies.coalescing.coalesced(self, app, worker)
