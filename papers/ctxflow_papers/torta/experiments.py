"""The experiments: the comparison, the surge, the failure, forecasts' accuracy, the MILP's time, and the condition.

Settings are the same for all topologies and loads. The baselines' were chosen for the least mean response time on
Abilene and Gabriel, ours on all four for hardly more than the best baseline's at less power and overhead, both on seed
1000; training has the seeds from 1000 on, and what is measured those from 0.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ctxflow.errors import CtxflowError
from ctxflow.policies.torta.macro import Networks, read
from ctxflow.policies.torta.quantities import Bools, Floats
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.forecasting import Imperfect, Trained
from ctxflow_papers.torta.methods import (
    Activation,
    Forecaster,
    Lookahead,
    Method,
    RoundRobin,
    Sdib,
    SkyLB,
    Torta,
    Transport,
    plain,
    planned,
)
from ctxflow_papers.torta.rules import Even, InTurn, KnownPrefix, Scored, Soonest
from ctxflow_papers.torta.serving import Failure, Served, Simulation, simulate
from ctxflow_papers.torta.settings import KINDS, LOADS, SLOT, SLOTS
from ctxflow_papers.torta.sizing import Sizing
from ctxflow_papers.torta.world import World, world

BASELINES = ("round_robin", "skylb", "sdib")
METRICS = ("response", "network", "waiting", "loading", "inference", "power", "overhead", "balance", "active", "moved")
RULE = Soonest(reluctance=3.0, power=4.0, even=6.0)
ALWAYS = Activation(always=True)
"""The baselines', and the printed form's: Eq. 6, region by region, cost each more overhead than it saved power."""
SIZED = Activation(preheats=True, sizing=Sizing())
"""Ours: one number for all regions, which is lowered once, and raised where demand outgrows it."""
MOST, MARGIN = 0.6, 0.6


def trained() -> Networks | None:
    """The networks that come with ctxflow; None, which is the transport form, if there are none."""
    try:
        return read()
    except CtxflowError:
        return None


def torta(networks: Networks | None, forecaster: Forecaster | None = None) -> Torta:
    """TORTA as it is compared; without networks it is transport, and the plain forecast."""
    chosen = forecaster or (plain if networks is None else Trained(networks))
    return Torta(networks, MOST, MARGIN, RULE, SIZED, chosen)


def methods(networks: Networks | None) -> dict[str, Method]:
    """All that are compared."""
    forecaster = plain if networks is None else Trained(networks)
    return {
        "round_robin": RoundRobin(InTurn(2.0, suited=True)),
        "skylb": SkyLB(1.0, KnownPrefix(2.0)),
        "sdib": Sdib(Even(2.0)),
        "transport": Transport(RULE),
        "torta_printed": Torta(networks, MOST, MARGIN, Scored(limit=2.0), ALWAYS, forecaster),
        "lookahead": Lookahead(0.05, RULE, SIZED, forecaster, 3, 2, MOST, MARGIN),
        "torta": torta(networks),
    }


@dataclasses.dataclass(frozen=True)
class Compared:
    """A method on a topology: each metric (loads, seeds), and all response times of a load, thinned."""

    values: Mapping[str, Floats]
    responses: Floats
    balances: Floats


def measured(served: Served, shape: tuple[int, int]) -> dict[str, Floats]:
    """Each metric by load and seed: seconds; dollars; hours of overhead; Eq. 11; servers; |A_t - A_{t-1}|^2."""
    parts = {name: served.mean(getattr(served, name)) for name in METRICS[:5]}
    parts |= {"power": served.power.sum(axis=0), "overhead": served.overhead.sum(axis=0) / 3600}
    parts |= {name: getattr(served, name)[1:].mean(axis=0) for name in METRICS[7:]}
    return {name: value.reshape(shape) for name, value in parts.items()}


def compared(
    topology: str, method: Method, seeds: Sequence[int], loads: Sequence[float] = LOADS, slots: int = SLOTS
) -> Compared:
    """All loads and seeds side by side."""
    place = world(topology)
    served = simulate(place, [tasks_of(place, load, seed, slots) for load in loads for seed in seeds], method)
    middle = served.run // len(seeds) == len(loads) // 2
    responses = served.response[middle & served.done]
    balances = served.balance[:, len(seeds) * (len(loads) // 2) : len(seeds) * (len(loads) // 2 + 1)]
    return Compared(
        measured(served, (len(loads), len(seeds))), responses[:: max(len(responses) // 20_000, 1)], balances.ravel()
    )


def over_best(found: Mapping[str, Compared], metric: str, name: str = "torta") -> Floats:
    """(seeds,) the ratio to the best baseline, the mean of all loads: by its mean, one baseline for each load."""
    ratios = []
    ours = found[name].values[metric]
    for load in range(len(ours)):
        best = min((found[each].values[metric][load] for each in BASELINES), key=lambda values: float(values.mean()))
        ratios.append(ours[load] / best)
    return np.asarray(np.mean(ratios, axis=0))


def above_best(found: Mapping[str, Compared], name: str = "torta") -> Floats:
    """(seeds,) the balance less the best baseline's, the mean of all loads."""
    ours = found[name].values["balance"]
    best = [
        max((found[each].values["balance"][load] for each in BASELINES), key=lambda values: float(values.mean()))
        for load in range(len(ours))
    ]
    return np.asarray((ours - np.stack(best)).mean(axis=0))


