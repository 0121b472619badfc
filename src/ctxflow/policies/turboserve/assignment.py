"""How long chunks take on a shared GPU, what a migration costs, and which GPU takes a session that has none.

TurboServe's initial placement and the baselines' rules. Residents are plain data: GPU -> the sessions on it. Where GPUs
are equally good, the first of the mapping is taken. Sessions that have a place are moved by `rebalancing`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

Curve = Callable[[int], float]
"""Seconds of a chunk on a GPU with so many sessions; more sessions never make it shorter."""


@dataclasses.dataclass(frozen=True)
class PowerCurve:
    """Seconds `fixed + each * sessions ** exponent`, and 0 without a session.

    >>> PowerCurve(0.1, 0.2)(3)
    0.7
    """

    fixed: float
    each: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.each < 0 or self.exponent < 0:
            raise ValueError("a chunk takes no less for more sessions: give numbers of 0 or more")

    def __call__(self, sessions: int) -> float:
        """Return seconds of a chunk with so many sessions."""
        return round(self.fixed + self.each * sessions**self.exponent, 12) if sessions else 0.0


def most_sessions(curve: Curve, chunk_target: float, limit: int = 4096) -> int:
    """Compute K: the most sessions on a GPU with which a chunk takes no longer than the target, 0 if none.

    >>> most_sessions(PowerCurve(0.0, 0.1), 0.55)
    5
    """
    count = 0
    while count < limit and curve(count + 1) <= chunk_target:
        count += 1
    return count


@dataclasses.dataclass(frozen=True)
class MigrationCost:
    """C_mig of (4): the alpha-beta model of a transfer.

    :ivar alpha: seconds of any move. :ivar bandwidth: bytes a second.

    >>> MigrationCost(0.02, 50e9).seconds(500_000_000)
    0.03
    """

    alpha: float
    bandwidth: float = math.inf

    def seconds(self, state_bytes: float) -> float:
        """Return what moving a session with so much state takes."""
        return self.alpha + state_bytes / self.bandwidth


Session: TypeAlias = Hashable
Gpu: TypeAlias = Hashable
Residents: TypeAlias = Mapping[Gpu, Collection[Session]]
"""GPU -> the sessions on it; a draining GPU is not in it."""


def unplaced(active: Iterable[Session], residents: Residents) -> list[Session]:
    """Compute U_e of (3): the active sessions without a GPU, or whose GPU is gone.

    >>> unplaced(["a", "b"], {0: ["a"]})
    ['b']
    """
    placed = {session for sessions in residents.values() for session in sessions}
    return [session for session in active if session not in placed]


@dataclasses.dataclass(frozen=True)
class SessionAssignment:
    """:ivar placed: session -> its GPU. :ivar waiting: those for which no GPU has room."""

    placed: Mapping[Session, Gpu]
    waiting: Sequence[Session]


def assign(
    sessions: Iterable[Session],
    residents: Residents,
    curve: Curve,
    capacity: int | None = None,
    speeds: Mapping[Gpu, float] | None = None,
) -> SessionAssignment:
    """Give each session the GPU on which its chunks are shortest, which raises the longest chunk of all the least.

    :param sessions: in the order in which they are placed.
    :param capacity: K, the most sessions on a GPU; None for no limit.
    :param speeds: how many times the curve's speed a GPU has; 1 for those not named.

    >>> assign(["c", "d", "e"], {0: ["a", "b"], 1: []}, PowerCurve(0, 1), capacity=2)
    SessionAssignment(placed={'c': 1, 'd': 1}, waiting=('e',))
    """
    speed = speeds or {}
    heap = []
    for order, (gpu, there) in enumerate(residents.items()):
        count = len(there)
        heap.append((curve(count + 1) / speed.get(gpu, 1.0), count, order, gpu))
    heapq.heapify(heap)
    placed: dict[Session, Gpu] = {}
    waiting = []
    for session in sessions:
        while heap and capacity is not None and heap[0][1] >= capacity:
            heapq.heappop(heap)
        if not heap:
            waiting.append(session)
            continue
        _, count, order, gpu = heap[0]
        placed[session] = gpu
        heapq.heapreplace(heap, (curve(count + 2) / speed.get(gpu, 1.0), count + 1, order, gpu))
    return SessionAssignment(placed, tuple(waiting))


def round_robin(gpus: Sequence[Gpu], turn: int) -> Gpu:
    """Return the GPU whose turn it is, whatever it holds: TurboServe's base configuration.

    >>> [round_robin("xyz", turn) for turn in range(4)]
    ['x', 'y', 'z', 'x']
    """
    return gpus[turn % len(gpus)]


def load_aware(counts: Mapping[Gpu, int]) -> Gpu:
    """Return the GPU with the fewest sessions (LAG).

    >>> load_aware({"x": 2, "y": 1})
    'y'
    """
    return min(counts, key=counts.__getitem__)


def memory_aware(state_bytes: Mapping[Gpu, float]) -> Gpu:
    """Return the GPU whose sessions' states take the least memory (MAG).

    >>> memory_aware({"x": 2e9, "y": 3e9})
    'x'
    """
    return min(state_bytes, key=state_bytes.__getitem__)
