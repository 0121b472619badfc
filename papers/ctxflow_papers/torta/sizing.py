"""How many servers of all regions together stay active, and which: ours, beside Eq. 6, which asks region by region.

Where a plan can move tasks between regions, what a region is asked for follows from who is active there; so the number
is one for each type of task, and follows demand slowly: starts cost minutes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.torta.quantities import Bools, Floats, Ints


@dataclasses.dataclass(frozen=True)
class Sizing:
    """By the highest demand so far, with room above it.

    :ivar stop: servers are stopped down to where the highest demand so far is that share of what those left can do.
    :ivar start: servers are started when demand is that share of what those active can do, and what waits.
    :ivar after: slots that are seen first; all servers are active in them.
    """

    stop: float = 0.66
    start: float = 1.0
    after: int = 15


def needed(waiting: Floats, demand: Floats, safety: float, capacity: float) -> Floats:
    """Eq. 6 over all regions, not rounded: servers that would be busy all the time.

    >>> needed(np.array([2.0]), np.array([16.0]), 1.0, 2.0)
    array([11.])
    """
    return np.asarray((waiting + demand + safety * np.sqrt(demand)) / capacity, dtype=np.float64)


def dearest(count: Ints, of: Bools, cost: Floats, active: Ints) -> Bools:
    """(L, S) in each run so many of those that are given, over all its regions: the dear ones of large groups first.

    Guarantees: one server of each group stays (Eq. 6 has one at least). A group is a region's servers for a type of
    task. Twice the cost weighs as much as four times the group, so that small ones stay, whose models would change.

    :param count: (B,) of each run; L is B runs of the same number of regions.
    :param of: (L, S) those that may be stopped. :param cost: (L, S) of each, in any unit.
    :param active: (L,) servers of the group, those at work among them.

    >>> cost = np.array([[3.0, 2.0, 2.0], [4.0, 1.0, 1.0]])
    >>> dearest(np.array([3]), np.ones((2, 3), dtype=bool), cost, np.array([3, 3])).tolist()
    [[True, True, False], [True, False, False]]
    """
    left = active[:, None] - _ranks(of, -cost)
    chosen = of & (left > 1)
    worth = cost * np.sqrt(np.maximum(left, 0))
    shape = (len(count), -1)
    return first(count, chosen.reshape(shape), -worth.reshape(shape)).reshape(of.shape)


def first(count: Ints, of: Bools, key: Floats) -> Bools:
    """(L, S) in each row so many of those that are given, the ones with the smallest keys.

    >>> first(np.array([1]), np.array([[True, False, True]]), np.array([[5.0, 1.0, 3.0]])).tolist()
    [[False, False, True]]
    """
    return of & (_ranks(of, key) < count[:, None])


def _ranks(of: Bools, key: Floats) -> Ints:
    """(L, S) the place of each in its row's order: those that are given by their keys, then the others."""
    order = np.argsort(np.where(of, key, np.inf), axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(of.shape[1]), of.shape), axis=1)
    return ranks
