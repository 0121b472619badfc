"""What a plan costs in operation: deployments and routes as planned, shares chosen anew for what really comes.

This is the paper's second stage, the linear program (12), for many scenarios at once.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.agh.allocation import Allocation
from ctxflow.policies.agh.problem import Arrays, Bools, Floats, Problem

AT_ONCE = 250
"""Scenarios in one linear program: they share nothing, and the solver's overhead is paid once."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """What each of S scenarios came to, in dollars over the horizon.

    :ivar data_storage, delay, unserved_dollars: (S,) C3, C4 and C5.
    :ivar unserved: (S, I) the share of each query type that is not served.
    """

    data_storage: Floats
    delay: Floats
    unserved_dollars: Floats
    unserved: Floats

    @property
    def total(self) -> Floats:
        """(S,) C3 + C4 + C5."""
        return self.data_storage + self.delay + self.unserved_dollars


def operate(
    problem: Problem,
    allocation: Allocation,
    rates: Floats,
    delays: Floats | None = None,
    errors: Floats | None = None,
) -> Operation:
    """The cheapest shares over the planned routes, for each scenario: (12a) to (12f).

    As printed, neither the budget nor the storage limits them.

    :param rates: (S, I) what the query types' rates are multiplied by.
    :param delays, errors: (S, I, J, K) what delays and errors are multiplied by; None for as planned.
    :raises ModuleNotFoundError: without SciPy.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> from ctxflow.policies.agh.solution import solve
    >>> planned = solve(paper_instance(), "agh")
    >>> found = operate(paper_instance(), planned.allocation, np.ones((2, 6)))
    >>> bool(found.delay[0] <= planned.costs.delay + 1e-6), float(found.unserved.max())
    (True, 0.0)
    """
    routes = _Routes(Arrays.of(problem), allocation)
    if delays is None and errors is None:
        shares = routes.by_rates(rates)
    else:
        parts = [slice(first, first + AT_ONCE) for first in range(0, len(rates), AT_ONCE)]
        shares = np.concatenate([
            routes.solve(rates[n], None if delays is None else delays[n], None if errors is None else errors[n])
            for n in parts
        ])  # fmt: skip
    return routes.operation(shares, rates, delays)


def keeps_up(problem: Problem, allocation: Allocation, rates: Floats) -> Bools:
    """(S,) whether the planned shares stay within the GPUs' throughput, (5g), at other rates.

    :param rates: (S, I) what the query types' rates are multiplied by.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> from ctxflow.policies.agh.solution import solve
    >>> planned = solve(paper_instance(), "agh").allocation
    >>> keeps_up(paper_instance(), planned, np.array([[1.0] * 6, [1000.0] * 6])).tolist()
    [True, False]
    """
    routes = _Routes(Arrays.of(problem), allocation)
    shares = np.array([route.share for route in allocation.routes])
    found: Bools = routes.load(shares, rates).max(axis=1, initial=0.0) <= 1
    return found


class _Routes:
    """The planned routes as arrays of length R; D deployments."""

    def __init__(self, arrays: Arrays, allocation: Allocation) -> None:
        self.arrays = arrays
        places = np.array([(r.query_type, r.model, r.tier) for r in allocation.routes], dtype=int).reshape(-1, 3)
        self.i, self.j, self.k = places.T
        number = {(each.model, each.tier): n for n, each in enumerate(allocation.deployments)}
        self.deployment = np.array([number[int(j), int(k)] for _, j, k in places], dtype=int)
        chosen = [allocation.deployments[n] for n in self.deployment]
        config = np.array(
            [
                np.flatnonzero((arrays.tensor == c.tensor_parallel) & (arrays.pipeline == c.pipeline_parallel))[0]
                for c in chosen
            ],
            dtype=int,
        )
        self.seconds = arrays.delay[self.i, self.j, self.k, config]
        self.error = arrays.error[self.i, self.j, self.k] / np.maximum(arrays.max_error[self.i], 1e-12)
        gpus = np.array([each.gpus for each in chosen], dtype=float)
        self.work = arrays.work[self.i, self.j, self.k] / (arrays.capacity[self.k] * gpus)
        self.deployments = len(allocation.deployments)

    def by_rates(self, rates: Floats) -> Floats:
        """(S, R + I) shares where the rates alone differ.

        What is best without a limit on throughput is best wherever it keeps that limit: no more is to be solved there.
        """
        free = self.solve(np.zeros((1, rates.shape[1])), None, None)
        shares = np.repeat(free, len(rates), axis=0)
        full = np.flatnonzero(self.load(free[0, : len(self.i)], rates).max(axis=1, initial=0.0) > 1 + 1e-9)
        for first in range(0, len(full), AT_ONCE):
            here = full[first : first + AT_ONCE]
            shares[here] = self.solve(rates[here], None, None)
        return shares

    def load(self, shares: Floats, rates: Floats) -> Floats:
        """(S, D) the share of its throughput that each deployment uses, with shares (R,)."""
        onto = np.zeros((len(self.i), self.deployments))
        onto[np.arange(len(self.i)), self.deployment] = self.work * shares
        used: Floats = rates[:, self.i] @ onto
        return used

    def solve(self, rates: Floats, delays: Floats | None, errors: Floats | None) -> Floats:
        """(S, R + I) the best shares of the routes, and what is unserved."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        arrays, i = self.arrays, self.i
        count, types, routes = len(rates), arrays.shape[0], len(i)
        seconds = self.delays(count, delays)
        factor = 1.0 if errors is None else errors[:, i, self.j, self.k]
        error = np.broadcast_to(self.error * factor, (count, routes))
        width, height, scenario = routes + types, 2 * types + self.deployments, np.arange(count)[:, None]
        columns = scenario * width + np.arange(routes)
        rows = np.concatenate([scenario * height + each for each in (i, types + i, 2 * types + self.deployment)])
        values = np.concatenate([seconds / arrays.max_delay[i], error, self.work * rates[:, i]])
        places = (rows.ravel(), np.tile(columns, (3, 1)).ravel())
        limits = csr_matrix((values.ravel(), places), (count * height, count * width))
        kinds = np.concatenate([i, np.arange(types)])
        places = ((scenario * types + kinds).ravel(), np.arange(count * width))
        whole = csr_matrix((np.ones(count * width), places), (count * types, count * width))
        cost = np.hstack([arrays.delay_dollars[i] * seconds, np.tile(arrays.unserved_dollars, (count, 1))])
        most, all_of_it = np.ones(count * height), np.ones(count * types)
        found = linprog(cost.ravel(), limits, most, whole, all_of_it, (0, 1), method="highs")
        if found.x is None:
            raise ArithmeticError(f"the second stage has an answer, and the solver found none: {found.message}")
        shares: Floats = np.asarray(found.x).reshape(count, width)
        return shares

    def delays(self, count: int, delays: Floats | None) -> Floats:
        """(S, R) seconds."""
        factor = 1.0 if delays is None else delays[:, self.i, self.j, self.k]
        return np.broadcast_to(self.seconds * factor, (count, len(self.i)))

    def operation(self, shares: Floats, rates: Floats, delays: Floats | None) -> Operation:
        """What shares (S, R + I) come to."""
        arrays, i = self.arrays, self.i
        served, unserved = shares[:, : len(i)], shares[:, len(i) :]
        data = (served * arrays.data_dollars[i] * rates[:, i]).sum(axis=1)
        delay = (served * arrays.delay_dollars[i] * self.delays(len(rates), delays)).sum(axis=1)
        return Operation(data, delay, unserved @ arrays.unserved_dollars, unserved)
