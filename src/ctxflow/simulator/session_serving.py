"""Sessions served in virtual time: a trace of them, by a strategy, on a cluster of GPUs.

The placement and the number of GPUs come from `ctxflow.policies.turboserve`. A chunk takes what the latency curve says
for the sessions on its GPU, and a migrated session's next one the migration longer. Every active session is on a GPU,
over the capacity if need be. A GPU is billed from its request on.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctxflow.policies.turboserve.autoscaling import (
    EPOCH,
    EPOCHS,
    SPARE,
    Anticipated,
    Levels,
    Parameters,
    Turnover,
    decide,
    decide_ahead,
    load,
    settled,
    volatility,
)
from ctxflow.policies.turboserve.fleet_size import consolidate
from ctxflow.policies.turboserve.rebalancing import (
    Curve,
    Gpu,
    MigrationCost,
    Move,
    MoveCosts,
    PowerCurve,
    Session,
    load_aware,
    memory_aware,
    rebalance,
    round_robin,
)
from ctxflow.policies.turboserve.rises import RESERVE

Placing = Literal["round-robin", "load-aware", "memory-aware"]
PROPORTIONAL = PowerCurve(0.0, 0.1336)
"""668 ms with 5 sessions (Table 9), in proportion."""
MIGRATION = MigrationCost(0.02, 250e9)
"""24 ms for a state of 1 GB: the paper's are 23 to 30 (Table 4)."""
MU = 0.01
"""mu of (4): the paper says "small"."""


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


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The GPUs that serve, and how fast they are. `capacity`: K; `dollars`: of a GPU and hour."""

    most: int
    least: int = 1
    capacity: int = 12
    curve: Curve = PROPORTIONAL
    boot_seconds: float = 30.0
    dollars: float = 1.0
    migration: MigrationCost = MIGRATION


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How sessions are placed and GPUs scaled.

    :ivar placing: where a session goes that becomes active.
    :ivar migrates: whether sessions are moved.
    :ivar gpus: held all the time; None where `levels` say how many.
    :ivar levels: one for each stretch of `stretch` seconds, the last of them from then on.
    :ivar anticipates: whether what comes within a boot is anticipated; False for the paper's loop.
    :ivar spare: standard deviations to have room for before a GPU is given back; None for the paper's hysteresis.
    :ivar period: seconds between rebalancings; None for one after every event.
    :ivar reserve: for how many boots rises that came faster than a boot are remembered (`Rises`); 0 for none.
    """

    placing: Placing = "load-aware"
    migrates: bool = True
    gpus: int | None = None
    levels: tuple[Levels, ...] = ()
    stretch: float = math.inf
    anticipates: bool = True
    spare: float | None = SPARE
    period: float | None = None
    reserve: float = RESERVE


@dataclasses.dataclass
class Served:
    """The outcome of serving a trace.

    :ivar worst: the longest chunk in s. :ivar mean: of all sessions over all time in s.
    :ivar over: seconds of chunks beyond the target, times the seconds for which sessions had them.
    :ivar together: the most sessions that were on one GPU.
    :ivar by_stretch: worst and GPU-seconds of each stretch. :ivar history: (time, GPUs held) at each change.
    :ivar volatilities: at each epoch.
    """

    dollars: float = 0.0
    gpu_seconds: float = 0.0
    worst: float = 0.0
    mean: float = 0.0
    over: float = 0.0
    together: int = 0
    migrations: int = 0
    by_stretch: list[list[float]] = dataclasses.field(default_factory=list)
    history: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    volatilities: list[float] = dataclasses.field(default_factory=list)


def serve(
    trace: SessionTrace, cluster: Cluster, strategy: Strategy, initial: int | None = None, target: float = math.inf
) -> Served:
    """Serve a trace.

    :param initial: GPUs that are ready at the start, by default half of the most or the strategy's.
    :param target: seconds of a chunk beyond which `Served.over` counts.
    """
    return _Run(trace, cluster, strategy, initial, target).served()


