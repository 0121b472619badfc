"""The MILP of P_DM in McCormick form: its variables, its rows, and what a solution stands for.

Options of a pair that differ only in their number of GPUs, as a site's workers do, are one variable and a whole number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, Deployment, Route
from ctxflow.policies.agh.linear_programs import Program
from ctxflow.policies.agh.problem import Arrays, Bools, Floats, Ints
from ctxflow.policies.agh.size_ranges import SizeRanges

TINY = 1e-6
DROPPED = 1e-9  # Shares under this are rounding, and no routes.


@dataclasses.dataclass(frozen=True)
class PlacementProgram:
    """The MILP, and which of its variables is what.

    The variables are w for each range, the GPUs that it
    has more than the fewest, v for each query type and range, x and z for each query type and pair, and u for each
    query type. q and y follow from these by (5d) and (5e), and are no variables.

    :ivar sizes: the G size ranges.
    :ivar pairs: (P, 2) model and tier. :ivar pair_of: (G,) the place of each range's pair.
    :ivar w, more, v, x, z, u: columns: (G,), (G,), (I, G), (I, P), (I, P), (I,).
    :ivar unit: dollars of one unit of the objective.
    """

    program: Program
    sizes: SizeRanges
    pairs: Ints
    pair_of: Ints
    w: Ints
    more: Ints
    v: Ints
    x: Ints
    z: Ints
    u: Ints
    unit: float


def build(arrays: Arrays, options: Bools, tightened: bool = True) -> PlacementProgram:
    """Return the MILP over some configurations (J, K, C).

    Each row is divided by its limit or its largest entry, and entries under 1e-6 of the row's largest are dropped:
    with (5f) as printed, whose KV entries are 1e-9 of the weights', HiGHS's presolve gives wrong optima.

    :param tightened: also the rows sum_c v = x, and v and x at most what delay, error, throughput and memory alone
        allow of the type. They cut off no answer, and the relaxation's bound is far better; False is the paper's own
        form (4).
    """
    rows = _Rows(arrays, options, tightened)
    for add in (rows.mccormick, rows.serving, rows.deploying, rows.memory, rows.throughput, rows.totals, rows.quality):
        add()
    return rows.program()


class _Rows:
    """Gathers the rows; one method for each kind."""

    def __init__(self, arrays: Arrays, options: Bools, tightened: bool) -> None:
        self.arrays, self.tightened = arrays, tightened
        self.sizes = SizeRanges.of(arrays, options)
        self.ranges, self.span = self.sizes.smallest, self.sizes.span
        self.pairs, self.pair_of = np.unique(self.ranges[:, :2], axis=0, return_inverse=True)
        self.pair_of = self.pair_of.reshape(-1)
        types, count, pairs = arrays.shape[0], len(self.ranges), len(self.pairs)
        self.w = np.arange(count)
        self.more = count + np.arange(count)
        self.v = 2 * count + np.arange(types * count).reshape(types, count)
        self.x = count * (2 + types) + np.arange(types * pairs).reshape(types, pairs)
        self.z = self.x + types * pairs
        self.u = count * (2 + types) + 2 * types * pairs + np.arange(types)
        self.size = int(self.u[-1]) + 1
        j, k, c = self.ranges.T
        self.gpus = arrays.gpus[c].astype(float)
        self.delay = arrays.delay[:, j, k, c]
        self.share = self._most()
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.limits: list[Floats] = []
        self.count = 0

    def _most(self) -> Floats:
        """Return (I, G) the largest share of a type that a range may serve by itself."""
        arrays, (j, k, c) = self.arrays, self.ranges.T
        most = np.ones(self.delay.shape)
        if self.tightened:
            gpus = self.gpus + self.span
            spare = arrays.spare_gb[j, k, c] + self.sizes.spare_gb * self.span
            for room, used in (
                (arrays.max_delay[:, None], self.delay),
                (arrays.max_error[:, None], arrays.error[:, j, k]),
                (arrays.capacity[k] * gpus, arrays.work[:, j, k]),
                (spare, arrays.kv_gb[:, j, k]),
            ):
                most = np.minimum(most, _ratio(np.broadcast_to(room, most.shape), used))
        return np.where(most < TINY, 0.0, most)

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
        sized = self.span > 0
        self.add([(self.more[sized], 1.0), (self.w[sized], -self.span[sized])], np.zeros(int(sized.sum())))
        tier, gpus = self.ranges[:, 1], self.gpus
        for k in np.flatnonzero(np.isfinite(self.arrays.stock)):
            here = tier == k
            stock = max(float(self.arrays.stock[k]), 1.0)
            parts = [(self.w[here], gpus[here] / stock), (self.more[here], 1.0 / stock)]
            self.add(parts, self.arrays.stock[k] / stock, [0, 0])

    def memory(self) -> None:
        """Add (5f): what its weights leave of an option's memory holds its KV caches (v is x times w)."""
        arrays, (j, k, c) = self.arrays, self.ranges.T
        spare, kv = arrays.spare_gb[j, k, c], arrays.kv_gb[:, j, k]
        each, whole = self.sizes.spare_gb, arrays.memory_gb[k] * self.gpus
        tight = kv.sum(axis=0) > spare
        rows = np.cumsum(tight) - 1
        parts = [
            (self.v[:, tight], (kv / whole)[:, tight]),
            (self.w[tight], -(spare / whole)[tight]),
            (self.more[tight], -(each / whole)[tight]),
        ]
        self.add(parts, np.zeros(int(tight.sum())), [rows[tight]] * 3)

    def throughput(self) -> None:
        """Add (5g), where it could bind."""
        arrays, (j, k) = self.arrays, self.pairs.T
        work = arrays.work[:, j, k] / arrays.capacity[k]
        tight = work.sum(axis=0) > 1.0
        rows = np.cumsum(tight) - 1
        chosen = tight[self.pair_of]
        where = rows[self.pair_of[chosen]]
        parts = [(self.x[:, tight], work[:, tight]), (self.w[chosen], -self.gpus[chosen]), (self.more[chosen], -1.0)]
        self.add(parts, np.zeros(int(tight.sum())), [rows[tight], where, where])

    def totals(self) -> None:
        """Add (5c), (5h)."""
        arrays, k = self.arrays, self.ranges[:, 1]
        weights = np.broadcast_to(arrays.weights_gb[self.pairs[:, 0]], self.z.shape)
        data = np.broadcast_to(arrays.data_gb[:, None], self.x.shape)
        stored = arrays.problem.horizon_hours * arrays.problem.storage_dollars_per_gb_hour
        size = max(arrays.problem.storage_gb, 1.0)
        self.add([(self.z, weights / size), (self.x, data / size)], arrays.problem.storage_gb / size, [0, 0])
        size = max(arrays.problem.budget_dollars, 1.0)
        rent = arrays.rent[k] / size
        parts = [
            (self.w, rent * self.gpus), (self.more, rent), (self.z, weights * stored / size),
            (self.x, data * stored / size),
        ]  # fmt: skip
        self.add(parts, arrays.problem.budget_dollars / size, [0, 0, 0, 0])

    def quality(self) -> None:
        """Add (5i), (5j)."""
        arrays, row = self.arrays, np.arange(self.x.shape[0])[:, None]
        error = arrays.error[:, self.pairs[:, 0], self.pairs[:, 1]]
        delay = np.where(self.share > 0, self.delay, 0.0) / arrays.max_delay[:, None]
        self.add([(self.v, delay)], np.ones(len(row)), [row])
        top = np.maximum(arrays.max_error, TINY)
        self.add([(self.x, error / top[:, None])], arrays.max_error / top, [row])

    def program(self) -> PlacementProgram:
        """Return the whole program, scaled: each row until its largest entry is 1, without entries under `TINY`."""
        arrays, k = self.arrays, self.ranges[:, 1]
        cost = np.zeros(self.size)
        cost[self.w], cost[self.more] = arrays.rent[k] * self.gpus, arrays.rent[k]
        cost[self.v] = arrays.delay_dollars[:, None] * np.where(self.share > 0, self.delay, 0.0)
        cost[self.x] = arrays.data_dollars[:, None]
        cost[self.z] = arrays.model_dollars[self.pairs[:, 0]]
        cost[self.u] = arrays.unserved_dollars
        upper = np.ones(self.size)
        upper[self.more], upper[self.u] = self.span, arrays.max_unserved
        integral = np.zeros(self.size, dtype=bool)
        integral[self.w] = integral[self.z] = True
        integral[self.more] = self.span > 0
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        largest = np.zeros(self.count)
        np.maximum.at(largest, rows, np.abs(values))
        factor = 1.0 / np.where(largest > 0, largest, 1.0)
        values = values * factor[rows]
        kept = np.abs(values) >= TINY
        unit = max(float(np.median(cost[self.w])) if len(self.w) else 1.0, TINY)
        program = Program(
            cost / unit, rows[kept], columns[kept], values[kept], np.concatenate(self.limits) * factor,
            np.zeros(self.size), upper, integral,
        )  # fmt: skip
        return PlacementProgram(
            program, self.sizes, self.pairs, self.pair_of,
            self.w, self.more, self.v, self.x, self.z, self.u, unit,
        )  # fmt: skip


