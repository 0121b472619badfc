"""The exact method: the MILP of P_DM in McCormick form, on HiGHS; and the improved one: the MILP around AGH's own."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, Deployment, Route, check
from ctxflow.policies.agh.draft import Choices, Mechanisms
from ctxflow.policies.agh.heuristics import adaptive, enough, greedy
from ctxflow.policies.agh.local_search import Exchange
from ctxflow.policies.agh.problem import Arrays, Bools, Floats, Ints, Problem
from ctxflow.policies.helpers import scipy_modules

TINY = 1e-6
INFEASIBLE = 2  # SciPy's status.
DROPPED = 1e-9  # Shares under this are rounding, and no routes.


@dataclasses.dataclass(frozen=True)
class Program:
    """minimise cost @ v subject to matrix @ v <= limit, lower <= v <= upper, v[integral] whole.

    The variables are, in this order: w for each option (a pair with a configuration), v for each query type and
    option, x and z for each query type and pair that has an option, and u for each query type. q and y follow from w
    by (5d) and (5e), and are no variables.

    :ivar options: (O, 3) model, tier and configuration. :ivar pairs: (P, 2) model and tier.
    :ivar unit: dollars of one unit of the objective.
    """

    options: Ints
    pairs: Ints
    cost: Floats
    matrix: Any
    limit: Floats
    lower: Floats
    upper: Floats
    integral: Bools
    unit: float

    def parts(self, values: Floats, types: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Return w (O,), v (I, O), x (I, P), z (I, P) and u (I,) of a solution."""
        count, pairs = len(self.options), len(self.pairs)
        ends = np.cumsum([count, types * count, types * pairs, types * pairs])
        w, v, x, z, u = np.split(values, ends)
        return w, v.reshape(types, count), x.reshape(types, pairs), z.reshape(types, pairs), u


def build(arrays: Arrays, options: Bools, tightened: bool = True) -> Program:
    """Return the MILP over some configurations (J, K, C).

    Each row is divided by its limit or its largest entry, and entries under 1e-6 of the row's largest are dropped:
    with (5f) as printed, whose KV entries are 1e-9 of the weights', HiGHS's presolve gives wrong optima.

    :param tightened: also the rows sum_c v = x, and v and x at most what delay and error alone allow of the type. They
        cut off no answer, and the relaxation's bound is far better; False is the paper's own form (4).
    """
    rows = _Rows(arrays, options, tightened)
    for add in (rows.mccormick, rows.serving, rows.deploying, rows.memory, rows.throughput, rows.totals, rows.quality):
        add()
    return rows.program()