class _Run:
    """The state of one run: GPUs are numbered in the order in which they were requested."""

    def __init__(
        self, trace: SessionTrace, cluster: Cluster, strategy: Strategy, initial: int | None, target: float
    ) -> None:
        self.trace, self.cluster, self.strategy = trace, cluster, strategy
        self.start = strategy.gpus or initial or max(cluster.least, cluster.most // 2)
        self.there: dict[Gpu, dict[Session, None]] = {gpu: {} for gpu in range(self.start)}
        self.counts: dict[Gpu, int] = dict.fromkeys(self.there, 0)
        self.memory: dict[Gpu, float] = dict.fromkeys(self.there, 0.0)
        self.booting: list[tuple[float, int]] = []
        self.draining: dict[Gpu, None] = {}
        self.place: dict[Session, Gpu] = {}
        self.next, self.turn = self.start, 0
        self.now, self.since_out, self.rebalanced = 0.0, -math.inf, 0.0
        self.latency = [cluster.curve(n) for n in range(len(trace.state_bytes) + 2)]
        self.target = target
        self.costs = MoveCosts({n: cluster.migration.seconds(size) for n, size in enumerate(trace.state_bytes)}, MU)
        self.activated, self.recent = 0, deque([0] * EPOCHS, EPOCHS)
        self.turnover = Turnover(0.0, strategy.reserve)
        self.seen: set[int] = set()
        self.ends: list[float] = []  # Of those seen, ascending.
        self.epoch_end = EPOCH
        self.weighted = self.busy = 0.0
        self.out = Served(history=[(0.0, self.start)])

    def served(self) -> Served:
        """Play all events, boots and epochs in the order of time."""
        first = [session for time, session, on in self.trace.events if time == 0.0 and on]
        for session in first:  # Placed before anything is decided.
            self._put(session, self._choose())
        for time, session, on in self.trace.events[len(first) :]:
            self._until(time)
            self._event(session, on)
        self._until(self.trace.seconds)
        self.out.dollars = self.out.gpu_seconds / 3600 * self.cluster.dollars
        self.out.mean = self.weighted / self.busy if self.busy else 0.0
        return self.out

    def _until(self, time: float) -> None:
        """Play boots and epochs up to a time."""
        while True:
            boot = self.booting[0][0] if self.booting else math.inf
            happens = min(boot, self.epoch_end)
            if happens > time:
                break
            self._pass(happens)
            if boot == happens:
                _, gpu = heapq.heappop(self.booting)
                self.there[gpu], self.counts[gpu], self.memory[gpu] = {}, 0, 0.0
            else:
                self.epoch_end += EPOCH
                self.recent.append(self.activated)
                self.activated = 0
                self.out.volatilities.append(volatility(self.recent))
            self._control()
        self._pass(time)

    def _pass(self, time: float) -> None:
        """Bill what is held, and note how long chunks take meanwhile."""
        seconds = time - self.now
        if seconds <= 0:
            return
        spent = seconds * (len(self.there) + len(self.booting))
        top = max(self.counts.values())
        self.out.gpu_seconds += spent
        self.out.together = max(self.out.together, top)
        self._worst(self.latency[top], spent)
        self.weighted += seconds * sum(n * self.latency[n] for n in self.counts.values())
        self.busy += seconds * len(self.place)
        if self.latency[top] > self.target:
            excess = sum(n * max(0.0, self.latency[n] - self.target) for n in self.counts.values())
            self.out.over += seconds * excess
        self.now = time

    def _worst(self, latency: float, spent: float = 0.0) -> None:
        self.out.worst = max(self.out.worst, latency)
        number = int(self.now // self.strategy.stretch)
        while len(self.out.by_stretch) <= number:
            self.out.by_stretch.append([0.0, 0.0])
        row = self.out.by_stretch[number]
        row[0], row[1] = max(row[0], latency), row[1] + spent

    def _event(self, session: int, on: bool) -> None:
        self.turnover.add(self.now, int(on), int(not on))
        if on:
            self.activated += 1
            self._put(session, self._choose())
        else:
            self._take(session)
        self._control()

    def _choose(self) -> Gpu:
        """Return the GPU of a session that becomes active."""
        counts = self.counts
        if self.draining:
            counts = {gpu: n for gpu, n in counts.items() if gpu not in self.draining}
        if self.strategy.placing == "round-robin":
            self.turn += 1
            return round_robin(list(counts), self.turn - 1)
        if self.strategy.placing == "memory-aware":
            return memory_aware({each: self.memory[each] for each in counts})
        return load_aware(counts)

    def _put(self, session: int, gpu: Gpu) -> None:
        self.there[gpu][session] = None
        self.counts[gpu] += 1
        self.memory[gpu] += self.trace.state_bytes[session]
        self.place[session] = gpu
        if session not in self.seen:
            self.seen.add(session)
            if self.trace.ends:
                bisect.insort(self.ends, self.trace.ends[session])

    def _take(self, session: int) -> None:
        gpu = self.place.pop(session)
        del self.there[gpu][session]
        self.counts[gpu] -= 1
        self.memory[gpu] -= self.trace.state_bytes[session]
        if gpu in self.draining and not self.counts[gpu]:
            self._release(gpu)

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            session, target = move.session, move.target
            assert isinstance(session, int), "a trace's sessions have numbers"
            self._take(session)
            self._put(session, target)
        for move in moves:
            count = self.counts[self.place[move.session]]
            self._worst(self.latency[count] + self.costs.seconds[move.session])
        self.out.migrations += len(moves)

    def _control(self) -> None:
        """Rebalance, then scale on what that leaves."""
        self._rebalance()
        if not self.strategy.levels:
            return
        held = len(self.there) + len(self.booting) - len(self.draining)
        number = min(int(self.now // self.strategy.stretch), len(self.strategy.levels) - 1)
        parameters = self.strategy.levels[number].at(self.out.volatilities[-1] if self.out.volatilities else 0.0)
        wish = settled(self._wish(held, parameters), held, self.now - self.since_out, self.cluster.boot_seconds)
        if wish > held:
            self._scale_out(wish - held)
        elif wish < held:
            self._scale_in(held - wish)

    def _wish(self, held: int, parameters: Parameters) -> int:
        """Return how many GPUs to hold, regardless of what was requested a while ago."""
        cluster, sessions, spare = self.cluster, len(self.place), self.strategy.spare
        most, least = cluster.most, cluster.least
        ahead = Anticipated(sessions)
        if self.strategy.anticipates:
            ahead = self.turnover.anticipated(self.now, sessions, cluster.boot_seconds, self._idle())
        expected = ahead.sessions
        if spare is not None:
            room = spare * ahead.deviation
            capacity = cluster.capacity
            return decide_ahead(expected, held, capacity, parameters.utilization, most, least, room, ahead.reserved)
        rho = load((n for gpu, n in self.counts.items() if gpu not in self.draining), cluster.capacity)
        rho *= expected / sessions if sessions else 1.0
        return decide(rho, expected, held, cluster.capacity, parameters, most, least)

    def _idle(self) -> int:
        """Return the sessions that have arrived and are idle, for a trace that says when they depart."""
        if not self.trace.ends:
            return 0
        return len(self.ends) - bisect.bisect_right(self.ends, self.now) - len(self.place)

    def _rebalance(self) -> None:
        """Rebalance where it can change something: after most events the placement is optimal already."""
        if not self.strategy.migrates:
            return
        if self.strategy.period is not None and self.now < self.rebalanced + self.strategy.period:
            return
        self.rebalanced = self.now
        top, low = max(self.counts.values()), min(self.counts.values())
        if self.latency[top] > self.latency[low + 1]:
            self._move(rebalance(self.there, self.cluster.curve, self.costs))

    def _scale_out(self, number: int) -> None:
        self.since_out = self.now
        for gpu in list(self.draining)[:number]:
            del self.draining[gpu]
            number -= 1
        for _ in range(number):
            heapq.heappush(self.booting, (self.now + self.cluster.boot_seconds, self.next))
            self.next += 1
        self._note()

    def _scale_in(self, number: int) -> None:
        """Give GPUs back: first those that boot, then those with the fewest sessions."""
        while number and self.booting:
            self.booting.pop()
            number -= 1
        if number and self.strategy.migrates:
            found = consolidate(self.there, len(self.there) - number, self.cluster.curve)
            self._move(list(found.moves))
            for gpu in found.released:
                self._release(gpu)
            self._rebalance()
        elif number:
            staying = [gpu for gpu in reversed(self.there) if gpu not in self.draining]
            for gpu in sorted(staying, key=self.counts.__getitem__)[:number]:
                self.draining[gpu] = None
                if not self.counts[gpu]:
                    self._release(gpu)
        self._note()

    def _release(self, gpu: Gpu) -> None:
        del self.there[gpu], self.counts[gpu], self.memory[gpu]
        self.draining.pop(gpu, None)
        self._note()

    def _note(self) -> None:
        self.out.history.append((self.now, len(self.there) + len(self.booting)))
