"""How many servers are active, and which: TORTA's Eq. 6, gradual switching, and the buffer that asks for more.

What does not live here: who starts and stops them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ctxflow.policies.routing.arrays import Bools, Floats, Ints, amounts

SAFETY = 1.0
"""Eq. 6's sigma, of which the paper prints no value: standard deviations of the predicted demand to be ready for."""


def target(
    queue: npt.ArrayLike,
    predicted: npt.ArrayLike,
    capacity: npt.ArrayLike,
    servers: npt.ArrayLike,
    safety: float = SAFETY,
) -> Ints:
    """Eq. 6: min(S_r, ceil((Q + F + sigma * sqrt(F)) / C_avg)) servers of each region.

    Guarantees: (R,) at most all of a region's servers, and at least one of them where there are any (1 <= N_active).
    A region whose servers' capacity is zero or unknown has all of them active while there is work, since nothing says
    how few would do. A prediction that is not a number counts as none: the queue then decides.

    :param queue: (R,) tasks that wait.
    :param predicted: (R,) tasks that are expected in the next slot.
    :param capacity: (R,) tasks that a server does in a slot, on average.
    :param servers: (R,) S_r, how many there are.

    >>> target([4, 0, 0], [16, 0, float("nan")], [5, 5, 5], [9, 9, 0]).tolist()
    [5, 1, 0]
    """
    expected, there = amounts(predicted), amounts(servers)
    work = amounts(queue) + expected + amounts(safety) * np.sqrt(expected)
    each = amounts(capacity)
    unknown = np.where(work > 0, np.inf, 0.0)
    needed = np.divide(work, each, out=unknown, where=each > 0)
    return np.asarray(np.minimum(np.maximum(np.ceil(needed - 1e-9), 1), there), dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Switches:
    """What changes in a region.

    :ivar activate: the servers to start, first one first.
    :ivar deactivate: the servers to stop.
    """

    activate: Ints
    deactivate: Ints


def switches(
    wanted: int,
    active: Bools,
    warm_up: Floats,
    suitability: Floats,
    utilisation: Floats,
    idle: Floats,
    step: int | None = None,
    patience: float = 1.0,
) -> Switches:
    """Which servers to start or to stop, gradually, so that a region comes nearer to its target.

    Started are those with the fewest seconds of warm-up for their suitability. Stopped are those of the lowest
    utilisation, and of these the longest idle; but none that has work, and none that has been idle for less than
    `patience` times its own warm-up, since starting it again would cost more than it saved (our reading of
    "to minimize wasted warm-up investments").

    Guarantees: never both at once; never more than `step`, nor beyond the target.

    :param wanted: servers that should be active, of `target`.
    :param active: (S,) those that are, or are warming up.
    :param warm_up: (S,) seconds from a start to being ready.
    :param suitability: (S,) how well each fits what is coming, such as the mean of Eq. 8 over the tasks.
    :param utilisation: (S,) share of each that is at work.
    :param idle: (S,) seconds since each had work.
    :param step: servers that may change in a slot, None for any number.

    >>> on = np.array([True, False, False])
    >>> nothing = np.zeros(3)
    >>> switches(2, on, np.array([30.0, 60.0, 20.0]), np.ones(3), nothing, nothing).activate.tolist()
    [2]
    >>> switches(0, on, np.full(3, 30.0), np.ones(3), nothing, np.array([29.0, 0, 0])).deactivate.tolist()
    []
    """
    none = np.zeros(0, dtype=np.int64)
    change = int(wanted) - int(active.sum())
    most = abs(change) if step is None else min(abs(change), max(step, 0))
    if change >= 0:
        off = np.flatnonzero(~active)
        seconds = amounts(warm_up[off]) / np.maximum(amounts(suitability[off]), 1e-9)
        return Switches(off[np.argsort(seconds, kind="stable")][:most], none)
    rested = active & (amounts(utilisation) <= 0) & (amounts(idle) >= patience * amounts(warm_up))
    free = np.flatnonzero(rested)
    return Switches(none, free[np.argsort(-amounts(idle[free]), kind="stable")][:most])


def for_buffer(waiting: int, limit: int, capacity: float, share: float = 0.8) -> int:
    """How many servers more a buffer asks for: none until it is nearly full, then enough for all that waits.

    :param waiting: tasks that found no place.
    :param limit: tasks that the buffer is made for; it takes more, but is then over its threshold.
    :param capacity: tasks that a server does in a slot; one server is asked for if nothing is known.
    :param share: the share of the limit from which on it asks.

    >>> for_buffer(7, 10, 4.0), for_buffer(8, 10, 4.0)
    (0, 2)
    """
    if waiting <= 0 or waiting < share * limit:
        return 0
    each = float(amounts(capacity))
    return int(np.ceil(waiting / each)) if each > 0 else 1
