"""Sessions served in virtual time: a trace of them, by the policies of a site file, on a cluster of GPUs.

The scheduler of a live run decides with the policies that are named, and the simulated engine carries out what it says:
GPUs boot, states travel, every chunk is made in a step that takes what the curve says for the sessions in it. What is
simulated is what happens, so that a session that comes while a step runs waits for its end, as it does live. No app has
a chunk target here: a step takes all sessions of its GPU, however many these are, and the longest is what is measured.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.policies.registry import make
from ctxflow.policies.turboserve.autoscaling import Epochs, Levels
from ctxflow.policies.turboserve.rebalancing import Curve, MigrationCost, PowerCurve
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

PROPORTIONAL = PowerCurve(0.0, 0.1336)
"""668 ms with 5 sessions (Table 9), in proportion."""
MIGRATION = MigrationCost(0.02, 250e9)
"""24 ms for a state of 1 GB: the paper's are 23 to 30 (Table 4)."""
TICK_SECONDS = 1.0
"""Between ticks, as in a live run."""
_TIER, _APP, _CONTEXT = "gpus", "stream", "model"
_ENDLESS = 2**62  # Chunks of a session: its turns end when its user is idle.


@dataclasses.dataclass(frozen=True)
class SessionTrace:
    """Sessions that become active and cease to be.

    :ivar events: (time, session, whether it is active from then on), ascending.
    :ivar state_bytes: of each session, by its number. :ivar arrivals, departures: in each window.
    :ivar ends: when each departs, active or idle, by its number; empty where all do when they cease to be active.
    """

    name: str
    seconds: float
    windows: int
    events: Sequence[tuple[float, int, bool]]
    state_bytes: Sequence[float]
    arrivals: Sequence[int]
    departures: Sequence[int]
    ends: Sequence[float] = ()

    def active(self) -> list[float]:
        """Return the average number of active sessions in each window."""
        edges = np.linspace(0.0, self.seconds, self.windows + 1)
        times = np.array([time for time, _, _ in self.events])
        signs = np.array([1.0 if on else -1.0 for _, _, on in self.events])
        window = self.seconds / self.windows
        return [float(np.sum(signs * np.clip(edge - times, 0.0, window)) / window) for edge in edges[1:]]

    def counts(self, slot: float) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
        """Return the fewest and the most active sessions in each slot of so many seconds."""
        number = round(self.seconds / slot)
        lowest, highest = np.zeros(number, int), np.zeros(number, int)
        position, now = 0, 0
        for at in range(number):
            low = high = now
            while position < len(self.events) and self.events[position][0] < (at + 1) * slot:
                now += 1 if self.events[position][2] else -1
                low, high = min(low, now), max(high, now)
                position += 1
            lowest[at], highest[at] = low, high
        return lowest, highest

    def volatilities(self, epoch: float = 10.0) -> list[float]:
        """Return (6), in sessions, at the end of each epoch."""
        epochs, position, found = Epochs(), 0, []
        for number in range(1, round(self.seconds / epoch) + 1):
            epochs.add((number - 1) * epoch, 0.0)
            while position < len(self.events) and self.events[position][0] < number * epoch:
                time, _, on = self.events[position]
                epochs.add(time, float(on and time > 0))
                position += 1
            found.append(epochs.volatility)
        return found


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The GPUs that serve, and how fast they are. `capacity`: K, of which `closed_loop` takes a share."""

    most: int
    least: int = 1
    capacity: int = 12
    curve: Curve = PROPORTIONAL
    boot_seconds: float = 30.0
    migration: MigrationCost = MIGRATION

    def closed_loop(self, levels: Levels, **options: Any) -> dict[str, Any]:
        """Return the policy `closed-loop`, as a site file would have it, with shares of this K.

        :param levels: by volatility in sessions. :param options: of the policy, which may take others than the levels'.
        """
        rows = [
            [bound / self.capacity, parameters.utilization]
            for bound, parameters in zip(levels.bounds, levels.parameters, strict=False)
        ]
        return {
            "policy": "closed-loop",
            "levels": [*rows, [levels.parameters[-1].utilization]],
            "tolerance": levels.parameters[0].tolerance,
            "sessions_per_worker": self.capacity,
            **options,
        }


@dataclasses.dataclass
class Served:
    """The outcome of serving a trace. Times in seconds.

    :ivar gpu_seconds: billed: of each GPU, from when it was requested until it was given back.
    :ivar worst: the longest chunk, with the migration before it. :ivar mean: of all chunks.
    :ivar over: seconds of chunks beyond the target, times the seconds for which sessions had them.
    :ivar longest_wait: the longest that a user waited for a chunk, from its prompt or the chunk before.
    :ivar together: the most sessions that a step served.
    :ivar history: (time, GPUs held, those that boot too) at each change.
    :ivar least_ready: in each second, the fewest GPUs that served.
    :ivar by_stretch: of each stretch of time, the longest chunk and the GPU-seconds.
    """

    gpu_seconds: float = 0.0
    worst: float = 0.0
    mean: float = 0.0
    over: float = 0.0
    longest_wait: float = 0.0
    together: int = 0
    chunks: int = 0
    migrations: int = 0
    history: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    least_ready: list[int] = dataclasses.field(default_factory=list)
    by_stretch: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def serve(
    trace: SessionTrace,
    cluster: Cluster,
    scaling: Any = "fixed",
    sessions: Any = "turboserve",
    initial: int | None = None,
    stretch: float = math.inf,
    target: float = math.inf,
) -> Served:
    """Serve a trace.

    :param scaling: the scaling policy, as a site file names it, or an object.
    :param sessions: likewise the policy that places sessions.
    :param initial: GPUs that are ready at the start, by default half of the most, or `workers` of a fixed number.
    :param stretch: seconds of a stretch (`Served.by_stretch`).
    :param target: seconds of a chunk beyond which `Served.over` counts; nobody decides by it.
    """
    return _Run(trace, cluster, scaling, sessions, initial, target).served(stretch)


class _Times:
    """The engine's times; GPUs that are requested at the start are ready then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.requested: dict[str, list[float]] = {}  # Machine -> when it was, ascending.
        self.now = 0.0

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        self.requested.setdefault(machine.name, []).append(self.now)
        return self._cluster.boot_seconds if self.now else 0.0

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        return 0.0

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        return 0.0

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        return self._cluster.curve(len(items))


