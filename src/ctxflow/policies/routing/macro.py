"""TORTA's macro layer on a live view: once a slot, which share of the work goes to which region.

Demand and capacity are in seconds of work: what is queued and what is forecast for the slot, beside the slots of each
region's workers. All items come from the region where the driver is. What does not live here: the forms of allocation
(allocation.py), and which worker takes what (torta.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ctxflow.policies.protocols import View
from ctxflow.policies.routing.allocation import Allocate
from ctxflow.policies.routing.arrays import Floats, amounts
from ctxflow.policies.routing.outlook import Outlook
from ctxflow.policies.routing.transport import costs, fallback
from ctxflow.policies.views import RegionView

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
        """Region -> share of the work; None where it may go anywhere.

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
        """Whether calls are divided among regions now."""
        return self._shares is not None

    def next_region(self) -> str | None:
        """The region that the next call goes to, by who got least of its share in this slot."""
        if self._shares is None:
            return None
        total = sum(self._given.values()) + 1
        return max(self._shares, key=lambda region: self._shares[region] * total - self._given.get(region, 0))  # type: ignore[index]

    def gave(self, region: str) -> None:
        """A call went to a region."""
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
    """(HORIZON,) seconds of work of the coming slots: what is queued counts in the first, what is forecast in each.

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
    """(R, R) what work of a region costs in another; what the site does not say is dearer than what it says."""
    network = np.array([[_seconds(origin, target) for target in regions] for origin in regions])
    power = np.array([math.nan if region.power_price is None else region.power_price for region in regions])
    return costs(power, network)


def _seconds(origin: RegionView, target: RegionView) -> float:
    """What a call's way between two regions takes, NaN if the site does not say."""
    if origin.name == target.name:
        return 0.0
    latency, bandwidth = origin.latency.get(target.name), origin.bandwidth.get(target.name)
    if latency is None and bandwidth is None:
        return math.nan
    return (latency or 0.0) + (CALL_BYTES / bandwidth if bandwidth else 0.0)


def _valid(matrix: Floats, capacity: Floats, prices: Floats) -> Floats:
    """A form's answer if every row of it is on the simplex, else each region's nearest with capacity."""
    regions = len(capacity)
    given = np.asarray(matrix, dtype=np.float64)
    fine = given.shape == (regions, regions) and np.isfinite(given).all() and (given >= -1e-9).all()
    if fine and np.allclose(given.sum(axis=1), 1.0, atol=1e-6):
        return np.maximum(given, 0.0)
    return np.asarray(np.eye(regions)[fallback(amounts(capacity), prices)], dtype=np.float64)
