"""Tables of workers: contexts, attempts and sessions on each, the tiers that they come from, who is in quarantine.

What policies see of a row is in its `shown`: a proxy (view.py), set when the row is put into the tables.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from ctxflow.policies.views import ContextOnWorkerView, SessionView, TierView, WorkerView
from ctxflow.scheduler.app_state import App, Group, Place
from ctxflow.scheduler.commands import Order
from ctxflow.scheduler.events import TierSpec, WorkerSpec
from ctxflow.scheduler.step_shares import Estimate

Key = TypeVar("Key")
Row = TypeVar("Row")

STEP_WEIGHT = 0.3  # Of the last step in the average of those with as many sessions.
MOST_CHARGES = 20  # That are open against a place: what fails at once would crowd out those of all others.
STEP_MEMORY = 60.0  # Seconds for which steps with so many sessions are remembered.

WAITING, PLACED, MIGRATING, SUSPENDED = "waiting", "placed", "migrating", "suspended"


class Shown(dict[Key, Row]):
    """A table as policies see it: a dictionary that only `show` and `hide` write to.

    It is read as fast as any dictionary, which a mapping proxy is not, and policies read in loops over all workers.
    """

    __slots__ = ()

    def __init__(self) -> None:
        """Make an empty one."""

    def _refuse(self, *values: object, **named: object) -> NoReturn:
        raise AttributeError("a policy may only read what it is shown")

    # Dictionaries promise that these work; this one refuses them.
    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


show = dict.__setitem__


def hide(table: Shown[Key, Row], key: Key) -> None:
    """Show a row no longer, if it was shown."""
    dict.pop(table, key, None)


@dataclasses.dataclass(slots=True)
class OnWorker:
    """One context on one worker."""

    context: str
    state: str  # "staging", "loading", "waking", "ready"; "spent" if it runs the one call that it was built for.
    since: float
    last_used: float
    claim: Claim | None = None
    begun: float = 0.0  # When it began to be staged or built.
    shown: ContextOnWorkerView = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def building(self) -> bool:
        """Whether it is on its way to being ready, which takes a slot."""
        return self.state in ("staging", "loading", "waking")


@dataclasses.dataclass(slots=True)
class ParkedContext:
    """A context that gave way, and whose library process stays: bytes of the host's memory, and left on each GPU."""

    context: str
    last_used: float
    memory: int
    gpu_memory: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Items of an app for which a worker loads a context; they stay queued."""

    app: str
    items: int


class Attempt(NamedTuple):  # Policies see it as it is; made for each batch, and sooner than a frozen dataclass.
    """One try at some items on one worker.

    :ivar group: the items that it is to keep apart from others, if it is; `place`: where it runs.
    """

    id: int
    app: str
    context: str
    worker: str
    items: tuple[int, ...]
    started: float
    group: Group | None = None
    place: Place = ("", ())

    @property
    def apart(self) -> int:
        """Return of how many at a time it is, that run apart from all others; 0 if it runs beside them."""
        return self.group.apart if self.group is not None else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A session's state in the cache of a worker, with so many chunks made."""

    worker: str
    made: int
    digest: str
    bytes: int


@dataclasses.dataclass(slots=True)
class SessionState:
    """One session; only session_moves.py and steps.py change it.

    :ivar state: "waiting", "placed", "migrating", "suspended".
    :ivar worker: who owns it (placed), or will (migrating).
    :ivar target: where it goes at its next chunk boundary.
    :ivar suspending: whether it is to be, or is, suspended; `by_user`: by its user.
    :ivar chunks: delivered so far. `made`: by the state that it goes on from; `kept`: by the one that is kept beside
        its worker, 0 if none is; `begun`: that were begun at some time.
    :ivar loaded: whether its state is in its worker's library process.
    :ivar step: the attempt that it is in; of one that nobody carries, that which brings its state out of a cache.
    :ivar prompts: that it has got, and how many had been got when its last chunk was begun for the first time.
    :ivar turn_over: whether it makes nothing before it gets a prompt.
    :ivar group: sessions of a group share no step with others, 0 for none; until `doubtful` chunks are made.
    :ivar failed_on: until then, where a step failed, and that looked like the machine's fault; `failed_at`: when.
    """

    id: int
    app: str
    context: str
    opened: float
    keep_every: int | None
    wanted: int
    state: str = "waiting"
    worker: str | None = None
    target: str | None = None
    suspending: bool = False
    by_user: bool = False
    chunks: int = 0
    made: int = 0
    kept: int = 0
    begun: int = 0
    loaded: bool = False
    frozen: Frozen | None = None
    step: int | None = None
    prompts: int = 0
    prompts_begun: int = 0
    turn_over: bool = False
    group: int = 0
    doubtful: int = 0
    crashes: int = 0
    losses: int = 0
    failed_on: frozenset[Place] = frozenset()
    failed_at: float = 0.0
    own: Estimate | None = None  # Seconds that it adds to a step; kept by steps.py.
    chunk_seconds: float | None = None
    state_bytes: int | None = None
    last_chunk_at: float | None = None
    shown: SessionView = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.turn_over or self.chunks >= self.wanted or (self.suspending and self.by_user)

    @property
    def ready(self) -> bool:
        """Whether the next step may make its next chunk."""
        return self.state == "placed" and self.step is None and not self.idle and not self.suspending


