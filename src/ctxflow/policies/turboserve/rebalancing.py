"""Which GPU a session goes to: the length of chunks on a shared GPU, initial placement, and rebalancing (4).

Residents are plain data: GPU -> the sessions on it. Where GPUs are equally good, the first of the mapping is taken.
Sessions weigh alike here; `session_weights` is for those that do not.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

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

    def __call__(self, sessions: float) -> float:
        """Return seconds of a chunk with so many sessions, or as many average ones as weigh as much."""
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
    """C_mig of (4), the alpha-beta model of a transfer: seconds of any move, and bytes a second.

    >>> MigrationCost(0.02, 50e9).seconds(500_000_000)
    0.03
    """

    alpha: float
    bandwidth: float = math.inf

    def seconds(self, state_bytes: float) -> float:
        """Return the seconds of moving so much state."""
        return self.alpha + state_bytes / self.bandwidth


Session: TypeAlias = Hashable
Gpu: TypeAlias = Hashable
Residents: TypeAlias = Mapping[Gpu, Collection[Session]]
"""GPU -> the sessions on it; a draining GPU is not in it."""


Capacity: TypeAlias = int | Mapping[Gpu, int] | None
"""K, the most sessions on a GPU: of all, or by GPU, without a limit on those not named; None for no limit."""


def limit_of(capacity: Capacity, gpu: Gpu) -> float:
    """Return the most sessions on a GPU.

    >>> limit_of({"x": 3}, "x"), limit_of({"x": 3}, "y"), limit_of(2, "y")
    (3, inf, 2)
    """
    limit = capacity.get(gpu) if isinstance(capacity, Mapping) else capacity
    return math.inf if limit is None else limit


@dataclasses.dataclass(frozen=True)
class SessionAssignment:
    """:ivar placed: session -> its GPU. :ivar waiting: those for which no GPU has room."""

    placed: Mapping[Session, Gpu]
    waiting: Sequence[Session]


def assign(
    sessions: Iterable[Session],
    residents: Residents,
    curve: Curve,
    capacity: Capacity = None,
    speeds: Mapping[Gpu, float] | None = None,
) -> SessionAssignment:
    """Give each session the GPU on which its chunks are shortest, which raises the longest chunk of all the least.

    :param sessions: in the order in which they are placed.
    :param capacity: K, the most sessions on a GPU, of all or by GPU; None for no limit.
    :param speeds: how many times the curve's speed a GPU has; 1 for those not named.

    >>> assign(["c", "d", "e"], {0: ["a", "b"], 1: []}, PowerCurve(0, 1), capacity=2)
    SessionAssignment(placed={'c': 1, 'd': 1}, waiting=('e',))
    """
    speed = speeds or {}
    counts = enumerate((gpu, len(there)) for gpu, there in residents.items())
    heap = [(curve(count + 1) / speed.get(gpu, 1.0), count, order, gpu) for order, (gpu, count) in counts]
    heapq.heapify(heap)
    placed: dict[Session, Gpu] = {}
    waiting = []
    for session in sessions:
        while heap and heap[0][1] >= limit_of(capacity, heap[0][3]):
            heapq.heappop(heap)
        if not heap:
            waiting.append(session)
            continue
        _, count, order, gpu = heap[0]
        placed[session] = gpu
        heapq.heapreplace(heap, (curve(count + 2) / speed.get(gpu, 1.0), count + 1, order, gpu))
    return SessionAssignment(placed, tuple(waiting))


Rule = Literal["plateau-aware", "printed"]
GROUP_SIZE = 64  # GPUs of a sub-group: the paper's.
ONE_GROUP = 256  # GPUs up to which a fleet is balanced as one.


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A session that goes to another GPU."""

    session: Session
    source: Gpu
    target: Gpu


@dataclasses.dataclass(frozen=True)
class MoveCosts:
    """What moves cost, against what they gain.

    :ivar seconds: C_mig by session; 0 for those not named.
    :ivar weight: mu: seconds of chunk time that a second of migration has to gain.
    """

    seconds: Mapping[Session, float] = dataclasses.field(default_factory=dict)
    weight: float = 0.0

    def of(self, session: Session) -> float:
        """Return mu C_mig of a session."""
        return self.weight * self.seconds.get(session, 0.0)


FREE = MoveCosts()