class _Rows:
    """Gathers the rows; one method for each kind."""

    def __init__(self, arrays: Arrays, options: Bools, tightened: bool) -> None:
        self.arrays, self.tightened = arrays, tightened
        self.options = np.argwhere(options)
        self.pairs, self.pair_of = np.unique(self.options[:, :2], axis=0, return_inverse=True)
        self.pair_of = self.pair_of.reshape(-1)
        types, count, pairs = arrays.shape[0], len(self.options), len(self.pairs)
        self.w = np.arange(count)
        self.v = count + np.arange(types * count).reshape(types, count)
        self.x = count * (1 + types) + np.arange(types * pairs).reshape(types, pairs)
        self.z = self.x + types * pairs
        self.u = count * (1 + types) + 2 * types * pairs + np.arange(types)
        self.size = int(self.u[-1]) + 1
        j, k, c = self.options.T
        self.delay = arrays.delay[:, j, k, c]
        self.share = self._most()
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.limits: list[Floats] = []
        self.count = 0

    def _most(self) -> Floats:
        """Return (I, O) the largest share of a type that an option may serve by itself."""
        arrays, (j, k, _) = self.arrays, self.options.T
        if not self.tightened:
            return np.ones(self.delay.shape)
        by_delay = _ratio(arrays.max_delay[:, None], self.delay)
        by_error = _ratio(arrays.max_error[:, None], arrays.error[:, j, k])
        most: Floats = np.minimum(1.0, np.minimum(by_delay, by_error))
        return most

    def add(self, parts: list[tuple[Any, Any]], limit: Any, rows: Any = None) -> None:
        """Add rows: for each (columns, values), entries at `rows` (by default one row per column)."""
        limit = np.atleast_1d(np.asarray(limit, dtype=float))
        numbers = np.arange(len(limit))
        for part, (variables, coefficients) in enumerate(parts):
            columns = np.asarray(variables)
            where = numbers if rows is None else np.asarray(rows[part])
            values = np.broadcast_to(coefficients, columns.shape)
            self.entries.append(
                (self.count + np.broadcast_to(where, columns.shape).ravel(), columns.ravel(), values.ravel())
            )
        self.limits.append(limit)
        self.count += len(limit)

    def mccormick(self) -> None:
        """Add (4); with sum_c v = x, which implies its rows v <= x and v >= x + w - 1."""
        types, count = self.v.shape
        w = np.broadcast_to(self.w, self.v.shape).ravel()
        x = self.x[:, self.pair_of].ravel()
        v, zeros = self.v.ravel(), np.zeros(types * count)
        self.add([(v, 1.0), (w, -self.share.ravel())], zeros)
        if self.tightened:
            pair_rows = (np.arange(types)[:, None] * len(self.pairs) + self.pair_of).ravel()
            every = np.arange(self.x.size)
            for sign in (1.0, -1.0):
                self.add([(v, sign), (self.x.ravel(), -sign)], np.zeros(self.x.size), [pair_rows, every])
        else:
            self.add([(v, 1.0), (x, -1.0)], zeros)
            self.add([(x, 1.0), (w, 1.0), (v, -1.0)], zeros + 1.0)

    def serving(self) -> None:
        """Add (5b), (5k)."""
        types, pairs = self.x.shape
        row = np.arange(types)
        for sign in (1.0, -1.0):
            self.add([(self.x, sign), (self.u, sign)], np.full(types, sign), [row[:, None], row])
        most = np.zeros((types, pairs))
        np.maximum.at(most.T, self.pair_of, self.share.T)
        self.add([(self.x.ravel(), 1.0), (self.z.ravel(), -most.ravel())], np.zeros(self.x.size))
        each = np.arange(self.z.size)
        by_option = (np.arange(types)[:, None] * pairs + self.pair_of).ravel()
        w = np.broadcast_to(self.w, self.v.shape).ravel()
        self.add([(self.z.ravel(), 1.0), (w, -1.0)], np.zeros(self.z.size), [each, by_option])

    def deploying(self) -> None:
        """Add (5d) with q <= 1, and no more GPUs of a tier than there are."""
        self.add([(self.w, 1.0)], np.ones(len(self.pairs)), [self.pair_of])
        tier, gpus = self.options[:, 1], self.arrays.gpus[self.options[:, 2]]
        for k in np.flatnonzero(np.isfinite(self.arrays.stock)):
            here = tier == k
            stock = max(float(self.arrays.stock[k]), 1.0)
            self.add([(self.w[here], gpus[here] / stock)], self.arrays.stock[k] / stock, [0])

    def memory(self) -> None:
        """Add (5f): what its weights leave of an option's memory holds its KV caches (v is x times w)."""
        arrays, (j, k, c) = self.arrays, self.options.T
        spare, kv = arrays.spare_gb[j, k, c], arrays.kv_gb[:, j, k]
        whole = arrays.memory_gb[k] * arrays.gpus[c]
        tight = kv.sum(axis=0) > spare
        rows = np.cumsum(tight) - 1
        parts = [(self.v[:, tight], (kv / whole)[:, tight]), (self.w[tight], -(spare / whole)[tight])]
        self.add(parts, np.zeros(int(tight.sum())), [rows[tight], rows[tight]])

    def throughput(self) -> None:
        """Add (5g), where it could bind."""
        arrays, (j, k) = self.arrays, self.pairs.T
        gpus = arrays.gpus[self.options[:, 2]].astype(float)
        work = arrays.work[:, j, k] / arrays.capacity[k]
        tight = work.sum(axis=0) > 1.0
        rows = np.cumsum(tight) - 1
        chosen = tight[self.pair_of]
        parts = [(self.x[:, tight], work[:, tight]), (self.w[chosen], -gpus[chosen])]
        self.add(parts, np.zeros(int(tight.sum())), [rows[tight], rows[self.pair_of[chosen]]])

    def totals(self) -> None:
        """Add (5c), (5h)."""
        arrays, (_, k, c) = self.arrays, self.options.T
        weights = np.broadcast_to(arrays.weights_gb[self.pairs[:, 0]], self.z.shape)
        data = np.broadcast_to(arrays.data_gb[:, None], self.x.shape)
        stored = arrays.problem.horizon_hours * arrays.problem.storage_dollars_per_gb_hour
        size = max(arrays.problem.storage_gb, 1.0)
        self.add([(self.z, weights / size), (self.x, data / size)], arrays.problem.storage_gb / size, [0, 0])
        size = max(arrays.problem.budget_dollars, 1.0)
        rent = arrays.rent[k] * arrays.gpus[c] / size
        parts = [(self.w, rent), (self.z, weights * stored / size), (self.x, data * stored / size)]
        self.add(parts, arrays.problem.budget_dollars / size, [0, 0, 0])

    def quality(self) -> None:
        """Add (5i), (5j)."""
        arrays, row = self.arrays, np.arange(self.x.shape[0])[:, None]
        error = arrays.error[:, self.pairs[:, 0], self.pairs[:, 1]]
        self.add([(self.v, self.delay / arrays.max_delay[:, None])], np.ones(len(row)), [row])
        top = np.maximum(arrays.max_error, TINY)
        self.add([(self.x, error / top[:, None])], arrays.max_error / top, [row])

    def program(self) -> Program:
        """Return the whole program, scaled."""
        from scipy.sparse import csr_matrix

        arrays, (_, k, c) = self.arrays, self.options.T
        cost = np.zeros(self.size)
        cost[self.w] = arrays.rent[k] * arrays.gpus[c]
        cost[self.v] = arrays.delay_dollars[:, None] * self.delay
        cost[self.x] = arrays.data_dollars[:, None]
        cost[self.z] = arrays.model_dollars[self.pairs[:, 0]]
        cost[self.u] = arrays.unserved_dollars
        upper = np.ones(self.size)
        upper[self.u] = arrays.max_unserved
        integral = np.zeros(self.size, dtype=bool)
        integral[self.w] = integral[self.z] = True
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        limit = np.concatenate(self.limits)
        matrix = csr_matrix((values, (rows, columns)), shape=(self.count, self.size))
        matrix, limit = _scaled(matrix, limit)
        unit = max(float(np.median(cost[self.w])) if len(self.w) else 1.0, TINY)
        lower = np.zeros(self.size)
        return Program(self.options, self.pairs, cost / unit, matrix, limit, lower, upper, integral, unit)


