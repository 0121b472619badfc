"""The macro layer as a live run and a simulation use it: which share of each region's demand goes where, once a slot.

What lives here: the one interface, `Allocate`, and the forms that need no training. What does not: the algorithms
(transport.py, lookahead.py), and who is asked (macro.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ctxflow.policies.routing.arrays import Floats
from ctxflow.policies.routing.lookahead import lookahead
from ctxflow.policies.routing.transport import capped


class Allocate(Protocol):
    """A form of the macro layer."""

    def __call__(self, demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
        """The shares of the first slot.

        :param demand: (H, R) of the coming slots, the first of which is decided.
        :param capacity: (R,) what each region can take in a slot, in the demand's unit.
        :param costs: (R, R) of a unit of row i in column j.
        :param previous: (R, R) the shares of the last slot, None if there was none.
        :returns: (R, R) shares; every row is on the simplex.
        """


def by_transport(demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
    """Optimal transport of the first slot's demand, with capacity as an upper bound; what was before does not count.

    >>> by_transport(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), None)
    array([[0., 1.],
           [0., 1.]])
    """
    return capped(demand[0], capacity, costs)


def by_lookahead(demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
    """Transport over all slots of the forecast; a unit by which a region's inflow rises costs as much as the dearest.

    >>> stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> by_lookahead(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), stay)[0]
    array([1., 0.])
    """
    if previous is None:
        return capped(demand[0], capacity, costs)
    return lookahead(demand, capacity, costs, before=previous.T @ demand[0], switching=float(np.abs(costs).max()))


FORMS: dict[str, Allocate] = {
    "transport": by_transport,
    "lookahead": by_lookahead,
}
"""The forms that can be chosen by name."""
