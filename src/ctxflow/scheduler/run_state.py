"""The whole state of a run in one object: all tables, and what can be read off them without a policy.

What does not live here: transitions (core.py and the modules that it calls), and what policies see (run_view.py).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from ctxflow.policies.protocols import Plan, Planning, View
from ctxflow.policies.views import AppView, RegionView, TierView, WorkerView
from ctxflow.scheduler.app_state import App, ContextState, Deal
from ctxflow.scheduler.settings import Limits, Policies
from ctxflow.scheduler.shared_tables import Arrivals, Charges, Ready, Reservations, Sessions, Surveys, Wards
from ctxflow.scheduler.worker_state import Attempt, SessionState, Shown, TierState, Worker, hide, show


@dataclasses.dataclass(slots=True)
class Counters:
    """Totals since the start; only transitions add to them."""

    submitted: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    retried: int = 0
    batches: int = 0
    duplicates: int = 0
    joined: int = 0
    lost: int = 0
    evicted: int = 0
    crashes: int = 0
    steps: int = 0
    chunks: int = 0
    migrations: int = 0
    suspensions: int = 0
    loads: int = 0


class RunState:
    """Everything that the scheduler knows.

    :ivar view: what policies see of it, read-only; made with the scheduler.
    """

    view: View

    def __init__(self, policies: Policies, limits: Limits, seed: int, start_when: float = 0.0) -> None:
        if not 0 <= start_when <= 1:
            raise ValueError("start_when is a share of the workers asked for: give 0 to 1")
        self.policies = policies
        self.limits = limits
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.plan = Plan()
        # What is computed for the next plan, and why the last could not be; kept by dispatch.py.
        self.planning: Planning | None = None
        self.planning_failure: str | None = None
        self.workers: dict[str, Worker] = {}
        self.apps: dict[str, App] = {}
        self.contexts: dict[str, ContextState] = {}
        self.attempts: dict[int, Attempt] = {}
        self.tiers: dict[str, TierState] = {}
        self.regions: dict[str, RegionView] = {}
        self.arrivals = Arrivals()  # Kept by core.py, on ticks.
        self.surveys = Surveys()
        self.reservations = Reservations()
        self.counters = Counters()
        # Workers that could take a call, longest free first; kept by `update_free`.
        self.free: dict[str, Worker] = {}
        # What policies see of some of these tables, row by row.
        self.workers_shown: Shown[str, WorkerView] = Shown()
        self.free_shown: Shown[str, WorkerView] = Shown()
        self.apps_shown: Shown[str, AppView] = Shown()
        self.tiers_shown: Shown[str, TierView] = Shown()
        # Context -> workers that hold it and were free; kept by `update_free`, cleaned by `free_holders`.
        self._holders_free: dict[str, dict[str, Worker]] = {}
        # Apps with a backlog and a context that is not broken; kept by items.py.
        self.ready = Ready()
        # Unanswered items -> their app. An item leaves when it is done, dead or cancelled.
        self.open: dict[int, App] = {}
        # Attempts that go on -> how many of their items, from the first on, they have answered.
        self.answered: dict[int, int] = {}
        # Attempts that were told to stop, since nobody waits for any of their items.
        self.interrupted: set[int] = set()
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
        # Apps whose items the plan divides among contexts -> whose the next item is; kept by items.py.
        self.deals: dict[str, Deal] = {}
        self.streams = Sessions()
        self.next_attempt = 1
        self.next_order = 0  # Of the next app that is declared.
        self.wake_at: float | None = None
        # No call is given before this share of the workers asked for is connected; kept by tiers.py, as is the next.
        self.start_when = start_when
        self.awaiting = start_when > 0
        self.scaled_at = 0.0

    @property
    def sessions(self) -> Mapping[int, SessionState]:
        """All sessions that are open, oldest first."""
        return self.streams.open

    def free_holders(self, context: str) -> list[Worker]:
        """Return the free workers that hold the context ready, longest known as such first."""
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
        """Forget who holds a context."""
        self._holders_free.pop(context, None)

    def usable(self, worker: Worker) -> bool:
        """Return whether a worker takes something new: a call, or a context to build.

        While workers are awaited before the first call, one that has built a context waits with it.
        """
        if worker.free_slots <= 0 or worker.noticed is not None or worker.draining:
            return False
        return not (self.awaiting and any(held.state == "ready" for held in worker.contexts.values()))

    def update_free(self, worker: Worker) -> None:
        """Put a worker where it belongs after its slots changed."""
        if self.usable(worker) and worker.id in self.workers:
            if worker.id not in self.free:
                self.free[worker.id] = worker
                show(self.free_shown, worker.id, worker.shown)
            for context in worker.contexts:
                self._holders_free.setdefault(context, {})[worker.id] = worker
        elif self.free.pop(worker.id, None) is not None:
            hide(self.free_shown, worker.id)

    def wake(self, time: float) -> None:
        """Ask for a Tick at that time at the latest."""
        self.wake_at = time if self.wake_at is None else min(self.wake_at, time)
