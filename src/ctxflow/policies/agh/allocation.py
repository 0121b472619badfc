"""An answer to a placement problem: what it costs, its JSON, and an independent check of every constraint.

The paper's (x, y, z, u, w) are lists. Costs are the five terms of (5a), the check (5b) to (5k) with the limits on GPUs
and unserved demand, in plain loops over the problem's numbers, which share no code with the methods that they judge.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from ctxflow.policies.agh.problem import Problem


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on a tier (q = 1), as places in the problem's lists, its configuration (w = 1) and its GPUs (y)."""

    model: int
    tier: int
    tensor_parallel: int
    pipeline_parallel: int
    gpus: int


@dataclasses.dataclass(frozen=True)
class Route:
    """The share x of a query type that one deployment serves (z = 1)."""

    query_type: int
    model: int
    tier: int
    share: float


@dataclasses.dataclass(frozen=True)
class CostTerms:
    """The five terms of (5a), in dollars over the horizon."""

    rental: float
    model_storage: float
    data_storage: float
    delay: float
    unserved: float

    @property
    def total(self) -> float:
        """Return their sum: the objective."""
        return self.rental + self.model_storage + self.data_storage + self.delay + self.unserved


@dataclasses.dataclass(frozen=True)
class Allocation:
    """What runs where, which queries are sent where, and u, the share of each query type that is not served.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> nothing = Allocation((), (), (1.0,) * 6)
    >>> costs = nothing.costs(paper_instance())
    >>> costs.rental, costs.total == costs.unserved
    (0.0, True)
    """

    deployments: tuple[Deployment, ...]
    routes: tuple[Route, ...]
    unserved: tuple[float, ...]

    def costs(self, problem: Problem) -> CostTerms:
        """Return the five terms of (5a).

        :raises KeyError: if a route leads to what is not deployed: its delay is not defined.
        """
        hours, stored = problem.horizon_hours, problem.horizon_hours * problem.storage_dollars_per_gb_hour
        types = problem.query_types
        return CostTerms(
            rental=hours * sum(each.gpus * problem.tiers[each.tier].dollars_per_hour for each in self.deployments),
            model_storage=stored * sum(problem.models[route.model].weights_gb for route in self.routes),
            data_storage=stored * sum(data_gb(problem, route.query_type) * route.share for route in self.routes),
            delay=sum(
                types[route.query_type].delay_dollars_per_ms * 1e3 * seconds
                for route, seconds in zip(self.routes, self.delays(problem), strict=True)
            ),
            unserved=sum(kind.unserved_dollars * share for kind, share in zip(types, self.unserved, strict=True)),
        )

    def delays(self, problem: Problem) -> list[float]:
        """Return what each route adds to its type's average delay, in seconds: share times D, (3)."""
        by_pair = {(each.model, each.tier): each for each in self.deployments}
        found = []
        for route in self.routes:
            where, kind = by_pair[route.model, route.tier], problem.query_types[route.query_type]
            compute = problem.compute_seconds_per_token[route.query_type][route.model][route.tier]
            communication = problem.communication_seconds_per_token[route.query_type][route.model][route.tier]
            seconds = compute * kind.tokens / where.tensor_parallel
            seconds += where.pipeline_parallel * communication * kind.output_tokens
            found.append(route.share * seconds)
        return found

    def as_data(self, problem: Problem) -> dict[str, Any]:
        """Return the allocation with the problem's names, for JSON."""
        types, models, tiers = problem.query_types, problem.models, problem.tiers
        return {
            "deployments": [
                {**dataclasses.asdict(each), "model": models[each.model].name, "tier": tiers[each.tier].name}
                for each in self.deployments
            ],
            "routes": [
                {
                    "query_type": types[route.query_type].name, "model": models[route.model].name,
                    "tier": tiers[route.tier].name, "share": route.share,
                }
                for route in self.routes
            ],
            "unserved": {kind.name: share for kind, share in zip(types, self.unserved, strict=True)},
        }  # fmt: skip


def data_gb(problem: Problem, query_type: int) -> float:
    """Return what the whole type's data takes: theta r lambda, in GB."""
    kind = problem.query_types[query_type]
    return kind.storage_kb_per_token * 1e-6 * kind.tokens * kind.queries_per_hour


TOLERANCE = 1e-6
CONSTRAINTS = {
    "5b": "what is routed and what is unserved of a query type are the whole of it",
    "5c": "rent and storage within the budget",
    "5d": "one allowed configuration for each deployment",
    "5e": "GPUs of a deployment are TP times PP",
    "5f": "weights and KV caches within the GPUs' memory",
    "5g": "work within the GPUs' throughput",
    "5h": "models and data within the storage",
    "5i": "a query type's average delay within its limit",
    "5j": "a query type's average error within its limit",
    "5k": "routes only to what is deployed, with shares from 0 to 1",
    "unserved": "what is unserved from 0 to the type's limit",
    "gpus": "no more GPUs of a tier than there are",
}


@dataclasses.dataclass(frozen=True)
class Violation:
    """A constraint (one of `CONSTRAINTS`) that is broken, where ("" for one of all together), and its two sides."""

    constraint: str
    where: str
    value: float
    limit: float

    def __str__(self) -> str:
        name = f"({self.constraint})" if self.constraint[0].isdigit() else self.constraint
        place = f" for {self.where}" if self.where else ""
        return f"{name} {CONSTRAINTS[self.constraint]}: {self.value:.6g} against {self.limit:.6g}{place}"


