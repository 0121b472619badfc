"""The whole state of a run: how it is set up, and all tables."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxflow.option_values import number, whole
from ctxflow.policies import protocols
from ctxflow.policies.registry import DEFAULTS, described, having, make
from ctxflow.policies.views import AppView, RegionView, TierView, WorkerView
from ctxflow.scheduler.app_state import App, Arrivals, ContextState, Deal, Ready
from ctxflow.scheduler.free_workers import FreeTables
from ctxflow.scheduler.open_items import OpenItems
from ctxflow.scheduler.worker_state import (
    Attempt,
    Charges,
    Sessions,
    SessionState,
    Shown,
    TierState,
    Wards,
    Worker,
)
from ctxflow.topology import Topology


@dataclasses.dataclass(frozen=True)
class Policies:
    """The policies of a run.

    :ivar choices: family -> how its policy was chosen, as data (see `ctxflow.policies.registry.described`).
    :ivar warming: the routing policy, if it also loads contexts ahead of demand; None if not.
    :ivar planning: the placement policy, if its plans are computed beside the run; None if not.
    :ivar coalescing: who says how many sessions a step serves: the batching policy, if it has an opinion.
    :ivar windows: who says how many items of an app whose calls overlap a worker has in flight: likewise.
    :ivar learning: the batching policy, if it learns from such items; None if not.
    :ivar job_health: the health policy, if it judges hosts by jobs too; None if not.
    """

    routing: protocols.RoutingPolicy
    batching: protocols.BatchingPolicy
    placement: protocols.PlacementPolicy
    preemption: protocols.PreemptionPolicy
    scaling: protocols.ScalingPolicy
    sessions: protocols.SessionPolicy = dataclasses.field(
        default_factory=lambda: make("sessions", DEFAULTS["sessions"])
    )
    health: protocols.HealthPolicy = dataclasses.field(default_factory=lambda: make("health", DEFAULTS["health"]))
    choices: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    warming: protocols.WarmingPolicy | None = dataclasses.field(init=False, compare=False, repr=False)
    planning: protocols.PlanningPolicy | None = dataclasses.field(init=False, compare=False, repr=False)
    coalescing: protocols.BatchingPolicy = dataclasses.field(init=False, compare=False, repr=False)
    windows: protocols.BatchingPolicy = dataclasses.field(init=False, compare=False, repr=False)
    learning: protocols.BatchingPolicy | None = dataclasses.field(init=False, compare=False, repr=False)
    job_health: protocols.JobHealthPolicy | None = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "warming", having(self.routing, "warm"))
        put(self, "planning", having(self.placement, "planning", "planned"))
        put(self, "coalescing", having(self.batching, "coalesced") or make("batching", "coalescing"))
        put(self, "windows", having(self.batching, "window") or make("batching", "fixed"))
        put(self, "learning", having(self.batching, "finished"))
        put(self, "job_health", having(self.health, "tried_job"))

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> Policies:
        """Make policies of what a site or a person chose of each family: a name, a table with options, or an object.

        :param choices: a family that is not in it has its default.
        :raises ValueError: for a choice that makes no sense, saying what to write.

        >>> Policies.chosen({"batching": "opportunistic"}).choices["routing"]
        {'policy': 'context-affinity'}
        """
        complete = {family: choices.get(family, default) for family, default in DEFAULTS.items()}
        made = {family: make(family, choice) for family, choice in complete.items()}
        return cls(**made, choices={family: described(family, choice) for family, choice in complete.items()})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Failure thresholds: how many failures are tolerated, and how long is waited.

    :ivar losses: times in a row that an item's workers may be lost, for no known reason, before it is suspected.
    :ivar crashes: crashes that an item alone may cause before it is dead.
    :ivar failures: hosts on which a context may fail before it is declared broken; workers, where all are on one host.
    :ivar retry_seconds: the first pause before a suspect worker is asked to build the context again.
    :ivar verdict: seconds that are waited, before a context is declared broken, for those who still build it.
    """

    losses: int = 3
    crashes: int = 2
    failures: int = 3
    retry_seconds: float = 5.0
    verdict: float = 600.0

    def __post_init__(self) -> None:
        for name in ("losses", "crashes", "failures"):
            whole(name, getattr(self, name), "how many failures are tolerated, 1 or more", 1)
        for name in ("retry_seconds", "verdict"):
            number(name, getattr(self, name), "seconds, 0 or more")


