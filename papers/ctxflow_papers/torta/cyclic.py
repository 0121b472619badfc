"""Round-robin over regions and over servers, as the paper's lower bound has it: in turn, as far as there is room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxflow.policies.torta.micro import NOWHERE
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, amounts


def even_shares(capacity: npt.ArrayLike) -> Floats:
    """The shares of regions in turn: (R, R), each region's tasks evenly over the regions that have capacity.

    >>> even_shares([3, 0, 9]).tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]
    """
    alive = amounts(capacity) > 0
    if not alive.any():
        return np.eye(len(alive))
    return np.tile(alive / alive.sum(), (len(alive), 1))


def in_turn(count: int, places: Ints, start: int = 0, allowed: Bools | None = None) -> tuple[Ints, int]:
    """Servers in turn, each task to the next one that has a place and may run it.

    :param places: (S,) tasks that each may still be given.
    :param start: the server whose turn it is.
    :param allowed: (count, S), None for anywhere.
    :returns: (count,) the server of each task, `NOWHERE` if all are full; and whose turn it is then.

    >>> in_turn(3, np.array([1, 0, 5]))
    (array([0, 2, 2]), 0)
    """
    left, where, turn = np.maximum(places, 0), np.full(count, NOWHERE, dtype=np.int64), start
    for task in range(count):
        open_to = left > 0 if allowed is None else (left > 0) & allowed[task]
        free = np.flatnonzero(open_to)
        if not len(free):
            continue
        later = np.searchsorted(free, turn % len(left))
        where[task] = free[later % len(free)]
        left[where[task]] -= 1
        turn = int(where[task]) + 1
    return where, turn % max(len(left), 1)
