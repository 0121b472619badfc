"""Sessions that do not weigh alike on GPUs: what each GPU bears, and moves and exchanges that make chunks shorter.

A chunk takes the longer the more the sessions of its GPU weigh together, and their states take its memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ctxflow.policies.turboserve.rebalancing import Capacity, Gpu, MoveCosts, Residents, Session, limit_of

LoadCurve: TypeAlias = Callable[[float], float]
"""Seconds of a chunk on a GPU whose sessions weigh so much together; more never makes it shorter."""

Change: TypeAlias = tuple[float, Session, Gpu, Session | None]
"""Seconds of the longer of the two chunks and what it costs, who moves, where to, and who comes back for it."""

PARTNERS = 8  # GPUs with the shortest chunks that sessions of the one with the longest are tried on.
TRIFLE = 1e-9


@dataclasses.dataclass(frozen=True)
class SessionWeights:
    """What tells sessions from each other.

    :ivar load: how much a session weighs on the curve; 1 for those not named.
    :ivar state_bytes: of its state; 0 for those not named.
    :ivar room: bytes for states on a GPU; no limit for those not named.
    :ivar longest: seconds that a chunk may take on a GPU that is given a session beside others.
    """

    load: Mapping[Session, float] = dataclasses.field(default_factory=dict)
    state_bytes: Mapping[Session, float] = dataclasses.field(default_factory=dict)
    room: Mapping[Gpu, float] = dataclasses.field(default_factory=dict)
    longest: float = math.inf

    def of(self, session: Session) -> tuple[float, float]:
        """Return load and bytes of a session."""
        return self.load.get(session, 1.0), self.state_bytes.get(session, 0.0)

    def too_many(self, gpu: Gpu, sessions: Iterable[Session]) -> bool:
        """Return whether states of sessions take more than the room on a GPU."""
        return sum(self.state_bytes.get(session, 0.0) for session in sessions) > self.room.get(gpu, math.inf)

    def common(self, sessions: Collection[Session]) -> float | None:
        """Return the load that all these have, None where it differs, or where memory or a target may bind.

        >>> [SessionWeights(load).common("ab") for load in ({}, {"a": 2.0, "b": 2.0}, {"a": 2.0})]
        [1.0, 2.0, None]
        """
        loads = {self.load.get(session, 1.0) for session in sessions}
        room = min(self.room.values(), default=math.inf)
        binds = math.isfinite(room) and sum(self.state_bytes.get(session, 0.0) for session in sessions) > room
        return None if len(loads) > 1 or binds or self.longest < math.inf else next(iter(loads), 1.0)


ALIKE = SessionWeights()


class Fleet:
    """Sessions on GPUs, and what each GPU bears; loads are kept without the dust of floating point."""

    def __init__(
        self,
        residents: Residents,
        curve: LoadCurve,
        capacity: Capacity,
        speeds: Mapping[Gpu, float],
        weights: SessionWeights,
    ) -> None:
        self.place: dict[Session, Gpu] = {}
        self.target, self.enough = weights.longest, 0.0  # Seconds that chunks may take, and that need not be shortened.
        self._curve, self._weights, self._speeds = curve, weights, speeds
        self._there: dict[Gpu, dict[Session, None]] = {gpu: {} for gpu in residents}
        self.loads: dict[Gpu, float] = dict.fromkeys(residents, 0.0)
        self.bytes: dict[Gpu, float] = dict.fromkeys(residents, 0.0)
        self._seconds: dict[Gpu, float] = dict.fromkeys(residents, 0.0)
        for gpu, sessions in residents.items():
            for session in sessions:
                self.put(session, gpu)
        # A GPU may keep what it has, and is given no more than it may have.
        self._most = {gpu: max(limit_of(capacity, gpu), len(there)) for gpu, there in residents.items()}
        self._given = {gpu: limit_of(capacity, gpu) for gpu in residents}

    def seconds(self, gpu: Gpu, load: float, count: int) -> float:
        """Return seconds of a chunk on a GPU with so many sessions that weigh so much."""
        return self._curve(load) / self._speeds.get(gpu, 1.0) if count else 0.0

    def longest(self) -> float:
        """Return the longest chunk of all."""
        return max(self._seconds.values(), default=0.0)

    def put(self, session: Session, gpu: Gpu) -> None:
        """Put a session that is nowhere on a GPU."""
        self.place[session] = gpu
        self._there[gpu][session] = None
        self._count(gpu, session, 1)

    def take(self, session: Session) -> Gpu:
        """Take a session off its GPU, and return that."""
        gpu = self.place.pop(session)
        del self._there[gpu][session]
        self._count(gpu, session, -1)
        return gpu

    def _count(self, gpu: Gpu, session: Session, sign: int) -> None:
        load, size = self._weights.of(session)
        self.loads[gpu] = round(self.loads[gpu] + sign * load, 9)
        self.bytes[gpu] += sign * size
        self._seconds[gpu] = self.seconds(gpu, self.loads[gpu], len(self._there[gpu]))

    def places(self, sessions: Iterable[Session]) -> dict[Session, Gpu]:
        """Return where some sessions are."""
        return {session: self.place[session] for session in sessions}

    def restore(self, places: Mapping[Session, Gpu]) -> None:
        """Put sessions where they were."""
        for session in places:
            if session in self.place:
                self.take(session)
        for session, gpu in places.items():
            self.put(session, gpu)

    def has_room(self, gpu: Gpu, session: Session, gone: Session | None = None) -> bool:
        """Return whether a GPU may be given a session, for another where one is `gone`."""
        left = self.bytes[gpu] - (self._weights.of(gone)[1] if gone is not None else 0.0)
        size = self._weights.of(session)[1]
        room = self._weights.room.get(gpu, math.inf)
        return len(self._there[gpu]) - (gone is not None) < self._given[gpu] and (not size or left + size <= room)

    def within(self, seconds: float, others: int) -> bool:
        """Return whether a session may have such a chunk beside so many others; alone it may have any."""
        return not others or seconds <= self.target

    def with_change(self, gpu: Gpu, more: float, fewer: float = 0.0, count: int = 0) -> float:
        """Return seconds of a chunk on a GPU if so much load came and went, and so many sessions."""
        load = round(self.loads[gpu] + more - fewer, 9)
        return self.seconds(gpu, load, len(self._there[gpu]) + count)

    def put_best(self, session: Session) -> bool:
        """Put a session where its chunks are shortest of the GPUs that may be given it; return whether there is one."""
        load = self._weights.of(session)[0]
        roomy = ((self.with_change(gpu, load, count=1), gpu) for gpu in self._there if self.has_room(gpu, session))
        able = (each for each in roomy if self.within(each[0], len(self._there[each[1]])))
        best = min(able, key=lambda each: each[0], default=None)
        if best is None:
            return False
        self.put(session, best[1])
        return True

    # --- better placements

    def relieve(self, movable: Collection[Session]) -> None:
        """Move sessions off GPUs whose states exceed their memory, as far as others have room."""
        free = set(movable)
        for gpu in self._there:
            while (excess := self.bytes[gpu] - self._weights.room.get(gpu, math.inf)) > 0:
                # The smallest that is enough, else the largest.
                sizes = sorted((self._weights.of(each)[1], n, each) for n, each in enumerate(self._there[gpu]))
                order = [one for one in sizes if one[0] >= excess] + [one for one in sizes[::-1] if one[0] < excess]
                if not any(size and each in free and self._leave(each) for size, _, each in order):
                    break

    def _leave(self, session: Session) -> bool:
        """Move a session to where chunks are shortest of the GPUs with room for it; return whether there is one."""
        load = self._weights.of(session)[0]
        others = [gpu for gpu in self._there if gpu != self.place[session] and self.has_room(gpu, session)]
        if others:
            self.take(session)
            self.put(session, min(others, key=lambda gpu: self.with_change(gpu, load, count=1)))
        return bool(others)

    def descend(self, movable: Collection[Session], costs: MoveCosts) -> None:
        """Move sessions off a GPU with the longest chunk, or exchange them, while that gains more than it costs."""
        free = set(movable)
        while (best := self._change(free, costs)) is not None:
            _, session, target, other = best
            source = self.take(session)
            if other is not None:
                self.take(other)
                self.put(other, source)
            self.put(session, target)

    def _change(self, free: Collection[Session], costs: MoveCosts) -> Change | None:
        """Return the best move off the GPU with the longest chunk, or if there is none, the best exchange with it."""
        if not self._seconds:
            return None
        top, near = self._extremes()
        longest = self._seconds[top]
        limit = longest - TRIFLE * max(1.0, longest)
        if longest <= self.enough:
            return None
        for changes in (self._moves, self._exchanges):
            able = (each for each in changes(top, near, free, costs) if each[0] < limit)
            if (best := min(able, key=lambda each: each[0], default=None)) is not None:
                return best
        return None

    def _moves(self, top: Gpu, near: Iterable[Gpu], free: Collection[Session], costs: MoveCosts) -> Iterator[Change]:
        for session in self._kinds(top, free):
            load = self._weights.of(session)[0]
            left = self.with_change(top, 0.0, load, -1)
            for gpu in near:
                there = self.with_change(gpu, load, count=1)
                if self.within(there, len(self._there[gpu])) and self.has_room(gpu, session):
                    yield max(left, there) + costs.of(session), session, gpu, None

    def _exchanges(
        self, top: Gpu, near: Iterable[Gpu], free: Collection[Session], costs: MoveCosts
    ) -> Iterator[Change]:
        for session in self._kinds(top, free):
            load, cost = self._weights.of(session)[0], costs.of(session)
            for gpu in near:
                for other in self._kinds(gpu, free):
                    back = self._weights.of(other)[0]
                    if back < load and self.has_room(gpu, session, other) and self.has_room(top, other, session):
                        there = self.with_change(gpu, load, back)
                        if self.within(there, len(self._there[gpu]) - 1):
                            worst = max(self.with_change(top, back, load), there)
                            yield worst + cost + costs.of(other), session, gpu, other

    def _extremes(self) -> tuple[Gpu, list[Gpu]]:
        """Return the GPU with the longest chunk, and some with the shortest."""
        top = max(self._seconds, key=self._seconds.__getitem__)
        return top, sorted((gpu for gpu in self._there if gpu != top), key=self._seconds.__getitem__)[:PARTNERS]

    def _kinds(self, gpu: Gpu, free: Collection[Session]) -> list[Session]:
        """Return the sessions of a GPU that may move, one of those that weigh the same."""
        kinds = {self._weights.of(session): session for session in reversed(self._there[gpu]) if session in free}
        return list(kinds.values())

    # --- fewer moves

    def go_home(self, movable: Sequence[Session], home: Mapping[Session, Gpu], bound: float, costs: MoveCosts) -> None:
        """Let sessions stay where they were as far as no chunk gets longer than the bound by that."""
        self._exchange_alike(movable, home)
        changed = True
        while changed:
            changed = False
            for session in sorted(self.away(movable, home), key=costs.of, reverse=True):
                target = home[session]
                if self._may_return(session, target, bound):
                    self.take(session)
                    self.put(session, target)
                    changed = True

    def away(self, movable: Iterable[Session], home: Mapping[Session, Gpu]) -> list[Session]:
        """Return those that are not where they were."""
        return [session for session in movable if self.place[session] != home[session]]

    def _may_return(self, session: Session, gpu: Gpu, bound: float) -> bool:
        load, size = self._weights.of(session)
        fits = not size or self.bytes[gpu] + size <= self._weights.room.get(gpu, math.inf)
        fits = fits and len(self._there[gpu]) < self._most[gpu]
        return fits and self.with_change(gpu, load, count=1) <= bound + TRIFLE

    def _exchange_alike(self, movable: Sequence[Session], home: Mapping[Session, Gpu]) -> None:
        """Have a session stay where another came to that weighs the same, which goes on in its place."""
        for session in self.away(movable, home):
            there = self.place[session]
            for other in [each for each in self._there[home[session]] if each in home and home[each] != home[session]]:
                if self._weights.of(other) == self._weights.of(session) and there != home[session]:
                    self.take(session)
                    self.take(other)
                    self.put(session, home[session])
                    self.put(other, there)
                    break

    # --- for a search of all placements

    def neighbourhoods(self) -> Iterator[list[Gpu]]:
        """Yield the GPU with the longest chunk with one of those with the shortest, then with two."""
        top, near = self._extremes()
        for number in (1, 2):
            yield from ([top, *others] for others in itertools.combinations(near, number))

    def least(self, coming: Sequence[tuple[float, float]]) -> float:
        """Return seconds that the longest chunk takes at least, once sessions with these weights have come, too.

        Some GPU bears its share of the load by speed or more, and the heaviest session is somewhere.
        """
        loads = [self._weights.of(session)[0] for session in self.place] + [load for load, _ in coming]
        speeds = {gpu: self._speeds.get(gpu, 1.0) for gpu in self.loads}
        if not loads or not speeds:
            return 0.0
        part = sum(loads) / sum(speeds.values())
        even = min(self.seconds(gpu, part * speed, 1) for gpu, speed in speeds.items())
        return max(even, min(self.seconds(gpu, max(loads), 1) for gpu in speeds)) - TRIFLE

    def kind(self, gpu: Gpu) -> tuple[float, ...]:
        """Return what tells a GPU from others that bear the same."""
        return self._speeds.get(gpu, 1.0), *self.allowed(gpu)

    def allowed(self, gpu: Gpu) -> tuple[float, float]:
        """Return the sessions and the bytes that a GPU may have: its room, or what it has now."""
        return self._most[gpu], max(self._weights.room.get(gpu, math.inf), self.bytes[gpu])

    def count(self, gpu: Gpu) -> int:
        """Return how many sessions are on a GPU."""
        return len(self._there[gpu])

    def weight(self, session: Session) -> tuple[float, float]:
        """Return load and bytes of a session."""
        return self._weights.of(session)