@dataclasses.dataclass(slots=True)
class Pace:
    """One worker's speed on one app."""

    item_seconds: float  # A moving average over its items, without what their calls cost beside their items.
    items: int  # Answered so far.
    last: tuple[int, float]  # Items and seconds of the last batch.
    beside: float = 1.0  # Calls in flight at the end of one, a moving average; 1 where they do not overlap.


@dataclasses.dataclass(slots=True)
class Worker:
    """One connected worker."""

    spec: WorkerSpec
    joined: float
    order: int = 0  # Of joining.
    contexts: dict[str, OnWorker] = dataclasses.field(default_factory=dict)  # Changed by `put` and `take` alone.
    contexts_shown: Shown[str, ContextOnWorkerView] = dataclasses.field(default_factory=Shown, repr=False)
    parked: dict[str, ParkedContext] = dataclasses.field(default_factory=dict)  # Of these none is in `contexts`.
    running: dict[int, Attempt] = dataclasses.field(default_factory=dict)
    noticed: float | None = None
    draining: bool = False
    released: bool = False  # Given back: it gets no step any more.
    done: int = 0  # Batches and steps that it has answered.
    paces: dict[str, Pace] = dataclasses.field(default_factory=dict)
    context_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    staging_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    # Contexts of level "partial" whose files are here, whether they are built or not; kept by context_moves.py.
    staged: set[str] = dataclasses.field(default_factory=set)
    # Contexts that were built again to bring states out since it is to go; kept by steps.py.
    rebuilt: set[str] = dataclasses.field(default_factory=set)
    # That it owns; changed by `carry` and `leave` alone.
    sessions: dict[int, SessionState] = dataclasses.field(default_factory=dict)
    sessions_shown: Shown[int, SessionView] = dataclasses.field(default_factory=Shown, repr=False)
    # App -> sessions of a step -> (a moving average of its seconds, when it last was one).
    steps: dict[str, dict[int, tuple[float, float]]] = dataclasses.field(default_factory=dict)

    # Context -> its overlapping calls that run, which take one slot together; none where there are none.
    in_flight: dict[str, int] = dataclasses.field(default_factory=dict)

    overlapping: int = 0  # The sum of these.
    windows: dict[str, int] = dataclasses.field(default_factory=dict)  # How many of each there may be.
    # The same if enough were queued, as it was last, of contexts that it holds.
    full: dict[str, int] = dataclasses.field(default_factory=dict)
    # Contexts of which it gets none of these any more until no call of any of them is left; changed by `RunState.turn`
    # and `update_free` alone, as is the app that it is drained for, "" for none.
    turning: set[str] = dataclasses.field(default_factory=set)
    promised: str = ""

    # Kept by `RunState.update_free`: slots that neither run nor load, and those of them or with room in a window.
    unused_slots: int = 0
    free_slots: int = 0
    offered: int = 0  # These, while it is among the free workers; 0 while it is not.
    load_offered: int = 0  # Under how many contexts it is found there.
    loading: int = 0

    # Read in every decision, so copied out of the specification.
    id: str = dataclasses.field(init=False)
    host: str = dataclasses.field(init=False)
    tier: str = dataclasses.field(init=False)
    slots: int = dataclasses.field(init=False)
    gpus: int = dataclasses.field(init=False)
    pin: int | None = dataclasses.field(init=False)
    devices: Sequence[str] = dataclasses.field(init=False)
    place: Place = dataclasses.field(init=False)
    # What the batch system calls its host; and whether it was asked for by number: not by hand, nor with a pin.
    machine: str = dataclasses.field(init=False)
    acquired: bool = dataclasses.field(init=False)
    shown: WorkerView = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.id, self.host, self.tier, self.slots, self.gpus = spec.id, spec.host, spec.tier, spec.slots, spec.gpus
        self.pin, self.devices, self.place = spec.pin, spec.devices, (spec.host, tuple(spec.devices))
        self.machine, self.acquired = spec.machine or spec.host, spec.acquired and spec.pin is None
        self.unused_slots = self.free_slots = self.slots

    def has_room(self, context: str) -> bool:
        """Return whether it could take one more call of a context that it holds: a slot, or a place in its window."""
        if context in self.turning:
            return False
        flying = self.in_flight.get(context)
        return self.unused_slots > 0 if flying is None else flying < self.windows[context]

    @property
    def slots_used(self) -> float:
        """Return how many slots are in use, of a window that is not emptied the share that is taken."""
        left = (1 - flying / self.full[context] for context, flying in self.in_flight.items() if self._open(context))
        return float(self.slots - self.unused_slots - sum(max(0.0, each) for each in left))

    def _open(self, context: str) -> bool:
        return context in self.full and context not in self.turning

    @property
    def leaving(self) -> bool:
        """Whether it is about to go: it has notice, or is to be given back."""
        return self.noticed is not None or self.draining

    def put(self, held: OnWorker) -> None:
        """Have it hold a context."""
        self.contexts[held.context] = held
        show(self.contexts_shown, held.context, held.shown)

    def take(self, context: str) -> OnWorker | None:
        """Have it hold a context no longer, if it did."""
        hide(self.contexts_shown, context)
        self.full.pop(context, None)
        return self.contexts.pop(context, None)

    def carry(self, session: SessionState) -> None:
        """Have it own a session."""
        self.sessions[session.id] = session
        show(self.sessions_shown, session.id, session.shown)

    def leave(self, session: int) -> None:
        """Have it own a session no longer, if it did."""
        self.sessions.pop(session, None)
        hide(self.sessions_shown, session)

    def learn_step(self, app: str, count: int, seconds: float, now: float) -> None:
        """Learn a step's seconds; numbers of sessions not seen for a while are forgotten, and tried again."""
        known = self.steps.setdefault(app, {})
        before = known.get(count)
        known[count] = (seconds if before is None else before[0] + STEP_WEIGHT * (seconds - before[0]), now)
        for old in [n for n, (_, at) in known.items() if at < now - STEP_MEMORY]:
            del known[old]


