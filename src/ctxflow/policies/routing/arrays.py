"""What the functions of this room compute with: arrays, made fit for use whatever they hold.

A region is a row or a column; times are seconds. What does not live here: any decision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


LARGEST = 1e100
"""What is beyond it is taken for infinite, and what is below its inverse for nothing: so no ratio of two overflows."""


def amounts(values: npt.ArrayLike) -> Floats:
    """Amounts that can be counted on: what is negative, infinite or not a number is nothing.

    >>> amounts([2, -1, float("nan"), float("inf")])
    array([2., 0., 0., 0.])
    """
    given = np.asarray(values, dtype=np.float64)
    return np.where((given >= 1 / LARGEST) & (given <= LARGEST), given, 0.0)


def prices(values: npt.ArrayLike) -> Floats:
    """Costs that can be compared: one that is unknown or infinite is dearer than all the others together.

    >>> prices([1.0, -2.0, float("nan")])
    array([ 1., -2.,  4.])
    """
    given = np.asarray(values, dtype=np.float64)
    known = np.abs(given) <= LARGEST
    if known.all():
        return given
    return np.where(known, given, 1.0 + np.abs(np.where(known, given, 0.0)).sum())


def shares_of(flows: npt.ArrayLike, otherwise: npt.ArrayLike) -> Floats:
    """Each row's flows as shares of the row, on the simplex.

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