def _ratio(over: Floats, under: Floats) -> Floats:
    """Return over / under, inf where nothing is under."""
    without = np.full(np.broadcast_shapes(over.shape, under.shape), np.inf)
    found: Floats = np.divide(over, under, out=without, where=under > 0)
    return found


def read(arrays: Arrays, made: PlacementProgram, values: Floats) -> Allocation:
    """Return the allocation that a solution stands for."""
    deployments = []
    for n in np.flatnonzero(values[made.w] > 0.5):
        j, k, _ = (int(each) for each in made.sizes.smallest[n])
        c = made.sizes.configuration(arrays, int(n), round(float(values[made.more[n]])))
        deployments.append(Deployment(j, k, int(arrays.tensor[c]), int(arrays.pipeline[c]), int(arrays.gpus[c])))
    x = np.where(values[made.x] > DROPPED, values[made.x], 0.0)
    x /= np.maximum(x.sum(axis=1, keepdims=True), 1.0)  # A solver's shares may be a rounding above the whole.
    routes = tuple(
        Route(int(i), int(made.pairs[p, 0]), int(made.pairs[p, 1]), float(x[i, p])) for i, p in np.argwhere(x)
    )
    unserved = tuple(float(share) for share in np.maximum(0.0, 1.0 - x.sum(axis=1)))
    return Allocation(tuple(deployments), routes, unserved)


