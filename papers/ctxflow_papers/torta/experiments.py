"""The experiments: the comparison, the failure of a region, and the exact program's time.

All that routes and scales are the policy classes that a site file names, on the simulated engine (`runs`). Their
options are the same for all topologies and loads, and were chosen on the seeds from 1000 on; what is measured are those
from 0. A seed draws the servers and their places, the regions' demand and its phase, power prices, and all that comes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ctxflow.policies.torta.quantities import Floats
from ctxflow_papers.torta.bounds import least_power, least_power_active
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.runs import Measures, served
from ctxflow_papers.torta.settings import SLOT
from ctxflow_papers.torta.world import world

SIZED = {"policy": "activation", "patience": 4.0, "safety": "measured"}
"""An idle server draws a quarter of its power, so that a start, at all of it, costs as much as four idle starts."""
ROUTINGS: Mapping[str, Any] = {
    "round_robin": {"policy": "round-robin", "keep": True},
    "skylb": "skylb",
    "sdib": {"policy": "sdib", "keep": True},
    "torta": "torta",
    "transport": {"policy": "torta", "macro": "transport", "patience": 0.0},
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "round_robin": {"routing": ROUTINGS["round_robin"], "scaling": "fixed"},
    "skylb": {"routing": ROUTINGS["skylb"], "scaling": "fixed"},
    "sdib": {"routing": ROUTINGS["sdib"], "scaling": "fixed"},
    "skylb_sized": {"routing": ROUTINGS["skylb"], "scaling": SIZED},
    "sdib_sized": {"routing": ROUTINGS["sdib"], "scaling": SIZED},
    "torta_unsized": {"routing": ROUTINGS["torta"], "scaling": "fixed"},
    "torta": {"routing": ROUTINGS["torta"], "scaling": SIZED},
    "torta_transport": {"routing": ROUTINGS["transport"], "scaling": "fixed"},
}
"""What a site file says: `routing` and `scaling`. The last has the paper's macro layer beside the micro layer."""
UNSIZED = ("round_robin", "skylb", "sdib")
RESIZED = ("skylb_sized", "sdib_sized")
METRICS = ("response", "waiting", "network", "power", "overhead", "loads", "starts", "balance", "active")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a run is.

    :ivar share: of Table I's servers. :ivar slots: of 45 s, in which tasks come. :ivar skipped: slots at the beginning
        that are not measured: servers start and models are loaded in them.
    """

    share: float = 0.25
    slots: int = 40
    skipped: int = 20


@dataclasses.dataclass(frozen=True)
class Compared:
    """All methods at one load of a topology.

    :ivar values: method -> metric -> (seeds,).
    :ivar bounds: of response and power, (seeds,): no policy can be below; `power_active`: none with all servers active.
    """

    values: Mapping[str, Mapping[str, Floats]]
    bounds: Mapping[str, Floats]

    def over(self, name: str, others: Sequence[str], metric: str) -> Floats:
        """Return (seeds,) a method's metric over the least of others', on each seed."""
        best = np.min([self.values[each][metric] for each in others], axis=0)
        return np.asarray(np.maximum(self.values[name][metric], 1e-9) / np.maximum(best, 1e-9))

    def over_bound(self, names: Sequence[str], bound: str) -> Floats:
        """Return (seeds,) the least of some methods over a bound, on each seed."""
        best = np.min([self.values[each][bound.removesuffix("_active")] for each in names], axis=0)
        return np.asarray(best / self.bounds[bound])


def compared(
    topology: str,
    load: float,
    seeds: Sequence[int],
    size: Size | None = None,
    methods: Sequence[str] = tuple(METHODS),
    told: Callable[[str], None] = lambda name: None,
) -> Compared:
    """Run methods at one load on the same tasks and servers of each seed."""
    chosen = size or Size()
    found: dict[str, dict[str, list[float]]] = {name: {metric: [] for metric in METRICS} for name in methods}
    bounds: dict[str, list[float]] = {"response": [], "power": [], "power_active": []}
    for seed in seeds:
        place = world(topology, seed, chosen.share)
        tasks = tasks_of(place, load, seed, chosen.slots)
        begin, longest = chosen.skipped * SLOT, 0.0
        for name in methods:
            told(name)
            measures = served(place, tasks, METHODS[name], begin, seed)
            longest = max(longest, measures.seconds)
            for metric, value in measures.summary().items():
                if metric in METRICS:
                    found[name][metric].append(value)
        bounds["response"].append(float(tasks.seconds[tasks.time >= begin].mean()))
        bounds["power"].append(least_power(place, tasks, begin, longest))
        bounds["power_active"].append(least_power_active(place, tasks, begin, longest))
    values = {name: {metric: np.array(each) for metric, each in table.items()} for name, table in found.items()}
    return Compared(values, {name: np.array(each) for name, each in bounds.items()})


def failures(
    seeds: Sequence[int], size: Size | None = None, methods: Sequence[str] = (*UNSIZED, "torta")
) -> dict[str, dict[str, Floats]]:
    """Fig. 4: the largest region of Abilene vanishes, for a quarter of what is measured; what becomes of its tasks.

    Its tasks are those that come from there then and in the four slots before. (seeds,) of each method: `completed`,
    the share of them that is answered within a minute's wait; `waiting` and `response` of these, in seconds.
    """
    chosen = size or Size()
    found: dict[str, dict[str, list[float]]] = {
        name: {"completed": [], "waiting": [], "response": []} for name in methods
    }
    for seed in seeds:
        place = world("abilene", seed, chosen.share)
        tasks = tasks_of(place, 0.7, seed, chosen.slots)
        region = int(np.bincount(place.region, minlength=place.regions).argmax())
        fails = (chosen.skipped + (chosen.slots - chosen.skipped) // 2) * SLOT
        until = fails + (chosen.slots - chosen.skipped) * SLOT / 4
        for name in methods:
            measures = served(place, tasks, METHODS[name], 0.0, seed, failure=(region, fails, until))
            mine = (tasks.origin == region) & (tasks.time >= fails - 4 * SLOT) & (tasks.time < until)
            row = _of(measures, mine)
            for metric, value in row.items():
                found[name][metric].append(value)
    return {name: {metric: np.array(each) for metric, each in table.items()} for name, table in found.items()}


def _of(measures: Measures, mine: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, float]:
    prompt = mine & (measures.waiting <= 60.0)
    return {
        "completed": float(prompt.sum() / max(mine.sum(), 1)),
        "waiting": float(measures.waiting[prompt].mean()),
        "response": float(measures.response[prompt].mean()),
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
