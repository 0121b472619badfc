"""The options of a problem, and the linear program over a set of them: routes, models stored, and what is unserved.

An option is a pair of model and tier with a configuration, or a range of configurations that differ in their size
alone, which the program then chooses. A set has one option of a pair at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.agh.draft import NOTHING
from ctxflow.policies.agh.linear_programs import Program
from ctxflow.policies.agh.problem import MOST, Constants, Floats, Ints
from ctxflow.policies.agh.size_ranges import SizeRanges

WHOLE = 1 - 1e-7
_LEAST = 1e-12
_TINY = 1e-6


class OptionTable:
    """The options of a problem with their constants, of I query types and O options.

    Delays, errors, work and KV caches are shares of their limits, of a query type served whole by one option; work and
    KV caches of its smallest configuration's.

    :ivar options: (O, 3) model, tier and smallest configuration. :ivar pair: (O,) the number of the pair.
    :ivar gpus, rent: (O,) GPUs and dollars of the smallest configuration. :ivar gpu_rent: (O,) dollars of a GPU.
    :ivar span: (O,) how many GPUs more it may have. :ivar speed, room: (O,) what each of these adds to the limits on
        work and KV caches, as a share.
    :ivar weights: (O,) GB. :ivar gb_dollars: of storing a GB.
    :ivar delay, error, work, kv: (I, O). :ivar error_room: (I,) the limit on the error: 1, or less where it is tiny.
    :ivar linear: (I, O) dollars of the delay.
    :ivar most: (I, O) the largest share that an option alone may serve; `load`: the work of that.
    :ivar forced: (I,) dollars of leaving unserved what must be served.
    """

    def __init__(self, arrays: Constants, forced_dollars: Floats) -> None:
        self.arrays, self.forced = arrays, forced_dollars
        self.sizes = SizeRanges.of(arrays, arrays.options())
        self.options, self.span = self.sizes.smallest, self.sizes.span
        j, k, c = self.options.T
        self.pair: Ints = j * arrays.shape[2] + k
        self.gpus: Ints = arrays.gpus[c]
        self.gpu_rent: Floats = arrays.rent[k]
        self.rent: Floats = self.gpu_rent * self.gpus
        self.weights: Floats = arrays.weights_gb[j]
        self.gb_dollars = arrays.hours * arrays.storage_price
        self.delay = arrays.delay[:, j, k, c] / arrays.max_delay[:, None]
        self.error = arrays.error[:, j, k] / np.maximum(arrays.max_error[:, None], _TINY)
        self.error_room = np.minimum(1.0, arrays.max_error / _TINY)
        self.work = arrays.work[:, j, k] / (arrays.capacity[k] * self.gpus)
        spare = np.maximum(arrays.spare_gb[j, k, c], _LEAST)
        self.kv = arrays.kv_gb[:, j, k] / spare
        self.speed, self.room = 1.0 / self.gpus, self.sizes.spare_gb / spare
        self.linear = arrays.delay_dollars[:, None] * arrays.delay[:, j, k, c]
        self.most = np.ones(self.delay.shape)
        limits = (
            (self.delay, 1.0), (self.error, self.error_room[:, None]),
            (self.work, 1 + self.span * self.speed), (self.kv, 1 + self.span * self.room),
        )  # fmt: skip
        for used, room in limits:
            self.most = np.minimum(self.most, room / np.maximum(used, _LEAST))
        never = self.most < _TINY
        self.most[never] = self.delay[never] = self.error[never] = self.linear[never] = 0.0
        self.load = self.work * self.most

    def fit(self, chosen: Sequence[int]) -> bool:
        """Return whether budget and stock have room for a set."""
        these = list(chosen)
        used = np.bincount(self.options[these, 1], weights=self.gpus[these], minlength=len(self.arrays.stock))
        return bool(self.rent[these].sum() <= self.arrays.budget and (used <= self.arrays.stock).all())

    def room_beside(self, chosen: Sequence[int]) -> Ints:
        """Return the options that may be added to a set: of other pairs, within budget and stock."""
        these, arrays = list(chosen), self.arrays
        used = np.bincount(self.options[these, 1], weights=self.gpus[these], minlength=len(arrays.stock))
        allowed = self.gpus <= (arrays.stock - used)[self.options[:, 1]]
        allowed &= self.rent + self.rent[these].sum() <= arrays.budget
        allowed &= ~np.isin(self.pair, self.pair[these])
        return np.flatnonzero(allowed)

    def total(self, chosen: Sequence[int], shares: Floats, more: Ints) -> float:
        """Return the dollars of shares (I, n) over a set with more GPUs (n,), each model stored that they use.

        It is inf beyond storage, budget or stock.
        """
        arrays, these = self.arrays, list(chosen)
        shares = np.where(shares > NOTHING, shares, 0.0)
        stored = float((self.weights[these] * (shares > 0)).sum() + arrays.data_gb @ shares.sum(axis=1))
        spent = float((self.rent[these] + self.gpu_rent[these] * more).sum()) + stored * self.gb_dollars
        used = np.bincount(self.options[these, 1], self.gpus[these] + more, len(arrays.stock))
        if (
            (used > arrays.stock).any()
            or stored > arrays.storage * (1 + NOTHING)
            or spent > arrays.budget * (1 + NOTHING)
        ):
            return np.inf
        unserved = np.maximum(0.0, 1 - shares.sum(axis=1))
        beyond = np.maximum(0.0, unserved - arrays.max_unserved)
        penalty = arrays.unserved_dollars @ (unserved - beyond) + self.forced @ beyond
        return spent + float((self.linear[:, these] * shares).sum() + penalty)


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a query type cannot have without storing a model outside some options: 1 - u <= alone + (1 - alone) sum z.

    :ivar inside: places in the set of those options, whose delays and errors allow no more than `alone` of the type.
    :ivar outside: places of the others, over whose z the sum is.
    """

    alone: float
    inside: Ints
    outside: Ints