def written(made: PlacementProgram, allocation: Allocation, arrays: Arrays) -> Floats | None:
    """Return the solution that stands for an allocation, None if it has a configuration that the program has not."""
    values = np.zeros(len(made.program.cost))
    place = {(int(j), int(k)): p for p, (j, k) in enumerate(made.pairs)}
    range_of: dict[int, int] = {}
    for each in allocation.deployments:
        for n in np.flatnonzero((made.sizes.smallest[:, :2] == (each.model, each.tier)).all(axis=1)):
            c = made.sizes.smallest[n, 2]
            more = each.gpus - int(arrays.gpus[c])
            alike = made.sizes.span[n] > 0 or (arrays.tensor[c], arrays.pipeline[c]) == (
                each.tensor_parallel, each.pipeline_parallel,
            )  # fmt: skip
            if alike and 0 <= more <= made.sizes.span[n]:
                values[made.w[n]], values[made.more[n]] = 1.0, more
                range_of[place[each.model, each.tier]] = int(n)
                break
        else:
            return None
    for route in allocation.routes:
        p = place[route.model, route.tier]
        values[made.x[route.query_type, p]] = values[made.v[route.query_type, range_of[p]]] = route.share
        values[made.z[route.query_type, p]] = 1.0
    values[made.u] = allocation.unserved
    return values
