"""Tables of apps and contexts: queues, groups that run alone, what calls cost, which apps have work, what arrives."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from ctxflow.policies.views import AppView, WorkerView
from ctxflow.scheduler.events import AppSpec, ContextSpec, Failure
from ctxflow.scheduler.open_items import ItemQueue
from ctxflow.scheduler.step_shares import StepShares

MANY = 64  # Apps with work that a routing policy is shown, whatever their contexts.
SPARE = 2  # Apps that it is shown beside one for each free worker, of each context, where there are more.
SLOT_SECONDS = 10.0  # How long arrivals are counted together.
SLOTS = 5  # How many slots count, as in TORTA (section V-B2).

Place = tuple[str, tuple[str, ...]]  # A host, and the ids of the GPUs that a worker has of it.


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Items that run together, and with no others."""

    items: tuple[int, ...]
    failed_on: frozenset[Place] = frozenset()  # Where they failed, alone or as a part of more.
    machines: frozenset[Place] = frozenset()  # Of these, where it looked like the machine's fault: to try last.
    moves: int = 0  # How often they went elsewhere as they were, since it looked like the place's fault.
    since: float = 0.0  # When they came to wait.
    alone: bool = True  # Else, of an app whose calls overlap, beside others in flight.
    beside: int = 1  # If alone, of how many attempts at a time: of others that were there when an engine died.

    @property
    def apart(self) -> int:
        """Return of how many attempts at a time it is, that run apart from all others; 0 if it runs beside them."""
        return self.beside if self.alone else 0


class Groups:
    """The groups of an app, by where they failed: so nobody has to look through all to find one for a worker."""

    def __init__(self) -> None:
        self._waiting: dict[frozenset[Place], collections.deque[Group]] = {}
        self.items = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Group]:
        return (group for groups in self._waiting.values() for group in groups)

    @property
    def firsts(self) -> Iterable[Group]:
        """Of those that failed at the same places, the one that comes next."""
        return (groups[0] for groups in self._waiting.values())

    def push(self, *groups: Group) -> None:
        """Put these first, in this order."""
        for group in reversed(groups):
            self._waiting.setdefault(group.failed_on, collections.deque()).appendleft(group)
            self.items += len(group.items)

    def append(self, *groups: Group) -> None:
        """Put these after others that failed at the same places, so that what fails at once puts none of them off."""
        for group in groups:
            self._waiting.setdefault(group.failed_on, collections.deque()).append(group)
            self.items += len(group.items)

    def pop(self, first: Group) -> Group:
        """Take one of the firsts; those that failed elsewhere are next, else one that fails at once would be all."""
        groups = self._waiting.pop(first.failed_on)
        group = groups.popleft()
        if groups:
            self._waiting[group.failed_on] = groups
        self.items -= len(group.items)
        return group

    def clear(self) -> list[Group]:
        """Take all."""
        groups = list(self)
        self._waiting.clear()
        self.items = 0
        return groups


