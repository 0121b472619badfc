"""The methods that are compared: what each plans for a slot, from what it may know.

The baselines react: they route what has come, by the servers that are active, and activate by the last slot's inflow.
The others plan by a forecast. All use the functions of `ctxflow.policies.torta`, for each type of task by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from ctxflow.policies.baselines import forward
from ctxflow.policies.torta import transport as looking
from ctxflow.policies.torta.macro import Networks, SlotState, allocate
from ctxflow.policies.torta.quantities import Floats, Ints, forecast
from ctxflow.policies.torta.transport import capped, costs, whole
from ctxflow_papers.torta.lanes import Rule
from ctxflow_papers.torta.rules import Even, InTurn, KnownPrefix, Scored
from ctxflow_papers.torta.settings import MOST_OF_REGION, NETWORK_WEIGHT, POWER_WEIGHT
from ctxflow_papers.torta.sizing import Sizing
from ctxflow_papers.torta.world import TASKS_PER_SLOT, World

HORIZON = 4
"""Slots ahead, the one to be decided among them: as long as the slowest server takes to start."""
NOT_YET = 0.25
"""What a plan counts of servers that are not active yet: what flows to them starts them, and more would wait."""
HISTORY = 5
"""Slots that a forecast looks back: the paper's K."""


@dataclasses.dataclass(frozen=True)
class State:
    """What there is before a slot, of B runs, R regions and K types of tasks.

    :ivar arrived: (t, B, R, K) tasks of the slots until now.
    :ivar coming: (T - t, B, R, K) those of this slot and of all after it, for forecasts of a wanted accuracy alone.
    :ivar counts: (B, R, K) this slot's, which a router that decides on arrival sees.
    :ivar inflow: (B, R, K) what each region was given in the last slot.
    :ivar backlog: (B, R, K) work on the servers that suit a type, in tasks; `waiting` less what runs.
    :ivar active: (B, R, K) servers that are ready. :ivar servers: (B, R, K) those that could be.
    :ivar price: (R,) of power.
    """

    world: World
    slot: int
    arrived: Ints
    coming: Ints
    counts: Ints
    inflow: Floats
    backlog: Floats
    waiting: Floats
    active: Ints
    servers: Ints
    price: Floats


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is decided for a slot.

    :ivar flows: (B, K, R, R) whole tasks from row to column; rows add up to what arrives.
    :ivar expected: (B, R, K) what the regions' servers are to be ready for.
    :ivar planned: (B, K, R, R) the shares that were decided, None if the flows are all there is.
    """

    flows: Ints
    expected: Floats
    planned: Floats | None = None

    def shares(self, regions: int) -> Floats:
        """(B, R, R) A_t: the shares of all types together, by what arrived; rows without tasks stay at home."""
        flows = self.flows.sum(axis=1).astype(np.float64)
        if self.planned is not None:
            weights = np.maximum(self.flows.sum(axis=3), 1e-9)[..., None]
            return np.asarray((self.planned * weights).sum(axis=1) / weights.sum(axis=1), dtype=np.float64)
        sums = flows.sum(axis=2, keepdims=True)
        return np.where(sums > 0, flows / np.maximum(sums, 1.0), np.eye(regions))


@dataclasses.dataclass(frozen=True)
class Activation:
    """How Eq. 6 is applied.

    :ivar safety: sigma. :ivar utilisation: the share of a server's capacity that is counted on.
    :ivar hold: slots that a target stays at least. :ivar always: all servers are active all the time.
    :ivar preheats: a server that starts loads the model that its region lacks the most.
    :ivar thrifty: of servers that suit the same, those of the least power are started first and stopped last.
    :ivar sizing: in the place of Eq. 6, one number for all regions; None for Eq. 6.
    """

    safety: float = 1.0
    utilisation: float = 1.0
    hold: int = 4
    always: bool = False
    preheats: bool = False
    thrifty: bool = False
    sizing: Sizing | None = None


class Method(Protocol):
    """A way to route and to activate."""

    rule: Rule
    activation: Activation

    def reset(self) -> None:
        """Forget earlier runs."""

    def plan(self, state: State) -> Plan:
        """What to do in the slot."""


class Forecaster(Protocol):
    """(B, H, R, K) the tasks of this slot, which have come (Algorithm 1's N_t), and those expected in the next ones."""

    def __call__(self, state: State, horizon: int) -> Floats:
        """Look ahead."""


def plain(state: State, horizon: int) -> Floats:
    """`forecast.forecast` from the last slots, this one among them."""
    runs, regions, kinds = state.counts.shape
    seen = np.concatenate([state.arrived[1 - HISTORY :], state.counts[None]]).reshape(-1, runs, regions * kinds)
    found = np.stack([forecast(seen[:, run], horizon - 1) for run in range(runs)])
    return np.concatenate([state.counts[:, None], found.reshape(runs, horizon - 1, regions, kinds)], axis=1)


@dataclasses.dataclass
class RoundRobin:
    """Regions in turn, as far as each has capacity; servers in turn."""

    rule: Rule = dataclasses.field(default_factory=InTurn)
    activation: Activation = Activation(always=True)

    def reset(self) -> None:
        """Nothing is kept."""

    def plan(self, state: State) -> Plan:
        """Even shares, but no more than a region's capacity."""
        room = np.maximum(state.servers * TASKS_PER_SLOT - state.backlog, 1e-3 * (state.servers > 0))
        total = state.counts.sum(axis=1, keepdims=True)
        given = poured(total, room, (state.servers > 0).astype(np.float64))
        return Plan(_spread(given, state.counts), state.inflow)


@dataclasses.dataclass
class SkyLB:
    """Home first; what does not fit goes to the nearest region with room.

    :ivar full: tasks in a slot, over what its servers can do, at which a region is full.
    """

    full: float = 1.0
    rule: Rule = dataclasses.field(default_factory=KnownPrefix)
    activation: Activation = Activation(always=True)

    def reset(self) -> None:
        """Nothing is kept."""

    def plan(self, state: State) -> Plan:
        """By type and run."""
        room = np.maximum(state.active * TASKS_PER_SLOT * self.full - state.backlog, 0.0)
        room[state.servers <= 0] = -1.0
        runs, regions, kinds = state.counts.shape
        flows = np.empty((runs, kinds, regions, regions), dtype=np.int64)
        for run, kind in np.ndindex(runs, kinds):
            flows[run, kind] = forward(state.counts[run, :, kind], room[run, :, kind], state.world.latency)
        return Plan(flows, state.inflow)


@dataclasses.dataclass
class Sdib:
    """The evenest: every region gets what makes its occupancy the same as the others', home first."""

    rule: Rule = dataclasses.field(default_factory=Even)
    activation: Activation = Activation(always=True)

    def reset(self) -> None:
        """Nothing is kept."""

    def plan(self, state: State) -> Plan:
        """Fill up the emptiest; what a region has too much is shared out by what the others lack."""
        capacity = np.maximum(state.active, state.servers > 0).astype(np.float64)
        total = state.counts.sum(axis=1, keepdims=True)
        given = levelled(total, state.backlog, capacity)
        counts = state.counts.astype(np.float64)
        home = np.minimum(counts, given)
        lacking = given - home
        away = lacking / np.maximum(lacking.sum(axis=1, keepdims=True), 1e-9)
        over = counts - home
        flows = np.einsum("bik,bjk->bkij", over, away)
        for region in range(counts.shape[1]):
            flows[:, :, region, region] += home[:, region]
        return Plan(_whole(flows, state.counts), state.inflow)


@dataclasses.dataclass
class Transport:
    """Eq. 2 within capacity, slot by slot, on what has come: the single-slot method that the paper argues against."""

    rule: Rule = dataclasses.field(default_factory=Scored)
    activation: Activation = Activation(always=True)

    def reset(self) -> None:
        """Nothing is kept."""

    def plan(self, state: State) -> Plan:
        """By type and run."""
        shares = transported(state, state.counts)
        return Plan(_whole(shares, state.counts), state.inflow, shares)


@dataclasses.dataclass
class Torta:
    """The paper's: the trained policy's A_t, which keeps near to transport and near to A_{t-1}.

    :ivar networks: None for the transport form: P*_t as it is.
    :ivar most, margin: what a plan may use of a region's capacity (`rooms`). :ivar before: A_{t-1}.
    """

    networks: Networks | None = None
    most: float = MOST_OF_REGION
    margin: float = 0.0
    rule: Rule = dataclasses.field(default_factory=Scored)
    activation: Activation = Activation(preheats=True, thrifty=True)
    forecaster: Forecaster = plain
    horizon: int = HORIZON
    before: Floats | None = None

    def reset(self) -> None:
        """Forget the last allocation."""
        self.before = None

    def seen(self, state: State, ahead: Floats, before: Floats | None) -> SlotState:
        """What the policy sees, of n = B K decisions; before the first slot A_{t-1} is P*.

        P* is of the mean of what has come and what is expected: one slot's counts are a noisy sample of mu_t.
        """
        shares = transported(state, ahead.mean(axis=1), self.most, self.margin)
        regions = shares.shape[-1]
        transport = shares.reshape(-1, regions, regions)

        def rows(values: Floats | Ints) -> Floats:
            return np.asarray(np.moveaxis(values, -1, 1).reshape(-1, regions), dtype=np.float64)

        later = np.moveaxis(ahead[:, 1:], -1, 1).reshape(len(transport), -1, regions)
        return SlotState(
            rows(ahead[:, 0]),
            later,
            rows(state.servers) * TASKS_PER_SLOT,
            rows(rooms(state, self.most, self.margin)),
            rows(state.waiting),
            rows(state.active) * TASKS_PER_SLOT,
            np.tile(state.price, (len(transport), 1)),
            transport,
            transport if before is None else before,
        )

    def plan(self, state: State) -> Plan:
        """By type and run."""
        ahead = self.forecaster(state, self.horizon)
        seen = self.seen(state, ahead, self.before)
        shares = seen.transport if self.networks is None else allocate(self.networks, seen)
        self.before = shares
        runs, regions, kinds = state.counts.shape
        return planned(shares.reshape(runs, kinds, regions, regions), ahead, state)


@dataclasses.dataclass
class Lookahead:
    """The linear program over the slots of a forecast, with a price on switching.

    :ivar every: slots that a plan holds. :ivar most, margin: what it may use of a region's capacity (`rooms`).
    :ivar switching: dollars of a task by which a region's inflow rises, in the unit of the costs.
    """

    switching: float = 0.05
    rule: Rule = dataclasses.field(default_factory=Scored)
    activation: Activation = Activation(preheats=True)
    forecaster: Forecaster = plain
    horizon: int = HORIZON
    every: int = 2
    most: float = MOST_OF_REGION
    margin: float = 0.0
    _shares: Floats | None = None

    def reset(self) -> None:
        """Forget the last plan."""
        self._shares = None

    def plan(self, state: State) -> Plan:
        """By type and run."""
        ahead = self.forecaster(state, self.horizon)
        if self._shares is not None and state.slot % self.every:
            return planned(self._shares, ahead, state)
        runs, regions, kinds = state.counts.shape
        cost, room = region_costs(state), rooms(state, self.most, self.margin)
        shares = np.empty((runs, kinds, regions, regions))
        for run, kind in np.ndindex(runs, kinds):
            shares[run, kind] = looking.lookahead(
                ahead[run, :, :, kind], room[run, :, kind], cost, state.inflow[run, :, kind], self.switching
            )
        self._shares = shares
        return planned(shares, ahead, state)


def planned(shares: Floats, ahead: Floats, state: State) -> Plan:
    """The plan of shares that were decided by a forecast: servers are to be ready for the most that will flow in."""
    inflow = np.einsum("bhik,bkij->bhjk", ahead, shares)
    return Plan(_whole(shares, state.counts), inflow.max(axis=1), shares)


def region_costs(state: State) -> Floats:
    """(R, R) C_ij, with the paper's w1 and w2."""
    away = state.world.transfer * (1 - np.eye(state.world.regions))
    return costs(state.price, state.world.latency, away, POWER_WEIGHT, NETWORK_WEIGHT)


def rooms(state: State, most: float = MOST_OF_REGION, margin: float = 0.0) -> Floats:
    """(B, R, K) tasks of a slot that regions may plan with: a share of their capacity, less their backlog.

    :param margin: what is left free beside it, in square roots of the capacity: small groups queue sooner.
    """
    capacity = (state.active + NOT_YET * (state.servers - state.active)) * TASKS_PER_SLOT
    room = capacity * most - margin * np.sqrt(capacity) - state.waiting
    return np.asarray(np.maximum(room, 1e-3 * (state.servers > 0)), dtype=np.float64)


def transported(state: State, demand: Floats | Ints, most: float = MOST_OF_REGION, margin: float = 0.0) -> Floats:
    """(B, K, R, R) P*, the shares of Eq. 2 within capacity, of a demand (B, R, K)."""
    runs, regions, kinds = demand.shape
    cost, room = region_costs(state), rooms(state, most, margin)
    shares = np.empty((runs, kinds, regions, regions))
    for run, kind in np.ndindex(runs, kinds):
        shares[run, kind] = capped(demand[run, :, kind], room[run, :, kind], cost)
    return shares


def poured(total: Floats | Ints, room: Floats, weight: Floats) -> Floats:
    """(B, R, K) a total shared out by weight, as far as there is room; what is more than all room, by room."""
    given = np.zeros_like(room)
    left = np.broadcast_to(total, (*total.shape[:1], 1, total.shape[2])).astype(np.float64)
    for _ in range(room.shape[1]):
        open_to = weight * (room - given > 1e-9)
        if not (open_to.any() and (left > 1e-9).any()):
            break
        share = open_to / np.maximum(open_to.sum(axis=1, keepdims=True), 1e-12)
        more = np.minimum(left * share, room - given)
        given += more
        left = left - more.sum(axis=1, keepdims=True)
    beyond = room / np.maximum(room.sum(axis=1, keepdims=True), 1e-12)
    return np.asarray(given + np.maximum(left, 0.0) * beyond, dtype=np.float64)


def levelled(total: Floats | Ints, held: Floats, capacity: Floats) -> Floats:
    """(B, R, K) a total poured over what is held, so that all are equally full where they are not fuller before.

    >>> levelled(np.full((1, 1, 1), 4.0), np.array([[[0.0], [2.0]]]), np.ones((1, 2, 1))).ravel().tolist()
    [3.0, 1.0]
    """
    full = np.divide(held, capacity, out=np.full(held.shape, np.inf), where=capacity > 0)
    order = np.argsort(full, axis=1, kind="stable")
    level, size = np.take_along_axis(full, order, axis=1), np.take_along_axis(capacity, order, axis=1)
    finite = np.where(np.isfinite(level), level, 0.0)
    sizes, work = np.cumsum(size, axis=1), np.cumsum(finite * size, axis=1)
    reached = (total + work) / np.maximum(sizes, 1e-12)
    beyond = np.concatenate([level[:, 1:], np.full_like(level[:, :1], np.inf)], axis=1)
    number = (reached <= beyond).argmax(axis=1)[:, None]
    surface = np.take_along_axis(reached, number, axis=1)
    return np.where(np.isfinite(full), np.maximum(surface - full, 0.0) * capacity, 0.0)


def _spread(given: Floats, counts: Ints) -> Ints:
    """(B, K, R, R) every region's tasks by the same shares."""
    shares = given / np.maximum(given.sum(axis=1, keepdims=True), 1e-12)
    rows = np.repeat(shares.transpose(0, 2, 1)[:, :, None, :], counts.shape[1], axis=2)
    return _whole(rows, counts)


def _whole(flows: Floats, counts: Ints) -> Ints:
    """(B, K, R, R) whole tasks by flows or shares in the proportion of each row, `counts` (B, R, K) in all."""
    runs, kinds, regions, _ = flows.shape
    rows = flows.reshape(-1, regions)
    sums = rows.sum(axis=1, keepdims=True)
    home = np.tile(np.eye(regions), (runs * kinds, 1))
    shares = np.where(sums > 1e-9, rows / np.maximum(sums, 1e-9), home)
    return whole(shares, counts.transpose(0, 2, 1).reshape(-1)).reshape(flows.shape)
