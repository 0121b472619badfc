"""TORTA's macro layer: which share of each region's demand goes where, once a slot (the algorithms: `transport`).

First its one interface, `Allocate`, and its forms; then the layer on a live view, where demand and capacity are seconds
of work. Items come from the regions that their apps name, else from the home region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ctxflow.policies.protocols import View
from ctxflow.policies.torta.quantities import Floats, Ints, Outlook, amounts, prices, shares_of
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

    Where one region alone has demand, as in a live run, it fills the cheapest regions first, without a solver.

    >>> by_transport(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), None)
    array([[0., 1.],
           [0., 1.]])
    """
    origins = np.flatnonzero(amounts(demand[0]))
    return _from_one(demand[0], capacity, costs, origins) if len(origins) < 2 else capped(demand[0], capacity, costs)


def _from_one(demand: Floats, capacity: Floats, costs: Floats, origins: Ints) -> Floats:
    """Return what `transport.capped` gives for the demand of one region, or of none."""
    possible, priced = amounts(capacity), prices(costs)
    flows = np.zeros_like(priced)
    for origin in origins.tolist():
        order = np.argsort(priced[origin], kind="stable")
        filled = np.minimum(np.cumsum(possible[order]), demand[origin])
        # More than all can take is shared out by what each can.
        full = demand[origin] >= possible.sum()
        flows[origin, order] = possible[order] if full else np.diff(filled, prepend=0.0)
    return shares_of(flows, fallback(possible, priced))


def by_lookahead(demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
    """Return transport over all slots of the forecast; a unit of rising inflow costs as much as the dearest.

    >>> stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> by_lookahead(np.array([[8.0, 0.0]]), np.array([9.0, 9.0]), np.array([[0.2, 0.1], [0.3, 0.1]]), stay)[0]
    array([1., 0.])
    """
    if previous is None:
        return by_transport(demand, capacity, costs, None)
    return lookahead(
        demand, capacity, costs, before=previous.T @ amounts(demand[0]), switching=float(prices(costs).max(initial=0.0))
    )


FORMS: dict[str, Allocate] = {"transport": by_transport, "lookahead": by_lookahead}


def form(name: str) -> Allocate:
    """Return a form by its name, one of `FORMS`.

    :raises ValueError: for an unknown one.
    :raises ModuleNotFoundError: if it needs a package that is not installed, saying what to install.
    """
    if name not in FORMS:
        raise ValueError(f"macro cannot be {name!r}: write one of {', '.join(FORMS)}")
    if name == "lookahead":
        needs_scipy()
    return FORMS[name]


CALL_BYTES = 1e6  # Of a call's way there and back.
HORIZON = 4  # Slots of the look-ahead.


class Macro:
    """The shares of regions, of the work of each region, kept for a slot, or until a region comes or goes."""

    def __init__(self, allocate: Allocate, slot_seconds: float) -> None:
        self._allocate = allocate
        self._slot_seconds = slot_seconds
        self._until = -math.inf
        self._regions: list[str] = []
        self._home = ""
        self._shares: dict[str, dict[str, float]] | None = None
        self._previous: Floats | None = None
        self._given: dict[str, dict[str, int]] = {}

    def divide(self, view: View, outlook: Outlook) -> None:
        """Divide the work, once a slot.

        It may go anywhere with one region, while an app's speed is unknown, and while every worker of all regions is
        needed.
        """
        if len(view.regions) < 2:
            self._shares = None
            return
        regions = sorted(outlook.slots)
        if view.now >= self._until or regions != self._regions:
            self._until, self._regions, self._given = view.now + self._slot_seconds, regions, {}
            self._shares = self._divided(view, outlook)

    def shares(self, origin: str = "") -> Mapping[str, float] | None:
        """Return region -> share of the work of a region, "" for the home region; None where it may go anywhere."""
        if self._shares is None:
            return None
        return self._shares.get(origin) or self._shares[self._home]

    @property
    def divides(self) -> bool:
        """Return whether calls are divided among regions now."""
        return self._shares is not None

    def next_region(self, origin: str = "") -> str | None:
        """Return the region of the next call: the one that got least of its share in this slot."""
        shares = self.shares(origin)
        if shares is None:
            return None
        given = self._given.get(origin, {})
        total = sum(given.values()) + 1
        return max(shares, key=lambda region: shares[region] * total - given.get(region, 0))

    def gave(self, origin: str, region: str) -> None:
        """Note that a call of a region went to another."""
        if self._shares is not None:
            given = self._given.setdefault(origin, {})
            given[region] = given.get(region, 0) + 1

    def _divided(self, view: View, outlook: Outlook) -> dict[str, dict[str, float]] | None:
        regions = list(view.regions.values())
        self._home = next((region.name for region in regions if region.home), regions[0].name)
        demand = work_seconds(view, outlook, self._slot_seconds, self._home)
        capacity = np.array([outlook.slots[region.name] * self._slot_seconds for region in regions])
        if demand is None or not capacity.any() or demand[0].sum() >= capacity.sum():
            self._previous = None
            return None
        prices = region_costs(regions)
        matrix = _valid(self._allocate(demand, capacity, prices, self._previous), capacity, prices)
        self._previous = matrix
        names = [region.name for region in regions]
        return {name: dict(zip(names, row, strict=True)) for name, row in zip(names, matrix.tolist(), strict=True)}


def work_seconds(view: View, outlook: Outlook, slot_seconds: float, home: str) -> Floats | None:
    """Return (HORIZON, R) seconds of work of the coming slots, None where an app's speed is unknown.

    What is queued counts in the first, what is forecast in each.
    """
    forecast = view.forecast or {}
    number = {name: place for place, name in enumerate(view.regions)}
    demand = np.zeros((HORIZON, len(number)))
    for app in view.apps.values():
        expected = float(amounts(forecast.get(app.id, 0.0)))
        if app.backlog <= 0 and expected <= 0:
            continue
        seconds = outlook.item_seconds(app)
        if seconds is None:
            return None
        origin = number[app.region if app.region in number else home]
        demand[0, origin] += max(app.backlog, 0) * seconds
        demand[:, origin] += expected * slot_seconds * seconds
    return demand


def region_costs(regions: Sequence[RegionView]) -> Floats:
    """Return (R, R) what work of a region costs in another; what the site does not say is above what it says."""
    network = np.array([[_seconds(origin, target) for target in regions] for origin in regions])
    power = np.array([math.nan if region.power_price is None else region.power_price for region in regions])
    return costs(power, network)


def _seconds(origin: RegionView, target: RegionView) -> float:
    """Return the seconds of a call's way between two regions, NaN if the site does not say."""
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