@dataclasses.dataclass(slots=True)
class CallCost:
    """Seconds of an app's calls that do not grow with their items, over all workers.

    Two parts. The way to the worker and back is what a call took less what the worker says that it took. What the call
    itself does once is read off two batches that one worker ran one after the other, one at least half as large again
    as the other: n items in T seconds and n' in T' lie on a line whose height at 0 is (T' n - T n') / (n - n'). These
    heights are averaged, each weighted by the inverse of its variance where items vary independently. Sizes that differ
    less are no experiment: a batch is smaller because the one before was slow.

    Before it is known it is taken to be small: one more height counts, of 0, with the variance of one item. What a
    wrong cost costs grows in proportion to the true one, so that the best single number is the mean of what it may be.
    And before there are three pairs it is all that a call takes: a batch that is too long for its call's cost loses
    little and tells much, while batches of one item would never tell that most of their time is cost.
    """

    way: float | None = None
    whole: float = 0.0
    inside: float = 0.0  # What a call itself does once; 0 before there are three pairs.
    pairs: int = 0
    weight: float = 0.0
    total: float = 0.0

    def add(self, way: float, whole: float) -> None:
        """Learn a call's time beside what its worker says that it took, and that: moving averages."""
        way = max(0.0, way)
        share = 1.0 if self.way is None else 0.05
        self.way = share * way + (1 - share) * (self.way or 0.0)
        self.whole = share * whole + (1 - share) * self.whole

    def add_pair(self, first: tuple[int, float], second: tuple[int, float], usual: float = 0.0) -> None:
        """Learn from two batches, (items, seconds), that a worker ran one after the other; nothing if they are alike.

        :param usual: the worker's seconds of an item: two short items that happen to be alike prove nothing.
        """
        (n, seconds), (before, seconds_before) = second, first
        item_seconds = max(usual, (seconds + seconds_before) / (n + before))
        if 2 * max(n, before) < 3 * min(n, before) or not item_seconds:
            return
        across = n - before
        height = (seconds_before * n - seconds * before) / across
        if not self.pairs:
            self.weight = item_seconds**-2
        weight = across**2 / (n * before * (n + before) * item_seconds**2)
        self.pairs += 1
        self.weight += weight
        self.total += weight * height
        self.inside = max(0.0, self.total / self.weight) if self.pairs >= 3 else 0.0

    @property
    def error(self) -> float:
        """The standard error of what a call does once, in seconds; 0 while all that a call takes is counted."""
        return self.weight**-0.5 if self.pairs >= 3 else 0.0

    @property
    def seconds(self) -> float | None:
        """The cost of a call, None before there was one.

        >>> cost = CallCost()
        >>> cost.add(way=0.25, whole=2.5)
        >>> cost.seconds
        2.75
        >>> for n in (3, 9, 27) * 100: cost.add_pair((1, 2.0 + 0.5), (n, 2.0 + 0.5 * n))
        >>> round(cost.seconds, 1)
        2.2
        """
        if self.way is None:
            return None
        return self.way + (self.whole if self.pairs < 3 else self.inside)


