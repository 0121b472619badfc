"""TORTA's macro layer: which share of each region's demand goes where, once a slot.

First its one interface, `Allocate`, and the forms that need no training (the algorithms are in `transport`, the trained
form in `networks`); then the layer on a live view. There demand and capacity are seconds of work: what is queued and
what is forecast for the slot, beside the slots of each region's workers. All items come from the driver's region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ctxflow.policies.protocols import View
from ctxflow.policies.torta.networks import ByNetworks, read
from ctxflow.policies.torta.outlook import Outlook
from ctxflow.policies.torta.quantities import Floats, Ints, amounts, prices, shares_of
from ctxflow.policies.torta.transport import capped, costs, fallback, lookahead, needs_scipy
from ctxflow.policies.views import RegionView


class Allocate(Protocol):
    """A form of the macro layer."""

    def __call__(self, demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
        """Return the shares of the first slot.

        :param demand: (H, R) of the coming slots, the first of which is decided.
        :param capacity: (R,) what each region can take in a slot, in the demand's unit.
        :param costs: (R, R) of a unit of row i in column j.
        :param previous: (R, R) the shares of the last slot, None if there was none.
        :returns: (R, R) shares; every row is on the simplex.
        """


def by_transport(demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
    """Return optimal transport of the first slot's demand, with capacity as an upper bound.

    What was before does not count.

    Where one region alone has demand, as in a live run, it fills the cheapest regions first, without a solver.

    >>> by_transport(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), None)
    array([[0., 1.],
           [0., 1.]])
    """
    origins = np.flatnonzero(amounts(demand[0]))
    return _from_one(demand[0], capacity, costs, origins) if len(origins) < 2 else capped(demand[0], capacity, costs)


def _from_one(demand: Floats, capacity: Floats, costs: Floats, origins: Ints) -> Floats:
    """Return what `transport.capped` gives for the demand of one region, or of none."""
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
    """Return transport over all slots of the forecast.

    A unit by which a region's inflow rises costs as much as the dearest.

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
    """Return a form by its name.

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


CALL_BYTES = 1e6
"""What a call sends and gets back, to weigh bandwidth: a megabyte."""
HORIZON = 4
"""Slots that the look-ahead looks at."""


class Macro:
    """The shares of regions, kept for a slot.

    :param allocate: who divides.
    :param slot_seconds: how long a division holds; a region that comes or goes has it made anew.
    """

    def __init__(self, allocate: Allocate, slot_seconds: float) -> None:
        self._allocate = allocate
        self._slot_seconds = slot_seconds
        self._until = -math.inf
        self._regions: list[str] = []
        self._shares: dict[str, float] | None = None
        self._previous: Floats | None = None
        self._given: dict[str, int] = {}

    def shares(self, view: View, outlook: Outlook) -> Mapping[str, float] | None:
        """Return region -> share of the work; None where it may go anywhere.

        It may go anywhere with one region, while nobody knows how long items take, and while there is as much to do as
        all regions together can: nothing is held back then, since every worker is wanted.
        """
        if len(view.regions) < 2:
            return None
        regions = sorted(outlook.slots)
        if view.now >= self._until or regions != self._regions:
            self._until, self._regions, self._given = view.now + self._slot_seconds, regions, {}
            self._shares = self._divided(view, outlook)
        return self._shares

    @property
    def divides(self) -> bool:
        """Return whether calls are divided among regions now."""
        return self._shares is not None

    def next_region(self) -> str | None:
        """Return the region that the next call goes to, by who got least of its share in this slot."""
        if self._shares is None:
            return None
        total = sum(self._given.values()) + 1
        return max(self._shares, key=lambda region: self._shares[region] * total - self._given.get(region, 0))  # type: ignore[index]

    def gave(self, region: str) -> None:
        """Note that a call went to a region."""
        if self._shares is not None:
            self._given[region] = self._given.get(region, 0) + 1

    def _divided(self, view: View, outlook: Outlook) -> dict[str, float] | None:
        demand, regions = work_seconds(view, outlook, self._slot_seconds), list(view.regions.values())
        capacity = np.array([outlook.slots[region.name] * self._slot_seconds for region in regions])
        if demand is None or not capacity.any() or demand[0] >= capacity.sum():
            self._previous = None
            return None
        home = next((number for number, region in enumerate(regions) if region.home), 0)
        wanted = np.zeros((len(demand), len(regions)))
        wanted[:, home] = demand
        prices = region_costs(regions)
        matrix = _valid(self._allocate(wanted, capacity, prices, self._previous), capacity, prices)
        self._previous = matrix
        return {region.name: float(matrix[home, number]) for number, region in enumerate(regions)}


def work_seconds(view: View, outlook: Outlook, slot_seconds: float) -> Floats | None:
    """Return (HORIZON,) seconds of work of the coming slots.

    What is queued counts in the first, what is forecast in each.

    :returns: None where nobody knows how long an app's items take.
    """
    queued = coming = 0.0
    forecast = view.forecast or {}
    for app in view.apps.values():
        expected = float(amounts(forecast.get(app.id, 0.0)))
        if app.backlog <= 0 and expected <= 0:
            continue
        seconds = outlook.item_seconds(app.id)
        if seconds is None:
            return None
        queued += max(app.backlog, 0) * seconds
        coming += expected * slot_seconds * seconds
    demand = np.full(HORIZON, coming)
    demand[0] += queued
    return demand


def region_costs(regions: Sequence[RegionView]) -> Floats:
    """Return (R, R) what work of a region costs in another; what the site does not say is dearer than what it says."""
    network = np.array([[_seconds(origin, target) for target in regions] for origin in regions])
    power = np.array([math.nan if region.power_price is None else region.power_price for region in regions])
    return costs(power, network)


def _seconds(origin: RegionView, target: RegionView) -> float:
    """Return what a call's way between two regions takes, NaN if the site does not say."""
    if origin.name == target.name:
        return 0.0
    latency, bandwidth = origin.latency.get(target.name), origin.bandwidth.get(target.name)
    if latency is None and bandwidth is None:
        return math.nan
    return (latency or 0.0) + (CALL_BYTES / bandwidth if bandwidth else 0.0)


def _valid(matrix: Floats, capacity: Floats, prices: Floats) -> Floats:
    """Return a form's answer if every row of it is on the simplex, else each region's nearest with capacity."""
    regions = len(capacity)
    given = np.asarray(matrix, dtype=np.float64)
    fine = given.shape == (regions, regions) and np.isfinite(given).all() and (given >= -1e-9).all()
    if fine and np.allclose(given.sum(axis=1), 1.0, atol=1e-6):
        return np.maximum(given, 0.0)
    return np.asarray(np.eye(regions)[fallback(amounts(capacity), prices)], dtype=np.float64)
