"""Which share of each region's tasks goes to which region: optimal transport (TORTA, Eq. 2), solved exactly.

`balanced` is the paper's form, `capped` has capacity as an upper bound only, so that cheap regions fill first, and
`lookahead` (not the paper's) is a linear program over the slots of a forecast that prices changes between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ctxflow.installing import how_to_install
from ctxflow.policies.helpers import scipy_modules
from ctxflow.policies.torta.quantities import Floats, Ints, amounts, prices, shares_of

DUST = 1e-12  # Flows under this share of all are rounding.


def costs(
    power_price: npt.ArrayLike,
    latency: npt.ArrayLike,
    transfer: npt.ArrayLike = 0.0,
    power_weight: float = 1.0,
    network_weight: float = 0.1,
) -> Floats:
    """Return what it costs to serve a task of region i in region j: w1 * PowerCost_j + w2 * (L_ij + BandwidthCost_ij).

    The paper says that w1 is far above w2 and prints neither; these are ours.

    :param power_price: (R,) of each region, in any unit.
    :param latency: (R, R) seconds, or in any unit.
    :param transfer: (R, R) the paper's BandwidthCost, in the latency's unit.

    >>> costs([0.1, 0.3], [[0.0, 1.0], [1.0, 0.0]]).round(3).tolist()
    [[0.1, 0.4], [0.2, 0.3]]
    """
    power = prices(power_price)[None, :]
    network = prices(np.asarray(latency, dtype=np.float64) + np.asarray(transfer, dtype=np.float64))
    return np.asarray(power_weight * power + network_weight * network, dtype=np.float64)


def balanced(demand: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike) -> Floats:
    """Compute Eq. 2 as printed: the flows of least cost between demand and capacity, both scaled to one.

    Every region gets its share of the capacity's total whatever it costs, so the price of power has no effect.

    Guarantees: (R, R) shares; every row is on the simplex; with demand and capacity somewhere, the columns weighted by
    demand are the shares of the capacity. A region without capacity gets nothing if another has some. A row without
    demand keeps its tasks at home, or in the cheapest region with capacity where there is none at home.

    :param demand: (R,) tasks of each region; what is negative or not a number counts as none.
    :param capacity: (R,) tasks that each region can take.
    :param cost: (R, R) of a task of row i in column j.
    :raises ModuleNotFoundError: without POT, saying what to install.

    >>> balanced([4, 4], [1, 3], [[0.0, 1.0], [1.0, 0.0]])
    array([[0.5, 0.5],
           [0. , 1. ]])
    """
    wanted, possible, priced = amounts(demand), amounts(capacity), prices(cost)
    otherwise = fallback(possible, priced)
    if not wanted.any() or not possible.any():
        return shares_of(np.zeros_like(priced), otherwise)
    return shares_of(_flows(_scaled(wanted), _scaled(possible), priced), otherwise)


def capped(demand: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike) -> Floats:
    """Compute Eq. 2 with capacity as an upper bound: the flows of least cost that serve the demand.

    Guarantees: as `balanced`, but a column takes at most its capacity; only if the demand is more than all capacity
    together are all regions overfull, by the same factor, which is `balanced`.

    >>> capped([4, 4], [9, 9], [[0.1, 0.9], [0.2, 0.8]])
    array([[1., 0.],
           [1., 0.]])
    """
    wanted, possible, priced = amounts(demand), amounts(capacity), prices(cost)
    if not wanted.any() or not possible.any():
        return balanced(wanted, possible, priced)
    spare = possible.sum() - wanted.sum()
    if spare <= 0:
        return balanced(wanted, possible, priced)
    sources = np.append(wanted, spare) / possible.sum()
    unused = np.vstack([priced, np.zeros((1, len(possible)))])
    flows = _flows(sources, possible / possible.sum(), unused)[:-1]
    return shares_of(flows, fallback(possible, priced))


def fallback(capacity: Floats, cost: Floats) -> Ints:
    """Return (R,) where a region's tasks go by default: home, or where there is capacity at the least cost.

    >>> fallback(np.array([1.0, 0.0, 1.0]), np.array([[0.0, 1, 2], [3, 0, 2], [1, 1, 0]])).tolist()
    [0, 2, 2]
    """
    home = np.arange(len(capacity))
    if not (capacity > 0).any():
        return home
    nearest = np.where(capacity[None, :] > 0, cost, np.inf).argmin(axis=1)
    return np.asarray(np.where(capacity > 0, home, nearest), dtype=np.int64)


def whole(shares: npt.ArrayLike, counts: npt.ArrayLike) -> Ints:
    """Return how many of each region's tasks go where: shares made whole by largest remainders.

    The paper draws a region for each task; this has the same mean, and the least variance.

    :param shares: (R, R) rows on the simplex. :param counts: (R,) tasks of each region.

    >>> whole([[0.5, 0.5], [0.1, 0.9]], [3, 10]).tolist()
    [[2, 1], [1, 9]]
    """
    there = np.floor(amounts(counts))
    exact = amounts(shares) * there[:, None]
    lower = np.floor(exact + 1e-9)
    missing = (there - lower.sum(axis=1)).astype(np.int64)
    order = np.argsort(-(exact - lower), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(exact.shape[1])[None, :].repeat(len(exact), axis=0), axis=1)
    return np.asarray(lower + (rank < missing[:, None]), dtype=np.int64)


def _scaled(values: Floats) -> Floats:
    scaled = values / values.max()
    return np.asarray(scaled / scaled.sum(), dtype=np.float64)


def _flows(sources: Floats, sinks: Floats, cost: Floats) -> Floats:
    """Return the exact solution; both sides add up to one."""
    try:
        import ot
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"optimal transport needs POT: {how_to_install('POT', extra='policies')}") from None
    span = float(np.abs(cost).max(initial=0.0)) or 1.0
    flows = ot.emd(sources, sinks * (sources.sum() / sinks.sum()), np.ascontiguousarray(cost / span))
    return np.where(flows > DUST, flows, 0.0)


OVERFULL = 100.0  # The price of a task beyond capacity, in units of the dearest cost.


def lookahead(
    demand: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike, before: npt.ArrayLike, switching: float = 1.0
) -> Floats:
    """Return which share of each region's tasks goes to which region in the first slot.

    The program is the capped form for each slot, and a cost for each task by which a region's inflow rises from one
    slot to the next, since a rise makes workers start and load contexts.

    Guarantees: (R, R) shares, every row on the simplex; a region without capacity gets nothing if another has some;
    if the demand of a slot is more than all capacity, all regions may be overfull by the same factor. Without
    switching costs the first slot costs what `transport.capped` costs, which also stands in if the solver fails.

    :param demand: (H, R) tasks of the coming slots, the first of which is decided.
    :param capacity: (R,) tasks that each region takes in a slot.
    :param cost: (R, R) of a task of row i in column j.
    :param before: (R,) tasks that each region got in the last slot.
    :param switching: cost of a task of rise, in the unit of `cost`, at most a hundred times the dearest cost.
    :raises ModuleNotFoundError: without SciPy or POT, saying what to install.

    >>> cost = [[0.1, 0.3], [0.3, 0.2]]
    >>> lookahead([[8, 0], [8, 0]], [10, 10], cost, before=[0, 8], switching=0.0)
    array([[1., 0.],
           [0., 1.]])
    >>> lookahead([[8, 0], [8, 0]], [10, 10], cost, before=[0, 8], switching=1.0)
    array([[0., 1.],
           [0., 1.]])
    """
    wanted, possible, priced = np.atleast_2d(amounts(demand)), amounts(capacity), prices(cost)
    alive = np.flatnonzero(possible > 0)
    asking = np.flatnonzero(wanted.any(axis=0))
    if not len(alive) or not wanted[0].any():
        return balanced(wanted[0], possible, priced)
    unit = max(float(wanted.max()), float(possible.max()))
    span = float(np.abs(priced).max()) or 1.0
    flows = _solve(
        wanted[:, asking] / unit,
        possible[alive] / unit,
        priced[np.ix_(asking, alive)] / span,
        np.minimum(amounts(before)[alive], wanted.sum(axis=1).max()) / unit,
        min(float(amounts(switching)) / span, OVERFULL),
    )
    if flows is None:
        return capped(wanted[0], possible, priced)
    all_flows = np.zeros_like(priced)
    all_flows[np.ix_(asking, alive)] = flows
    all_flows[wanted[0] <= 0] = 0.0
    return shares_of(all_flows, fallback(possible, priced))


def _solve(demand: Floats, capacity: Floats, cost: Floats, before: Floats, switching: float) -> Floats | None:
    """Return the first slot's flows, None if it failed; variables: flows (H, I, J), rises (H, J), overfull (H,)."""
    optimize, sparse = needs_scipy()
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
    found = optimize.linprog(objective, A_ub=upper, b_ub=limits, A_eq=equal, b_eq=demand.ravel(), method="highs-ds")
    if found.status != 0:
        return None
    first = np.asarray(found.x[: flows // slots], dtype=np.float64).reshape(origins, regions)
    return np.where(first > 1e-10, first, 0.0)


def needs_scipy() -> list[Any]:
    """Return SciPy's `optimize` and `sparse`; raise ModuleNotFoundError, saying what to install, without SciPy."""
    return scipy_modules("the look-ahead needs", "optimize", "sparse")