@dataclasses.dataclass(slots=True)
class Reservation:
    """GPUs kept for one worker."""

    pin: int
    context: str
    room: protocols.Room
    state: str  # "clearing", "asked", "started", "held" or "leaving".
    due: float  # When that has lasted too long.
    grace_until: float
    tiers: tuple[str, ...]  # Of the victims.
    released: set[str] = dataclasses.field(default_factory=set)  # Victims that were given back.
    worker: str | None = None  # Who holds the place.
    idle_since: float | None = None


@dataclasses.dataclass(slots=True)
class Want:
    """A context that may need a worker of its own."""

    again_at: float = 0.0  # When it is looked at again.
    lost: int = 0  # How often in a row somebody else got its GPUs first.
    told: str = ""  # Why it waits, as a person was told last.


class Reservations:
    """The table of reservations."""

    def __init__(self) -> None:
        self.all: dict[int, Reservation] = {}
        # The contexts with two GPUs or more, where the preemption policy makes room.
        self.wants: dict[str, Want] = {}
        self.next_pin = 1

    @property
    def reserved(self) -> Mapping[str, Sequence[str]]:
        """The GPUs that are kept for workers that have not joined yet, by machine."""
        kept: dict[str, list[str]] = {}
        for each in self.all.values():
            if each.worker is None:
                kept.setdefault(each.room.machine, []).extend(each.room.devices)
        return kept


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A machine as it was surveyed."""

    name: str
    tier: str
    topology: Topology


class Surveys:
    """What the surveys of machines found."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}  # As they were surveyed last, by tier and name.
        self.awaited: dict[str, float] = {}  # Tier -> when it was asked for its machines.
        self.fresh: set[str] = set()  # Tiers of whose machines nobody has decided since they were surveyed.
        self.told = ""  # Why a survey failed, as a person was told last.


class Flights:
    """Attempts of apps with calls of one item each, which may be in flight by the thousand.

    :ivar overlapping: calls that overlap, also of other apps.
    :ivar of: item -> its attempts; `attempts`: how many there are.
    :ivar full: context -> workers whose windows of it were full, longest not asked first.
    """

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}
        self.attempts = self.overlapping = 0
        self.full: dict[str, dict[str, Worker]] = {}

    def begin(self, number: int, items: Sequence[int]) -> None:
        """Note an attempt."""
        self.attempts += 1
        for item in items:
            self.of.setdefault(item, []).append(number)

    def end(self, number: int, items: Sequence[int]) -> None:
        """Forget an attempt."""
        self.attempts -= 1
        for item in items:
            numbers = self.of[item]
            numbers.remove(number)
            if not numbers:
                del self.of[item]

    def take_full(self, context: str, most: int) -> list[Worker]:
        """Return workers, so many at most, whose windows of a context are full; next time they are the last ones."""
        known = self.full.get(context, {})
        found: list[Worker] = []
        while known and len(found) < most:
            worker = known.pop(next(iter(known)))
            flying = worker.in_flight.get(context, 0)
            if flying and flying >= worker.windows[context]:
                found.append(worker)
        known.update({worker.id: worker for worker in found})
        return found


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
    parks: int = 0
    wakes: int = 0