def check(problem: Problem, allocation: Allocation, tolerance: float = TOLERANCE) -> list[Violation]:
    """Return the constraints that an allocation breaks, none if it is feasible.

    :param tolerance: how far a side may be over, as a share of the limit (or of 1, if that is more).

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> print(check(paper_instance(), Allocation((), (), (1.0, 1.0, 1.0, 1.0, 1.0, 0.5)))[0])
    (5b) what is routed and what is unserved of a query type are the whole of it: 0.5 against 1 for Video
    """
    sides = [*_shares(problem, allocation, tolerance), *_deployed(problem, allocation, tolerance)]
    pairs = {(each.model, each.tier) for each in allocation.deployments}
    if all((route.model, route.tier) in pairs for route in allocation.routes):  # Else delays are not defined.
        sides += _delays_and_errors(problem, allocation)
    sides += [*_memory_and_throughput(problem, allocation), *_totals(problem, allocation)]
    return [each for each in sides if _over(each, tolerance)]


def _over(found: Violation, tolerance: float) -> bool:
    slack = tolerance * max(1.0, abs(found.limit))
    if found.constraint in ("5b", "5d", "5e"):
        return abs(found.value - found.limit) > slack
    return found.value > found.limit + slack


def _shares(problem: Problem, allocation: Allocation, tolerance: float) -> Iterator[Violation]:
    routed: dict[int, float] = defaultdict(float)
    for route in allocation.routes:
        routed[route.query_type] += route.share
    for i, kind in enumerate(problem.query_types):
        unserved = allocation.unserved[i]
        yield Violation("5b", kind.name, routed[i] + unserved, 1.0)
        yield Violation("unserved", kind.name, unserved, kind.max_unserved)
        if unserved < -tolerance:
            yield Violation("unserved", kind.name, -unserved, 0.0)


def _deployed(problem: Problem, allocation: Allocation, tolerance: float) -> Iterator[Violation]:
    pairs = Counter((each.model, each.tier) for each in allocation.deployments)
    for (j, k), count in pairs.items():
        if count != 1:
            yield Violation("5d", _pair(problem, j, k), count, 1)
    for each in allocation.deployments:
        tier, name = problem.tiers[each.tier], _pair(problem, each.model, each.tier)
        if each.tensor_parallel not in tier.tensor_parallel or each.pipeline_parallel not in tier.pipeline_parallel:
            yield Violation("5d", f"{name}, TP {each.tensor_parallel} and PP {each.pipeline_parallel}", 0, 1)
        yield Violation("5e", name, each.gpus, each.tensor_parallel * each.pipeline_parallel)
    seen = Counter((route.query_type, route.model, route.tier) for route in allocation.routes)
    for route in allocation.routes:
        name = f"{problem.query_types[route.query_type].name} to {_pair(problem, route.model, route.tier)}"
        if seen[route.query_type, route.model, route.tier] > 1:
            yield Violation("5k", f"{name}, more than once", 2, 1)
        if (route.model, route.tier) not in pairs:
            yield Violation("5k", f"{name}, which is not deployed", route.share or 1.0, 0.0)
        yield Violation("5k", name, route.share, 1.0)
        if route.share < -tolerance:
            yield Violation("5k", name, -route.share, 0.0)


def _memory_and_throughput(problem: Problem, allocation: Allocation) -> Iterator[Violation]:
    sent: dict[tuple[int, int], list[Route]] = defaultdict(list)
    for route in allocation.routes:
        sent[route.model, route.tier].append(route)
    for each in allocation.deployments:
        j, k, here = each.model, each.tier, sent[each.model, each.tier]
        tier, model, name = problem.tiers[k], problem.models[j], _pair(problem, j, k)
        split = each.tensor_parallel * each.pipeline_parallel
        resident, types = problem.resident_queries, problem.query_types
        tokens = sum(types[r.query_type].tokens * resident[r.query_type][j][k] * r.share for r in here)
        held = (model.weights_gb + model.kv_bytes_per_token * 1e-9 * tokens) / split
        yield Violation("5f", name, held, tier.memory_gb)
        work = 0.0  # TFLOP an hour.
        for route in here:
            kind, alpha = types[route.query_type], problem.gflop_per_token[route.query_type][j][k]
            work += alpha * (kind.tokens * kind.queries_per_hour / 1e3) * route.share
        yield Violation("5g", name, work, problem.utilization * 3600 * tier.tflops * each.gpus)


def _delays_and_errors(problem: Problem, allocation: Allocation) -> Iterator[Violation]:
    delay: dict[int, float] = defaultdict(float)
    error: dict[int, float] = defaultdict(float)
    for route, seconds in zip(allocation.routes, allocation.delays(problem), strict=True):
        delay[route.query_type] += seconds
        error[route.query_type] += problem.error[route.query_type][route.model][route.tier] * route.share
    for i, kind in enumerate(problem.query_types):
        yield Violation("5i", kind.name, delay[i], kind.max_delay_seconds)
        yield Violation("5j", kind.name, error[i], kind.max_error)


def _totals(problem: Problem, allocation: Allocation) -> Iterator[Violation]:
    stored = 0.0
    for route in allocation.routes:
        stored += problem.models[route.model].weights_gb
        stored += data_gb(problem, route.query_type) * route.share
    rent = sum(each.gpus * problem.tiers[each.tier].dollars_per_hour for each in allocation.deployments)
    spent = problem.horizon_hours * (rent + problem.storage_dollars_per_gb_hour * stored)
    yield Violation("5c", "", spent, problem.budget_dollars)
    yield Violation("5h", "", stored, problem.storage_gb)
    for k, tier in enumerate(problem.tiers):
        if tier.gpus is not None:
            used = sum(each.gpus for each in allocation.deployments if each.tier == k)
            yield Violation("gpus", tier.name, used, tier.gpus)


def _pair(problem: Problem, model: int, tier: int) -> str:
    return f"{problem.models[model].name} on {problem.tiers[tier].name}"
