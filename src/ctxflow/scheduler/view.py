"""What policies see of a run, read-only in fact: the view, and a proxy of each row of the tables.

A proxy is made once for each row and kept in its `shown`. Fields that never change are copied into it (`__slots__`);
the others are read from the row each time (`_live`). What a view gives is immutable, a mapping that cannot be written,
or a copy. What each field means is told in policies/views.py and policies/protocols.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from ctxflow.policies import views
from ctxflow.scheduler.app_state import App, Place
from ctxflow.scheduler.eligibility import has_work
from ctxflow.scheduler.events import RegionSpec
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import SessionState, TierState, Worker

ENDLESS = 10**9  # Items that no workers have windows for.

_put = object.__setattr__
_GivesWay = Callable[[RunState, Worker, App], Sequence[str] | None]
_CanCarry = Callable[[RunState, SessionState, Worker], bool]


def _live(path: str) -> Any:
    """Return a property that reads a field of the row, without entering a Python function."""
    return property(operator.attrgetter(f"_row.{path}"))


class ReadOnly:
    """Something on which nothing can be set or deleted."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a policy may only read what it is shown: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a policy may only read what it is shown: {name!r} cannot be deleted")


class _Proxy(ReadOnly):
    """Shows a row of a table: `__slots__` names the fields that are copied from it, or from its specification."""

    __slots__ = ("_row",)

    _row: Any

    def __init__(self, row: Any) -> None:
        _put(self, "_row", row)
        kinds = type(self), type(row)
        if kinds not in _COPIED:
            _COPIED[kinds] = list(_copied(*kinds))
        for name, value in _COPIED[kinds]:
            _put(self, name, value(row))


_COPIED: dict[tuple[type, type], list[tuple[str, Callable[[Any], Any]]]] = {}


def _copied(kind: type, row: type) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the fields that proxies of a kind copy from rows of a type, each with what reads it there."""
    names = itertools.chain.from_iterable(vars(each).get("__slots__", ()) for each in kind.__mro__)
    own = {name for each in row.__mro__ for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    for name in names:
        if not name.startswith("_"):
            yield name, operator.attrgetter(name if name in own else f"spec.{name}")


class ShownContext(_Proxy):
    """One context on one worker (`ContextOnWorkerView`)."""

    __slots__ = ("context",)

    context: str
    state: str = _live("state")
    since: float = _live("since")
    last_used: float = _live("last_used")


class ShownSession(_Proxy):
    """One session (`SessionView`)."""

    __slots__ = ("app", "context", "id", "opened")

    id: int
    app: str
    context: str
    opened: float
    worker: str | None = _live("worker")
    state: str = _live("state")
    target: str | None = _live("target")
    idle: bool = _live("idle")
    ready: bool = _live("ready")
    failed_on: frozenset[Place] = _live("failed_on")
    by_user: bool = _live("by_user")
    chunks: int = _live("chunks")
    chunk_seconds: float | None = _live("chunk_seconds")
    state_bytes: int | None = _live("state_bytes")
    last_chunk_at: float | None = _live("last_chunk_at")

    @property
    def own_seconds(self) -> float | None:
        """Seconds that it adds to a step, estimated."""
        own = self._row.own
        return own.mean if own is not None else None


class ShownWorker(_Proxy):
    """One worker (`WorkerView`)."""

    __slots__: tuple[str, ...] = ("acquired", "contexts", "devices", "gpu_model", "gpus", "host")
    __slots__ += ("id", "joined", "machine", "parked", "pin", "region", "running", "sessions", "slots", "tier")

    _row: Worker
    id: str
    tier: str
    region: str
    host: str
    gpu_model: str | None
    gpus: int
    slots: int
    machine: str
    devices: Sequence[str]
    pin: int | None
    joined: float
    acquired: bool
    contexts: Mapping[str, views.ContextOnWorkerView]
    parked: Collection[str]
    running: Mapping[int, views.AttemptView]
    sessions: Mapping[int, views.SessionView]
    free_slots: int = _live("free_slots")
    slots_used: float = _live("slots_used")
    noticed: float | None = _live("noticed")
    draining: bool = _live("draining")

    def __init__(self, row: Worker) -> None:
        super().__init__(row)
        _put(self, "devices", tuple(row.devices))
        _put(self, "contexts", row.contexts_shown)
        _put(self, "parked", row.parked.keys())
        _put(self, "running", MappingProxyType(row.running))
        _put(self, "sessions", row.sessions_shown)

    @property
    def topology(self) -> Mapping[str, object] | None:
        """The machine's topology as the worker reported it, a copy of it."""
        return copy.deepcopy(self._row.spec.topology)

    def in_flight(self, context: str) -> int:
        """Return how many overlapping calls run with the context."""
        return self._row.in_flight.get(context, 0)

    def seconds_per_item(self, app: str) -> float | None:
        """Return a moving average of its finished batches."""
        pace = self._row.paces.get(app)
        return pace.item_seconds if pace is not None else None

    def calls_beside(self, app: str) -> float | None:
        """Return how many calls overlapped while that was measured."""
        pace = self._row.paces.get(app)
        return pace.beside if pace is not None else None

    def items_done(self, app: str) -> int:
        """Return how many items of the app it answered."""
        pace = self._row.paces.get(app)
        return pace.items if pace is not None else 0

    def load_seconds(self, context: str) -> float | None:
        """Return the seconds of the last load."""
        return self._row.context_seconds.get(context)

    def stage_seconds(self, context: str) -> float | None:
        """Return the seconds of the last staging."""
        return self._row.staging_seconds.get(context)

    def step_seconds(self, app: str) -> Mapping[int, float]:
        """Return moving averages of the seconds of a step, by the number of its sessions."""
        return {count: seconds for count, (seconds, _) in self._row.steps.get(app, {}).items()}


