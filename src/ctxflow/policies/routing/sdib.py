"""SDIB as a baseline: the least standard deviation of the servers' occupancy, and the least idle time.

After Yang et al. (MERL-LB), whose two objectives TORTA's authors adapt; here they are one sum, and each task goes to
the server that makes it smallest.
"""

from __future__ import annotations

import numpy as np

from ctxflow.policies.routing.arrays import Bools, Floats, Ints, amounts
from ctxflow.policies.routing.matching import NOWHERE


def spread(
    sizes: Floats,
    held: Floats,
    capacity: Floats,
    places: Ints,
    idle: Floats,
    idle_weight: float = 0.01,
    allowed: Bools | None = None,
) -> Ints:
    """(N,) the server of each task, in the order given; `NOWHERE` for those that find no place.

    Guarantees: no server gets more tasks than it has places, nor one that it is not allowed.

    :param sizes: (N,) what each task adds to a server's load.
    :param held: (S,) the servers' loads.
    :param capacity: (S,) the loads that they are made for; occupancy is load over capacity.
    :param places: (S,) tasks that each may still be given.
    :param idle: (S,) seconds since each had work.
    :param idle_weight: what a second of mean idle time counts beside a unit of standard deviation.
    :param allowed: (N, S), None for anywhere.

    >>> zero, two = np.zeros(2), np.full(2, 2.0)
    >>> spread(np.ones(3), zero, two, np.array([9, 9]), np.array([0.0, 5.0])).tolist()
    [1, 0, 0]
    """
    room = amounts(capacity)
    scale = np.divide(1.0, room, out=np.ones_like(room), where=room > 0)
    occupancy, resting = amounts(held) * scale, amounts(idle)
    left = np.where(room > 0, np.maximum(places, 0), 0)
    where = np.full(len(sizes), NOWHERE, dtype=np.int64)
    count = max(len(room), 1)
    for task, size in enumerate(amounts(sizes).tolist()):
        open_to = left > 0 if allowed is None else (left > 0) & allowed[task]
        if not open_to.any():
            continue
        more = size * scale
        mean = (occupancy.sum() + more) / count
        squares = ((occupancy**2).sum() + 2 * occupancy * more + more**2) / count
        deviation = np.sqrt(np.maximum(squares - mean**2, 0.0))
        badness = deviation + idle_weight * (resting.sum() - resting) / count
        best = int(np.where(open_to, badness, np.inf).argmin())
        where[task], left[best] = best, left[best] - 1
        occupancy[best] += more[best]
        resting[best] = 0.0
    return where
