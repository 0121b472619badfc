"""What TORTA's functions compute with: numbers made fit for use whatever they hold, and a region's servers and tasks.

A region is a row or a column; times are seconds. *Server* and *task* are the paper's words for a worker and for a call
that waits for one. Compute and memory are in any units that are the same for both, such as TFLOP/s and GB.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


LARGEST = 1e100
"""What is beyond it is taken for infinite, and what is below its inverse for nothing: so no ratio of two overflows."""


def amounts(values: npt.ArrayLike) -> Floats:
    """Return amounts that can be counted on: what is negative, infinite or not a number is nothing.

    >>> amounts([2, -1, float("nan"), float("inf")])
    array([2., 0., 0., 0.])
    """
    given = np.asarray(values, dtype=np.float64)
    return np.where((given >= 1 / LARGEST) & (given <= LARGEST), given, 0.0)


def prices(values: npt.ArrayLike) -> Floats:
    """Return costs that can be compared: one that is unknown or infinite is dearer than all the others together.

    >>> prices([1.0, -2.0, float("nan")])
    array([ 1., -2.,  4.])
    """
    given = np.asarray(values, dtype=np.float64)
    known = np.abs(given) <= LARGEST
    if known.all():
        return given
    return np.where(known, given, 1.0 + np.abs(np.where(known, given, 0.0)).sum())


def shares_of(flows: npt.ArrayLike, otherwise: npt.ArrayLike) -> Floats:
    """Return each row's flows as shares of the row, on the simplex.

    :param flows: (R, R) from row to column.
    :param otherwise: (R,) the column that gets all of a row from which nothing flows.

    >>> shares_of([[1.0, 3.0], [0.0, 0.0]], [0, 1])
    array([[0.25, 0.75],
           [0.  , 1.  ]])
    """
    known = amounts(flows)
    largest = known.max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(known, largest, out=np.zeros_like(known), where=largest > 0)
    empty = np.flatnonzero(largest[:, 0] <= 0)
    scaled[empty, np.asarray(otherwise, dtype=np.int64)[empty]] = 1.0
    return np.asarray(scaled / scaled.sum(axis=1, keepdims=True), dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Servers:
    """S servers of one region.

    :ivar compute: (S,) what each can compute.
    :ivar memory: (S,) of its GPU.
    :ivar capacity: (S,) tasks that it is made for, running and waiting.
    :ivar used: (S,) the work it has under way, in tasks.
    :ivar queue: (S,) tasks that wait on it.
    :ivar places: (S,) tasks that it may still be given.
    :ivar suits: (S, K) whether its architecture is the right one for a type of task.
    """

    compute: Floats
    memory: Floats
    capacity: Floats
    used: Floats
    queue: Floats
    places: Ints
    suits: Bools


@dataclasses.dataclass(frozen=True)
class Tasks:
    """N tasks.

    :ivar compute: (N,) what each asks for.
    :ivar memory: (N,) what it needs of a GPU.
    :ivar kind: (N,) its type, a column of `Servers.suits`.
    :ivar model: (N,) the number of its model, or context.
    :ivar deadline: (N,) when its result is wanted; infinite for never.
    :ivar work: (N,) what it adds to the work of a server, in tasks.
    :ivar embedding: (N, D) of its input, None if the app gives none.
    """

    compute: Floats
    memory: Floats
    kind: Ints
    model: Ints
    deadline: Floats
    work: Floats
    embedding: Floats | None = None


@dataclasses.dataclass(frozen=True)
class Recent:
    """M tasks that ran lately: who holds what.

    :ivar server: (M,) where.
    :ivar model: (M,) which model.
    :ivar time: (M,) when, in seconds.
    :ivar embedding: (M, D) of their inputs, None if they had none.
    """

    server: Ints
    model: Ints
    time: Floats
    embedding: Floats | None = None
