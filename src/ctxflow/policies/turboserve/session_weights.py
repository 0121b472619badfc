"""Sessions that do not weigh alike: which GPU each goes to, and which move.

The best placement of unlike weights is a partition problem, so there is a search: of all placements for few sessions,
by moves and exchanges beyond. Sessions that weigh alike are left to `rebalancing`, which is exact and fast for any
number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ctxflow.policies.turboserve.rebalancing import (
    FREE,
    Capacity,
    Gpu,
    Move,
    MoveCosts,
    Residents,
    Session,
    SessionAssignment,
    assign,
    rebalance,
)
from ctxflow.policies.turboserve.weighed_fleet import ALIKE, TRIFLE, Fleet, LoadCurve, SessionWeights

EXACT = 12  # Sessions up to which all placements are searched,
NEAR = 0.01  # With more than these, what is closer than this to a bound is good enough.
NODES = 3_000  # and how many partial ones at most, so that it takes no more than some milliseconds.


def assign_by_weight(
    sessions: Iterable[Session],
    residents: Residents,
    curve: LoadCurve,
    capacity: Capacity = None,
    speeds: Mapping[Gpu, float] | None = None,
    weights: SessionWeights = ALIKE,
) -> SessionAssignment:
    """Give sessions GPUs so that the longest chunk of all is short; those on GPUs already stay.

    Guarantees: a GPU that is given a session has the memory for it, no more than K sessions, and chunks no longer than
    `weights.longest`, unless it is alone there; one that waits finds no GPU beside those that came before it. With few
    sessions the longest chunk is the shortest that there is for those that are placed.

    :param sessions: in the order in which they find room.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> weights = SessionWeights({"a": 1.0, "b": 1.0, "c": 2.0})
    >>> assign_by_weight("abc", {0: [], 1: []}, PowerCurve(0, 1), weights=weights).placed
    {'a': 1, 'b': 1, 'c': 0}
    """
    new = list(sessions)
    everybody = [*new, *(session for there in residents.values() for session in there)]
    if (each := weights.common(everybody)) is not None:
        return assign(new, residents, _counted(curve, each), capacity, speeds)
    fleet = Fleet(residents, curve, capacity, speeds or {}, weights)
    waiting = [session for session in new if not fleet.put_best(session)]
    while True:
        placed = [session for session in new if session in fleet.place]
        _arrange(fleet, placed, weights)
        left = [session for session in waiting if not fleet.put_best(session)]  # There may be room elsewhere by now.
        if len(left) == len(waiting):
            return SessionAssignment(fleet.places(placed), tuple(waiting))
        waiting = left


def _arrange(fleet: Fleet, placed: Sequence[Session], weights: SessionWeights) -> None:
    """Find for some sessions the places where the longest chunk is short, from where they are or the heaviest first."""
    greedy = fleet.places(placed)
    for session in placed:
        fleet.take(session)
    heaviest_first = sorted(placed, key=lambda session: weights.load.get(session, 1.0), reverse=True)
    if all(fleet.put_best(session) for session in heaviest_first):
        better, packed = fleet.longest(), fleet.places(placed)
        fleet.restore(greedy)
        if better < fleet.longest():
            fleet.restore(packed)
    else:
        fleet.restore(greedy)
    fleet.descend(placed, FREE)
    _deepen(fleet, placed)


def rebalance_by_weight(
    residents: Residents,
    curve: LoadCurve,
    costs: MoveCosts = FREE,
    capacity: Capacity = None,
    speeds: Mapping[Gpu, float] | None = None,
    fixed: Collection[Session] = frozenset(),
    weights: SessionWeights = ALIKE,
) -> list[Move]:
    """Return moves that make the longest chunk shorter, one for each session that moves, and few.

    First sessions leave GPUs whose states exceed their memory, as far as others have room; no GPU is given one that it
    has no memory for, or that is more than K. With few sessions the longest chunk is at most weight * (the dearest
    session's seconds) longer than under the best placement there is, and none that takes fewer moves has one as short.
    With more it is within 1 % of what nobody can beat, or one that no move, no exchange of two sessions, and no other
    division of what two or three GPUs have shortens, as far as was looked.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> weights = SessionWeights({"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0})
    >>> rebalance_by_weight({0: "ab", 1: "cd"}, PowerCurve(0, 1), weights=weights)
    [Move(session='b', source=0, target=1)]
    """
    everybody = [session for there in residents.values() for session in there]
    if (each := dataclasses.replace(weights, longest=math.inf).common(everybody)) is not None:
        return rebalance(residents, _counted(curve, each), costs, capacity, speeds=speeds, fixed=fixed)
    unbound = dataclasses.replace(weights, longest=math.inf)
    fleet = Fleet(residents, curve, capacity, speeds or {}, unbound)
    home = dict(fleet.place)
    movable = [session for session in everybody if session not in fixed]
    if len(movable) > EXACT:
        fleet.enough = (1 + NEAR) * fleet.least([])
    fleet.relieve(movable)
    fleet.descend(movable, costs)
    bound, found = max(fleet.longest(), fleet.enough), fleet.places(movable)
    _deepen(fleet, movable)
    slack = costs.weight * max((costs.seconds.get(each, 0.0) for each in movable), default=0.0)
    if fleet.longest() + slack < bound:
        bound = fleet.longest() + slack
    else:
        fleet.restore(found)
    fleet.go_home(movable, home, bound, costs)
    if len(movable) <= EXACT:
        best, moves = fleet.places(movable), len(fleet.away(movable, home))
        fewer = _Search(fleet, movable, list(residents), bound + TRIFLE, NODES).fewest(home, moves, costs)
        fleet.restore(fewer if fewer is not None else best)
    return [Move(each, home[each], fleet.place[each]) for each in movable if fleet.place[each] != home[each]]


def longest_chunk(
    residents: Residents, curve: LoadCurve, speeds: Mapping[Gpu, float] | None = None, weights: SessionWeights = ALIKE
) -> float:
    """Return the longest chunk of all.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> longest_chunk({0: "ab", 1: "c"}, PowerCurve(0, 1), weights=SessionWeights({"c": 3.0}))
    3.0
    """
    return Fleet(residents, curve, None, speeds or {}, weights).longest()


def _counted(curve: LoadCurve, each: float) -> Callable[[int], float]:
    """Return the curve by the number of sessions that all have this load."""
    return curve if each == 1.0 else lambda count: curve(count * each)


def _deepen(fleet: Fleet, movable: Sequence[Session]) -> None:
    """Search all placements of few sessions, or else those of the longest chunk's GPU and of one or two others.

    All searches together look at no more than `NODES` partial placements.
    """
    left = NODES
    if len(movable) <= EXACT:
        _search(fleet, movable, list(fleet.loads), left)
        return
    better = True
    while better and left > 0 and fleet.longest() > fleet.enough:
        better, before = False, fleet.longest()
        for gpus in fleet.neighbourhoods():
            some = [session for session in movable if fleet.place[session] in gpus]
            if len(some) <= EXACT and left > 0:
                left = _search(fleet, some, gpus, left)
                if fleet.longest() < before:
                    fleet.descend(movable, FREE)
                    better = True
                    break


def _search(fleet: Fleet, movable: Sequence[Session], gpus: Sequence[Gpu], nodes: int) -> int:
    """Find where on some GPUs these make the longest chunk of all shortest; return how many nodes are left."""
    best = fleet.places(movable)
    search = _Search(fleet, movable, gpus, fleet.longest() - TRIFLE, nodes)
    found = search.shortest()
    fleet.restore(found if found is not None else best)
    return search.left


class _Search:
    """A search of all placements of some sessions on some GPUs, the heaviest first; it ends after so many nodes.

    The sessions are taken off the fleet, and the search counts for itself what each GPU bears.
    """

    def __init__(self, fleet: Fleet, movable: Sequence[Session], gpus: Sequence[Gpu], bound: float, nodes: int) -> None:
        self.left = nodes
        self._fleet, self._bound, self._gpus = fleet, bound, gpus
        self._allowed = [fleet.allowed(gpu) for gpu in gpus]
        self._order = sorted(movable, key=fleet.weight, reverse=True)
        self._weights = [fleet.weight(session) for session in self._order]
        for session in movable:
            fleet.take(session)
        self._least = fleet.least(self._weights)
        self._load = [fleet.loads[gpu] for gpu in gpus]
        self._bytes = [fleet.bytes[gpu] for gpu in gpus]
        self._count = [fleet.count(gpu) for gpu in gpus]
        kinds = [fleet.kind(gpu) for gpu in gpus]
        self._kind = [kinds.index(kind) for kind in kinds]
        self._at = [0] * len(self._order)
        self._found: dict[Session, Gpu] | None = None

    def shortest(self) -> dict[Session, Gpu] | None:
        """Return the placement with the shortest longest chunk that is within the bound, None if there is none."""
        if self._fleet.longest() <= self._bound:
            self._shorten(0, self._fleet.longest())
        return self._found

    def fewest(self, home: Mapping[Session, Gpu], moves: int, costs: MoveCosts) -> dict[Session, Gpu] | None:
        """Return the placement with fewer moves than so many, and the fewest, of those within the bound."""
        self._most = moves, -1.0
        self._home = [self._gpus.index(home[session]) for session in self._order]
        self._costs = [costs.seconds.get(session, 0.0) for session in self._order]
        if self._fleet.longest() <= self._bound:
            self._save(0, 0, 0.0)
        return self._found

    def _options(self, number: int) -> list[tuple[float, int]]:
        """Return where a session may go, and the chunk's seconds there, those within the bound, the shortest first."""
        load, size = self._weights[number]
        found = []
        for at, gpu in enumerate(self._gpus):
            if self._count[at] < self._allowed[at][0] and (not size or self._bytes[at] + size <= self._allowed[at][1]):
                seconds = self._fleet.seconds(gpu, self._load[at] + load, 1)
                if seconds <= self._bound and self._fleet.within(seconds, self._count[at]):
                    found.append((seconds, at))
        found.sort()
        return found

    def _enter(self, number: int, at: int) -> tuple[float, float]:
        load, size = self._weights[number]
        before = self._load[at], self._bytes[at]
        self._load[at], self._bytes[at] = round(before[0] + load, 9), before[1] + size
        self._count[at] += 1
        self._at[number] = at
        self.left -= 1
        return before

    def _leave(self, at: int, before: tuple[float, float]) -> None:
        self._load[at], self._bytes[at] = before
        self._count[at] -= 1

    def _places(self) -> dict[Session, Gpu]:
        return {session: self._gpus[at] for session, at in zip(self._order, self._at, strict=True)}

    def _shorten(self, number: int, longest: float) -> None:
        if number == len(self._order):
            self._found, self._bound = self._places(), longest - TRIFLE
            return
        seen = set()
        for seconds, at in self._options(number):
            if max(seconds, longest, self._least) > self._bound or self.left <= 0:
                return
            key = self._load[at], self._bytes[at], self._count[at], self._kind[at]
            if key not in seen:
                seen.add(key)
                before = self._enter(number, at)
                self._shorten(number + 1, max(longest, seconds))
                self._leave(at, before)

    def _save(self, number: int, moves: int, cost: float) -> None:
        if (moves, cost) >= self._most:
            return
        if number == len(self._order):
            self._found, self._most = self._places(), (moves, cost)
            return
        for _, at in sorted(self._options(number), key=lambda each: each[1] != self._home[number]):
            if self.left > 0:
                away = at != self._home[number]
                before = self._enter(number, at)
                self._save(number + 1, moves + away, cost + away * self._costs[number])
                self._leave(at, before)