def rebalance(
    residents: Residents,
    curve: Curve,
    costs: MoveCosts = FREE,
    capacity: Capacity = None,
    rule: Rule = "plateau-aware",
    speeds: Mapping[Gpu, float] | None = None,
    fixed: Collection[Session] = frozenset(),
) -> list[Move]:
    """Return the moves that make the longest chunk shorter, one for each session that moves, and as few as do.

    The printed rule takes the best move off one GPU with the longest chunk, while that shortens the longest chunk of
    all; it stalls where two GPUs share the longest. The plateau-aware rule moves a session from a GPU with the longest
    chunk to one where chunks stay shorter than that.

    Guarantees of the plateau-aware rule, where no GPU is over the capacity to begin with: the longest chunk is at most
    weight * (the dearest session's seconds) longer than under the best placement there is, so without a weight it is
    the best; no placement that takes fewer moves has as short a longest chunk; no GPU gets a longer chunk than the
    longest was; O((GPUs + moves) log GPUs), whatever the sessions.

    :param residents: sessions by GPU; GPUs without any have to be named.
    :param curve: seconds of a chunk by the sessions on a GPU.
    :param capacity: K, of all or by GPU; None for no limit.
    :param rule: "plateau-aware", or "printed" for (4) as it stands.
    :param speeds: how many times the curve's speed a GPU has; 1 for those not named.
    :param fixed: sessions that stay where they are; the best placement is then the best without moving them.
    :raises ValueError: for an unknown rule.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> rebalance({0: ["a", "b", "c"], 1: ["d", "e", "f"], 2: [], 3: []}, PowerCurve(0, 1))[0]
    Move(session='a', source=0, target=2)
    >>> rebalance({0: ["a", "b", "c"], 1: ["d", "e", "f"], 2: [], 3: []}, PowerCurve(0, 1), rule="printed")
    []
    """
    if rule not in ("plateau-aware", "printed"):
        raise ValueError(f"there is no rule {rule!r}: choose plateau-aware or printed")
    board = _Board(residents, curve, costs, capacity, speeds or {}, fixed)
    for session, source, target in board.plateau_aware() if rule == "plateau-aware" else board.printed():
        board.move(session, source, target)
    return board.fewest_moves() if rule == "plateau-aware" else board.moves()


def balanced_groups(
    residents: Residents,
    group_size: int = GROUP_SIZE,
    one_group: int = ONE_GROUP,
    load: Callable[[Collection[Session]], float] = len,
) -> list[dict[Gpu, Collection[Session]]]:
    """Divide a fleet into sub-groups of about the same load each, one where it has no more than `one_group` GPUs.

    >>> balanced_groups({"x": "ab", "y": "c", "z": "", "w": ""}, group_size=2, one_group=3)
    [{'x': 'ab', 'w': ''}, {'y': 'c', 'z': ''}]
    """
    if len(residents) <= one_group:
        return [dict(residents)]
    parts: list[dict[Gpu, Collection[Session]]] = [{} for _ in range(math.ceil(len(residents) / group_size))]
    for number, gpu in enumerate(sorted(residents, key=lambda gpu: -load(residents[gpu]))):
        turn, place = divmod(number, len(parts))
        parts[-1 - place if turn % 2 else place][gpu] = residents[gpu]
    return parts