class ShownApp(_Proxy):
    """One app (`AppView`)."""

    __slots__: tuple[str, ...] = ("alternative_of", "batch_size", "chunk_target", "context")
    __slots__ += ("concurrency", "deadline", "error", "id", "max_delay", "max_error", "order", "priority")
    __slots__ += ("region",)

    id: str
    context: str
    concurrency: int | None
    priority: int
    deadline: float | None
    batch_size: int | None
    max_delay: float | None
    max_error: float | None
    error: float
    alternative_of: str
    order: int
    region: str
    chunk_target: float | None
    keeps_context: bool = _live("keeps_context")
    overlaps: bool = _live("windowed")
    backlog: int = _live("backlog")
    unclaimed: int = _live("unclaimed")
    running: int = _live("attempts")
    call_seconds: float | None = _live("call_cost.seconds")
    call_seconds_error: float = _live("call_cost.error")
    waiting_since: float | None = _live("waiting_since")
    arrived: int = _live("arrived")

    @property
    def shared_seconds(self) -> float | None:
        """Seconds of a step that do not depend on its sessions, estimated."""
        shared = self._row.step_shares.shared
        return shared.mean if shared is not None else None

    def step_pace(self, gpu_model: str | None) -> float:
        """Return how many times as long steps take on a GPU model as on that of the first step."""
        pace: float = self._row.step_shares.pace(gpu_model or "")
        return pace


class EndlessApp(ShownApp):
    """One app as it would be if its queue had no end."""

    __slots__ = ()

    backlog = unclaimed = ENDLESS


class _ReadOnlyList(Sequence[float]):
    """A list that goes on growing, and cannot be written to by those who see it."""

    __slots__ = ("__list",)

    def __init__(self, shown: list[float]) -> None:
        self.__list = shown

    def __len__(self) -> int:
        return len(self.__list)

    def __getitem__(self, index: Any) -> Any:
        return self.__list[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self.__list)


class ShownTier(_Proxy):
    """One tier (`TierView`)."""

    __slots__ = ("_lifetimes", "name")

    _row: TierState
    _lifetimes: Sequence[float]
    name: str
    minimum: int = _live("spec.minimum")
    maximum: int = _live("spec.maximum")
    gpus: int = _live("spec.gpus")
    machines: str = _live("spec.machines")
    price: float | None = _live("spec.price")
    boot_seconds: float | None = _live("spec.boot_seconds")
    requested: int | None = _live("asked")
    connected: int = _live("connected")
    match_rate: float | None = _live("match_rate")
    eviction_rate: float | None = _live("eviction_rate")

    def __init__(self, row: TierState) -> None:
        super().__init__(row)
        _put(self, "_lifetimes", _ReadOnlyList(row.lifetimes))

    @property
    def lifetimes(self) -> Sequence[float] | None:
        """The seconds that its evicted workers lived, None before there was one."""
        return self._lifetimes or None


def shown_region(spec: RegionSpec) -> views.RegionView:
    """Return a region as policies see it."""
    latency, bandwidth = MappingProxyType(dict(spec.latency)), MappingProxyType(dict(spec.bandwidth))
    return dataclasses.replace(spec, latency=latency, bandwidth=bandwidth, tiers=tuple(spec.tiers))


