"""The ways to serve query types over a set of deployments, and how they are packed into storage that does not hold all.

A way is one deployment, or two with a type split between them. Packing is a multiple-choice knapsack whose items may
be cut: each type takes one way, which stores models whole and of its data as much as is served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.agh.arrays import Bools, Floats, Ints
from ctxflow.policies.agh.draft import NOTHING

PAIRS = 4000
"""Up to so many changes of two types at once are looked at; with more of them, only changes of one."""
ROUNDS = 32
"""Changes made, at most: far more than are ever needed, a bound on time."""
_LEAST = 1e-12


def filled(value: Floats, size: Floats, room: Floats) -> Floats:
    """Return (N, I) the share of each item in the best filling of N knapsacks, whose items may be cut.

    The densest items go first.

    :param value: (N, I) of an item whole; one that is worth nothing is left out.
    :param size: (N, I) of an item whole. :param room: (N,).

    >>> filled(np.array([[4.0, 3.0, -1.0]]), np.array([[2.0, 1.0, 1.0]]), np.array([2.0])).tolist()
    [[0.5, 1.0, 0.0]]
    """
    size = np.where(value > 0, size, 0.0)
    density = np.where(value > 0, value / np.maximum(size, _LEAST), -1.0)
    order = np.argsort(-density, axis=1, kind="stable")
    sizes = np.take_along_axis(size, order, axis=1)
    left = room[:, None] - (np.cumsum(sizes, axis=1) - sizes)
    part = np.where(sizes > _LEAST, np.clip(left / np.maximum(sizes, _LEAST), 0.0, 1.0), 1.0)
    found = np.empty_like(part)
    np.put_along_axis(found, order, part, axis=1)
    return np.where(value > 0, found, 0.0)


def packed(
    taken: Ints, most: Floats, saved: Floats, data: Floats, fixed: Floats, weights: Floats, storage: float
) -> tuple[Ints, Floats]:
    """Return better ways and shares than those given: change one type's way, or two at once, as long as that saves.

    :param taken: (I,) the way of each type; way 0 serves nothing.
    :param most: (I, W) the largest share that a way can serve.
    :param saved: (I, W) dollars saved by serving all of a type so, the storing of its data paid.
    :param data: (I,) GB of a type's data. :param fixed, weights: (W,) dollars and GB of a way's models.
    :param storage: GB for all. :returns: (I,) ways and shares.

    >>> ways, shares = packed(np.array([1, 0]), np.array([[0, 1.0], [0, 1.0]]), np.array([[0, 3.0], [0, 9.0]]),
    ...     np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.array([0.0, 1.0]), storage=3.0)
    >>> ways.tolist(), shares.tolist()
    ([0, 1], [0.0, 1.0])
    """
    types, width = most.shape
    every = np.arange(types)
    value, size = most * saved, most * data[:, None]

    def judged(tries: Ints) -> tuple[Floats, Floats]:
        """Return the dollars (N,) that N assignments (N, I) of ways save, and the shares (N, I) that are served."""
        room = storage - weights[tries].sum(axis=1)
        part = filled(value[every, tries], size[every, tries], np.maximum(room, 0.0))
        gain = (part * value[every, tries]).sum(axis=1) - fixed[tries].sum(axis=1)
        return np.where(room >= 0, gain, -np.inf), part

    def neighbours() -> Ints:
        single = np.tile(taken, (types, width, 1))
        single[every, :, every] = np.arange(width)
        found = [single.reshape(-1, types)]
        if (types * width) ** 2 <= PAIRS:
            both = np.tile(found[0], (types, width, 1, 1))
            both[every, :, :, every] = np.arange(width)[None, :, None]
            found.append(both.reshape(-1, types))
        return np.concatenate(found)

    gain, part = judged(taken[None])
    for _ in range(ROUNDS):
        tries = neighbours()
        gains, parts = judged(tries)
        best = int(gains.argmax())
        if gains[best] <= gain[0] + 1e-9:
            break
        taken, gain, part = tries[best], gains[best, None], parts[best, None]
    return taken, np.asarray(part[0] * most[every, taken], dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Split:
    """Query types served by one option and each other one together, at least cost: arrays (I, O).

    :ivar linear: dollars of the whole type, served so.
    :ivar share: the other option's part.
    :ivar most: the share that can be served so; 0 where two are not better than one.
    :ivar whole: dollars with the storing of both models and the penalty; without end where it cannot be.
    """

    linear: Floats
    share: Floats
    most: Floats
    whole: Floats


@dataclasses.dataclass(frozen=True)
class Routing:
    """What each type is served by: a way (I,) and a share (I,), with the total in dollars."""

    taken: Ints
    shares: Floats
    total: float


@dataclasses.dataclass(frozen=True)
class Ways:
    """The W ways to serve a type with a set of options.

    :ivar chosen: the set. :ivar pairs: for each way the places in it of its two options; equal for one, -1 for none.
    :ivar linear: (I, W) dollars of the whole type. :ivar most: (I, W) the largest share that can be served so.
    :ivar shares: (I, W) the second option's part. :ivar fixed, weights: (W,) dollars and GB of the models stored.
    """

    chosen: Sequence[int]
    pairs: list[tuple[int, int]]
    linear: Floats
    most: Floats
    shares: Floats
    fixed: Floats
    weights: Floats

    @property
    def possible(self) -> Bools:
        """Return (I, W) whether a way serves anything, or is the one that need not."""
        found = self.most > NOTHING
        found[:, 0] = True
        return found

    def parts(self, i: int, way: int) -> list[tuple[int, float]]:
        """Return the options of a way, with their parts of what it serves of a type."""
        a, b = self.pairs[way]
        if a < 0:
            return []
        if a == b:
            return [(self.chosen[a], 1.0)]
        return [(self.chosen[b], float(self.shares[i, way])), (self.chosen[a], 1 - float(self.shares[i, way]))]
