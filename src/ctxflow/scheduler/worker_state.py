"""Workers as the scheduler knows them: contexts, attempts and sessions on each, and the tiers they come from.

What policies see of each row is in its `shown`: a proxy (proxies.py), set when the row is put into the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeVar

from ctxflow.policies.views import ContextOnWorkerView, SessionView, TierView, WorkerView
from ctxflow.scheduler.app_state import Group, Place
from ctxflow.scheduler.events import TierSpec, WorkerSpec

Key = TypeVar("Key")
Row = TypeVar("Row")

STEP_WEIGHT = 0.3  # Of the last step in the average of those with as many sessions.
STEP_MEMORY = 60.0  # Seconds for which steps with so many sessions are remembered.

WAITING, PLACED, MIGRATING, SUSPENDED = "waiting", "placed", "migrating", "suspended"


class Shown(dict[Key, Row]):
    """A table as policies see it: a dictionary that only `show` and `hide` write to.

    It is read as fast as any dictionary, which a mapping proxy is not, and policies read in loops over all workers.

    >>> table = Shown()
    >>> show(table, "w1", 1)
    >>> table["w1"] = 2
    Traceback (most recent call last):
        ...
    AttributeError: a policy may only read what it is shown
    >>> table
    {'w1': 1}
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
    """One context on one worker.

    :ivar state: "staging", "loading", "ready"; "spent" if it runs the one call that it was built for.
    :ivar begun: when it began to be staged or built.
    """

    context: str
    state: str
    since: float
    last_used: float
    memory: int | None = None
    gpu_memory: int | None = None
    claim: Claim | None = None
    begun: float = 0.0
    shown: ContextOnWorkerView = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def building(self) -> bool:
        """Whether it is on its way to being ready, which takes a slot."""
        return self.state in ("staging", "loading")


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


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A session's state in the cache of a worker, with so many chunks made."""

    worker: str
    made: int
    digest: str
    bytes: int


@dataclasses.dataclass(slots=True)
class SessionState:
    """One session; only sessions.py changes it.

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
    """One worker's speed on one app.

    :ivar item_seconds: a moving average over its items, without what their calls cost beside their items.
    :ivar items: answered so far.
    :ivar last: items and seconds of the last batch.
    """

    item_seconds: float
    items: int
    last: tuple[int, float]


@dataclasses.dataclass(slots=True)
class Worker:
    """One connected worker."""

    spec: WorkerSpec
    joined: float
    contexts: dict[str, OnWorker] = dataclasses.field(default_factory=dict)  # Changed by `put` and `take` alone.
    contexts_shown: Shown[str, ContextOnWorkerView] = dataclasses.field(default_factory=Shown, repr=False)
    running: dict[int, Attempt] = dataclasses.field(default_factory=dict)
    noticed: float | None = None
    draining: bool = False
    released: bool = False  # Given back: it gets no step any more.
    held: bool = False  # In quarantine; kept by quarantine.py.
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

    # Read in every decision, so copied out of the specification.
    id: str = ""
    place: Place = ("", ())
    tier: str = ""
    slots: int = 1
    loading: int = 0
    shown: WorkerView = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.id, self.place = self.spec.id, (self.spec.host, tuple(self.spec.devices))
        self.tier, self.slots = self.spec.tier, self.spec.slots

    @property
    def free_slots(self) -> int:
        """Slots that neither run nor load."""
        return self.slots - len(self.running) - self.loading

    @property
    def acquired(self) -> bool:
        """Whether it is one of those that were asked for by number, and neither started by hand nor pinned."""
        return self.spec.acquired and self.spec.pin is None

    @property
    def pin(self) -> int | None:
        """The number of the reservation that it was asked for by."""
        return self.spec.pin

    @property
    def machine(self) -> str:
        """What the batch system calls its host."""
        return self.spec.machine or self.spec.host

    @property
    def devices(self) -> Sequence[str]:
        """The ids of its GPUs."""
        return self.spec.devices

    @property
    def region(self) -> str:
        """The group of workers close to it."""
        return self.spec.region

    @property
    def host(self) -> str:
        """The machine it is on."""
        return self.spec.host

    @property
    def gpus(self) -> int:
        """How many GPUs it was given."""
        return self.spec.gpus

    @property
    def gpu_model(self) -> str | None:
        """Such as "NVIDIA A10"."""
        return self.spec.gpu_model

    def put(self, held: OnWorker) -> None:
        """Have it hold a context."""
        self.contexts[held.context] = held
        show(self.contexts_shown, held.context, held.shown)

    def take(self, context: str) -> OnWorker | None:
        """Have it hold a context no longer, if it did."""
        hide(self.contexts_shown, context)
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
    """A tier of the site, and what was measured of it.

    :ivar gpu_memory: bytes on each GPU: the least that a worker reported or the site says.
    :ivar asked: workers asked for last.
    :ivar lacking_seconds: for how long fewer workers were connected than were asked for.
    :ivar connected: workers that were asked for and are there.
    :ivar emptying: those that are given back when their sessions, and states of others, have left them.
    :ivar worker_seconds: for how long those that are gone were connected; `gpu_seconds`, that times their GPUs.
    :ivar jobs_evicted: also those whose worker had not joined; `lifetimes` has the others, once each.
    :ivar held: how often a job was held, by the reason that the batch system gave.
    """

    spec: TierSpec
    gpu_memory: int | None = None
    asked: int | None = None
    connected: int = 0
    emptying: set[str] = dataclasses.field(default_factory=set)
    worker_seconds: float = 0.0
    gpu_seconds: float = 0.0
    lifetimes: list[float] | None = None
    lacking_seconds: float = 0.0
    lacking_since: float | None = None
    jobs_started: int = 0
    jobs_evicted: int = 0
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    shown: TierView = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def minimum(self) -> int:
        """Never fewer workers than this."""
        return self.spec.minimum

    @property
    def maximum(self) -> int:
        """Never more workers than this."""
        return self.spec.maximum

    @property
    def price(self) -> float | None:
        """Dollars a worker costs an hour."""
        return self.spec.price

    @property
    def match_rate(self) -> float | None:
        """Workers that the batch system gives an hour: jobs begun, by the time in which workers were lacking."""
        known = self.jobs_started and self.lacking_seconds
        return 3600 * self.jobs_started / self.lacking_seconds if known else None

    @property
    def eviction_rate(self) -> float | None:
        """Evictions per worker and second, once there was one."""
        return len(self.lifetimes) / self.worker_seconds if self.lifetimes and self.worker_seconds else None
