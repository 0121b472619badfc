"""TORTA's macro layer: which share of each region's demand goes where, once a slot (the algorithms: `transport`).

First its one interface, `Allocate`, its forms, and the layer on a live view, where demand and capacity are seconds of
work and all items come from the driver's region; then the trained form (section V-B2), with numpy alone.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ctxflow.errors import CtxflowError
from ctxflow.policies.protocols import View
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, Outlook, amounts, prices, shares_of
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
    """Return a form by its name: one of `FORMS`, or "trained", which reads its networks from the package.

    :raises ValueError: for an unknown one.
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


CALL_BYTES = 1e6  # Of a call's way there and back.
HORIZON = 4  # Slots of the look-ahead.


class Macro:
    """The shares of regions, kept for a slot, or until a region comes or goes."""

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

        That is with one region, while an app's speed is unknown, and while every worker of all regions is needed.
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
        """Return the region of the next call: the one that got least of its share in this slot."""
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
    """Return (HORIZON,) seconds of work of the coming slots, None where an app's speed is unknown.

    What is queued counts in the first, what is forecast in each.
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


SHIPPED = "networks.npz"


@dataclasses.dataclass(frozen=True)
class Layers:
    """A perceptron: linear layers with ReLU between them.

    :ivar weights: (in, out) of each layer. :ivar biases: (out,) of each.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, values: Floats) -> Floats:
        """Return (..., in) to (..., out).

        >>> Layers((np.eye(2), np.ones((2, 1))), (np.zeros(2), np.zeros(1)))(np.array([3.0, -1.0])).tolist()
        [3.0]
        """
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight + bias
            if number < len(self.weights) - 1:
                values = np.maximum(values, 0.0)
        return values


@dataclasses.dataclass(frozen=True)
class Networks:
    """The trained networks: of the demand (predictor) and of the allocation (body, head), and how they were trained."""

    predictor: Layers
    body: Layers
    head: Layers
    about: dict[str, object] = dataclasses.field(default_factory=dict)


def read(path: Path | None = None) -> Networks:
    """Read networks, by default those that come with ctxflow; raise CtxflowError if they are missing or damaged."""
    source = path or importlib.resources.files("ctxflow.policies.torta").joinpath(SHIPPED)
    try:
        with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes().decode())
            predictor, body, head = (_layers(arrays, name) for name in ("predictor", "body", "head"))
            return Networks(predictor, body, head, about)
    except FileNotFoundError:
        raise CtxflowError(f"there are no trained networks at {source}: `ctxflow train torta` writes them") from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CtxflowError(f"{source} holds no networks of `ctxflow train torta` ({error})") from None


def _layers(arrays: np.lib.npyio.NpzFile, name: str) -> Layers:
    count = sum(1 for key in arrays.files if key.startswith(f"{name}.") and key.endswith(".weight"))
    if not count:
        raise KeyError(name)
    found = ([arrays[f"{name}.{n}.{what}"].astype(np.float64) for n in range(count)] for what in ("weight", "bias"))
    weights, biases = found
    return Layers(tuple(weights), tuple(biases))


FEATURES = 14
LEAST = 1e-4  # Of transport's share in a column that is there, so that a pull can reach it.
MOST_PULL = 2.0


@dataclasses.dataclass(frozen=True)
class SlotState:
    """What is known before a slot: arrays of one decision, or of several (...).

    :ivar demand: (..., R) tasks of the slot. :ivar ahead: (..., H, R) those expected after it.
    :ivar capacity: (..., R) tasks that a region could do in a slot; 0 for one that has vanished.
    :ivar room: (..., R) what a plan may use of it. :ivar waiting: (..., R) tasks. :ivar price: (..., R) of power.
    :ivar active: (..., R) tasks that the active servers could do.
    :ivar transport: (..., R, R) P*. :ivar before: (..., R, R) A_{t-1}.
    """

    demand: Floats
    ahead: Floats
    capacity: Floats
    room: Floats
    waiting: Floats
    active: Floats
    price: Floats
    transport: Floats
    before: Floats