def _scaled(matrix: Any, limit: Floats) -> tuple[Any, Floats]:
    """Return the rows scaled until their largest entry is 1, without entries under `TINY`."""
    largest = np.asarray(abs(matrix).max(axis=1).todense()).ravel()
    factor = 1.0 / np.where(largest > 0, largest, 1.0)
    lengths = np.diff(matrix.indptr)
    data = matrix.data * np.repeat(factor, lengths)
    data[abs(data) < TINY] = 0.0
    scaled = matrix.copy()
    scaled.data = data
    scaled.eliminate_zeros()
    return scaled, limit * factor


def _ratio(over: Floats, under: Floats) -> Floats:
    """Return over / under, inf where nothing is under."""
    without = np.full(np.broadcast_shapes(over.shape, under.shape), np.inf)
    found: Floats = np.divide(over, under, out=without, where=under > 0)
    return found


@dataclasses.dataclass(frozen=True)
class MilpResult:
    """What the solver found.

    :ivar allocation: its best, None if it found none in its time, or if there is none.
    :ivar bound: the least dollars of any allocation; None if there is none, or if the solver contradicted itself.
    :ivar closed: whether the allocation was proven to be the best, within the gap requested.
    """

    allocation: Allocation | None
    bound: float | None
    closed: bool


def exact(
    arrays: Arrays, time_limit: float = 600.0, gap: float = 1e-4, options: Bools | None = None, tightened: bool = True
) -> MilpResult:
    """Return the cheapest allocation, or the best found in time, with a bound on how much better there could be.

    Each answer is checked against the constraints and against GH's; one that contradicts them is found again without
    presolve, and if that does too, it comes without a bound.

    :param time_limit: seconds for the solver; the answer is rounded after that.
    :param gap: the share of the cost by which the answer may be above the bound and still count as the best.
    :param options: (J, K, C) which configurations may be used; the bound then holds among those only.
    :param tightened: as in `build`.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> outcome = exact(Arrays.of(paper_instance()))
    >>> outcome.closed
    True
    """
    _optimize()
    program = build(arrays, arrays.options() if options is None else options, tightened)
    feasible = greedy(arrays)
    most = feasible.total if options is None and not check(arrays.problem, feasible.allocation()) else np.inf
    begun = time.monotonic()
    outcome = _attempt(arrays, program, time_limit, gap, presolve=True)
    if not _credible(arrays.problem, outcome, most, gap):
        left = time_limit - (time.monotonic() - begun)
        outcome = _attempt(arrays, program, left, gap, presolve=False)
        if not _credible(arrays.problem, outcome, most, gap):
            return MilpResult(outcome.allocation, None, False)
    return outcome


