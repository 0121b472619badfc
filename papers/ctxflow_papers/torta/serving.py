"""Runs of a topology under a method, slot by slot: what is planned, who is active, where tasks go, what it costs.

Several runs (seeds, loads) of one topology go side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.torta.quantities import Bools, Floats, Ints
from ctxflow.policies.torta.scaling import target
from ctxflow_papers.torta.demand import Tasks
from ctxflow_papers.torta.lanes import POPULAR, START, WATTS, Arrivals, Lanes
from ctxflow_papers.torta.methods import Method, Plan, State
from ctxflow_papers.torta.rules import MEAN
from ctxflow_papers.torta.settings import IDLE_WATTS, KINDS, POPULARITY, SLOT, START_HOUR, WORKING_WATTS
from ctxflow_papers.torta.sizing import Sizing, dearest, first, needed
from ctxflow_papers.torta.world import TASKS_PER_SLOT, World

TYPES = range(len(KINDS))


@dataclasses.dataclass(frozen=True)
class Failure:
    """A region without servers for some slots; what runs there is lost, and asked again.

    :ivar patience: seconds that a task waits at most before it is given up, in all regions.
    """

    region: int
    begins: int
    ends: int
    patience: float = 60.0


@dataclasses.dataclass
class Served:
    """What it came to, run by run (B); by slot (T, B) where it says so.

    :ivar power: dollars by slot. :ivar overhead: seconds of switches, starts and stops by slot.
    :ivar balance: Eq. 11 by slot. :ivar active: servers by slot. :ivar moved: |A_t - A_{t-1}|^2 by slot.
    :ivar network, waiting, loading, inference: seconds of each task. :ivar done: whether it was served.
    :ivar run, arrival, origin: of each task.
    """

    power: Floats
    overhead: Floats
    balance: Floats
    active: Floats
    moved: Floats
    network: Floats
    waiting: Floats
    loading: Floats
    inference: Floats
    done: Bools
    run: Ints
    arrival: Floats
    origin: Ints

    @property
    def response(self) -> Floats:
        """Seconds from a task's arrival to its result."""
        return self.network + self.waiting + self.loading + self.inference

    def mean(self, values: Floats) -> Floats:
        """(B,) the mean over each run's tasks that were served."""
        runs = self.power.shape[1]
        there = np.bincount(self.run[self.done], minlength=runs)
        summed = np.bincount(self.run[self.done], values[self.done], minlength=runs)
        return np.asarray(summed / np.maximum(there, 1), dtype=np.float64)


