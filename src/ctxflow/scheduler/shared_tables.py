"""Tables of what workers, apps and sessions share: sessions, charges, quarantine, reservations, surveys, arrivals."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ctxflow.policies.helpers import urgency
from ctxflow.policies.protocols import Room
from ctxflow.policies.views import SessionView
from ctxflow.scheduler.app_state import App, Place
from ctxflow.scheduler.commands import Order
from ctxflow.scheduler.worker_state import MIGRATING, WAITING, SessionState, Shown, Worker
from ctxflow.topology import Topology

MANY = 64
"""How many apps with work a routing policy is shown, whatever their contexts."""
SPARE = 2  # Apps that it is shown beside one for each free worker, of each context, where there are more.
SLOT_SECONDS = 10.0
"""How long arrivals are counted together."""
SLOTS = 5
"""How many slots count, as in TORTA (section V-B2)."""
MOST = 20  # Charges that are open against a place: what fails at once would crowd out those of all others.

Entry = tuple[float, float, int, App]  # Its urgency, and it.


class Ready(dict[str, App]):
    """Apps with a backlog and a context that is not broken, by id, in the order in which they came to have one.

    As soon as there are many, those of each context are kept in the order of urgency: thousands of apps with a call
    each then cost what one with thousands of calls does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ordered: dict[str, list[Entry]] | None = None  # By context, without those that are held back.
        self._held: list[tuple[float, int, App]] = []

    def add(self, app: App) -> None:
        """Add an app that has work."""
        self[app.id] = app
        if self._ordered is not None:
            self._insert(app, self._ordered)
        elif len(self) > MANY:
            self._ordered = {}
            for each in self.values():
                self._insert(each, self._ordered)

    def drop(self, app: App) -> None:
        """Drop an app that has none any more, if it had some."""
        if self.pop(app.id, None) is None or self._ordered is None:
            return
        self._remove(app, self._ordered)
        if len(self) <= MANY // 2:
            self._ordered = None
            self._held.clear()

    def hold(self, app: App, until: float) -> None:
        """Hold an app's work back until a time."""
        app.held_until = until
        if self._ordered is not None:
            self._remove(app, self._ordered)
            self._insert(app, self._ordered)

    def release(self, app: App) -> None:
        """Let an app's work be given again."""
        app.held_until = None
        if self._ordered is not None and app.id in self:
            self._insert(app, self._ordered)

    def offered(self, now: float, free: int) -> list[App]:
        """Return the apps that a policy may choose from: all, or the most urgent of each context."""
        if self._ordered is None:
            return [app for app in self.values() if app.held_until is None or app.held_until <= now]
        while self._held and self._held[0][0] <= now:
            until, _, app = heapq.heappop(self._held)
            if self.get(app.id) is app and app.held_until == until:
                app.held_until = None
                self._insert(app, self._ordered)
        found: list[App] = []
        for entries in self._ordered.values():
            left = free + SPARE
            for _, _, _, app in entries:
                found.append(app)
                # Workers load the context already for others, and what failed may have to go elsewhere.
                left -= app.unclaimed > 0 and not app.isolated.items
                if not left:
                    break
        return found

    def waiting_for(self, context: str) -> list[App]:
        """Return apps that wait for a context, the most urgent one among them."""
        if self._ordered is None:
            return [app for app in self.values() if app.context == context]
        first = [entry[3] for entry in self._ordered.get(context, [])[:1]]
        return first + [app for _, _, app in self._held if app.context == context and self.get(app.id) is app]

    def _insert(self, app: App, ordered: dict[str, list[Entry]]) -> None:
        if app.held_until is not None:
            heapq.heappush(self._held, (app.held_until, app.order, app))
            return
        entries = ordered.setdefault(app.context, [])
        key = urgency(app)
        place = bisect.bisect_left(entries, key)
        if place == len(entries) or entries[place][3] is not app:
            entries.insert(place, (*key, app))

    @staticmethod
    def _remove(app: App, ordered: dict[str, list[Entry]]) -> None:
        entries = ordered.get(app.context, [])
        place = bisect.bisect_left(entries, urgency(app))
        if place < len(entries) and entries[place][3] is app:
            del entries[place]
            if not entries:
                del ordered[app.context]


@dataclasses.dataclass(eq=False, slots=True)
class Charge:
    """A failed attempt, until it is known whose fault that was.

    :ivar items: those that were not answered elsewhere yet.
    :ivar crash: whether a library process or a worker ended over it.
    """

    attempt: int

    worker: Worker
    app: App
    items: set[int]
    message: str
    crash: bool


