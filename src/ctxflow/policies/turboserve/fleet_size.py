"""Which sessions move when the number of GPUs changes: off those that are to be released, onto those that are new."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ctxflow.policies.turboserve.rebalancing import (
    FREE,
    Curve,
    Gpu,
    Move,
    MoveCosts,
    Residents,
    assign,
    rebalance_groups,
)


@dataclasses.dataclass(frozen=True)
class Consolidation:
    """The GPUs that are empty after the moves, and the moves off them."""

    released: Sequence[Gpu]
    moves: Sequence[Move]


def consolidate(residents: Residents, keep: int, curve: Curve, capacity: int | None = None) -> Consolidation:
    """Empty the GPUs with the fewest sessions, so that they can be released at once.

    Guarantees: at least `keep` GPUs stay (1 or more, else ValueError), and more where their capacity is needed; none
    that stays is over capacity unless it was before.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> consolidate({"x": "ab", "y": "c", "z": ""}, 1, PowerCurve(0, 1), capacity=3)
    Consolidation(released=('z', 'y'), moves=(Move(session='c', source='y', target='x'),))
    """
    if keep < 1:
        raise ValueError("sessions have to stay somewhere: keep 1 GPU or more")
    number = {gpu: n for n, gpu in enumerate(residents)}
    order = sorted(residents, key=lambda gpu: (len(residents[gpu]), -number[gpu]))
    released = order[: max(0, len(order) - keep)]
    if capacity is not None:
        released = released[: _fitting(residents, released, capacity)]
    gone = set(released)
    home = {session: gpu for gpu in released for session in residents[gpu]}
    staying = {gpu: sessions for gpu, sessions in residents.items() if gpu not in gone}
    placed = assign(home, staying, curve, capacity).placed
    return Consolidation(tuple(released), tuple(Move(each, home[each], gpu) for each, gpu in placed.items()))


def spread(
    residents: Residents, added: Iterable[Gpu], curve: Curve, costs: MoveCosts = FREE, capacity: int | None = None
) -> list[Move]:
    """Rebalance onto GPUs that have just been added, so that they are used at once.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> spread({"x": "abc"}, ["y"], PowerCurve(0, 1))
    [Move(session='a', source='x', target='y')]
    """
    return rebalance_groups({**residents, **dict.fromkeys(added, ())}, curve, costs, capacity)


def _fitting(residents: Residents, released: Sequence[Gpu], capacity: int) -> int:
    """Return how many of the GPUs can be emptied, the first ones first, without putting another over its capacity."""
    room = sum(max(0, capacity - len(sessions)) for sessions in residents.values())
    for number, gpu in enumerate(released):
        there = len(residents[gpu])
        # Its own room goes with it, and its sessions take as much of the others'.
        room -= max(0, capacity - there) + there
        if room < 0:
            return number
    return len(released)
