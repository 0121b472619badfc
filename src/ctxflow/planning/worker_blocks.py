"""Whole workers as the GPUs of a placement problem.

The problem has one deployment of a model on a tier, of so many GPUs that serve each query together; ctxflow has as
many workers as it likes, each of which serves by itself. So each tier of a site is divided into blocks of 1, 2, 4, ...
workers, each of which is a tier of the problem with one "GPU": one model has it, or none. That keeps memory exact (a
worker holds the whole model), and any number of workers of a tier is a sum of a few blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ctxflow.policies.agh.allocation import Allocation
from ctxflow.policies.agh.problem import GpuTier, Model, Problem, QueryType, Table
from ctxflow.policies.agh.staffing import blocks

NEVER = 1e4
"""How many times its limit the delay of a query type is on a model that is none of its candidates."""


@dataclasses.dataclass(frozen=True)
class SiteOffer:
    """A tier of a site.

    :ivar workers: how many there are to be had.
    :ivar price: of a worker, an hour.
    :ivar memory_gb: of a worker, for one model.
    """

    name: str
    workers: int
    price: float
    memory_gb: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a query type takes on a model on a worker of a tier.

    :ivar delay: seconds from its coming until its answer.
    :ivar seconds: for which it takes a worker, where others are served beside it.
    """

    delay: float
    seconds: float


Speeds = Sequence[Sequence[Sequence[Speed | None]]]
"""By query type, model and tier; None for a model that the query type cannot have there."""


def block_owners(offers: Sequence[SiteOffer]) -> list[tuple[int, int]]:
    """Return the tiers of the problem: (number of the offer, workers) of each block."""
    return [(number, size) for number, offer in enumerate(offers) for size in blocks(offer.workers)]


def problem_of(
    name: str,
    queries: Sequence[QueryType],
    models: Sequence[Model],
    offers: Sequence[SiteOffer],
    speeds: Speeds,
    *,
    hours: float,
    budget: float | None = None,
    errors: Sequence[Sequence[float]] | None = None,
    utilization: float = 0.9,
    source: str = "",
) -> Problem:
    """Return the placement problem of a site's workers.

    The storage has no limit. Everything within the problem's units: one "GPU" of a block is all of its workers.

    :param budget: None for more than all workers cost.
    :param errors: shares of wrong answers by query type and model; none by default.
    :raises ValueError: for what cannot be.
    """
    owners = block_owners(offers)
    if not owners:
        raise ValueError("there is no worker to be had on any tier: see `ctxflow site check SITE --live`")
    most = hours * sum(offer.price * offer.workers for offer in offers)
    tiers = [
        GpuTier(
            name=f"{offers[number].name} #{place} x{size}", memory_gb=offers[number].memory_gb, tflops=float(size),
            dollars_per_hour=size * offers[number].price, tensor_parallel=(1,), pipeline_parallel=(1,), gpus=1,
        )
        for place, (number, size) in enumerate(owners, 1)
    ]  # fmt: skip
    nothing = tuple(tuple((0.0,) * len(owners) for _ in models) for _ in queries)

    def table(figure: str) -> Table:
        return tuple(
            tuple(tuple(_figure(query, row[number], figure) for number, _ in owners) for row in rows)
            for query, rows in zip(queries, speeds, strict=True)
        )

    return Problem(
        name=name,
        source=source,
        horizon_hours=hours,
        budget_dollars=most + 1.0 if budget is None else budget,
        storage_gb=1.0 + len(owners) * len(queries) * sum(model.weights_gb for model in models),  # Each place counts.
        utilization=utilization,
        query_types=tuple(queries),
        models=tuple(models),
        tiers=tuple(tiers),
        compute_seconds_per_token=table("delay"),
        communication_seconds_per_token=nothing,
        error=nothing if errors is None else tuple(tuple((each,) * len(owners) for each in row) for row in errors),
        gflop_per_token=table("work"),
        resident_queries=nothing,
    )


def _figure(query: QueryType, speed: Speed | None, figure: str) -> float:
    """Return a table's number.

    In (3) a query's tokens times it are its delay, in (5g) what a worker of 1 TFLOPS does.
    """
    tokens = query.tokens
    if speed is None:
        return (NEVER * query.max_delay_seconds if figure == "delay" else 0.0) / tokens
    return speed.delay / tokens if figure == "delay" else 1e3 * speed.seconds / tokens


@dataclasses.dataclass(frozen=True)
class StaffedModel:
    """Workers of a tier that hold a model, in an answer.

    :ivar model, offer: their numbers.
    :ivar workers: those needed, never more than the blocks have.
    :ivar shares: (query type, its share) served there.
    """

    model: int
    offer: int
    workers: int
    shares: tuple[tuple[int, float], ...]


def staffing(
    problem: Problem, offers: Sequence[SiteOffer], speeds: Speeds, allocation: Allocation
) -> list[StaffedModel]:
    """Return the workers that an answer takes, without those of a block that are not needed."""
    owners = block_owners(offers)
    held: dict[tuple[int, int], int] = {}
    shares: dict[tuple[int, int], dict[int, float]] = {}
    for each in allocation.deployments:
        number, size = owners[each.tier]
        held[each.model, number] = held.get((each.model, number), 0) + size
    for route in allocation.routes:
        here = shares.setdefault((route.model, owners[route.tier][0]), {})
        here[route.query_type] = here.get(route.query_type, 0.0) + route.share
    found = []
    for (model, number), most in sorted(held.items()):
        busy = 0.0
        for query, share in shares.get((model, number), {}).items():
            speed = speeds[query][model][number]
            busy += share * problem.query_types[query].queries_per_hour * (speed.seconds if speed else 0.0) / 3600
        needed = math.ceil(busy / problem.utilization - 1e-9)
        if needed > 0 or shares.get((model, number)):
            own = tuple(sorted(shares.get((model, number), {}).items()))
            found.append(StaffedModel(model, number, min(most, max(1, needed)), own))
    return found
