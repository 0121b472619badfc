"""A problem as numpy arrays, which the methods compute on: the constants of P_DM in the shapes of vectorised code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.policies.agh.problem import MOST, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the heuristics compute on: the constants of I query types, J models, K tiers and C configurations.

    Made of a placement problem (`Arrays`), or of a live run, whose contexts take no storage (`staffing`).

    Configurations are all (TP, PP) of any tier, fewest GPUs first; of equally many GPUs the higher TP first, which has
    the smaller delay for every query type, so that the first that fits is the one that M1 wants.

    :ivar tensor, pipeline, gpus: (C,) TP, PP and their product.
    :ivar allowed: (K, C) whether the tier allows it.
    :ivar fits: (J, K, C) whether the tier allows it and the weights alone leave no GPU overfull.
    :ivar spare_gb: (J, K, C) what a pair's GPUs have left for KV caches together, in GB.
    :ivar kv_gb: (I, J, K) what the whole type takes of that.
    :ivar rates: (I,) queries an hour.
    :ivar delay: (I, J, K, C) seconds, D.
    :ivar error: (I, J, K).
    :ivar max_delay, max_error, unserved_dollars, max_unserved: (I,).
    :ivar work: (I, J, K) of the whole type in an hour, in the unit of `capacity`: (K,) of one GPU.
    :ivar weights_gb: (J,).
    :ivar rent: (K,) dollars of one GPU over the horizon.
    :ivar model_dollars: (J,) of storing the weights over the horizon, for each type that is sent there.
    :ivar data_gb, data_dollars: (I,) of storing the whole type's data.
    :ivar delay_dollars: (I,) for a second.
    :ivar stock: (K,) GPUs to be had, inf without a limit.
    :ivar hours: of the horizon. :ivar budget: dollars. :ivar storage: GB, at `storage_price` dollars an hour each.
    """

    tensor: Ints
    pipeline: Ints
    gpus: Ints
    allowed: Bools
    fits: Bools
    spare_gb: Floats
    kv_gb: Floats
    rates: Floats
    delay: Floats
    error: Floats
    max_delay: Floats
    max_error: Floats
    unserved_dollars: Floats
    max_unserved: Floats
    work: Floats
    capacity: Floats
    weights_gb: Floats
    rent: Floats
    model_dollars: Floats
    data_gb: Floats
    data_dollars: Floats
    delay_dollars: Floats
    stock: Floats
    hours: float
    budget: float
    storage: float
    storage_price: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return I, J, K and C."""
        i, j, k, c = self.delay.shape
        return i, j, k, c

    def options(self) -> Bools:
        """Return the configurations that an optimum may need: (J, K, C).

        Left out, without loss: what does not fit into memory, budget or stock by itself; and a configuration beside
        another one of the pair that has no more GPUs, delays no query type more, and could carry all of them at once.
        """
        allowed = self.fits & (self.rent[:, None] * self.gpus <= self.budget)
        allowed &= self.gpus <= self.stock[:, None]
        enough = self.capacity[None, :, None] * self.gpus >= self.work.sum(axis=0)[..., None]
        enough &= self.spare_gb >= self.kv_gb.sum(axis=0)[..., None]
        for slow in range(len(self.gpus)):
            for fast in range(slow):  # Sorted by GPUs: those before it have no more.
                better = (self.delay[..., fast] <= self.delay[..., slow]).all(axis=0) & allowed[..., fast]
                same_size = self.gpus[fast] == self.gpus[slow]
                allowed[..., slow] &= ~(better & (same_size | enough[..., fast]))
        return allowed


@dataclasses.dataclass(frozen=True)
class Arrays(Constants):
    """The constants of a placement problem, with what only the exact method and the reasons need.

    :ivar problem: with limits that can be computed with.
    :ivar memory_gb: (K,) of one GPU.
    """

    problem: Problem
    memory_gb: Floats

    @classmethod
    def of(cls, problem: Problem) -> Arrays:
        """Return the arrays of a problem.

        >>> from ctxflow.policies.agh.problem import paper_instance
        >>> arrays = Arrays.of(paper_instance())
        >>> arrays.shape, arrays.gpus[:4].tolist(), arrays.tensor[:4].tolist()
        ((6, 6, 10, 12), [1, 2, 2, 4], [1, 2, 1, 4])
        """
        problem = _bounded(problem)
        types, models, tiers = problem.query_types, problem.models, problem.tiers
        tensor, pipeline, allowed = _configurations(problem)
        gpus = tensor * pipeline
        inputs, outputs = _column(types, "input_tokens"), _column(types, "output_tokens")
        tokens, rate = inputs + outputs, _column(types, "queries_per_hour")
        compute = np.array(problem.compute_seconds_per_token)
        communication = np.array(problem.communication_seconds_per_token)
        delay = (compute * tokens[:, None, None])[..., None] / tensor
        delay += (communication * outputs[:, None, None])[..., None] * pipeline
        weights = _column(models, "weights_gb")
        spare = _column(tiers, "memory_gb")[None, :, None] * gpus - weights[:, None, None]
        data = _column(types, "storage_kb_per_token") * 1e-6 * tokens * rate
        stored = problem.horizon_hours * problem.storage_dollars_per_gb_hour
        kv = _column(models, "kv_bytes_per_token")[None, :, None] * 1e-9 * tokens[:, None, None]
        return cls(
            problem=problem,
            tensor=tensor,
            pipeline=pipeline,
            gpus=gpus,
            allowed=allowed,
            fits=allowed[None] & (spare >= 0),
            spare_gb=spare,
            kv_gb=kv * np.array(problem.resident_queries),
            rates=rate,
            delay=delay,
            error=np.array(problem.error),
            max_delay=_column(types, "max_delay_seconds"),
            max_error=_column(types, "max_error"),
            unserved_dollars=_column(types, "unserved_dollars"),
            max_unserved=_column(types, "max_unserved"),
            work=np.array(problem.gflop_per_token) * (tokens * rate / 1e3)[:, None, None],
            capacity=problem.utilization * 3600.0 * _column(tiers, "tflops"),
            weights_gb=weights,
            memory_gb=_column(tiers, "memory_gb"),
            rent=problem.horizon_hours * _column(tiers, "dollars_per_hour"),
            model_dollars=stored * weights,
            data_gb=data,
            data_dollars=stored * data,
            delay_dollars=1e3 * _column(types, "delay_dollars_per_ms"),
            stock=np.array([np.inf if tier.gpus is None else tier.gpus for tier in tiers]),
            hours=problem.horizon_hours,
            budget=problem.budget_dollars,
            storage=problem.storage_gb,
            storage_price=problem.storage_dollars_per_gb_hour,
        )


def _bounded(problem: Problem) -> Problem:
    """Return the problem with limits so high that they are none within what can be computed with."""
    limits = {name: min(getattr(problem, name), MOST) for name in ("budget_dollars", "storage_gb")}
    types = [
        kind.model_copy(update={"max_delay_seconds": min(kind.max_delay_seconds, MOST)}) for kind in problem.query_types
    ]
    return problem.model_copy(update={**limits, "query_types": tuple(types)})


def _column(parts: Any, field: str) -> Floats:
    return np.array([getattr(part, field) for part in parts], dtype=float)


def _configurations(problem: Problem) -> tuple[Ints, Ints, Bools]:
    """Return TP and PP of all configurations, and which tier allows which: (C,), (C,), (K, C)."""
    sets = [{(n, m) for n in tier.tensor_parallel for m in tier.pipeline_parallel} for tier in problem.tiers]
    order = sorted(set().union(*sets), key=lambda pair: (pair[0] * pair[1], -pair[0]))
    allowed = np.array([[pair in each for pair in order] for each in sets])
    tensor, pipeline = np.array(order, dtype=np.int64).T
    return tensor, pipeline, allowed
