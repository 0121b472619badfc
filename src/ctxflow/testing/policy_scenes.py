"""Runs made by hand for tests of policies: what a policy sees (`ctxflow.policies.protocols.View`), as plain data.

    scene = Scene(apps={"ask": SceneApp("ask", "model", backlog=12)}, workers={"w1": SceneWorker("w1")})
    list(MyRouting().assign(scene, list(scene.apps.values())))

What nobody measured is None, as in a run. Scenes drawn at random are in `drawn_scenes`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from ctxflow.policies.views import AppView, SessionView, TierView, WorkerView
from ctxflow.topology import Topology


@dataclasses.dataclass
class SceneContext:
    """A context on a worker."""

    context: str
    state: str = "ready"
    since: float = 0.0
    last_used: float = 0.0


@dataclasses.dataclass
class SceneAttempt:
    """A batch that runs on a worker; one without items is a step of sessions."""

    id: int
    app: str
    worker: str
    items: Sequence[int]
    started: float = 0.0


@dataclasses.dataclass
class SceneSession:
    """A session."""

    id: int
    app: str
    context: str
    worker: str | None = None
    state: str = "waiting"
    target: str | None = None
    idle: bool = False
    failed_on: frozenset[tuple[str, tuple[str, ...]]] = frozenset()
    by_user: bool = False
    chunks: int = 0
    chunk_seconds: float | None = None
    state_bytes: int | None = None
    opened: float = 0.0
    last_chunk_at: float | None = None

    @property
    def ready(self) -> bool:
        """Return whether the next step may make its next chunk."""
        return self.state == "placed" and not self.idle


@dataclasses.dataclass
class SceneWorker:
    """A worker.

    :ivar pace: app -> (seconds of an item, items answered); `loading` and `staging`: context -> seconds.
    :ivar steps: app -> sessions of a step -> seconds. What is not in these was never measured.
    """

    id: str
    tier: str = "default"
    region: str = "home"
    host: str = "host"
    gpu_model: str | None = None
    topology: Mapping[str, object] | None = None
    gpus: int = 1
    slots: int = 1
    contexts: dict[str, SceneContext] = dataclasses.field(default_factory=dict)
    running: dict[int, SceneAttempt] = dataclasses.field(default_factory=dict)
    sessions: dict[int, SceneSession] = dataclasses.field(default_factory=dict)
    machine: str = ""
    devices: tuple[str, ...] = ()
    pin: int | None = None
    joined: float = 0.0
    noticed: float | None = None
    draining: bool = False
    acquired: bool = True
    pace: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    loading: dict[str, float] = dataclasses.field(default_factory=dict)
    staging: dict[str, float] = dataclasses.field(default_factory=dict)
    steps: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)

    @property
    def free_slots(self) -> int:
        """Return how many calls more it could take now."""
        return self.slots - len(self.running)

    @property
    def stays(self) -> bool:
        """Return whether it is not about to go."""
        return self.noticed is None and not self.draining

    def seconds_per_item(self, app: str) -> float | None:
        """Return what was measured."""
        return self.pace[app][0] if app in self.pace else None

    def items_done(self, app: str) -> int:
        """Return how many items the measurement rests on."""
        return self.pace[app][1] if app in self.pace else 0

    def load_seconds(self, context: str) -> float | None:
        """Return what was measured."""
        return self.loading.get(context)

    def stage_seconds(self, context: str) -> float | None:
        """Return what was measured."""
        return self.staging.get(context)

    def step_seconds(self, app: str) -> Mapping[int, float]:
        """Return what was measured, by sessions of a step."""
        return self.steps.get(app, {})


@dataclasses.dataclass
class SceneApp:
    """An app with its queue."""

    id: str
    context: str
    backlog: int = 0
    priority: int = 0
    deadline: float | None = None
    batch_size: int | None = None
    max_delay: float | None = None
    max_error: float | None = None
    error: float = 0.0
    alternative_of: str = ""
    call_seconds: float | None = None
    call_seconds_error: float = 0.0
    waiting_since: float | None = None
    arrived: int = 0
    order: int = 0
    chunk_target: float | None = None
    claimed: int = 0

    @property
    def unclaimed(self) -> int:
        """Return the items queued for which nobody loads the context yet."""
        return max(0, self.backlog - self.claimed)


@dataclasses.dataclass
class SceneTier:
    """A tier of the site."""

    name: str
    minimum: int = 0
    maximum: int = 8
    gpus: int = 1
    machines: str = ""
    price: float | None = None
    boot_seconds: float | None = None
    match_rate: float | None = None
    eviction_rate: float | None = None
    lifetimes: Sequence[float] | None = None


@dataclasses.dataclass
class SceneMachine:
    """A machine that workers may be on."""

    name: str
    tier: str
    topology: Topology


@dataclasses.dataclass
class SceneRegion:
    """A group of workers close to each other."""

    name: str
    latency: dict[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: dict[str, float] = dataclasses.field(default_factory=dict)
    power_price: float | None = None
    tiers: Sequence[str] = ()
    home: bool = False


@dataclasses.dataclass
class Scene:
    """A run as a policy sees it.

    :ivar needs: context -> the GPUs that a worker must have for it; 0 for one that is not named.
    :ivar items: of the batches that the run's batching policy makes, at most.
    """

    now: float = 0.0
    workers: dict[str, SceneWorker] = dataclasses.field(default_factory=dict)
    apps: dict[str, SceneApp] = dataclasses.field(default_factory=dict)
    attempts: dict[int, SceneAttempt] = dataclasses.field(default_factory=dict)
    tiers: dict[str, SceneTier] = dataclasses.field(default_factory=dict)
    machines: dict[str, SceneMachine] = dataclasses.field(default_factory=dict)
    reserved: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    regions: dict[str, SceneRegion] = dataclasses.field(default_factory=dict)
    sessions: dict[int, SceneSession] = dataclasses.field(default_factory=dict)
    forecast: dict[str, float] | None = None
    needs: dict[str, int] = dataclasses.field(default_factory=dict)
    items: int = 10
    random: random.Random = dataclasses.field(default_factory=lambda: random.Random(0), compare=False)

    @property
    def free(self) -> Mapping[str, SceneWorker]:
        """Return the workers that could take a call now."""
        return {name: worker for name, worker in self.workers.items() if worker.stays and worker.free_slots > 0}

    @property
    def contexts(self) -> Collection[str]:
        """Return the ids of all contexts."""
        return tuple(dict.fromkeys(app.context for app in self.apps.values()))

    @property
    def ready(self) -> list[SceneApp]:
        """Return the apps with a backlog, which a routing policy is given."""
        return [app for app in self.apps.values() if app.backlog > 0]

    def batch_size(self, app: AppView, worker: WorkerView) -> int:
        """Return the items of a batch: a short queue is shared out evenly."""
        return min(app.batch_size or self.items, -(-app.backlog // max(1, len(self.workers))))

    def can_run(self, app: AppView, worker: WorkerView) -> bool:
        """Return whether the worker has the GPUs, stays, and has a slot free."""
        here = self.workers[worker.id]
        return here.stays and here.free_slots > 0 and here.gpus >= self.needs.get(app.context, 0)

    def able(self, app: AppView, tier: TierView) -> bool:
        """Return whether the tier's workers have the GPUs."""
        return tier.gpus >= self.needs.get(app.context, 0)

    def permits(self, app: AppView, tier: TierView) -> bool:
        """Return whether the tier's workers have the GPUs: no plan forbids anything."""
        return self.able(app, tier)

    def holders(self, context: str) -> int:
        """Return how many workers hold or load a context."""
        return sum(context in worker.contexts for worker in self.workers.values())

    def free_holders(self, context: str) -> Iterable[WorkerView]:
        """Return the free workers that hold a context ready."""
        there = ((worker, worker.contexts.get(context)) for worker in self.free.values())
        return [worker for worker, held in there if held is not None and held.state == "ready"]

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        """Return whether the worker has the GPUs, stays, and no step of the session failed there."""
        here = self.workers[worker.id]
        able = here.stays and here.gpus >= self.needs.get(session.context, 0)
        return able and (here.host, here.devices) not in session.failed_on

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        """Return K: the most sessions of a step that was measured to meet the chunk target."""
        met = [n for n, each in worker.step_seconds(app.id).items() if each <= (app.chunk_target or each)]
        return max(met, default=1)
