"""The macro layer as a live run and a simulation use it: which share of each region's demand goes where, once a slot.

What lives here: the one interface, `Allocate`, and the forms that need no training. What does not: the algorithms
(transport.py, lookahead.py), and who is asked (macro.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ctxflow.policies.routing.arrays import Floats, Ints, amounts, prices, shares_of
from ctxflow.policies.routing.gating import ByNetworks
from ctxflow.policies.routing.lookahead import lookahead, needs_scipy
from ctxflow.policies.routing.networks import read
from ctxflow.policies.routing.transport import capped, fallback


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

    Where one region alone has demand, as in a live run, it fills the cheapest regions first, without a solver.

    >>> by_transport(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), None)
    array([[0., 1.],
           [0., 1.]])
    """
    origins = np.flatnonzero(amounts(demand[0]))
    return _from_one(demand[0], capacity, costs, origins) if len(origins) < 2 else capped(demand[0], capacity, costs)


def _from_one(demand: Floats, capacity: Floats, costs: Floats, origins: Ints) -> Floats:
    """What `transport.capped` gives for the demand of one region, or of none."""
    possible, dear = amounts(capacity), prices(costs)
    flows = np.zeros_like(dear)
    for origin in origins.tolist():
        order = np.argsort(dear[origin], kind="stable")
        filled = np.minimum(np.cumsum(possible[order]), demand[origin])
        # More than all can take is shared out by what each can.
        full = demand[origin] >= possible.sum()
        flows[origin, order] = possible[order] if full else np.diff(filled, prepend=0.0)
    return shares_of(flows, fallback(possible, dear))


def by_lookahead(demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
    """Transport over all slots of the forecast; a unit by which a region's inflow rises costs as much as the dearest.

    >>> stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> by_lookahead(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), stay)[0]
    array([1., 0.])
    """
    if previous is None:
        return by_transport(demand, capacity, costs, None)
    return lookahead(
        demand, capacity, costs, before=previous.T @ amounts(demand[0]), switching=float(prices(costs).max(initial=0.0))
    )


FORMS: dict[str, Allocate] = {
    "transport": by_transport,
    "lookahead": by_lookahead,
}
"""The forms that can be chosen by name, beside "trained", which reads its networks from the package."""


def form(name: str) -> Allocate:
    """A form by its name.

    :raises ValueError: for one that there is not.
    :raises CtxflowError: for "trained" without networks.
    :raises ModuleNotFoundError: if it needs a package that is not installed, saying what to install.
    """
    if name == "trained":
        return ByNetworks(read())
    if name not in FORMS:
        raise ValueError(f"macro cannot be {name!r}: write one of {', '.join((*FORMS, 'trained'))}")
    if name == "lookahead":
        needs_scipy()
    return FORMS[name]
