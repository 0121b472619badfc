"""The whole state of a run in one object, which is also the view that policies get.

What lives here: the tables and what can be read off them. What does not: transitions (core.py and the modules
that it calls).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ctxflow.policies.protocols import Plan, Planning
from ctxflow.policies.views import AppView, RegionView, SessionView, TierView, WorkerView
from ctxflow.scheduler import residency, steps
from ctxflow.scheduler import sessions as streams
from ctxflow.scheduler.arrivals import Arrivals
from ctxflow.scheduler.evidence import Charges
from ctxflow.scheduler.quarantine import Wards
from ctxflow.scheduler.ready import Ready
from ctxflow.scheduler.reservations import Reservations
from ctxflow.scheduler.settings import Limits, Policies
from ctxflow.scheduler.shares import Deal
from ctxflow.scheduler.state import App, Attempt, ContextState, Counters, Session, Worker
from ctxflow.scheduler.surveys import Machine, Surveys
from ctxflow.scheduler.tiers import Tier


class RunState:
    """Everything that the scheduler knows; `ctxflow.policies.protocols.View` is its read-only face."""

    def __init__(self, policies: Policies, limits: Limits, seed: int, start_when: float = 0.0) -> None:
        if not 0 <= start_when <= 1:
            raise ValueError("start_when is a share of the workers asked for: give 0 to 1")
        self.policies = policies
        self.limits = limits
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.plan = Plan()
        # What is computed for the next plan, and why the last could not be; kept by planning.py.
        self.planning: Planning | None = None
        self.planning_failure: str | None = None
        self.workers: dict[str, Worker] = {}
        self.apps: dict[str, App] = {}
        self.contexts: dict[str, ContextState] = {}
        self.attempts: dict[int, Attempt] = {}
        self.tiers: dict[str, Tier] = {}
        self.regions: dict[str, RegionView] = {}
        self.arrivals = Arrivals()  # Kept by core.py, on ticks.
        self.surveys = Surveys()
        self.reservations = Reservations()
        self.counters = Counters()
        # Workers that could take a call, longest free first; kept by `update_free`.
        self.free: dict[str, Worker] = {}
        # Context -> workers that hold it and were free; kept by `update_free`, cleaned by `free_holders`.
        self._holders_free: dict[str, dict[str, Worker]] = {}
        # Apps with a backlog and a context that is not broken; kept by items.py.
        self.ready = Ready()
        # Unanswered items -> their app. An item leaves when it is done, dead or cancelled.
        self.open: dict[int, App] = {}
        # Items that several attempts hold now -> how many.
        self.copies: dict[int, int] = {}
        # Item -> times its workers were lost for no known reason / it crashed alone / it raised alone.
        self.losses: dict[int, int] = {}
        self.crashes: dict[int, int] = {}
        self.raised: dict[int, int] = {}
        # Contexts that failed often enough, while somebody may still show otherwise; kept by breaking.py.
        self.undecided: dict[str, ContextState] = {}
        # Failed attempts, until it is known whose fault that was; kept by evidence.py.
        self.charges = Charges()
        # Who is in quarantine; kept by quarantine.py.
        self.wards = Wards()
        # Apps whose items the plan divides among contexts -> whose the next item is; kept by shares.py.
        self.deals: dict[str, Deal] = {}
        self.streams = streams.Sessions()
        self.next_attempt = 1
        self.next_order = 0  # Of the next app that is declared.
        self.wake_at: float | None = None
        # No call is given before this share of the workers asked for is connected; kept by tiers.py, as is the next.
        self.start_when = start_when
        self.awaiting = start_when > 0
        self.scaled_at = 0.0

    @property
    def forecast(self) -> Mapping[str, float] | None:
        """Items expected per second by app; worked out when somebody asks."""
        return self.arrivals.forecast()

    def batch_size(self, app: AppView, worker: WorkerView) -> int:
        """What the batching policy would give this worker's next batch of the app."""
        return self.policies.batching.size(self, app, worker)

    def can_run(self, app: AppView, worker: WorkerView) -> bool:
        """Whether a free worker could run the app now, or load its context for it."""
        return residency.can_run(self, self.workers[worker.id], self.apps[app.id])

    @property
    def sessions(self) -> Mapping[int, Session]:
        """All sessions that are open, oldest first."""
        return self.streams.open

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        """Whether a worker may carry a session."""
        return streams.can_carry(self, self.streams.open[session.id], self.workers[worker.id])

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        """K of an app on a worker."""
        return steps.capacity(self, app, worker)

    def holders(self, context: str) -> int:
        """How many workers hold or load the context."""
        state = self.contexts.get(context)
        return state.holders if state else 0

    def free_holders(self, context: str) -> list[Worker]:
        """The free workers that hold the context ready, longest known as such first."""
        known = self._holders_free.get(context)
        if not known:
            return []
        found = []
        for worker in list(known.values()):
            held = worker.contexts.get(context)
            if held is None or worker.id not in self.free:
                del known[worker.id]
            elif held.state == "ready":
                found.append(worker)
        return found

    def forget_holders(self, context: str) -> None:
        """Nobody holds a context, or will."""
        self._holders_free.pop(context, None)

    @property
    def machines(self) -> Mapping[str, Machine]:
        """The machines on which workers can be asked for."""
        return self.surveys.machines

    @property
    def reserved(self) -> Mapping[str, Sequence[str]]:
        """The GPUs that are kept for workers that have not joined yet."""
        return self.reservations.reserved

    def permits(self, app: AppView, tier: TierView) -> bool:
        """Whether workers of the tier have the GPUs that the app needs, and the plan lets its context be there.

        Not if only a worker with a place of its own may hold the context.
        """
        wanted = self.contexts[app.context].spec
        own = wanted.affinity == "guaranteed" and wanted.id in self.reservations.wants
        return not own and self.able(app, tier) and self.plan.permits(app.context, tier.name)

    def able(self, app: AppView, tier: TierView) -> bool:
        """Whether workers of the tier have the GPUs and the memory on each that the app's context declares.

        Not if it is broken. What it took where it was built does not count: some take what there is.
        """
        context, offered = self.contexts[app.context], self.tiers[tier.name]
        if context.broken is not None or context.spec.gpus > offered.gpus:
            return False
        needed = context.spec.gpu_memory if context.spec.gpus else None
        return needed is None or offered.gpu_memory is None or needed <= offered.gpu_memory

    def usable(self, worker: Worker) -> bool:
        """Whether a worker takes something new: a call, or a context to build.

        While workers are awaited before the first call, one that has built a context waits with it.
        """
        if worker.free_slots <= 0 or worker.noticed is not None or worker.draining:
            return False
        return not (self.awaiting and any(held.state == "ready" for held in worker.contexts.values()))

    def update_free(self, worker: Worker) -> None:
        """Put a worker where it belongs after its slots changed."""
        if self.usable(worker) and worker.id in self.workers:
            self.free.setdefault(worker.id, worker)
            for context in worker.contexts:
                self._holders_free.setdefault(context, {})[worker.id] = worker
        else:
            self.free.pop(worker.id, None)

    def wake(self, time: float) -> None:
        """Ask for a Tick at that time at the latest."""
        self.wake_at = time if self.wake_at is None else min(self.wake_at, time)
