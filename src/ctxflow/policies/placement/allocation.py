"""An answer to a placement problem, what it costs, and its JSON.

What lives here: the paper's (x, y, z, u, w) as lists of what is there, and the five terms of (5a), computed plainly.
What does not live here: whether it keeps the constraints (`check`), how it was found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ctxflow.policies.placement.problem import Problem


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on a tier (q = 1), with its configuration (w = 1) and its GPUs (y).

    :ivar model, tier: their places in the problem's lists.
    """

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
class Costs:
    """The five terms of (5a), in dollars over the horizon."""

    rental: float
    model_storage: float
    data_storage: float
    delay: float
    unserved: float

    @property
    def total(self) -> float:
        """Their sum: the objective."""
        return self.rental + self.model_storage + self.data_storage + self.delay + self.unserved


@dataclasses.dataclass(frozen=True)
class Allocation:
    """What runs where, who is sent where, and who is not served.

    :ivar unserved: u of each query type, a share.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> nothing = Allocation((), (), (1.0,) * 6)
    >>> costs = nothing.costs(paper_instance())
    >>> costs.rental, costs.total == costs.unserved
    (0.0, True)
    """

    deployments: tuple[Deployment, ...]
    routes: tuple[Route, ...]
    unserved: tuple[float, ...]

    def costs(self, problem: Problem) -> Costs:
        """The five terms of (5a).

        :raises KeyError: if a route leads to what is not deployed: its delay is not defined.
        """
        hours, stored = problem.horizon_hours, problem.horizon_hours * problem.storage_dollars_per_gb_hour
        types = problem.query_types
        return Costs(
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
        """What each route adds to its type's average delay, in seconds: share times D, (3)."""
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
        """The allocation with the problem's names, for JSON."""
        types, models, tiers = problem.query_types, problem.models, problem.tiers
        return {
            "deployments": [
                {
                    "model": models[each.model].name,
                    "tier": tiers[each.tier].name,
                    "tensor_parallel": each.tensor_parallel,
                    "pipeline_parallel": each.pipeline_parallel,
                    "gpus": each.gpus,
                }
                for each in self.deployments
            ],
            "routes": [
                {
                    "query_type": types[route.query_type].name,
                    "model": models[route.model].name,
                    "tier": tiers[route.tier].name,
                    "share": route.share,
                }
                for route in self.routes
            ],
            "unserved": {kind.name: share for kind, share in zip(types, self.unserved, strict=True)},
        }


def data_gb(problem: Problem, query_type: int) -> float:
    """What the whole type's data takes: theta r lambda, in GB."""
    kind = problem.query_types[query_type]
    return kind.storage_kb_per_token * 1e-6 * kind.tokens * kind.queries_per_hour