class _Run:
    """A scheduler, an engine, and what users do; all that is measured is read off their events and commands."""

    def __init__(
        self, trace: SessionTrace, cluster: Cluster, scaling: Any, sessions: Any, initial: int | None, target: float
    ) -> None:
        fixed = scaling.get("workers") if isinstance(scaling, Mapping) else None
        self.trace, self.cluster, self.target = trace, cluster, target
        self.most = max(cluster.most, fixed or 0)
        self.start = initial or fixed or max(cluster.least, cluster.most // 2)
        self.times = _Times(cluster)
        self.active: set[int] = set()
        self.engine = SimulatedEngine(
            [SimulatedMachine(f"gpu-{number}", tier=_TIER) for number in range(self.most)],
            self.times,
            state_bytes=lambda session: int(trace.state_bytes[session]),
            carry_seconds=cluster.migration.seconds,
            turn_over=lambda session: session not in self.active,
        )
        self.scheduler = Scheduler(
            Policies(
                routing=make("routing", "context-affinity"),
                batching=make("batching", "coalescing"),
                placement=make("placement", "everywhere"),
                preemption=make("preemption", "none"),
                scaling=make("scaling", scaling),
                sessions=make("sessions", sessions),
                health=make("health", "none"),
            )
        )
        self.out = Served()
        self.since: dict[int, float] = {}  # Session -> since when its user waits for a chunk.
        self.carried: dict[str, float] = {}  # Worker -> the longest migration whose session no step has served yet.
        self.late: dict[int, float] = {}  # Step -> that of its sessions.
        self.steps: list[tuple[float, float]] = []  # (When, the longest chunk so far), where it became longer.
        self.chunk_seconds = 0.0

    def served(self, stretch: float) -> Served:
        """Play what users do, ticks and the engine's events in the order of time."""
        engine, scheduler, trace = self.engine, self.scheduler, self.trace
        users, next_tick = self._users(), TICK_SECONDS
        position = self._begin(users)
        while engine.now < trace.seconds:
            wake = scheduler.next_wake
            due = min(next_tick, trace.seconds, math.inf if wake is None else wake)
            if position < len(users):
                due = min(due, users[position][0])
            for event in engine.poll(max(0.0, due - engine.now)):
                self._feed(event)
            now = engine.now
            while position < len(users) and users[position][0] <= now:
                self._user(*users[position])
                position += 1
            if now >= due and (now >= next_tick or (wake is not None and now >= wake)):
                next_tick = now + TICK_SECONDS
                self._feed(ev.Tick(now))
        engine.stop()
        self._measure(stretch)
        return self.out

    def _begin(self, users: Sequence[tuple[float, int, str]]) -> int:
        """Have those who are there at the start be served on the GPUs of the start; return how many that is."""
        cluster = self.cluster
        tier = ev.TierSpec(_TIER, self.start, self.most, price=1.0, boot_seconds=cluster.boot_seconds)
        self._feed(ev.TierOffered(0.0, tier))
        self._feed(ev.ContextDeclared(0.0, ev.ContextSpec(_CONTEXT, _CONTEXT)))
        self._feed(ev.AppDeclared(0.0, ev.AppSpec(_APP, _APP, _CONTEXT, sessions=True, keep_every=1)))
        for event in self.engine.poll(0.0):  # Those that are there at the start.
            self._feed(event)
        there = 0
        while there < len(users) and users[there][0] <= 0.0:
            self._user(*users[there])
            there += 1
        self._feed(ev.TierOffered(0.0, dataclasses.replace(tier, minimum=min(cluster.least, self.start))))
        return there

    def _users(self) -> list[tuple[float, int, str]]:
        """Return what users do, in the order of time: one that is idle when it departs is gone with that."""
        found = [(time, session, "active" if on else "idle") for time, session, on in self.trace.events]
        if self.trace.ends:
            gone = [(time, session, "gone") for session, time in enumerate(self.trace.ends)]
            found = list(heapq.merge(found, sorted(gone), key=lambda each: each[0]))
        return found

    def _user(self, time: float, session: int, does: str) -> None:
        now = self.engine.now
        if does == "active":
            known = session in self.scheduler.state.sessions
            self.active.add(session)
            self.since[session] = now
            self._feed(ev.SessionPrompted(now, session) if known else ev.SessionOpened(now, session, _APP, _ENDLESS, 1))
            return
        self.active.discard(session)
        if does == "gone" or not self.trace.ends:
            self._feed(ev.SessionClosed(now, session))

    def _feed(self, event: ev.Event) -> None:
        """Feed the scheduler an event, have its commands executed, and measure."""
        if type(event) is ev.StepFinished:
            self._chunks(event)
        elif type(event) is ev.StateArrived:
            seconds = self.cluster.migration.seconds(self.trace.state_bytes[event.session])
            self.carried[event.worker] = max(seconds, self.carried.get(event.worker, 0.0))
        commands = self.scheduler.handle(event)
        if not commands:
            return
        for command in commands:
            if type(command) is cmd.Step and command.worker in self.carried:
                self.late[command.attempt] = self.carried.pop(command.worker)
            elif type(command) is cmd.DeliverChunk:
                session, now = command.session, event.time
                if session in self.active or session in self.since:
                    self.out.longest_wait = max(self.out.longest_wait, now - self.since[session])
                    self.since[session] = now
        self.times.now = self.engine.now
        self.engine.execute(commands)

    def _chunks(self, event: ev.StepFinished) -> None:
        made = sum("made" in outcome for outcome in event.outcomes)
        seconds = event.seconds + self.late.pop(event.attempt, 0.0)
        if made:
            self.out.chunks += made
            self.out.together = max(self.out.together, made)
            self.chunk_seconds += made * event.seconds
            self.out.over += made * event.seconds * max(0.0, event.seconds - self.target)
            self.steps.append((event.time, seconds))

    def _measure(self, stretch: float) -> None:
        out = self.out
        out.worst = max((seconds for _, seconds in self.steps), default=0.0)
        out.mean = self.chunk_seconds / out.chunks if out.chunks else 0.0
        out.migrations = self.scheduler.state.counters.migrations
        spans = self._billed()
        out.gpu_seconds = sum(end - begin for begin, end in spans)
        out.history = _levels([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        out.least_ready = self._least_ready()
        for number in range(math.ceil(self.trace.seconds / stretch) if stretch < math.inf else 1):
            begin, end = number * stretch if number else 0.0, (number + 1) * stretch
            worst = max((seconds for time, seconds in self.steps if begin < time <= end), default=0.0)
            cost = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)
            out.by_stretch.append((worst, cost))

    def _least_ready(self) -> list[int]:
        """Return the fewest GPUs that served in each second."""
        found, ready, position = [], 0, 0
        changes = _levels([(time, change) for time, _, change in self.engine.presence])
        for second in range(math.ceil(self.trace.seconds)):
            while position < len(changes) and changes[position][0] <= second:
                ready = changes[position][1]
                position += 1
            least = ready
            while position < len(changes) and changes[position][0] < second + 1:
                ready = changes[position][1]
                least = min(least, ready)
                position += 1
            found.append(least)
        return found

    def _billed(self) -> list[tuple[float, float]]:
        """Return from when to when each GPU was billed; one whose boot nobody waited for any more, for the boot."""
        left: dict[str, list[float]] = {}
        for time, machine, change in self.engine.presence:
            if change < 0:
                left.setdefault(machine.name, []).append(time)
        found = []
        joined = {(machine.name, time) for time, machine, change in self.engine.presence if change > 0}
        for name, times in self.times.requested.items():
            goes = iter(left.get(name, ()))
            for begin in times:
                ready = begin + (self.cluster.boot_seconds if begin else 0.0)
                end = next(goes, self.trace.seconds) if (name, ready) in joined else ready
                found.append((begin, min(end, self.trace.seconds)))
        return found


def _levels(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the sum of the changes so far, at each time of one."""
    found: list[tuple[float, int]] = []
    held = 0
    for time, change in sorted(changes):
        held += change
        if found and found[-1][0] == time:
            found.pop()
        found.append((time, held))
    return found
