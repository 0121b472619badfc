"""Look-ahead transport: a linear program over the next slots, with a price on switching. The paper has no such rival.

Where TORTA trains a policy to follow optimal transport smoothly, this says so in a linear program: the capped form of
transport (transport.py) for each slot of a forecast, and a cost for each task by which a region's inflow rises from a
slot to the next, since a rise is what makes workers start and load contexts.
What does not live here: the forecast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ctxflow.installing import how_to_install
from ctxflow.policies.routing.arrays import Floats, amounts, prices, shares_of
from ctxflow.policies.routing.transport import balanced, capped, fallback

OVERFULL = 100.0
"""The price of a task beyond capacity, in units of the dearest cost: nothing is worth it if it can be helped."""


def lookahead(
    demand: npt.ArrayLike,
    capacity: npt.ArrayLike,
    cost: npt.ArrayLike,
    before: npt.ArrayLike,
    switching: float = 1.0,
) -> Floats:
    """Which share of each region's tasks goes to which region in the first slot.

    Guarantees: (R, R) shares, every row on the simplex; a region without capacity gets nothing if another has some;
    if the demand of a slot is more than all capacity, all regions may be overfull by the same factor. Without
    switching costs the first slot costs what `transport.capped` costs, which also stands in if the solver fails.

    :param demand: (H, R) tasks of the coming slots, the first of which is decided.
    :param capacity: (R,) tasks that each region takes in a slot.
    :param cost: (R, R) of a task of row i in column j.
    :param before: (R,) tasks that each region got in the last slot.
    :param switching: cost of each task by which a region's inflow rises, in the unit of `cost`; above a hundred times
        the dearest cost it is that.
    :raises ModuleNotFoundError: without SciPy or POT, saying what to install.

    >>> cost = [[0.1, 0.3], [0.3, 0.2]]
    >>> lookahead([[8, 0], [8, 0]], [10, 10], cost, before=[0, 8], switching=0.0)
    array([[1., 0.],
           [0., 1.]])
    >>> lookahead([[8, 0], [8, 0]], [10, 10], cost, before=[0, 8], switching=1.0)
    array([[0., 1.],
           [0., 1.]])
    """
    wanted, possible, dear = np.atleast_2d(amounts(demand)), amounts(capacity), prices(cost)
    alive = np.flatnonzero(possible > 0)
    asking = np.flatnonzero(wanted.any(axis=0))
    if not len(alive) or not wanted[0].any():
        return balanced(wanted[0], possible, dear)
    unit = max(float(wanted.max()), float(possible.max()))
    span = float(np.abs(dear).max()) or 1.0
    flows = _solve(
        wanted[:, asking] / unit,
        possible[alive] / unit,
        dear[np.ix_(asking, alive)] / span,
        np.minimum(amounts(before)[alive], wanted.sum(axis=1).max()) / unit,
        min(float(amounts(switching)) / span, OVERFULL),
    )
    if flows is None:
        return capped(wanted[0], possible, dear)
    all_flows = np.zeros_like(dear)
    all_flows[np.ix_(asking, alive)] = flows
    all_flows[wanted[0] <= 0] = 0.0
    return shares_of(all_flows, fallback(possible, dear))


def _solve(demand: Floats, capacity: Floats, cost: Floats, before: Floats, switching: float) -> Floats | None:
    """The first slot's flows, None if the solver failed. Variables: flows (H, I, J), rises (H, J), overfull (H,)."""
    linprog, sparse = needs_scipy()
    slots, origins = demand.shape
    regions = len(capacity)
    flows, rises = slots * origins * regions, slots * regions
    each_slot = sparse.eye(slots)
    leaving = sparse.kron(sparse.eye(slots * origins), np.ones((1, regions)))
    arriving = sparse.kron(each_slot, sparse.kron(np.ones((1, origins)), sparse.eye(regions)))
    step = sparse.kron(each_slot - sparse.eye(slots, k=-1), sparse.kron(np.ones((1, origins)), sparse.eye(regions)))
    room = sparse.kron(each_slot, -capacity[:, None])
    upper = sparse.bmat(
        [[arriving, sparse.csr_matrix((rises, rises)), room], [step, -sparse.eye(rises), None]], format="csr"
    )
    limits = np.concatenate([np.tile(capacity, slots), before, np.zeros(rises - regions)])
    equal = sparse.hstack([leaving, sparse.csr_matrix((slots * origins, rises + slots))], format="csr")
    objective = np.concatenate(
        [np.tile(cost.ravel(), slots), np.full(rises, switching), np.full(slots, OVERFULL * capacity.sum())]
    )
    found = linprog(objective, A_ub=upper, b_ub=limits, A_eq=equal, b_eq=demand.ravel(), method="highs-ds")
    if found.status != 0:
        return None
    first = np.asarray(found.x[: flows // slots], dtype=np.float64).reshape(origins, regions)
    return np.where(first > 1e-10, first, 0.0)


def needs_scipy() -> tuple[Any, Any]:
    """SciPy's `linprog` and `sparse`.

    :raises ModuleNotFoundError: saying what to install.
    """
    try:
        from scipy import sparse
        from scipy.optimize import linprog
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"the look-ahead needs SciPy: {how_to_install('scipy', extra='policies')}") from None
    return linprog, sparse
