"""Which share of each region's tasks goes to which region: optimal transport (TORTA, Eq. 2), solved exactly.

Two forms. `balanced` is the paper's: demand and capacity are both scaled to one, so that every region gets its share
of the capacity's total whatever it costs. There the price of power is inert: it adds the same to every plan. `capped`
moves the demand itself, with capacity as an upper bound only, so that cheap regions fill first.
What does not live here: the costs of switching from slot to slot (lookahead.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ctxflow.installing import how_to_install
from ctxflow.policies.routing.arrays import Floats, Ints, amounts, prices, shares_of

DUST = 1e-12  # Flows under this share of all are rounding.


def costs(
    power_price: npt.ArrayLike,
    latency: npt.ArrayLike,
    transfer: npt.ArrayLike = 0.0,
    power_weight: float = 1.0,
    network_weight: float = 0.1,
) -> Floats:
    """What it costs to serve a task of region i in region j: w1 * PowerCost_j + w2 * (L_ij + BandwidthCost_ij).

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
    """Eq. 2 as printed: the flows of least cost between demand and capacity, both scaled to one.

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
    wanted, possible, dear = amounts(demand), amounts(capacity), prices(cost)
    otherwise = fallback(possible, dear)
    if not wanted.any() or not possible.any():
        return shares_of(np.zeros_like(dear), otherwise)
    return shares_of(_flows(_scaled(wanted), _scaled(possible), dear), otherwise)


def capped(demand: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike) -> Floats:
    """Eq. 2 with capacity as an upper bound: the flows of least cost that serve the demand.

    Guarantees: as `balanced`, but a column takes at most its capacity; only if the demand is more than all capacity
    together are all regions overfull, by the same factor, which is `balanced`.

    >>> capped([4, 4], [9, 9], [[0.1, 0.9], [0.2, 0.8]])
    array([[1., 0.],
           [1., 0.]])
    """
    wanted, possible, dear = amounts(demand), amounts(capacity), prices(cost)
    if not wanted.any() or not possible.any():
        return balanced(wanted, possible, dear)
    spare = possible.sum() - wanted.sum()
    if spare <= 0:
        return balanced(wanted, possible, dear)
    sources = np.append(wanted, spare) / possible.sum()
    unused = np.vstack([dear, np.zeros((1, len(possible)))])
    flows = _flows(sources, possible / possible.sum(), unused)[:-1]
    return shares_of(flows, fallback(possible, dear))


def fallback(capacity: Floats, cost: Floats) -> Ints:
    """(R,) where a region's tasks go if nothing else is known: home, or where there is capacity at the least cost.

    >>> fallback(np.array([1.0, 0.0, 1.0]), np.array([[0.0, 1, 2], [3, 0, 2], [1, 1, 0]])).tolist()
    [0, 2, 2]
    """
    home = np.arange(len(capacity))
    if not (capacity > 0).any():
        return home
    nearest = np.where(capacity[None, :] > 0, cost, np.inf).argmin(axis=1)
    return np.asarray(np.where(capacity > 0, home, nearest), dtype=np.int64)


def whole(shares: npt.ArrayLike, counts: npt.ArrayLike) -> Ints:
    """How many of each region's tasks go where: shares made whole by largest remainders.

    The paper draws a region for each task; this has the same mean, and the least variance.

    :param shares: (R, R) rows on the simplex.
    :param counts: (R,) tasks of each region; what is negative or not a number counts as none.

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
    """The exact solution; both sides add up to one."""
    span = float(np.abs(cost).max(initial=0.0)) or 1.0
    flows = _solver().emd(sources, sinks * (sources.sum() / sinks.sum()), np.ascontiguousarray(cost / span))
    return np.where(flows > DUST, flows, 0.0)


def _solver() -> Any:
    try:
        import ot
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"optimal transport needs POT: {how_to_install('POT', extra='policies')}") from None
    return ot
