# ruff: noqa: D101, D102 - classes and methods are those of `ctxflow.policies.views` and `protocols.View`
"""Runs made by hand, or drawn at random, for tests of policies: what a policy sees (`protocols.View`) as plain data.

    scene = Scene(apps={"ask": SceneApp("ask", "model", backlog=12)}, workers={"w1": SceneWorker("w1")})
    list(MyRouting().assign(scene, scene.ready))

What was not measured is None, as in a run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from ctxflow.policies.views import AppView, AttemptView, SessionView, TierView, WorkerView
from ctxflow.topology import Gpu, NumaNode, Topology


@dataclasses.dataclass
class SceneContext:
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
    own_seconds: float | None = None
    state_bytes: int | None = None
    opened: float = 0.0
    last_chunk_at: float | None = None

    @property
    def ready(self) -> bool:
        return self.state == "placed" and not self.idle


@dataclasses.dataclass
class SceneWorker:
    """A worker: what was measured of it is in `pace`, `loading`, `staging` and `steps`.

    :ivar pace: app -> (seconds of an item, items answered); `loading` and `staging`: context -> seconds.
    :ivar steps: app -> sessions of a step -> seconds.
    :ivar flying: context -> overlapping calls that run; `windows`: how many there may be, no more than those if it is
        not said. They are in `running` too.
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
    parked: set[str] = dataclasses.field(default_factory=set)
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
    flying: dict[str, int] = dataclasses.field(default_factory=dict)
    windows: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def unused_slots(self) -> int:
        """Return how many slots run nothing at all."""
        return self.slots - (len(self.running) - sum(self.flying.values())) - len(self.flying)

    @property
    def free_slots(self) -> int:
        if not self.flying:  # As a rule: policies ask often.
            return self.unused_slots
        return self.unused_slots + sum(count < self.windows.get(context, 0) for context, count in self.flying.items())

    @property
    def slots_used(self) -> float:
        left = (1 - count / self.windows.get(context, count) for context, count in self.flying.items())
        return self.slots - self.unused_slots - sum(left)

    @property
    def stays(self) -> bool:
        return self.noticed is None and not self.draining

    def in_flight(self, context: str) -> int:
        """Return how many overlapping calls run with the context."""
        return self.flying.get(context, 0)

    def seconds_per_item(self, app: str) -> float | None:
        return self.pace[app][0] if app in self.pace else None

    def calls_beside(self, app: str) -> float | None:
        return float(max([1, *self.flying.values()])) if app in self.pace else None

    def items_done(self, app: str) -> int:
        return self.pace[app][1] if app in self.pace else 0

    def load_seconds(self, context: str) -> float | None:
        return self.loading.get(context)

    def stage_seconds(self, context: str) -> float | None:
        return self.staging.get(context)

    def step_seconds(self, app: str) -> Mapping[int, float]:
        return self.steps.get(app, {})


@dataclasses.dataclass
class SceneApp:
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
    keeps_context: bool = True
    overlaps: bool = False
    running: int = 0
    concurrency: int | None = None
    region: str = ""
    shared_seconds: float | None = None
    paces: dict[str | None, float] = dataclasses.field(default_factory=dict)

    def step_pace(self, gpu_model: str | None) -> float:
        return self.paces.get(gpu_model, 1.0)

    @property
    def unclaimed(self) -> int:
        return max(0, self.backlog - self.claimed)


@dataclasses.dataclass
class SceneTier:
    name: str
    minimum: int = 0
    maximum: int = 8
    gpus: int = 1
    machines: str = ""
    price: float | None = None
    boot_seconds: float | None = None
    requested: int | None = None
    match_rate: float | None = None
    eviction_rate: float | None = None
    lifetimes: Sequence[float] | None = None
    connected: int = 0


@dataclasses.dataclass
class SceneMachine:
    name: str
    tier: str
    topology: Topology