class Deal:
    """Says whose each next item is, so that shares hold.

    Of the first n items, however many they are, no more than their shares of n go to the worst one, the worst two, ...:
    so no beginning has a higher mean error than all of it is to have.

    :param shares: app -> its share, the one with the most errors first; they sum up to 1.

    >>> deal = Deal({"small": 0.25, "large": 0.75})
    >>> [deal.next() for _ in range(8)]
    ['large', 'large', 'large', 'small', 'large', 'large', 'large', 'small']
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares = shares
        self._apps = list(shares)
        self._bounds = [*itertools.accumulate(shares.values())]
        self._bounds[-1] = 1.0
        self._given = [0] * len(shares)  # To the worst one, the worst two, ...
        self._dealt = 0

    def next(self) -> str:
        """Return the app of the next item."""
        self._dealt += 1
        n = len(self._apps) - 1
        while n and self._given[n - 1] + 1 <= self._bounds[n - 1] * self._dealt + 1e-9:
            n -= 1
        for wider in range(n, len(self._apps)):
            self._given[wider] += 1
        return self._apps[n]


@dataclasses.dataclass(slots=True)
class App:
    """One app and its queue."""

    spec: AppSpec
    order: int
    queue: ItemQueue = dataclasses.field(default_factory=ItemQueue)
    # Items still in the queue that were cancelled: whoever takes from it leaves them out.
    cancelled: int = 0
    # Groups that must run alone as they are: the halves of a bisection, suspects.
    isolated: Groups = dataclasses.field(default_factory=Groups)
    witness: str = ""  # The worker found last that what failed elsewhere could run on; kept by run_state.py.
    claimed: int = 0
    claims: int = 0  # Loads that it is claimed for.
    attempts: int = 0  # That run; also steps of its sessions.
    open_sessions: int = 0
    # Workers that know how long its calls, or steps of its sessions, take.
    measured_on: dict[str, WorkerView] = dataclasses.field(default_factory=dict)
    arrived: int = 0
    widened: int = 0  # How many had arrived when all full workers were asked last; kept by dispatch.py.
    waiting_since: float | None = None
    held_until: float | None = None
    alternatives: list[str] = dataclasses.field(default_factory=list)  # The apps that may answer its items.
    call_cost: CallCost = dataclasses.field(default_factory=CallCost)
    step_shares: StepShares = dataclasses.field(default_factory=StepShares)  # Of its sessions.

    backlog: int = 0  # Items queued; kept by `items.settle`.
    # Whether its calls overlap on a worker, and whether they are of one item each, as many as the policy's window.
    # Set when it is put into the tables.
    overlaps: bool = False
    windowed: bool = False
    keeps_context: bool = True  # Whether its context is pervasive; likewise.
    concurrency: int | None = None  # As its context declares it; likewise.
    # Beginning of items -> the worker that was given it last; items taken before the first since that was first. Kept
    # by prefixes.py.
    homes: dict[int, str] = dataclasses.field(default_factory=dict)
    overtaken: int = 0
    alike: int = 0  # The most numbers that any of its items said how it begins by.

    # Read in every decision, so copied out of the specification.
    id: str = dataclasses.field(init=False)
    context: str = dataclasses.field(init=False)
    priority: int = dataclasses.field(init=False)
    deadline: float | None = dataclasses.field(init=False)
    batch_size: int | None = dataclasses.field(init=False)
    # Set when it is put into the tables.
    shown: AppView = dataclasses.field(init=False, repr=False, compare=False)
    endless: AppView = dataclasses.field(init=False, repr=False, compare=False)  # The same, with a queue without end.
    urgency: tuple[float, float, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.id, self.context, self.priority, self.deadline = spec.id, spec.context, spec.priority, spec.deadline
        self.batch_size = spec.batch_size if spec.batch else 1

    @property
    def unclaimed(self) -> int:
        """Items queued for which no worker loads the context."""
        return self.backlog - self.claimed


@dataclasses.dataclass(frozen=True, slots=True)
class Suspect:
    """A worker on which a context failed: how often, and when it may be asked again."""

    failures: int
    retry_at: float


@dataclasses.dataclass(slots=True)
class ContextState:
    """What is known of a context across workers."""

    spec: ContextSpec
    apps: dict[str, None] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    gpu_memory: int | None = None
    built_memory: int | None = None  # Of these, when it had just been built: without the states of sessions.
    built_gpu_memory: int | None = None
    # Whether it may be parked; None once that has failed. Then, as measured last: what it holds on the host while it
    # is parked, and what it takes to park and to wake it. Kept by parking.py.
    parks: bool | None = False
    parked_memory: int | None = None
    park_crashes: int = 0  # In a row.
    park_seconds: float = 0.0
    wake_seconds: float = 0.0
    holders: dict[str, WorkerView] = dataclasses.field(default_factory=dict)  # Workers with it in any state.
    # Workers that know how long a load takes.
    built_on: dict[str, WorkerView] = dataclasses.field(default_factory=dict)
    on_tier: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # Its holders by tier.
    # Worker -> its failures; forgotten when the worker is lost or the context builds there.
    suspects: dict[str, Suspect] = dataclasses.field(default_factory=dict)
    # Since it was last built anywhere: worker -> host, how often, from when on; kept by faults.py, as is all below.
    failed_workers: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: int = 0
    failing_since: float = 0.0
    retry_at: float = 0.0
    # Workers lost without notice while they built it, one after the other, since it was last built.
    losses: int = 0
    lost_at: float = -1.0
    # How often it was built; how often it was not, before the failures running now; these, and when the last came.
    builds: int = 0
    failed_builds: int = 0
    streak: int = 0
    failed_at: float = -1.0
    deciding: tuple[float, Failure] | None = None  # Since when it has failed often enough, and why.
    broken: Failure | None = None
    witness: str = ""  # The worker that was found last to be able to build it; kept by faults.py.


_Entry = tuple[float, float, int, App]  # Its urgency, and it.


class Ready(dict[str, App]):
    """Apps with a backlog and a context that is not broken, by id, in the order in which they came to have one.

    As soon as there are many, those of each context are kept in the order of urgency, so that none is looked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ordered: dict[str, list[_Entry]] | None = None  # By context, without those that are held back.
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

    def _insert(self, app: App, ordered: dict[str, list[_Entry]]) -> None:
        if app.held_until is not None:
            heapq.heappush(self._held, (app.held_until, app.order, app))
            return
        entries = ordered.setdefault(app.context, [])
        key = app.urgency
        place = bisect.bisect_left(entries, key)
        if place == len(entries) or entries[place][3] is not app:
            entries.insert(place, (*key, app))

    @staticmethod
    def _remove(app: App, ordered: dict[str, list[_Entry]]) -> None:
        entries = ordered.get(app.context, [])
        place = bisect.bisect_left(entries, app.urgency)
        if place < len(entries) and entries[place][3] is app:
            del entries[place]
            if not entries:
                del ordered[app.context]


class Arrivals:
    """Counts of the last slots.

    >>> from ctxflow.scheduler.events import AppSpec
    >>> arrivals, app = Arrivals(), App(AppSpec("a", "a"), order=0)
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
