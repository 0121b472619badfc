"""What policies see of each row of the tables: proxies that are read-only in fact.

A proxy is made once for each row, kept in its `shown`, and given out each time: what never changes is copied into it,
what changes is looked up when it is read. Nothing can be set on it, and what it gives is immutable, a mapping that
cannot be written, or made anew for whoever asks. What does not live here: the types, with what each field means
(policies/views.py), and the view of the whole run (run_view.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from ctxflow.policies.views import AttemptView, ContextOnWorkerView, RegionView, SessionView
from ctxflow.scheduler.app_state import App, Place
from ctxflow.scheduler.events import RegionSpec
from ctxflow.scheduler.worker_state import OnWorker, Pace, SessionState, TierState, Worker

_put = object.__setattr__


class ReadOnly:
    """Something on which nothing can be set or deleted."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse.

        :raises AttributeError: always.
        """
        raise AttributeError(f"a policy may only read what it is shown: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse.

        :raises AttributeError: always.
        """
        raise AttributeError(f"a policy may only read what it is shown: {name!r} cannot be deleted")


class ShownContext(ReadOnly):
    """One context on one worker (`ContextOnWorkerView`)."""

    __slots__ = ("_row", "context")

    _row: OnWorker
    context: str

    def __init__(self, row: OnWorker) -> None:
        _put(self, "_row", row)
        _put(self, "context", row.context)

    @property
    def state(self) -> str:
        """How far it is."""
        return self._row.state

    @property
    def since(self) -> float:
        """When it came into that state."""
        return self._row.since

    @property
    def last_used(self) -> float:
        """When a batch last ended on it."""
        return self._row.last_used


class ShownSession(ReadOnly):
    """One session (`SessionView`)."""

    __slots__ = ("_row", "app", "context", "id", "opened")

    _row: SessionState
    id: int
    app: str
    context: str
    opened: float

    def __init__(self, row: SessionState) -> None:
        _put(self, "_row", row)
        for name in ("id", "app", "context", "opened"):
            _put(self, name, getattr(row, name))

    @property
    def worker(self) -> str | None:
        """Who carries it, or is about to."""
        return self._row.worker

    @property
    def state(self) -> str:
        """Where it stands."""
        return self._row.state

    @property
    def target(self) -> str | None:
        """The worker that it goes to at its next chunk boundary."""
        return self._row.target

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self._row.idle

    @property
    def ready(self) -> bool:
        """Whether the next step may make its next chunk."""
        return self._row.ready

    @property
    def failed_on(self) -> frozenset[Place]:
        """Where a step of it failed."""
        return self._row.failed_on

    @property
    def by_user(self) -> bool:
        """Whether its user suspended it."""
        return self._row.by_user

    @property
    def chunks(self) -> int:
        """How many it has delivered."""
        return self._row.chunks

    @property
    def chunk_seconds(self) -> float | None:
        """What its last chunk took."""
        return self._row.chunk_seconds

    @property
    def state_bytes(self) -> int | None:
        """The size of its state."""
        return self._row.state_bytes

    @property
    def last_chunk_at(self) -> float | None:
        """When its last chunk was made."""
        return self._row.last_chunk_at


class ShownWorker(ReadOnly):
    """One worker (`WorkerView`)."""

    __slots__ = (
        "_paces",
        "_row",
        "acquired",
        "contexts",
        "devices",
        "gpu_model",
        "gpus",
        "host",
        "id",
        "joined",
        "machine",
        "pin",
        "region",
        "running",
        "sessions",
        "slots",
        "tier",
    )

    _row: Worker
    _paces: Mapping[str, Pace]
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
    contexts: Mapping[str, ContextOnWorkerView]
    running: Mapping[int, AttemptView]
    sessions: Mapping[int, SessionView]

    def __init__(self, row: Worker) -> None:
        _put(self, "_row", row)
        for name in ("id", "tier", "region", "host", "gpu_model", "gpus", "slots", "machine", "pin"):
            _put(self, name, getattr(row, name))
        _put(self, "joined", row.joined)
        _put(self, "acquired", row.acquired)
        _put(self, "devices", tuple(row.devices))
        _put(self, "contexts", row.contexts_shown)
        _put(self, "running", MappingProxyType(row.running))
        _put(self, "sessions", row.sessions_shown)
        _put(self, "_paces", row.paces)

    @property
    def free_slots(self) -> int:
        """How many more calls it could take now."""
        row = self._row
        return row.slots - len(row.running) - row.loading

    @property
    def noticed(self) -> float | None:
        """When it was told that it will be evicted."""
        return self._row.noticed

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._row.draining

    @property
    def topology(self) -> Mapping[str, object] | None:
        """The machine's topology as the worker reported it, a copy of it."""
        return copy.deepcopy(self._row.spec.topology)

    def seconds_per_item(self, app: str) -> float | None:
        """Return a moving average of its finished batches."""
        pace = self._paces.get(app)
        return pace.item_seconds if pace is not None else None

    def items_done(self, app: str) -> int:
        """Return how many items of the app it answered."""
        pace = self._paces.get(app)
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