def cuts(delay: Floats, error: Floats, room: float) -> list[Cut]:
    """Return the cuts of a query type over n options: inside are those that can serve least of it, fewest first.

    :param delay, error: (n,) shares of their limits, served whole by each. :param room: for the error.
    """
    most = np.minimum(1.0, np.minimum(1 / np.maximum(delay, _LEAST), room / np.maximum(error, _LEAST)))
    if most.min(initial=1.0) >= WHOLE:
        return []
    order = np.argsort(most, kind="stable")
    found, alone = [], 0.0
    for count in range(1, len(most)):
        newest, inside, outside = int(order[count - 1]), order[:count], order[count:]
        alone = max(alone, float(most[newest]), _mixed(delay, error, room, newest, inside[:-1]))
        if alone >= WHOLE:
            break
        if most[outside[0]] > most[newest] + NOTHING:
            found.append(Cut(alone, inside, outside))
    return found


def _mixed(delay: Floats, error: Floats, room: float, one: int, others: Ints) -> float:
    """Return the largest share that an option and another serve, using up both delay and error; 0 if none do."""
    slope = delay[one] * error[others] - delay[others] * error[one]
    slope = np.where(np.abs(slope) > _LEAST, slope, np.inf)
    own, rest = (error[others] - room * delay[others]) / slope, (room * delay[one] - error[one]) / slope
    return float(np.minimum(1.0, np.where((own > 0) & (rest > 0), own + rest, 0.0)).max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Prices:
    """The dual prices of a set's program, in dollars, 0 or more.

    :ivar serving, delay, error: (I,) of a query type, and of all that its delay and its error may be.
    :ivar storage: of a GB of storage. :ivar budget: of a dollar of the budget. :ivar stock: (K,) of a GPU of a tier.
    :ivar cuts: of each cut.
    """

    serving: Floats
    delay: Floats
    error: Floats
    storage: float
    budget: float
    stock: Floats
    cuts: Floats


class SetProgram:
    """The program over a set of n options.

    Variables: shares x and stored models z (I, n), what is unserved, as allowed and beyond it, and the GPUs that each
    option has more. Rows: serving, delay and error of each type; throughput and memory of each option; storage; budget;
    the stock of each tier; x <= most z; and the cuts, without which a little z would do.

    :ivar x, z, more: (I, n), (I, n) and (n,) the columns of the variables.
    """

    def __init__(self, options: OptionTable, chosen: Sequence[int]) -> None:
        types, count = len(options.arrays.rates), len(chosen)
        self.options, self.chosen = options, list(chosen)
        self.x: Ints = np.arange(types * count).reshape(types, count)
        self.z: Ints = self.x + types * count
        self.more: Ints = 2 * types * count + 2 * types + np.arange(count)
        delay, error, room = options.delay[:, self.chosen], options.error[:, self.chosen], options.error_room
        self.cuts = [(i, cut) for i in range(types) for cut in cuts(delay[i], error[i], float(room[i]))]
        self._limits = 3 * types + 2 * count  # The row of storage; the next is the budget's, and those of stocks.
        self._linking = self._limits + 2 + len(options.arrays.stock)
        # Storage and budget in units of their limits.
        self._scale = max(options.arrays.storage, 1.0), max(options.arrays.budget, 1.0)

    def program(self, whole: bool) -> Program:
        """Return the program; its cost is without rent.

        :param whole: whether each model is stored or not and GPUs are whole; they may be in part otherwise.
        """
        options, these, x, z = self.options, self.chosen, self.x, self.z
        arrays, (types, count) = options.arrays, x.shape
        left = 2 * x.size + np.arange(types)
        forced, i, n = left + types, np.arange(types), np.arange(count)
        every_i, every_n = np.broadcast_to(i[:, None], x.shape), np.broadcast_to(n, x.shape)
        gb, dollars = 1 / self._scale[0], options.gb_dollars / self._scale[1]
        data, weights = (
            np.broadcast_to(arrays.data_gb[:, None], x.shape),
            np.broadcast_to(options.weights[these], x.shape),
        )
        ones, base, linking = np.ones(x.shape), self._limits, self._linking + x
        parts = [
            (every_i, x, -ones), (i, left, -np.ones(types)), (i, forced, -np.ones(types)),
            (types + every_i, x, options.delay[:, these]), (2 * types + every_i, x, options.error[:, these]),
            (3 * types + every_n, x, options.work[:, these]), (3 * types + count + every_n, x, options.kv[:, these]),
            (base + 0 * x, x, data * gb), (base + 0 * x, z, weights * gb),
            (base + 1 + 0 * x, x, data * dollars), (base + 1 + 0 * x, z, weights * dollars),
            (3 * types + n, self.more, -options.speed[these]), (3 * types + count + n, self.more, -options.room[these]),
            (base + 1 + 0 * n, self.more, options.gpu_rent[these] / self._scale[1]),
            (base + 2 + options.options[these, 1], self.more, np.ones(count)),
            (linking, x, ones), (linking, z, -options.most[:, these]),
        ]  # fmt: skip
        for row, (query, cut) in enumerate(self.cuts, self._linking + x.size):
            columns = np.concatenate([[left[query], forced[query]], z[query, cut.outside]])
            values = np.full(len(columns), -(1 - cut.alone))
            values[:2] = -1.0
            parts.append((np.full(len(columns), row), columns, values))
        rows, columns, values = (np.concatenate([np.ravel(part[place]) for part in parts]) for place in range(3))
        room = (arrays.budget - options.rent[these].sum()) / self._scale[1]
        used = np.bincount(options.options[these, 1], options.gpus[these], len(arrays.stock))
        stock = np.minimum(arrays.stock - used, MOST)
        limit = np.concatenate([
            -np.ones(types), np.ones(types), options.error_room, np.ones(2 * count), [arrays.storage * gb, room], stock,
            np.zeros(x.size), [cut.alone - 1 for _, cut in self.cuts],
        ])  # fmt: skip
        cost = (options.linear[:, these] + options.gb_dollars * data, options.gb_dollars * weights)
        upper = (options.most[:, these], ones, arrays.max_unserved, 1 - arrays.max_unserved, options.span[these])
        integral = np.zeros(2 * x.size + 2 * types + count, dtype=bool)
        integral[z] = integral[self.more] = whole
        kept = values != 0
        return Program(
            cost=np.concatenate([
                *map(np.ravel, cost), arrays.unserved_dollars, options.forced, options.gpu_rent[these],
            ]),
            rows=rows[kept], columns=columns[kept], values=values[kept], limit=limit,
            lower=np.zeros(len(integral)), upper=np.concatenate([*map(np.ravel, upper)]), integral=integral,
        )  # fmt: skip

    def prices(self, duals: Floats) -> Prices:
        """Return the prices that the rows' duals (R,) are."""
        types, base = len(self.options.arrays.rates), self._limits
        prices = -duals
        return Prices(
            serving=prices[:types], delay=prices[types : 2 * types], error=prices[2 * types : 3 * types],
            storage=float(prices[base]) / self._scale[0], budget=float(prices[base + 1]) / self._scale[1],
            stock=prices[base + 2 : self._linking], cuts=prices[self._linking + self.x.size :],
        )  # fmt: skip