class RunState:
    """Everything that the scheduler knows."""

    view: protocols.View  # What policies see of it, read-only; made with the scheduler.

    def __init__(self, policies: Policies, limits: Limits, seed: int, start_when: float = 0.0) -> None:
        if not 0 <= start_when <= 1:
            raise ValueError("start_when is a share of the workers asked for: give 0 to 1")
        self.policies = policies
        self.limits = limits
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.plan = protocols.Plan()
        # What is computed for the next plan, and why the last could not be; kept by dispatch.py.
        self.planning: protocols.Planning | None = None
        self.planning_failure: str | None = None
        self.workers: dict[str, Worker] = {}
        # Tier, and GPU model or "*" for any -> host -> workers there; kept by dispatch.py.
        self.hosts: defaultdict[tuple[str, str | None], Counter[str]] = defaultdict(Counter)
        self.apps: dict[str, App] = {}
        self.contexts: dict[str, ContextState] = {}
        self.attempts: dict[int, Attempt] = {}
        self.flights = Flights()  # Kept by attempts.py and `update_free`.
        self.tiers: dict[str, TierState] = {}
        self.regions: dict[str, RegionView] = {}
        self.arrivals = Arrivals()  # Kept by core.py, on ticks.
        self.surveys = Surveys()
        self.reservations = Reservations()
        self.counters = Counters()
        # Workers that could take a call, longest free first; kept by `update_free`.
        self.free_tables = FreeTables()
        self.free = self.free_tables.workers
        # What policies see of some of these tables, row by row.
        self.workers_shown: Shown[str, WorkerView] = Shown()
        self.apps_shown: Shown[str, AppView] = Shown()
        self.tiers_shown: Shown[str, TierView] = Shown()
        # Apps with a backlog and a context that is not broken; kept by items.py.
        self.ready = Ready()
        # Unanswered items -> their app. An item leaves when it is done, dead or cancelled.
        self.open = OpenItems[App]()
        # Attempts that go on -> how many of their items, from the first on, they have answered.
        self.answered: dict[int, int] = {}
        # Attempts that were told to stop, since nobody waits for any of their items.
        self.interrupted: set[int] = set()
        # Items that several attempts hold now -> how many.
        self.copies: dict[int, int] = {}
        # Item -> times its workers were lost for no known reason / it crashed alone / it raised alone.
        self.losses: dict[int, int] = {}
        # Open items -> how they begin, of those that say so; see prefixes.py.
        self.prefixes: dict[int, tuple[int, ...]] = {}
        # Item -> times that a library process died under it and others.
        self.deaths: dict[int, int] = {}
        self.crashes: dict[int, int] = {}
        self.raised: dict[int, int] = {}
        # Contexts that failed often enough, while somebody may still show otherwise; kept by faults.py.
        self.undecided: dict[str, ContextState] = {}
        # Failed attempts, until it is known whose fault that was; kept by faults.py.
        self.charges = Charges()
        # Who is in quarantine; kept by faults.py.
        self.wards = Wards()
        # Apps whose items the plan divides among contexts -> whose the next item is; kept by items.py.
        self.deals: dict[str, Deal] = {}
        self.streams = Sessions()
        self.sessions: Mapping[int, SessionState] = self.streams.open  # Oldest first.
        self.drained: list[
            Worker
        ] = []  # Workers that have nothing in flight any more, for the apps that they wait for.
        self.next_attempt = 1
        self.next_order = 0  # Of the next app that is declared.
        self.wake_at: float | None = None
        # No call is given before this share of the workers asked for is connected; kept by dispatch.py, as is the next.
        self.start_when = start_when
        self.awaiting = start_when > 0
        self.scaled_at = 0.0

    def turn(self, worker: Worker, contexts: Iterable[str], promised: str = "") -> None:
        """Give a worker no more calls of these that overlap there, until none is left: other work gets their place.

        :param promised: the app whose work that is, if it is known.
        """
        flying = [context for context in contexts if context in worker.in_flight]
        if flying:
            worker.turning.update(flying)
            worker.promised = promised or worker.promised
            self.update_free(worker)

    def forget_holders(self, context: str) -> None:
        """Forget who holds a context."""
        self.free_tables.forget(context)
        self.flights.full.pop(context, None)

    def update_free(self, worker: Worker) -> None:
        """Put a worker where it belongs after its slots changed: whether it takes a call, or a context to build.

        While workers are awaited before the first call, one that has built a context waits with it.
        """
        free_slots = worker.slots - len(worker.running) - worker.loading
        if worker.overlapping:
            free_slots += worker.overlapping - len(worker.in_flight)
        if worker.turning and worker.turning.isdisjoint(worker.in_flight):
            worker.turning.clear()
            self.drained.append(worker)
        worker.unused_slots = free_slots
        if worker.overlapping:
            windows, turning = worker.windows, worker.turning
            for context, count in worker.in_flight.items():
                if count >= windows[context]:
                    self.flights.full.setdefault(context, {})[worker.id] = worker
                elif context not in turning:
                    free_slots += 1
        worker.free_slots = free_slots
        name = worker.id
        if (
            free_slots > 0
            and not worker.draining
            and worker.noticed is None
            and name in self.workers
            and not (self.awaiting and any(held.state == "ready" for held in worker.contexts.values()))
        ):
            self.free_tables.offer(worker)
        elif worker.offered:
            self.free_tables.withdraw(worker)

    def drain(self, worker: Worker, draining: bool = True) -> None:
        """Have a worker take nothing new, or take work again; the session policy is asked about its sessions."""
        worker.draining = draining
        if worker.leaving:
            self.streams.leaving[worker.id] = worker
        else:
            worker.rebuilt.clear()
            self.streams.leaving.pop(worker.id, None)
        self.streams.unsettled = True
        self.update_free(worker)

    def wake(self, time: float) -> None:
        """Ask for a Tick at that time at the latest."""
        self.wake_at = time if self.wake_at is None else min(self.wake_at, time)