def features(seen: SlotState) -> Floats:
    """Return (..., R, FEATURES) of each region, all without units."""
    mean = seen.capacity.mean(axis=-1, keepdims=True) + 1e-9
    own = seen.capacity + 0.1 * mean
    planned = np.einsum("...i,...ij->...j", seen.demand, seen.transport)
    kept = np.einsum("...i,...ij->...j", seen.demand, seen.before)
    later = seen.ahead.max(axis=-2)
    apart = np.sqrt(((seen.transport - seen.before) ** 2).sum(axis=-1))
    home = (np.diagonal(each, axis1=-2, axis2=-1) for each in (seen.transport, seen.before))
    price = seen.price / (seen.price.mean(axis=-1, keepdims=True) + 1e-9) - 1.0
    columns = (
        seen.demand / mean, later / mean, seen.capacity / mean, seen.room / own, seen.waiting / own, seen.active / own,
        planned / own, kept / own, apart, price, (later - seen.demand) / mean, np.broadcast_to(
            (seen.demand.sum(axis=-1) / (seen.capacity.sum(axis=-1) + 1e-9))[..., None], apart.shape
        ), *home,
    )  # fmt: skip
    return np.asarray(np.clip(np.nan_to_num(np.stack(columns, axis=-1)), -5.0, 5.0), dtype=np.float64)


def outputs(networks: Networks, seen: SlotState) -> Floats:
    """Return (..., R, 2) the gate and the pull of each region, before `allocated` bounds them."""
    hidden = np.maximum(networks.body(features(seen)), 0.0)
    pooled = np.broadcast_to(hidden.mean(axis=-2, keepdims=True), hidden.shape)
    return networks.head(np.concatenate([hidden, pooled], axis=-1))


def allocated(decided: Floats, seen: SlotState) -> Floats:
    """Return (..., R, R) A_t from gates and pulls (..., R, 2).

    Rows are on the simplex, 0 for a region without capacity while another has some; what is not a number is a gate
    wide open and no pull, which is transport.
    """
    gate = 1.0 / (1.0 + np.exp(-np.clip(np.nan_to_num(decided[..., 0], nan=50.0), -50.0, 50.0)))
    pull = MOST_PULL * np.tanh(np.nan_to_num(decided[..., 1]))
    alive = amounts(seen.capacity) > 0
    alive = np.where(alive.any(axis=-1, keepdims=True), alive, True)[..., None, :]
    aim = on_simplex((seen.transport + LEAST) * np.exp(pull)[..., None, :], alive)
    kept = on_simplex(seen.before, alive, aim)
    return np.asarray((1 - gate[..., None]) * kept + gate[..., None] * aim, dtype=np.float64)


def on_simplex(rows: Floats, alive: Bools, otherwise: Floats | None = None) -> Floats:
    """Return rows without dead columns, scaled to one; an empty row is even, or as in `otherwise`."""
    masked = np.where(alive, amounts(rows), 0.0)
    sums = masked.sum(axis=-1, keepdims=True)
    even = np.broadcast_to(alive / alive.sum(axis=-1, keepdims=True), masked.shape)
    instead = even if otherwise is None else otherwise
    return np.where(sums > 0, masked / np.where(sums > 0, sums, 1.0), instead)


def allocate(networks: Networks, seen: SlotState) -> Floats:
    """Return (..., R, R) A_t, as the policy decides."""
    return allocated(outputs(networks, seen), seen)


MOST = 0.6  # The share of a region's capacity that transport fills, as in training.


@dataclasses.dataclass(frozen=True)
class ByNetworks:
    """The trained policy as a form of the macro layer; queues are in the demand, and all capacity counts as active.

    It says how far to go from the last allocation towards optimal transport P*. The paper's network has an output for
    each pair of regions of one topology; ours sees one region at a time, and the mean of all, and so serves any number.
    For each it gives a *gate*, how far its row moves, and a *pull*, how much more its column takes than in P*:

        A_t[i] = (1 - gate_i) A_{t-1}[i] + gate_i softmax_j(log P*_t[i, j] + pull_j)
    """

    networks: Networks

    def __call__(self, demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
        """Return the shares of the first slot: (R, R), rows on the simplex."""
        wanted, possible, priced = amounts(np.atleast_2d(demand)), amounts(capacity), prices(costs)
        transport = capped(wanted.mean(axis=0), MOST * possible, priced)
        nothing, price = np.zeros(len(possible)), priced.mean(axis=0)
        before = transport if previous is None else amounts(previous)
        ahead = wanted[1:] if len(wanted) > 1 else wanted
        seen = SlotState(wanted[0], ahead, possible, MOST * possible, nothing, possible, price, transport, before)
        return allocate(self.networks, seen)
