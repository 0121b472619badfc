"""Which GPU takes a session that has none: TurboServe's initial placement, and the baselines' rules.

Residents are plain data: GPU -> the sessions on it. Where GPUs are equally good, the first of the mapping is taken.
What does not live here: moving sessions that have a place (rebalancing.py, consolidation.py).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from ctxflow.policies.scaling.latency import Curve

Session: TypeAlias = Hashable
Gpu: TypeAlias = Hashable
Residents: TypeAlias = Mapping[Gpu, Collection[Session]]
"""GPU -> the sessions on it; a draining GPU is not in it."""


def unplaced(active: Iterable[Session], residents: Residents) -> list[Session]:
    """U_e of (3): the active sessions without a GPU, or whose GPU is gone.

    >>> unplaced(["a", "b"], {0: ["a"]})
    ['b']
    """
    placed = {session for sessions in residents.values() for session in sessions}
    return [session for session in active if session not in placed]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """:ivar placed: session -> its GPU. :ivar waiting: those for which no GPU has room."""

    placed: Mapping[Session, Gpu]
    waiting: Sequence[Session]


def assign(
    sessions: Iterable[Session],
    residents: Residents,
    curve: Curve,
    capacity: int | None = None,
    speeds: Mapping[Gpu, float] | None = None,
) -> Assignment:
    """Give each session the GPU on which its chunks are shortest, which raises the longest chunk of all the least.

    :param sessions: in the order in which they are placed.
    :param capacity: K, the most sessions on a GPU; None for no limit.
    :param speeds: how many times the curve's speed a GPU has; 1 for those not named.

    >>> from ctxflow.policies.scaling.latency import PowerCurve
    >>> assign(["c", "d", "e"], {0: ["a", "b"], 1: []}, PowerCurve(0, 1), capacity=2)
    Assignment(placed={'c': 1, 'd': 1}, waiting=('e',))
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
    return Assignment(placed, tuple(waiting))


def round_robin(gpus: Sequence[Gpu], turn: int) -> Gpu:
    """The GPU whose turn it is, whatever it holds: TurboServe's base configuration.

    >>> [round_robin("xyz", turn) for turn in range(4)]
    ['x', 'y', 'z', 'x']
    """
    return gpus[turn % len(gpus)]


def load_aware(counts: Mapping[Gpu, int]) -> Gpu:
    """The GPU with the fewest sessions (LAG).

    >>> load_aware({"x": 2, "y": 1})
    'y'
    """
    return min(counts, key=counts.__getitem__)


def memory_aware(state_bytes: Mapping[Gpu, float]) -> Gpu:
    """The GPU whose sessions' states take the least memory (MAG).

    >>> memory_aware({"x": 2e9, "y": 3e9})
    'x'
    """
    return min(state_bytes, key=state_bytes.__getitem__)