SURGE_RISES = 4
"""Slots."""


def surge_begins(slots: int) -> int:
    """The slot of the surge: with 200 slots from 8:00 on it is 9:00, as in Fig. 2."""
    return 2 * slots // 5


def surge(place: World, chance: np.random.Generator, slots: int) -> Floats:
    """Fig. 2a: a third of the demand, until it triples within three minutes; it stays, and falls as it rose."""
    del chance
    begins = surge_begins(slots)
    points = [begins, begins + SURGE_RISES, 7 * slots // 10, 7 * slots // 10 + SURGE_RISES]
    level = np.interp(np.arange(slots), points, [1.0, 3.0, 3.0, 1.0])
    return np.asarray(level[:, None] * place.demand)


@dataclasses.dataclass(frozen=True)
class Course:
    """A run slot by slot (T,): mean waiting of the tasks that come in it, servers that are active; and the waits of
    those that come in the first ten minutes of the surge."""

    waiting: Floats
    active: Floats
    at_surge: Floats


def surges(networks: Networks | None, seed: int, slots: int = 200) -> dict[str, Course]:
    """Fig. 2: a method that scales by what it saw, ours by its forecast, and ours with a perfect one for 15 minutes."""
    place = world("abilene")
    quick = Activation(safety=2.0, hold=8)
    ours = dataclasses.replace(quick, preheats=True, thrifty=True)
    runs: dict[str, Method] = {
        "reactive": Sdib(Even(2.0), quick),
        "torta": dataclasses.replace(torta(networks), activation=ours),
        "ideal": dataclasses.replace(torta(networks, Imperfect(1.0)), activation=ours, horizon=20),
    }
    found = {}
    for name, method in runs.items():
        served = simulate(place, [tasks_of(place, 0.8, seed, slots, surge)], method)
        slot = np.minimum((served.arrival / SLOT).astype(np.int64), slots - 1)
        count = np.maximum(np.bincount(slot, minlength=slots), 1)
        waiting = served.waiting + served.loading
        window = (slot >= surge_begins(slots)) & (slot < surge_begins(slots) + 14)
        found[name] = Course(np.bincount(slot, waiting, slots) / count, served.active[:, 0], waiting[window])
    return found


def failures(networks: Networks | None, seeds: Sequence[int], slots: int = 180) -> dict[str, dict[str, Floats]]:
    """Fig. 4: the largest region vanishes half way, for a quarter of the run; what becomes of its tasks then.

    Its tasks are those that ran there, and those that come from there in the next four slots. (seeds,) of each method:
    `completed`, the share of them that is served within a minute's wait; `waiting` and `response` of these, in seconds.
    """
    place = world("abilene")
    region, fails = int(place.there.sum(axis=1).argmax()), slots // 2
    found = {}
    for name, method in methods(networks).items():
        if name in ("transport", "torta_printed"):
            continue
        tasks = [tasks_of(place, 0.7, seed, slots) for seed in seeds]
        method.reset()
        simulation = Simulation(place, tasks, method, Failure(region, fails, fails + slots // 4))
        lost: Bools = np.zeros(len(simulation.time), dtype=bool)
        for slot in range(slots):
            simulation.step()
            if slot == fails:
                lost = simulation.resent
        served = simulation.served
        slots_of = (served.arrival / SLOT).astype(np.int64)
        mine = lost | ((served.origin == region) & (slots_of >= fails) & (slots_of < fails + 4))
        rows = []
        for run in range(len(seeds)):
            these = mine & (served.run == run)
            done = these & served.done
            rows.append((done.sum() / max(these.sum(), 1), served.waiting[done].mean(), served.response[done].mean()))
        found[name] = dict(zip(("completed", "waiting", "response"), np.array(rows).T, strict=True))
    return found


def accuracies(
    networks: Networks | None,
    wanted: Sequence[float],
    seeds: Sequence[int],
    topology: str = "abilene",
    slots: int = SLOTS,
) -> dict[float, dict[str, Floats]]:
    """Fig. 12: ours with forecasts of each accuracy, at the middle load."""
    load = LOADS[len(LOADS) // 2]
    return {
        each: {
            name: values[0]
            for name, values in compared(
                topology, torta(networks, Imperfect(each)), seeds, (load,), slots
            ).values.items()
        }
        for each in wanted
    }


def milp_seconds(tasks: int, seed: int, limit: float) -> tuple[float, bool]:
    """Fig. 5: seconds of the exact program for so many tasks on 50 servers in 5 regions, and whether it was solved.

    Limits of 3 to 20 tasks a server are scaled to hold all tasks; a region takes 80 % of its own at most.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    chance = np.random.default_rng((seed, tasks))
    servers, regions = 50, 5
    limits = chance.integers(3, 21, servers).astype(np.float64)
    limits = np.ceil(limits * max(1.0, 1.5 * tasks / limits.sum()))
    kind, suits = chance.integers(0, 2, tasks), chance.integers(0, 2, servers)
    cost = (
        chance.uniform(1, 10, tasks)[:, None]
        * np.where(kind[:, None] == suits, 1.0, 1.6)
        * chance.uniform(0.8, 1.2, servers)
    )
    each = sparse.kron(sparse.eye(tasks), np.ones((1, servers)), format="csr")
    per_server = sparse.kron(np.ones((1, tasks)), sparse.eye(servers), format="csr")
    region = np.repeat(np.eye(regions), servers // regions, axis=1)
    constraints = [
        LinearConstraint(each, 1, 1),
        LinearConstraint(per_server, 0, limits),
        LinearConstraint(sparse.csr_matrix(region) @ per_server, 0, 0.8 * region @ limits),
    ]
    begun = time.perf_counter()
    found = milp(
        cost.ravel(), integrality=np.ones(tasks * servers), bounds=Bounds(0, 1), constraints=constraints,
        options={"time_limit": limit},
    )  # fmt: skip
    return time.perf_counter() - begun, found.status == 0


@dataclasses.dataclass(frozen=True)
class Condition:
    """The advantage condition, (1 - 1/s) / eps > (L_R + beta L_P) / (alpha K_0), from measured constants.

    :ivar eps: the mean of |A_t - P*_t|. :ivar reactive: K_0, the mean of |A_t - A_{t-1}|^2 of single-slot transport on
        each slot's counts, `least` that of the reactive baseline that has the least. :ivar own: ours.
    :ivar response, power: L_R and beta L_P by finite differences, seconds (and seconds' worth of power, beta such that
        power counts as much as response) for a unit of |A - A'|.
    """

    eps: float
    reactive: float
    least: float
    own: float
    response: float
    power: float

    @property
    def s(self) -> float:
        """How much smaller the switching cost is than the reactive method's."""
        return self.reactive / self.own

    @property
    def left(self) -> float:
        """(1 - 1/s) / eps."""
        return (1 - 1 / self.s) / self.eps

    @property
    def right(self) -> float:
        """(L_R + beta L_P) / K_0, with alpha = 1 second for a unit of switching cost."""
        return (self.response + self.power) / self.reactive


def condition(networks: Networks, topology: str, seeds: Sequence[int], slots: int = 160, tries: int = 12) -> Condition:
    """Measure its constants on some seeds."""
    place = world(topology)
    tasks = [tasks_of(place, LOADS[n % len(LOADS)], seed, slots) for n, seed in enumerate(seeds)]
    moved = {
        name: float(simulate(place, tasks, method).moved[1:].mean())
        for name, method in methods(networks).items()
        if name in ("transport", "skylb", "sdib")
    }
    method = torta(networks)
    method.reset()
    simulation = Simulation(place, tasks, method)
    far, slopes = [], []
    chance = np.random.default_rng(0)
    for slot in range(slots):
        state = simulation.state()
        ahead = method.forecaster(state, method.horizon)
        seen = method.seen(state, ahead, method.before)
        if slot and slot % max(slots // tries, 1) == 0:
            slopes.append(_slopes(simulation, chance))
        simulation.step()
        shares = method.before
        assert shares is not None
        weights = np.maximum(seen.demand, 1e-9)[..., None].reshape(len(seeds), len(KINDS), -1, 1)
        apart = ((shares - seen.transport).reshape(len(seeds), len(KINDS), *shares.shape[1:]) * weights).sum(axis=1)
        far.append(np.sqrt(((apart / weights.sum(axis=1)) ** 2).sum(axis=(1, 2))).mean())
    response, power = np.mean(slopes, axis=0)
    own = float(simulation.served.moved[1:].mean())
    return Condition(
        float(np.mean(far)), moved["transport"], min(moved["skylb"], moved["sdib"]), own, float(response), float(power)
    )


def _slopes(simulation: Simulation, chance: np.random.Generator) -> tuple[float, float]:
    """How response and power of one slot change with the allocation: as it is planned, and mixed with another."""
    base, other = copy.deepcopy(simulation), copy.deepcopy(simulation)
    plan = base.step()
    assert plan.planned is not None
    regions = plan.planned.shape[-1]
    mixed = 0.9 * plan.planned + 0.1 * chance.dirichlet(np.ones(regions), plan.planned.shape[:-1])
    ahead = simulation.method.forecaster(other.state(), simulation.method.horizon)  # type: ignore[attr-defined]
    changed = planned(mixed, ahead, other.state())
    other.step(changed)
    slot = simulation.slot
    here = slice(base.starts[slot], base.starts[slot + 1])
    distance = float(np.sqrt(((plan.shares(regions) - changed.shares(regions)) ** 2).sum(axis=(1, 2))).mean())
    first, second = base.served.response[here].mean(), other.served.response[here].mean()
    power = np.abs(base.served.power[slot] - other.served.power[slot]).mean() / base.served.power[slot].mean()
    return abs(second - first) / distance, power * first / distance