def _credible(problem: Problem, outcome: MilpResult, most: float, gap: float) -> bool:
    """Return whether the checker agrees, and neither bound nor proof is above what a feasible allocation costs."""
    slack = 1 + max(gap, 1e-5)
    if outcome.allocation is None:
        possible = np.isfinite(most) or all(kind.max_unserved >= 1 for kind in problem.query_types)
        return not (outcome.closed and possible) and (outcome.bound or 0.0) <= most * slack
    total = outcome.allocation.costs(problem).total
    agreed = outcome.bound is not None and outcome.bound <= min(total, most) * slack + 1e-6
    least = most if outcome.bound is None else min(most, outcome.bound)
    proven = not outcome.closed or total <= least * slack + 1e-6
    return agreed and proven and not check(problem, outcome.allocation)


def _attempt(arrays: Arrays, program: Program, time_limit: float, gap: float, presolve: bool) -> MilpResult:
    options = {"mip_rel_gap": gap, "time_limit": max(time_limit, 1e-3), "presolve": presolve}
    found = _solve(program, options, program.lower, program.upper, program.integral)
    bound = getattr(found, "mip_dual_bound", None)
    if found.x is None:
        infeasible = found.status == INFEASIBLE
        return MilpResult(None, None if bound is None or infeasible else max(bound * program.unit, 0.0), infeasible)
    whole = np.round(found.x)
    lower, upper = (np.where(program.integral, whole, edge) for edge in (program.lower, program.upper))
    clean = _solve(program, {"presolve": presolve}, lower, upper, np.zeros_like(program.integral))
    allocation = read(arrays, program, found.x if clean.x is None else clean.x)
    if bound is None:  # No variable was integral: a linear program is its own bound.
        bound = found.fun
    return MilpResult(allocation, bound * program.unit, found.status == 0)


def _solve(program: Program, options: dict[str, Any], lower: Floats, upper: Floats, integral: Bools) -> Any:
    optimize = _optimize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of options that SciPy passes on to HiGHS.
        return optimize.milp(
            program.cost,
            integrality=integral.astype(int),
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(program.matrix, -np.inf, program.limit),
            options=options,
        )


def _optimize() -> Any:
    return scipy_modules("the exact and improved placement methods need", "optimize")[0]


def read(arrays: Arrays, program: Program, values: Floats) -> Allocation:
    """Return the allocation that a solution stands for."""
    w, _, x, _, _ = program.parts(values, arrays.shape[0])
    chosen = program.options[w > 0.5]
    deployments = tuple(
        Deployment(int(j), int(k), int(arrays.tensor[c]), int(arrays.pipeline[c]), int(arrays.gpus[c]))
        for j, k, c in chosen
    )
    x = np.where(x > DROPPED, x, 0.0)
    x /= np.maximum(x.sum(axis=1, keepdims=True), 1.0)  # A solver's shares may be a rounding above the whole.
    routes = tuple(
        Route(int(i), int(program.pairs[p, 0]), int(program.pairs[p, 1]), float(x[i, p])) for i, p in np.argwhere(x)
    )
    unserved = tuple(float(share) for share in np.maximum(0.0, 1.0 - x.sum(axis=1)))
    return Allocation(deployments, routes, unserved)


AROUND = 24  # Configurations in the neighbourhood besides those of AGH's own pairs.


def improved(arrays: Arrays, seed: int = 0, time_limit: float = 2.0) -> Allocation:
    """Return the best allocation among the most promising configurations around AGH's answer, never above AGH's own.

    :param seed: of AGH's random orderings.
    :param time_limit: seconds for the solver; AGH's answer stands if it finds nothing better.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> improved(arrays).costs(arrays.problem).total <= adaptive(arrays).total + 1e-6
    True
    """
    draft = adaptive(arrays, seed=seed)
    found = draft.allocation()
    # Where AGH leaves more unserved than is allowed, so do its neighbours: all configurations then.
    near = Exchange(arrays, Choices(arrays, Mechanisms())).pool(draft, AROUND) if enough(draft) else None
    if near is not None and not near.any():
        return found
    better = exact(arrays, time_limit, options=near).allocation
    if better is None or check(arrays.problem, better):
        return found
    return better if not enough(draft) or better.costs(arrays.problem).total < draft.total else found