@dataclasses.dataclass(slots=True)
class TierState:
    """A tier of the site, and what was measured of it."""

    spec: TierSpec
    gpu_memory: int | None = None  # Bytes on each GPU: the least that a worker reported or the site says.
    asked: int | None = None  # Workers asked for last.
    connected: int = 0  # Workers that were asked for and are there.
    # Those that are given back when their sessions, and states of others, have left them.
    emptying: set[str] = dataclasses.field(default_factory=set)
    worker_seconds: float = 0.0  # For how long those that are gone were connected; the next, that times their GPUs.
    gpu_seconds: float = 0.0
    lifetimes: list[float] = dataclasses.field(default_factory=list)  # Of workers that were evicted.
    lacking_seconds: float = 0.0  # For how long fewer workers were connected than were asked for.
    lacking_since: float | None = None
    jobs_started: int = 0
    jobs_evicted: int = 0  # Also those whose worker had not joined.
    held: dict[str, int] = dataclasses.field(default_factory=dict)  # How often a job was held, by the reason given.
    shown: TierView = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def match_rate(self) -> float | None:
        """Workers that the batch system gives an hour: jobs begun, by the time in which workers were lacking."""
        known = self.jobs_started and self.lacking_seconds
        return 3600 * self.jobs_started / self.lacking_seconds if known else None

    @property
    def eviction_rate(self) -> float | None:
        """Evictions per worker and second, once there was one."""
        return len(self.lifetimes) / self.worker_seconds if self.lifetimes and self.worker_seconds else None


@dataclasses.dataclass(eq=False, slots=True)
class Charge:
    """A failed attempt, until it is known whose fault that was."""

    attempt: int
    worker: Worker
    app: App
    items: set[int]  # Those that were not answered elsewhere yet.
    message: str
    crash: bool  # Whether a library process or a worker ended over it.


class Charges:
    """The charges that are open, oldest first, those that each item is part of, and how many there are by place.

    :ivar lost_at: when a host's last loss of a worker was counted.
    """

    def __init__(self) -> None:
        self.open: OrderedDict[Charge, None] = OrderedDict()
        self.of: dict[int, list[Charge]] = {}
        self.against = Counter[Place]()
        self.lost_at: dict[str, float] = {}

    def room(self, worker: Worker) -> bool:
        """Return whether another charge against a worker's place may be opened."""
        return self.against[worker.place] < MOST_CHARGES

    def add(self, charge: Charge) -> None:
        """Open a charge."""
        self.open[charge] = None
        self.against[charge.worker.place] += 1
        for item in charge.items:
            self.of.setdefault(item, []).append(charge)

    def close(self, charge: Charge) -> None:
        """Close a charge of which no item is left."""
        del self.open[charge]
        self.against[charge.worker.place] -= 1
        if not self.against[charge.worker.place]:
            del self.against[charge.worker.place]

    def drop(self, charge: Charge) -> None:
        """Drop a charge: nothing follows from it."""
        self.close(charge)
        for item in charge.items:
            left = [each for each in self.of.pop(item) if each is not charge]
            if left:
                self.of[item] = left

    def settle(self, items: Iterable[int]) -> None:
        """Drop the charges of items that are given up, or that nobody waits for."""
        for item in items:
            for charge in self.of.get(item, ()):
                self.drop(charge)