class Simulation:
    """The runs of one topology under one method, which `step` carries on by a slot.

    :param tasks: of each run; all have the same number of slots.
    """

    def __init__(self, world: World, tasks: Sequence[Tasks], method: Method, failure: Failure | None = None) -> None:
        self.world, self.method, self.failure = world, method, failure
        self.runs, self.slots = len(tasks), len(tasks[0].starts) - 1
        self.lanes = Lanes(world, self.runs)
        self.slot = 0
        self._merge(tasks)
        shape = (self.runs, world.regions, len(KINDS))
        self.inflow = np.zeros(shape)
        self.targets: list[Ints] = []
        self.most: Floats = np.zeros((self.runs, len(KINDS)))
        self.servers = self._count(self.lanes.there)
        self.shares: Floats | None = None
        rows = (self.slots, self.runs)
        by_slot = {name: np.zeros(rows) for name in ("power", "overhead", "balance", "active", "moved")}
        by_task = {name: np.zeros(len(self.time)) for name in ("network", "waiting", "loading", "inference")}
        done = np.zeros(len(self.time), dtype=bool)
        self.served = Served(**by_slot, **by_task, done=done, run=self.run, arrival=self.time, origin=self.origin)
        self.lane_of = np.full(len(self.time), -1)
        self.again: Ints = np.zeros(0, dtype=np.int64)
        self.resent: Bools = np.zeros(len(self.time), dtype=bool)

    def _merge(self, tasks: Sequence[Tasks]) -> None:
        """All runs' tasks, by slot and then by run."""
        slots = [np.repeat(np.arange(self.slots), np.diff(each.starts)) for each in tasks]
        order = np.argsort(np.concatenate(slots), kind="stable")
        for name in ("time", "origin", "kind", "model", "seconds", "tflops"):
            setattr(self, name, np.concatenate([getattr(each, name) for each in tasks])[order])
        self.run = np.repeat(np.arange(self.runs), [len(each.time) for each in tasks])[order]
        per_slot = np.sum([np.diff(each.starts) for each in tasks], axis=0)
        self.starts = np.concatenate([[0], np.cumsum(per_slot)])
        self.counts = np.stack([each.counts(self.world.regions) for each in tasks], axis=1)

    time: Floats
    origin: Ints
    kind: Ints
    model: Ints
    seconds: Floats
    tflops: Floats

    def state(self) -> State:
        """What a method sees before the slot."""
        now = self.slot * SLOT
        lanes = self.lanes
        backlog = np.where(lanes.on & lanes.there, np.maximum(lanes.free - np.maximum(now, lanes.ready), 0.0), 0.0)
        counts = self.counts[self.slot].copy()
        for task in self.again:
            counts[self.run[task], self.origin[task], self.kind[task]] += 1
        return State(
            self.world,
            self.slot,
            self.counts[: self.slot],
            self.counts[self.slot :],
            counts,
            self.inflow,
            self._sum(backlog / MEAN),
            self._sum(np.maximum(backlog / MEAN - 1.0, 0.0)),
            self._count(lanes.on & lanes.there & (lanes.ready <= now)),
            self.servers,
            self.price,
        )

    @property
    def price(self) -> Floats:
        """(R,) dollars for a kWh now."""
        return np.asarray(self.world.price[int(START_HOUR + self.slot * SLOT / 3600) % 24], dtype=np.float64)

    @property
    def mean_price(self) -> Floats:
        """(R,) dollars for a kWh, the mean of the run's hours."""
        hours = np.arange(START_HOUR, START_HOUR + max(round(self.slots * SLOT / 3600), 1)) % 24
        return np.asarray(self.world.price[hours].mean(axis=0), dtype=np.float64)

    def _sum(self, values: Floats) -> Floats:
        """(B, R, K) of servers' values, by the type that suits them."""
        summed = np.stack([np.where(self.lanes.suits == kind, values, 0.0).sum(axis=1) for kind in TYPES], axis=1)
        return summed.reshape(self.runs, self.world.regions, len(KINDS))

    def _count(self, chosen: Bools) -> Ints:
        return self._sum(chosen.astype(np.float64)).astype(np.int64)

    def step(self, plan: Plan | None = None) -> Plan:
        """One slot, by the method's plan or the one that is given."""
        if self.failure is not None:
            self._fail(self.failure)
        state = self.state()
        if plan is None:
            plan = self.method.plan(state)
        begun = self.slot * SLOT
        busy = self._backlog(begun)
        seconds = self._activate(state, plan, begun)
        which = np.arange(self.starts[self.slot], self.starts[self.slot + 1])
        if len(self.again):
            which = np.concatenate([self.again, which])
            self.again = self.again[:0]
        loaded, worked = self._route(which, plan, begun)
        ended = begun + SLOT
        booted = np.clip(np.minimum(self.lanes.ready, ended) - np.maximum(self.lanes.begun, begun), 0.0, SLOT)
        booted[~self.lanes.on] = 0.0
        busy = np.clip(busy + worked - self._backlog(ended), 0.0, SLOT)
        self._measure(busy, booted, seconds + loaded, plan)
        self.slot += 1
        return plan

    def _backlog(self, now: float) -> Floats:
        """(L, S) seconds of work, starting not counted, that servers have at a time."""
        return np.asarray(np.maximum(self.lanes.free - np.maximum(self.lanes.ready, now), 0.0), dtype=np.float64)

    def _wanted(self, state: State, plan: Plan) -> Ints:
        """(L, K) servers that should be active: Eq. 6, for each region and type of task, the most of the last slots."""
        active = self.method.activation
        if active.always:
            return self.servers.reshape(-1, len(KINDS))
        wanted = target(state.waiting, plan.expected, TASKS_PER_SLOT * active.utilisation, self.servers, active.safety)
        idle = plan.expected + state.waiting <= 0
        idle[..., 0] &= ~idle.all(axis=-1)  # Eq. 6 has one server of a region active at least, whatever it suits.
        wanted = np.where(idle, 0, wanted)
        if len(self.targets) < active.hold:  # At the start all are active, and nothing says yet how few would do.
            wanted = np.maximum(wanted, self.servers)
        self.targets = [*self.targets, wanted][-active.hold - 1 :]
        return np.asarray(np.maximum.reduce(self.targets).reshape(-1, len(KINDS)), dtype=np.int64)

    def _activate(self, state: State, plan: Plan, now: float) -> Floats:
        """Start and stop servers; seconds of it (L, S)."""
        lanes, active = self.lanes, self.method.activation
        if active.sizing is None:
            start, stop = self._switched(state, plan, now)
        else:
            start, stop = self._resized(active.sizing, state, plan, now)
        preheated = self._missing(lanes.on & ~stop) if active.preheats else None
        return lanes.stop(stop) + lanes.start(start, now, preheated)

    def _switched(self, state: State, plan: Plan, now: float) -> tuple[Bools, Bools]:
        """(L, S) what to start and to stop by Eq. 6, region by region."""
        lanes, active = self.lanes, self.method.activation
        wanted = self._wanted(state, plan)
        start, stop = np.zeros_like(lanes.on), np.zeros_like(lanes.on)
        resting = now - lanes.free
        for kind in TYPES:
            mine = lanes.there & (lanes.suits == kind)
            on = mine & lanes.on
            change = wanted[:, kind] - on.sum(axis=1)
            dear = 1e6 * WATTS[lanes.gpu] if active.thrifty else 0.0
            start |= first(change, mine & ~lanes.on, START[lanes.gpu] + dear)
            stop |= first(-change, on & (resting >= 0), -resting - dear)
        return start, stop

    def _resized(self, sizing: Sizing, state: State, plan: Plan, now: float) -> tuple[Bools, Bools]:
        """(L, S) what to start and to stop over all regions."""
        lanes, safety = self.lanes, self.method.activation.safety
        start, stop = np.zeros_like(lanes.on), np.zeros_like(lanes.on)
        demand = np.maximum(plan.expected.sum(axis=1), state.counts.sum(axis=1))
        need = needed(state.waiting.sum(axis=1), demand, safety, TASKS_PER_SLOT)
        self.most = np.maximum(self.most, need)
        if self.slot < sizing.after:
            return lanes.there & ~lanes.on, stop
        cost = WATTS[lanes.gpu] * np.tile(self.mean_price, self.runs)[:, None]
        rows = (self.runs, -1)
        for kind in TYPES:
            mine = lanes.there & (lanes.suits == kind)
            on = mine & lanes.on
            count = on.reshape(rows).sum(axis=1)
            more = np.ceil(need[:, kind] / sizing.start).astype(np.int64) - count
            fewer = count - np.ceil(self.most[:, kind] / sizing.stop).astype(np.int64)
            start |= first(more, (mine & ~lanes.on).reshape(rows), cost.reshape(rows)).reshape(on.shape)
            start |= mine & ~on.any(axis=1)[:, None]  # A region that is back: plans count on it.
            stop |= dearest(fewer, on & (lanes.free <= now), cost, on.sum(axis=1))
        return start, stop

    def _missing(self, on: Bools) -> Ints:
        """(L, S) the model of a server's type that its region holds the fewest of for what it is asked for."""
        held = np.stack([((used > -np.inf) & on).sum(axis=1) for used in self.lanes.used], axis=1) / POPULAR
        by_type = held.reshape(-1, len(KINDS), len(POPULARITY)).argmin(axis=2)
        best = by_type + np.arange(len(KINDS)) * len(POPULARITY)
        return np.take_along_axis(best, self.lanes.suits, axis=1)

    def _route(self, which: Ints, plan: Plan, now: float) -> tuple[Floats, Floats]:
        """Send tasks to regions and servers; seconds of switches and of all work that each server was given."""
        regions, kinds = self.world.regions, len(KINDS)
        run, origin, kind = self.run[which], self.origin[which], self.kind[which]
        row = (run * kinds + kind) * regions + origin
        chance = np.random.default_rng(self.slot).random(len(which))
        order = np.lexsort((chance, row))
        to = np.repeat(np.tile(np.arange(regions), self.runs * kinds * regions), plan.flows.ravel())
        which, run, origin = which[order], run[order], origin[order]
        sent = np.maximum(self.time[which], now)
        trip = np.where(to == origin, 0.0, self.world.latency[origin, to] + self.world.transfer)
        lane, there = run * regions + to, sent + trip
        order = np.lexsort((there, lane))
        which, lane, there, trip, sent = which[order], lane[order], there[order], trip[order], sent[order]
        tasks = Arrivals(lane, there, self.kind[which], self.model[which], self.seconds[which], self.tflops[which])
        patience = self.failure.patience if self.failure is not None else np.inf
        placed = self.lanes.serve(tasks, self.method.rule, patience)
        done = placed.server >= 0
        self.served.network[which] = 2 * trip
        self.served.waiting[which] = placed.waiting + sent - self.time[which]
        self.served.loading[which], self.served.inference[which] = placed.loading, placed.inference
        self.served.done[which] = done
        self.lane_of[which] = np.where(done, lane, -1)
        flat = lane[done] * self.lanes.gpu.shape[1] + placed.server[done]

        def summed(seconds: Floats) -> Floats:
            found = np.bincount(flat, seconds[done], minlength=self.lanes.gpu.size)
            return np.asarray(found.reshape(self.lanes.gpu.shape), dtype=np.float64)

        self.inflow = plan.flows.sum(axis=2).transpose(0, 2, 1).astype(np.float64)
        return summed(placed.loading), summed(placed.loading + placed.inference)

    def _measure(self, busy: Floats, booted: Floats, overhead: Floats, plan: Plan) -> None:
        lanes, runs, slot, served = self.lanes, self.runs, self.slot, self.served
        on = lanes.on & lanes.there
        watts = WATTS[lanes.gpu]
        joules = watts * (WORKING_WATTS * (busy + booted) + IDLE_WATTS * np.where(on, SLOT - booted - busy, 0.0))
        price = np.tile(self.price, runs)[:, None]
        served.power[slot] = (joules * price).reshape(runs, -1).sum(axis=1) / 3.6e6
        served.overhead[slot] = overhead.reshape(runs, -1).sum(axis=1)
        ready = (on & (booted <= 0)).reshape(runs, -1)
        served.active[slot] = on.reshape(runs, -1).sum(axis=1)
        served.balance[slot] = balance(busy.reshape(runs, -1), ready)
        shares = plan.shares(self.world.regions)
        if self.shares is not None:
            served.moved[slot] = ((shares - self.shares) ** 2).sum(axis=(1, 2))
        self.shares = shares

    def _fail(self, failure: Failure) -> None:
        """The region vanishes; what is under way there is asked again; after some slots it is back, cold."""
        lanes = self.lanes
        mine = np.arange(len(lanes.gpu)) % self.world.regions == failure.region
        if self.slot == failure.begins:
            now = self.slot * SLOT
            lanes.there[mine] = False
            lanes.stop(mine[:, None] & lanes.on)
            lanes.free[mine] = now
            end = self.time + self.served.waiting + self.served.loading + self.served.inference
            lost = (self.lane_of >= 0) & (end > now)
            lost &= np.isin(self.lane_of, np.flatnonzero(mine))
            self.again, self.resent = np.flatnonzero(lost), lost
            self.served.done[lost] = False
        elif self.slot == failure.ends:
            lanes.there[mine] = np.tile(self.world.there, (self.runs, 1))[mine]
        self.servers = self._count(lanes.there)


def simulate(world: World, tasks: Sequence[Tasks], method: Method, failure: Failure | None = None) -> Served:
    """All slots of some runs."""
    method.reset()
    simulation = Simulation(world, tasks, method, failure)
    for _ in range(simulation.slots):
        simulation.step()
    return simulation.served


def balance(busy: Floats, active: Bools) -> Floats:
    """(B,) Eq. 11: 1 / (1 + the coefficient of variation of the active servers' utilisation); 1 if all rest.

    >>> active = np.array([[True, True, False], [True, True, True]])
    >>> balance(np.array([[9.0, 9.0, 0.0], [9.0, 0.0, 0.0]]), active).round(3)
    array([1.   , 0.414])
    """
    count = np.maximum(active.sum(axis=1), 1)
    mean = np.where(active, busy, 0.0).sum(axis=1) / count
    spread = np.sqrt(np.where(active, (busy - mean[:, None]) ** 2, 0.0).sum(axis=1) / count)
    return np.asarray(1.0 / (1.0 + np.divide(spread, mean, out=np.zeros_like(mean), where=mean > 0)))