class Charges:
    """The charges that are open, oldest first, those that each item is part of, and how many there are by place.

    :ivar lost_at: when a host's last loss of a worker was counted.
    """

    def __init__(self) -> None:
        self.open: collections.OrderedDict[Charge, None] = collections.OrderedDict()
        self.of: dict[int, list[Charge]] = {}
        self.against = collections.Counter[Place]()
        self.lost_at: dict[str, float] = {}

    def room(self, worker: Worker) -> bool:
        """Return whether another charge against a worker's place may be opened."""
        return self.against[worker.place] < MOST

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
    """All that is known of a run's sessions.

    :ivar open: those that are not over, by number; `shown`: what policies see of them.
    :ivar steps: attempt -> the orders of that step.
    :ivar drops: (worker, app) -> sessions whose states are there and wanted by nobody.
    :ivar unsettled: whether the policy is to be asked again.
    :ivar groups: numbers for sessions that must be in a step by themselves, after a step failed.
    :ivar waiting: app -> its sessions that wait for a worker and have something to do; no app without any.
    :ivar bound: session -> the worker that it is to go to, or is on its way to, and its context.
    :ivar awaited: how many sessions those are, by worker and context.
    :ivar charges: steps that failed, by session, until it is known whose fault that was.
    """

    open: dict[int, SessionState] = dataclasses.field(default_factory=dict)
    shown: Shown[int, SessionView] = dataclasses.field(default_factory=Shown)
    steps: dict[int, Sequence[Order]] = dataclasses.field(default_factory=dict)
    drops: dict[tuple[str, str], list[int]] = dataclasses.field(default_factory=dict)
    unsettled: bool = False
    groups: int = 0
    waiting: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    bound: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    awaited: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    charges: Charges = dataclasses.field(default_factory=Charges)

    def note(self, session: SessionState) -> None:
        """Keep `waiting`, `bound` and `awaited` true: called wherever a session has changed in what they tell.

        So who asks at every event need not look at each session.
        """
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
    """A host, or some GPUs or one worker of it, in quarantine.

    :ivar devices: the GPUs; none for all of the host, or for one worker without any.
    :ivar worker: the one worker that is meant, "" for all of the host; another one with its GPUs is meant too.
    :ivar returned: how often a worker joined from there all the same.
    :ivar by_hand: a person said so, and says when it is over; what runs there is not stopped.
    """

    host: str
    machine: str
    devices: tuple[str, ...]
    worker: str
    cause: str
    until: float
    returned: int = 0
    by_hand: bool = False

    def has(self, worker: Worker) -> bool:
        """Return whether a worker is in quarantine with it."""
        if worker.host != self.host:
            return False
        if not self.worker or worker.id == self.worker:
            return True
        return bool(self.devices) and not set(self.devices).isdisjoint(worker.devices)


class Wards:
    """All that is in quarantine; how often each host was; and the hosts that each tier is not asked for on."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.times: dict[tuple[str, tuple[str, ...]], int] = {}
        self.excluded: dict[str, tuple[str, ...]] = {}

    def of(self, worker: Worker) -> Unit | None:
        """Return what a worker is in quarantine with."""
        return next((unit for unit in self.units if unit.has(worker)), None) if self.units else None


@dataclasses.dataclass(slots=True)
class Reservation:
    """GPUs kept for one worker.

    :ivar state: "clearing", "asked", "started", "held" or "leaving".
    :ivar due: when the state has lasted too long.
    :ivar tiers: the tiers of the victims.
    :ivar released: victims that were given back.
    :ivar worker: who holds the place.
    """

    pin: int
    context: str
    room: Room
    state: str
    due: float
    grace_until: float
    tiers: tuple[str, ...]
    released: set[str] = dataclasses.field(default_factory=set)
    worker: str | None = None
    idle_since: float | None = None


@dataclasses.dataclass(slots=True)
class Want:
    """A context that may need a worker of its own.

    :ivar again_at: when it is looked at again.
    :ivar lost: how often in a row somebody else got its GPUs first.
    :ivar told: what was told last of why it waits.
    """

    again_at: float = 0.0
    lost: int = 0
    told: str = ""


class Reservations:
    """The table of reservations.

    :ivar wants: the contexts with two GPUs or more, where the preemption policy makes room.
    """

    def __init__(self) -> None:
        self.all: dict[int, Reservation] = {}
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
    """What the surveys found.

    :ivar machines: as they were surveyed last, by tier and name.
    :ivar awaited: the tiers whose survey is not there yet, and when it was asked for.
    :ivar fresh: the tiers whose machines nobody has decided on since they were surveyed.
    :ivar told: why a survey failed, as it was told last.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.awaited: dict[str, float] = {}
        self.fresh: set[str] = set()
        self.told = ""

    def decided(self) -> None:
        """Note that something was decided on the surveys: they are old for whoever comes next."""
        self.fresh.clear()


class Arrivals:
    """Counts of the last slots.

    >>> from ctxflow.scheduler.events import AppSpec
    >>> arrivals, app = Arrivals(), App(AppSpec("a", "a"), 0, id="a")
    >>> for time in (0, 10, 20):
    ...     arrivals.note(time, [app])
    ...     app.arrived += 50
    >>> dict(arrivals.forecast())
    {'a': 5.0}
    """

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, dict[str, int]]] = collections.deque(maxlen=SLOTS + 1)
        self._forecast: Mapping[str, float] | None = None

    def note(self, now: float, apps: Iterable[App]) -> None:
        """Count, if a slot is over; to be called on ticks."""
        if not self._seen or now >= self._seen[-1][0] + SLOT_SECONDS:
            self._seen.append((now, {app.id: app.arrived for app in apps}))
            self._forecast = None

    def forecast(self) -> Mapping[str, float] | None:
        """Return items a second by app, None before a slot is over; apps of which nothing comes are left out."""
        if self._forecast is None and len(self._seen) > 1:
            # Numpy is imported where somebody asks: most runs do without.
            from ctxflow.policies.torta.quantities import forecast

            names = list(self._seen[-1][1])
            slots = list(self._seen)
            rates = [
                # An app that was forgotten in between counts anew.
                [max(0, after.get(name, 0) - before.get(name, 0)) / (end - begin) for name in names]
                for (begin, before), (end, after) in itertools.pairwise(slots)
            ]
            expected = forecast(rates)[0] if names else ()
            rates_by_app = zip(names, expected, strict=True)
            self._forecast = MappingProxyType({name: float(rate) for name, rate in rates_by_app if rate > 0})
        return self._forecast