@dataclasses.dataclass
class SceneRegion:
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
    :ivar items: of the batches that the run's batching policy makes, at most; `window`: of those in flight on a worker.
    :ivar state_rooms: worker -> bytes for states of sessions; nobody knows those of others.
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
    preferred: Sequence[str] = ()
    releases_idle: bool = False
    needs: dict[str, int] = dataclasses.field(default_factory=dict)
    items: int = 10
    window: int = 8
    state_rooms: dict[str, int] = dataclasses.field(default_factory=dict)
    random: random.Random = dataclasses.field(default_factory=lambda: random.Random(0), compare=False)

    def fly(self, app: str, worker: str, count: int, started: float = 0.0) -> None:
        """Have a worker run so many items of an app whose calls overlap, in a window of `window`."""
        here, kind = self.workers[worker], self.apps[app]
        here.flying[kind.context] = here.flying.get(kind.context, 0) + count
        here.windows[kind.context] = self.full_window(kind, here)
        kind.running += count
        first = max(self.attempts, default=0) + 1
        for number in range(first, first + count):
            attempt = SceneAttempt(number, app, worker, range(1000 * number, 1000 * number + 1), started)
            self.attempts[number] = here.running[number] = attempt

    @property
    def free(self) -> Mapping[str, SceneWorker]:
        return {name: worker for name, worker in self.workers.items() if worker.stays and worker.free_slots > 0}

    @property
    def contexts(self) -> Collection[str]:
        return tuple(dict.fromkeys(app.context for app in self.apps.values()))

    @property
    def ready(self) -> list[SceneApp]:
        return [app for app in self.apps.values() if app.backlog > 0]

    def batch_size(self, app: AppView, worker: WorkerView) -> int:
        if app.overlaps:
            return self.full_window(app, worker)
        return min(app.batch_size or self.items, -(-app.backlog // max(1, len(self.workers))))

    def full_window(self, app: AppView, worker: WorkerView) -> int:
        return min(self.window, app.concurrency or self.window) if app.overlaps else app.concurrency or 1

    def room(self, app: AppView, worker: WorkerView) -> int:
        if self.drains(app, worker):
            return 0
        size = self.batch_size(app, worker)
        return size - worker.in_flight(app.context) if app.overlaps else max(1, size)

    def drains(self, app: AppView, worker: WorkerView) -> bool:
        here = self.workers[worker.id]
        flying, shares = here.flying.get(app.context), app.overlaps or (app.concurrency or 1) > 1
        if flying is not None and shares:
            return flying >= here.windows.get(app.context, 0)
        return here.unused_slots < 1

    def can_run(self, app: AppView, worker: WorkerView) -> bool:
        here = self.workers[worker.id]
        able = here.stays and here.free_slots > 0 and here.gpus >= self.needs.get(app.context, 0)
        return able and not (app.overlaps and app.context in here.flying and self.drains(app, worker))

    def gives_way(self, app: AppView, worker: WorkerView) -> Sequence[str]:
        return ()

    def able(self, app: AppView, tier: TierView) -> bool:
        return tier.gpus >= self.needs.get(app.context, 0)

    def permits(self, app: AppView, tier: TierView) -> bool:
        return self.able(app, tier)

    def answered(self, attempt: AttemptView) -> bool:
        return False

    def holders(self, context: str) -> int:
        return sum(context in worker.contexts for worker in self.workers.values())

    def free_holders(self, context: str) -> Iterable[WorkerView]:
        there = ((worker, worker.contexts.get(context)) for worker in self.free.values())
        return [worker for worker, held in there if held is not None and held.state == "ready"]

    def free_parked(self, context: str) -> Iterable[WorkerView]:
        return [worker for worker in self.free.values() if context in worker.parked]

    def free_by_load(self) -> Iterable[WorkerView]:
        return sorted(self.free.values(), key=lambda worker: len(worker.contexts))

    @property
    def free_slots(self) -> int:
        return sum(worker.free_slots for worker in self.free.values())

    def hosts(self, tier: str, gpu_model: str | None = "*") -> int:
        there = [worker for worker in self.workers.values() if worker.tier == tier]
        return len({worker.host for worker in there if gpu_model in ("*", worker.gpu_model)})

    @property
    def in_flight(self) -> int:
        return sum(sum(worker.flying.values()) for worker in self.workers.values())

    def holding(self, context: str) -> Collection[WorkerView]:
        return [worker for worker in self.workers.values() if context in worker.contexts]

    def built_on(self, context: str) -> Collection[WorkerView]:
        return [worker for worker in self.workers.values() if worker.load_seconds(context) is not None]

    def measured_on(self, app: str) -> Collection[WorkerView]:
        return [worker for worker in self.workers.values() if worker.seconds_per_item(app) is not None]

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        here = self.workers[worker.id]
        able = here.stays and here.gpus >= self.needs.get(session.context, 0)
        return able and (here.host, here.devices) not in session.failed_on

    def state_room(self, app: AppView, worker: WorkerView) -> int | None:
        return self.state_rooms.get(worker.id)

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        met = [n for n, each in worker.step_seconds(app.id).items() if each <= (app.chunk_target or each)]
        return max(met, default=1)


GPUS_OF_A_MACHINE = 8


def drawn(
    seed: int, *, workers: int = 6, apps: int = 3, tiers: int = 2, sessions: int = 4, measured: float = 0.7
) -> Scene:
    """Return a run drawn at random, the same for a seed, of which a share of what could be was measured."""
    chance = random.Random(seed)

    def known(value: float) -> float | None:
        return value if chance.random() < measured else None

    scene = Scene(now=chance.uniform(100, 1000), random=random.Random(seed))
    for number in range(tiers):
        name = f"tier{number}"
        scene.tiers[name] = SceneTier(
            name, chance.choice([0, 0, 1]), max(1, workers), chance.choice([1, 2, 4]), "",
            known(chance.uniform(0.2, 4)), known(chance.uniform(5, 90)), None, known(chance.uniform(1, 50)),
            known(chance.uniform(1e-5, 1e-2)),
            [chance.uniform(10, 5000) for _ in range(chance.randrange(1, 9))] if chance.random() < measured else None,
        )  # fmt: skip
    names = list(scene.tiers)
    regions = ["home", "away"][: chance.choice([1, 2])]
    for number, name in enumerate(regions):
        others = {other: 0.05 for other in regions if other != name and chance.random() < measured}
        of_it = names[number :: len(regions)]
        scene.regions[name] = SceneRegion(name, others, dict(others), known(0.1 * (number + 1)), of_it, number == 0)
    for number in range(apps):
        backlog = chance.choice([0, 1, 7, 60, 2000])
        scene.apps[f"app{number}"] = SceneApp(
            f"app{number}", f"context{number % max(1, apps - 1)}", backlog, chance.choice([0, 0, 1]),
            scene.now + chance.uniform(-50, 500) if chance.random() < 0.3 else None, chance.choice([None, None, 4]),
            chance.choice([None, 30.0]), call_seconds=known(chance.uniform(0.01, 2)), order=number,
            waiting_since=scene.now - chance.uniform(0, 200) if backlog else None,
            arrived=backlog + chance.randrange(500),
            chunk_target=chance.choice([None, 0.5]), overlaps=number % 3 == 2,
        )  # fmt: skip
        if scene.apps[f"app{number}"].overlaps:  # Calls of one item each.
            scene.apps[f"app{number}"].batch_size = 1
    if scene.contexts and names:
        scene.needs = {context: chance.choice([0, 1, 1, 2]) for context in scene.contexts}
    for app in list(scene.apps.values())[::2]:
        app.shared_seconds = 0.05
    for number in range(workers if tiers else 0):
        _add_worker(scene, chance, f"w{number}", measured)
    if scene.workers and scene.apps:
        for number in range(sessions):
            _add_session(scene, chance, number + 1)
    if chance.random() < measured:
        scene.forecast = {name: chance.uniform(0, 5) for name in scene.apps}
    return scene


def _add_worker(scene: Scene, chance: random.Random, name: str, measured: float) -> None:
    tier = scene.tiers[chance.choice(list(scene.tiers))]
    region = next((each.name for each in scene.regions.values() if tier.name in each.tiers), "home")
    model = chance.choice(["NVIDIA A10", "NVIDIA A100", None])
    worker = SceneWorker(
        name, tier.name, region, f"host{chance.randrange(1 + len(scene.workers) // 2)}", model, None, tier.gpus,
        chance.choice([1, 1, 2]), joined=scene.now - chance.uniform(0, 500), acquired=chance.random() < 0.9,
        noticed=scene.now if chance.random() < 0.05 else None, draining=chance.random() < 0.05,
    )  # fmt: skip
    for app in scene.apps.values():
        if worker.gpus >= scene.needs.get(app.context, 0) and chance.random() < 0.5:
            state = chance.choice(["ready", "ready", "loading"])
            worker.contexts[app.context] = SceneContext(app.context, state, worker.joined, worker.joined)
            if chance.random() < measured:
                worker.pace[app.id] = (chance.uniform(0.05, 5), chance.randrange(1, 300))
                worker.loading[app.context] = chance.uniform(1, 60)
                worker.staging[app.context] = chance.uniform(0, 20)
                worker.steps[app.id] = {n: 0.1 + 0.1 * n for n in range(1, chance.randrange(2, 6))}
    able = [app for app in scene.apps.values() if app.context in worker.contexts]
    scene.workers[name] = worker
    if able and chance.random() < 0.4:
        app = chance.choice(able)
        if app.overlaps:
            scene.fly(app.id, name, chance.randrange(1, scene.window + 1), scene.now - 3.0)
            return
        number = max(scene.attempts, default=0) + 1
        attempt = SceneAttempt(number, app.id, name, range(1000 * number, 1000 * number + 5), scene.now - 3.0)
        scene.attempts[number] = worker.running[number] = attempt


def _add_session(scene: Scene, chance: random.Random, number: int) -> None:
    app = chance.choice(list(scene.apps.values()))
    session = SceneSession(number, app.id, app.context, idle=chance.random() < 0.3, opened=scene.now - number)
    there = [w for w in scene.workers.values() if w.stays and app.context in w.contexts]
    if there and chance.random() < 0.6:
        worker = chance.choice(there)
        session.worker, session.state = worker.id, "placed"
        session.chunks, session.state_bytes = chance.randrange(9), chance.choice([None, 10**6])
        worker.sessions[number] = session
        if session.chunks and number % 4:  # The others are as if their steps had told nothing yet.
            session.own_seconds = 0.02 * (1 + number % 5)
    elif chance.random() < 0.2:
        session.state, session.by_user, session.idle = "suspended", True, True
    scene.sessions[number] = session


class Story:
    """Time that goes by in a scene: queues grow and shrink, batches end, workers come and go; the same for a seed."""

    def __init__(self, scene: Scene, seed: int, measured: float = 0.7) -> None:
        self.scene, self._measured, self._joined = scene, measured, 0
        self._chance = random.Random(f"story {seed}")

    def go_on(self, seconds: float) -> None:
        """Let so many seconds pass."""
        scene, chance = self.scene, self._chance
        scene.now += seconds
        for attempt in list(scene.attempts.values()):
            if chance.random() < 0.5:
                self._end(attempt)
        for app in scene.apps.values():
            more = chance.choice([0, 0, 3, 40])
            app.arrived += more
            app.backlog = max(0, app.backlog + more - chance.choice([0, 5, 50]))
            app.waiting_since = (app.waiting_since or scene.now) if app.backlog else None
        for session in scene.sessions.values():
            if not session.by_user and chance.random() < 0.2:
                session.idle = not session.idle
        if scene.tiers and chance.random() < 0.3:
            self._joined += 1
            _add_worker(scene, chance, f"new{self._joined}", self._measured)
        if scene.workers and chance.random() < 0.2:
            self._lose(scene.workers[chance.choice(list(scene.workers))])

    def _end(self, attempt: SceneAttempt) -> None:
        worker = self.scene.workers[attempt.worker]
        self._gone(attempt, worker)
        del worker.running[attempt.id]
        done = worker.items_done(attempt.app) + len(attempt.items)
        if self._measured:
            worker.pace[attempt.app] = (worker.seconds_per_item(attempt.app) or self._chance.uniform(0.1, 2), done)

    def _gone(self, attempt: SceneAttempt, worker: SceneWorker) -> None:
        del self.scene.attempts[attempt.id]
        app = self.scene.apps[attempt.app]
        if app.overlaps:
            app.running -= 1
            worker.flying[app.context] -= 1
            if not worker.flying[app.context]:
                del worker.flying[app.context]

    def _lose(self, worker: SceneWorker) -> None:
        del self.scene.workers[worker.id]
        for attempt in worker.running.values():
            self._gone(attempt, worker)
        for session in worker.sessions.values():
            session.worker, session.state, session.target = None, "waiting", None


def with_machines(scene: Scene, machines: int, gpus: int = 1) -> Scene:
    """Return the scene with machines of 8 GPUs in 2 sockets, of workers with so many, strangers, or nobody."""
    chance = random.Random(machines)
    scene.workers.clear()
    scene.attempts.clear()
    scene.sessions.clear()
    scene.tiers = {"default": SceneTier("default", 0, 64, gpus)}
    for number in range(machines):
        name = f"machine{number}"
        users: dict[int, str] = {}
        for first in range(0, GPUS_OF_A_MACHINE, gpus):
            devices = tuple(f"GPU-{name}-{n}" for n in range(first, first + gpus))
            kind = chance.choice(["worker", "worker", "stranger", "nobody"])
            if kind != "nobody":
                users |= dict.fromkeys(range(first, first + gpus), "us" if kind == "worker" else "a stranger")
            if kind == "worker":
                worker = SceneWorker(
                    f"{name}-{first}", host=name, machine=name, devices=devices, gpus=gpus, joined=chance.uniform(0, 90)
                )
                if scene.apps and chance.random() < 0.7:
                    app, attempt = chance.choice(list(scene.apps.values())), len(scene.attempts) + 1
                    worker.contexts[app.context] = SceneContext(app.context)
                    run = SceneAttempt(attempt, app.id, worker.id, range(attempt, attempt + 1), scene.now)
                    scene.attempts[attempt] = worker.running[attempt] = run
                scene.workers[worker.id] = worker
        scene.machines[f"default {name}"] = SceneMachine(name, "default", topology(name, users))
    return scene


def topology(name: str, users: Mapping[int, str]) -> Topology:
    """Return that of a machine of 8 GPUs, each in a NUMA node of its own, four of which are a socket.

    :param users: GPU -> who uses it.
    """
    nodes = tuple(NumaNode(n, n // 4) for n in range(GPUS_OF_A_MACHINE))
    cards = tuple(
        Gpu(n, f"GPU-{name}-{n}", "NVIDIA A10", numa=n, used_by=users.get(n)) for n in range(GPUS_OF_A_MACHINE)
    )
    return Topology(name, (0, 1), nodes, (), cards)