@dataclasses.dataclass(slots=True)
class Sessions:
    """All that is known of a run's sessions, by number unless it says otherwise."""

    open: dict[int, SessionState] = dataclasses.field(default_factory=dict)  # Those that are not over.
    shown: Shown[int, SessionView] = dataclasses.field(default_factory=Shown)  # What policies see of them.
    steps: dict[int, Sequence[Order]] = dataclasses.field(default_factory=dict)  # By attempt.
    # (worker, app) -> sessions whose states are there and wanted by nobody.
    drops: dict[tuple[str, str], list[int]] = dataclasses.field(default_factory=dict)
    unsettled: bool = False  # Whether the policy is to be asked again.
    groups: int = 0  # Of sessions that must be in a step by themselves, after a step failed: the last one's number.
    # App -> its sessions that wait for a worker and have something to do; no app without any.
    waiting: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    # Session -> the worker that it is to go to, or is on its way to, and its context; and how many of each pair.
    bound: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    awaited: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    leaving: dict[str, Worker] = dataclasses.field(default_factory=dict)  # Workers that are about to go.
    charges: Charges = dataclasses.field(default_factory=Charges)  # Steps that failed, by session.

    def note(self, session: SessionState) -> None:
        """Update `waiting`, `bound` and `awaited` after a session has changed in what they tell."""
        if session.state == WAITING and not session.idle and session.id in self.open:
            self.waiting.setdefault(session.app, set()).add(session.id)
        elif session.app in self.waiting:
            self.waiting[session.app].discard(session.id)
            if not self.waiting[session.app]:
                del self.waiting[session.app]
        before, now = self.bound.pop(session.id, None), going(session) if session.id in self.open else None
        if now is not None:
            self.bound[session.id] = now
            self.awaited[now] += 1
        if before is not None:
            self.awaited[before] -= 1
            if not self.awaited[before]:
                del self.awaited[before]


def going(session: SessionState) -> tuple[str, str] | None:
    """Return the worker that a session is to go to, or is on its way to, and its context."""
    worker = session.worker if session.state == MIGRATING else session.target
    return None if worker is None else (worker, session.context)


@dataclasses.dataclass(slots=True)
class Unit:
    """A host, or some GPUs or one worker of it, in quarantine."""

    host: str
    machine: str
    devices: tuple[str, ...]  # None for all of the host, or for one worker without any.
    worker: str  # The one that is meant, and others with its GPUs; "" for all of the host.
    cause: str
    until: float
    gpus: int = 0  # The most that a worker there had, or was to have.
    returned: int = 0  # How often a worker joined from there all the same.
    by_hand: bool = False  # A person said so, and says when it is over; what runs there is not stopped.
    jobs: bool = False  # Only no job is asked for there,
    tier: str = ""  # of this tier.

    @property
    def what(self) -> str:
        """In words."""
        return f"worker {self.worker} on host {self.host}" if self.worker else f"host {self.host}"

    def has(self, worker: Worker) -> bool:
        """Return whether a worker is in quarantine with it."""
        if worker.host != self.host or self.jobs:
            return False
        if not self.worker or worker.id == self.worker:
            return True
        return bool(self.devices) and not set(self.devices).isdisjoint(worker.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class Unproven:
    """An app whose calls all failed on the only host of its tier: nobody can tell yet whose fault that is."""

    host: str
    app: str
    message: str

    @property
    def text(self) -> str:
        """In words."""
        where = f"{self.host}, the only host of its tier so far"
        return f"calls of {self.app} fail on {where}, and wait some minutes for another one that answers them"


class Wards:
    """All that is in quarantine; how often each host was; and the hosts that each tier is not asked for on.

    :ivar slow: who is slow, and keeps its work; `unproven`: by app; both are kept by faults.py on ticks.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.times: dict[tuple[str, tuple[str, ...]], int] = {}
        self.held: dict[str, Worker] = {}  # The workers that are in quarantine; kept by faults.py.
        self.excluded: dict[str, tuple[str, ...]] = {}
        # Since when work has waited that units could do, and nobody who is there; until when nobody asks for relief.
        self.deserted: float | None = None
        self.relief_at = 0.0
        self.slow: list[Unit] = []
        self.unproven: dict[str, Unproven] = {}

    def of(self, worker: Worker) -> Unit | None:
        """Return what a worker is in quarantine with."""
        return next((unit for unit in self.units if unit.has(worker)), None) if self.units else None