class ShownApp(ReadOnly):
    """One app (`AppView`)."""

    __slots__ = (
        "_row",
        "alternative_of",
        "batch_size",
        "chunk_target",
        "context",
        "deadline",
        "error",
        "id",
        "max_delay",
        "max_error",
        "order",
        "priority",
    )

    _row: App
    id: str
    context: str
    priority: int
    deadline: float | None
    batch_size: int | None
    max_delay: float | None
    max_error: float | None
    error: float
    alternative_of: str
    order: int
    chunk_target: float | None

    def __init__(self, row: App) -> None:
        _put(self, "_row", row)
        for name in ("id", "context", "priority", "deadline", "batch_size", "max_delay", "max_error", "error"):
            _put(self, name, getattr(row, name))
        for name in ("alternative_of", "order", "chunk_target"):
            _put(self, name, getattr(row, name))

    @property
    def backlog(self) -> int:
        """Items queued."""
        row = self._row
        return len(row.queue) - row.cancelled + row.isolated.items

    @property
    def unclaimed(self) -> int:
        """Items queued for which no worker loads the context."""
        row = self._row
        return len(row.queue) - row.cancelled + row.isolated.items - row.claimed

    @property
    def call_seconds(self) -> float | None:
        """What a call costs beside its items."""
        return self._row.call_cost.seconds

    @property
    def call_seconds_error(self) -> float:
        """How far off that may be."""
        return self._row.call_cost.error

    @property
    def waiting_since(self) -> float | None:
        """Since when something has been queued."""
        return self._row.waiting_since

    @property
    def arrived(self) -> int:
        """Items submitted so far."""
        return self._row.arrived


class ShownTier(ReadOnly):
    """One tier (`TierView`)."""

    __slots__ = ("_row", "name")

    _row: TierState
    name: str

    def __init__(self, row: TierState) -> None:
        _put(self, "_row", row)
        _put(self, "name", row.name)

    @property
    def minimum(self) -> int:
        """Never fewer workers than this."""
        return self._row.spec.minimum

    @property
    def maximum(self) -> int:
        """Never more workers than this."""
        return self._row.spec.maximum

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self._row.spec.gpus

    @property
    def machines(self) -> str:
        """What it has in common with other tiers of the same machines."""
        return self._row.spec.machines

    @property
    def price(self) -> float | None:
        """Dollars a worker costs an hour."""
        return self._row.spec.price

    @property
    def boot_seconds(self) -> float | None:
        """From asking for a worker to its joining, as the site says."""
        return self._row.spec.boot_seconds

    @property
    def match_rate(self) -> float | None:
        """Workers that the batch system gives an hour."""
        return self._row.match_rate

    @property
    def eviction_rate(self) -> float | None:
        """Evictions per worker and second."""
        return self._row.eviction_rate

    @property
    def lifetimes(self) -> Sequence[float] | None:
        """How long its evicted workers lived."""
        lived = self._row.lifetimes
        return None if lived is None else tuple(lived)


def shown_region(spec: RegionSpec) -> RegionView:
    """Return a region as policies see it."""
    latency, bandwidth = MappingProxyType(dict(spec.latency)), MappingProxyType(dict(spec.bandwidth))
    return dataclasses.replace(spec, latency=latency, bandwidth=bandwidth, tiers=tuple(spec.tiers))