class _Board:
    """Sessions on GPUs while moves are tried; copies a GPU's sessions only when it is touched."""

    def __init__(
        self,
        residents: Residents,
        curve: Curve,
        costs: MoveCosts,
        capacity: Capacity,
        speeds: Mapping[Gpu, float],
        fixed: Collection[Session],
    ) -> None:
        self._residents, self._curve, self._costs, self._speeds = residents, curve, costs, speeds
        self._touched: dict[Gpu, dict[Session, None]] = {}
        self._by_cost: dict[Gpu, list[Session]] = {}
        self._counts = {gpu: len(sessions) for gpu, sessions in residents.items()}
        self._capacity, self._fixed = capacity, fixed
        self._seconds = [curve(count) for count in range(max(self._counts.values(), default=0) + 2)]
        self._origin: dict[Session, Gpu] = {}
        self._place: dict[Session, Gpu] = {}

    def latency(self, gpu: Gpu, count: int) -> float:
        """Return seconds of a chunk with so many sessions on this GPU."""
        while count >= len(self._seconds):
            self._seconds.append(self._curve(len(self._seconds)))
        return self._seconds[count] / self._speeds.get(gpu, 1.0) if self._speeds else self._seconds[count]

    def move(self, session: Session, source: Gpu, target: Gpu) -> None:
        """Carry out a move."""
        del self._sessions(source)[session]
        self._sessions(target)[session] = None
        self._by_cost.pop(target, None)
        self._counts[source] -= 1
        self._counts[target] += 1
        self._origin.setdefault(session, source)
        self._place[session] = target

    def moves(self) -> list[Move]:
        """Return what was carried out, from where a session was at first to where it is at last."""
        pairs = ((session, self._origin[session], target) for session, target in self._place.items())
        return [Move(session, source, target) for session, source, target in pairs if source != target]

    def fewest_moves(self) -> list[Move]:
        """Return as few moves as make the longest chunk what it is now.

        What was carried out may take more: a session that goes on from a GPU where another had come to, and moves off
        one of several GPUs with the longest chunk when not all of them could be relieved.
        """
        latency = self.latency
        longest = max((latency(gpu, n) for gpu, n in self._counts.items()), default=0.0)
        leaving: list[tuple[Session, Gpu]] = []
        light: list[tuple[float, int, int, Gpu]] = []
        for order, (gpu, sessions) in enumerate(self._residents.items()):
            stay = len(sessions)
            while latency(gpu, stay) > longest:
                stay -= 1
            if stay < len(sessions):
                movable = [session for session in sessions if session not in self._fixed]
                cheapest = sorted(movable, key=self._costs.of) if self._costs.weight else movable
                leaving += [(session, gpu) for session in cheapest[: len(sessions) - stay]]
            elif stay < self._limit(gpu):
                light.append((latency(gpu, stay + 1), stay, order, gpu))
        heapq.heapify(light)
        found = []
        for session, source in leaving:
            _, there, order, target = light[0]
            found.append(Move(session, source, target))
            if there + 1 < self._limit(target):
                heapq.heapreplace(light, (latency(target, there + 2), there + 1, order, target))
            else:
                heapq.heappop(light)
        return found

    def plateau_aware(self) -> Iterator[tuple[Session, Gpu, Gpu]]:
        """Yield moves from a GPU with the longest chunk to where chunks are shortest with one session more."""
        counts, latency = self._counts, self.latency
        heavy = [(-latency(gpu, n), -n, order, gpu) for order, (gpu, n) in enumerate(counts.items())]
        light = [(latency(gpu, n + 1), n, order, gpu) for order, (gpu, n) in enumerate(counts.items())]
        heapq.heapify(heavy)
        heapq.heapify(light)
        while heavy and light:
            longest, sessions, order, source = heavy[0]
            if counts[source] != -sessions:
                heapq.heappop(heavy)
                continue
            then, there, order_there, target = light[0]
            if counts[target] != there or there >= self._limit(target):
                heapq.heappop(light)
                continue
            if not sessions or -longest - then <= 0:
                return
            session = self._cheapest(source)
            if session is None or -longest - then - self._costs.of(session) <= 0:
                return
            yield session, source, target
            # Each is replaced at the top of one heap, and found out of date later in the other.
            left, now = -sessions - 1, there + 1
            heapq.heapreplace(heavy, (-latency(source, left), -left, order, source))
            heapq.heapreplace(light, (latency(target, now + 1), now, order_there, target))
            heapq.heappush(heavy, (-then, -now, order_there, target))
            heapq.heappush(light, (-longest, left, order, source))

    def printed(self) -> Iterator[tuple[Session, Gpu, Gpu]]:
        """Yield the best move off the first GPU with the longest chunk, while (4) is positive."""
        while self._counts:
            now = {gpu: self.latency(gpu, n) for gpu, n in self._counts.items()}
            source = max(now, key=now.__getitem__)
            if not self._counts[source]:
                return
            best: tuple[float, Gpu] | None = None
            session = self._cheapest(source)
            if session is None:
                return
            least = self.latency(source, self._counts[source] - 1)
            for target, n in self._counts.items():
                if target != source and n < self._limit(target):
                    rest = max((each for gpu, each in now.items() if gpu not in (source, target)), default=0.0)
                    worst = max(rest, least, self.latency(target, n + 1))
                    gain = now[source] - worst - self._costs.of(session)
                    if gain > 0 and (best is None or gain > best[0]):
                        best = gain, target
            if best is None:
                return
            yield session, source, best[1]

    def _sessions(self, gpu: Gpu) -> dict[Session, None]:
        if gpu not in self._touched:
            self._touched[gpu] = dict.fromkeys(self._residents[gpu])
        return self._touched[gpu]

    def _limit(self, gpu: Gpu) -> float:
        return limit_of(self._capacity, gpu)

    def _cheapest(self, gpu: Gpu) -> Session | None:
        """Return the session whose move costs least of those that may leave the GPU."""
        sessions = self._sessions(gpu)
        if not self._costs.weight:
            return next((each for each in sessions if each not in self._fixed), None)
        order = self._by_cost.get(gpu)
        if order is None:
            movable = (session for session in sessions if session not in self._fixed)
            order = self._by_cost[gpu] = sorted(movable, key=self._costs.of, reverse=True)
        while order and order[-1] not in sessions:
            order.pop()
        return order[-1] if order else None