class RunView(ReadOnly):
    """What policies may know of a run (`ctxflow.policies.protocols.View`).

    :param gives_way: what a free worker would unload or park to load an app's context for its queue now, None if it
        could not.
    :param can_carry: whether a worker may carry a session.

    >>> from ctxflow.scheduler import Policies, Scheduler
    >>> view = Scheduler(Policies.chosen({})).view
    >>> view.now = 1.0
    Traceback (most recent call last):
        ...
    AttributeError: a policy may only read what it is shown: 'now' cannot be set
    """

    __slots__: tuple[str, ...] = ("_can_carry", "_gives_way", "_size", "_state", "_window", "apps", "attempts")
    __slots__ += ("capacity", "free", "now", "random", "regions", "sessions", "tiers", "workers")

    _state: RunState
    _gives_way: _GivesWay
    _can_carry: _CanCarry
    now: float
    random: random.Random
    workers: Mapping[str, views.WorkerView]
    free: Mapping[str, views.WorkerView]
    apps: Mapping[str, views.AppView]
    attempts: Mapping[int, views.AttemptView]
    tiers: Mapping[str, views.TierView]
    regions: Mapping[str, views.RegionView]
    sessions: Mapping[int, views.SessionView]
    _size: Callable[[views.AppView, views.WorkerView], int]
    _window: Callable[[views.AppView, views.WorkerView], int]
    capacity: Callable[[views.AppView, views.WorkerView], int]

    def __init__(self, state: RunState, gives_way: _GivesWay, can_carry: _CanCarry) -> None:
        _put(self, "_state", state)
        _put(self, "_gives_way", gives_way)
        _put(self, "_can_carry", can_carry)
        _put(self, "now", state.now)  # Each event's, set by the scheduler: policies read it all the time.
        _put(self, "random", state.random)
        _put(self, "workers", state.workers_shown)
        _put(self, "free", state.free_tables.shown)
        _put(self, "apps", state.apps_shown)
        _put(self, "attempts", MappingProxyType(state.attempts))
        _put(self, "tiers", state.tiers_shown)
        _put(self, "regions", MappingProxyType(state.regions))
        _put(self, "sessions", state.streams.shown)
        _put(self, "_size", functools.partial(state.policies.batching.size, self))
        _put(self, "_window", functools.partial(state.policies.windows.window, self))
        _put(self, "capacity", functools.partial(state.policies.coalescing.coalesced, self))

    @property
    def contexts(self) -> Collection[str]:
        """The ids of all declared contexts."""
        return tuple(self._state.contexts)

    @property
    def machines(self) -> Mapping[str, views.MachineView]:
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

    @property
    def preferred(self) -> Sequence[str]:
        """The tiers in the order in which the plan would have them used."""
        return self._state.plan.order

    @property
    def releases_idle(self) -> bool:
        """Whether the scaling policy gives back workers for which there is no work."""
        return bool(getattr(self._state.policies.scaling, "releases_idle", False))

    def batch_size(self, app: views.AppView, worker: views.WorkerView) -> int:
        """Return the items that a worker would take at a time: of a batch, or in flight where calls overlap."""
        if not app.overlaps:
            return self._size(app, worker)
        window = self._window(app, worker)
        return max(1, window if app.concurrency is None else min(window, app.concurrency))

    def full_window(self, app: views.AppView, worker: views.WorkerView) -> int:
        """Return the calls that a slot takes at a time while enough is queued."""
        queue = self._state.apps[app.id]
        if queue.windowed:
            return self.batch_size(queue.endless, worker)
        return (app.concurrency or 1) if queue.overlaps else 1

    def room(self, app: views.AppView, worker: views.WorkerView) -> int:
        """Return the items that an assignment could begin with nothing drained."""
        if self.drains(app, worker):
            return 0
        queue, there = self._state.apps[app.id], self._state.workers[worker.id]
        size = self.batch_size(app, worker)
        return max(0, size - there.in_flight.get(app.context, 0)) if queue.windowed else max(1, size)

    def drains(self, app: views.AppView, worker: views.WorkerView) -> bool:
        """Return whether an assignment would drain a worker first."""
        queue, there = self._state.apps[app.id], self._state.workers[worker.id]
        shares = queue.overlaps and app.context in there.in_flight
        return not (there.has_room(app.context) if shares else there.unused_slots > 0)

    def can_run(self, app: views.AppView, worker: views.WorkerView) -> bool:
        """Return whether a free worker could run the app now, or load its context for it."""
        state = self._state
        queue, there = state.apps[app.id], state.workers[worker.id]
        held = there.contexts.get(queue.context)
        if held is None:
            return self._gives_way(state, there, queue) is not None
        if queue.overlaps:
            flying = there.in_flight.get(queue.context, 0)
            if queue.context in there.turning or (flying and flying >= there.windows[queue.context]):
                return False
        return held.state == "ready" and (not queue.isolated.items or has_work(state, queue, there))

    def gives_way(self, app: views.AppView, worker: views.WorkerView) -> Sequence[str]:
        """Return the contexts that a free worker would unload or park to load the app's."""
        state = self._state
        queue, there = state.apps[app.id], state.workers[worker.id]
        return () if queue.context in there.contexts else tuple(self._gives_way(state, there, queue) or ())

    def permits(self, app: views.AppView, tier: views.TierView) -> bool:
        """Return whether workers of the tier could run the app, as the plan allows, without a place of their own."""
        state = self._state
        wanted = state.contexts[app.context].spec
        own = wanted.affinity == "guaranteed" and wanted.id in state.reservations.wants
        return not own and self.able(app, tier) and state.plan.permits(app.context, tier.name)

    def answered(self, attempt: views.AttemptView) -> bool:
        """Return whether somebody else has answered a batch that still runs."""
        return attempt.items[-1] not in self._state.open  # One answer is that of all.

    def able(self, app: views.AppView, tier: views.TierView) -> bool:
        """Return whether workers of the tier have the GPUs, and the memory on each, that the app's context declares."""
        context, offered = self._state.contexts[app.context], self._state.tiers[tier.name]
        if context.broken is not None or context.spec.gpus > offered.spec.gpus:
            return False
        needed = context.spec.gpu_memory if context.spec.gpus else None
        return needed is None or offered.gpu_memory is None or needed <= offered.gpu_memory

    def holders(self, context: str) -> int:
        """Return how many workers hold or load the context."""
        known = self._state.contexts.get(context)
        return len(known.holders) if known is not None else 0

    def holding(self, context: str) -> Collection[views.WorkerView]:
        """Return the workers that hold or load the context, longest first."""
        known = self._state.contexts.get(context)
        return known.holders.values() if known is not None else ()

    def built_on(self, context: str) -> Collection[views.WorkerView]:
        """Return the workers that were measured to load the context."""
        known = self._state.contexts.get(context)
        return known.built_on.values() if known is not None else ()

    def measured_on(self, app: str) -> Collection[views.WorkerView]:
        """Return the workers that were measured with the app."""
        known = self._state.apps.get(app)
        return known.measured_on.values() if known is not None else ()

    @property
    def free_slots(self) -> int:
        """The free slots of all free workers."""
        return self._state.free_tables.slots

    def hosts(self, tier: str, gpu_model: str | None = "*") -> int:
        """Return how many hosts have workers of the tier, with that GPU model; "*" for any."""
        return len(self._state.hosts.get((tier, gpu_model), ()))

    @property
    def in_flight(self) -> int:
        """The calls of all workers that overlap with others of their context."""
        return self._state.flights.overlapping

    def free_holders(self, context: str) -> Iterable[views.WorkerView]:
        """Return the free workers that hold the context ready, longest free first."""
        known = self._state.free_tables.ready.get(context)
        return known.values() if known else ()

    def free_parked(self, context: str) -> Iterable[views.WorkerView]:
        """Return the free workers on which the context is parked."""
        known = self._state.free_tables.parked.get(context)
        return known.values() if known else ()

    def free_by_load(self) -> Iterator[views.WorkerView]:
        """Return the free workers, those that hold the fewest contexts first."""
        loads = self._state.free_tables.by_load
        return itertools.chain.from_iterable(loads[count].values() for count in sorted(loads))

    def state_room(self, app: views.AppView, worker: views.WorkerView) -> int | None:
        """Return the bytes that states of the app's sessions may take on a worker, None if nobody knows."""
        context, there = self._state.contexts[app.context], self._state.workers[worker.id].spec
        gpus = context.spec.gpus
        limit, taken = context.spec.memory, context.built_memory
        if gpus:
            limit, taken = there.gpu_memory, context.built_gpu_memory
        return None if limit is None or taken is None else max(0, limit - taken) * max(1, gpus)

    def can_carry(self, session: views.SessionView, worker: views.WorkerView) -> bool:
        """Return whether a worker may carry a session."""
        state = self._state
        return self._can_carry(state, state.streams.open[session.id], state.workers[worker.id])
