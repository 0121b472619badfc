"""What sets of deployments can do: each judged by a linear program, whose prices bound what any other set could do.

The relaxation over a set leaves the routes free, and a model may be stored for a query type in part. Its dual prices
are a bound on the cost of every set (a generalised Benders cut; Geoffrion 1972): a constant, less what each option of
the set is worth at those prices. An option's worth is the best filling of its throughput (5g), less its rent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.agh.draft import NOTHING, Choices, Draft, filled
from ctxflow.policies.agh.linear_programs import Effort, Solver
from ctxflow.policies.agh.problem import MOST, Floats, Ints
from ctxflow.policies.agh.set_program import OptionTable, Prices, SetProgram

FILLED = 200  # Options, the most promising, whose bound is exact.
_LEAST = 1e-12
KEPT = 60  # Bounds, the latest: older ones are from far away.
MIP_NODES = 20  # For one set: its program nearly always ends at the root.
DIVE = (1e-6, 0.05, 0.2, 0.4)
MIP_WORK = 20  # How much longer that takes than the relaxation.

Chosen = tuple[int, ...]
"""Numbers of options, ascending."""


@dataclasses.dataclass
class Judged:
    """What is known of a set of options.

    :ivar relaxed: dollars that every allocation over the set costs at least.
    :ivar total: dollars of the best allocation known over it, inf if none is. :ivar shares: (I, n) of that allocation.
    :ivar more: (n,) the GPUs that each option has there beyond its fewest.
    :ivar dived, settled: whether a good one was looked for, and the best.
    """

    chosen: Chosen
    relaxed: float
    total: float
    shares: Floats
    more: Ints
    dived: bool
    settled: bool


class OptionSets:
    """What was learnt of sets of options.

    :ivar judged: what is known by set; None for a set that the program says cannot be.
    :ivar work: entries of all programs solved, and of tables: a measure of the time, half a million a second.
    """

    def __init__(self, options: OptionTable) -> None:
        self.options = options
        self.judged: dict[Chosen, Judged | None] = {}
        self.work = 0
        self._count = 0
        self._constants: Floats = np.zeros(KEPT)
        self._worths: Floats = np.zeros((KEPT, len(options.pair)))
        self._linear, self._mixed = Solver(presolve=False), Solver(presolve=True)

    def judge(self, chosen: Sequence[int]) -> Judged | None:
        """Return what the relaxation says of a set, None if budget or stock have no room for it."""
        these = tuple(sorted(int(each) for each in chosen))
        if these not in self.judged:
            self.judged[these] = self._relaxation(these) if self.options.fit(these) else None
        return self.judged[these]

    def settle(self, judged: Judged, under: float, thoroughly: bool) -> None:
        """Find a good allocation over a set, or thoroughly the best, if one costs less than `under`."""
        made = SetProgram(self.options, judged.chosen)
        if not judged.dived:
            judged.dived = True
            self._dive(made, judged)
        if not thoroughly or judged.settled or judged.total < under:
            return
        judged.settled = True
        program = made.program(whole=True)
        rent = float(self.options.rent[list(judged.chosen)].sum())
        self.work += MIP_WORK * len(program.values)
        outcome = self._mixed.solve(program, Effort(nodes=MIP_NODES, under=min(under, judged.total) - rent))
        if outcome.values is not None:
            self._improve(judged, made, outcome.values)

    def _improve(self, judged: Judged, made: SetProgram, values: Floats) -> None:
        shares, more = values[made.x], _whole(values[made.more])
        total = self.options.total(judged.chosen, shares, more)
        if total < judged.total:
            judged.total, judged.shares, judged.more = total, shares, more

    def _dive(self, made: SetProgram, judged: Judged) -> None:
        """Improve what is known of a set: store what its shares use, without the least of them in each round."""
        program = made.program(whole=False)
        shares = judged.shares
        for least in DIVE:
            keep = (shares > least).astype(float)
            lower, upper = program.lower.copy(), program.upper.copy()
            lower[made.z] = upper[made.z] = keep
            self.work += len(program.values)
            outcome = self._linear.solve(dataclasses.replace(program, lower=lower, upper=upper))
            if outcome.values is None:
                continue
            shares = outcome.values[made.x]
            self._improve(judged, made, outcome.values)

    def bounds(self, base: Sequence[int], added: Ints | None = None) -> Floats:
        """Return (N,) lower bounds of the dollars over a set, with each row (N, A) of options added to it.

        :param added: none by default: the set itself, (1,).
        """
        kept = min(self._count, KEPT)
        constants, worths = self._constants[:kept], self._worths[:kept]
        own = constants - worths[:, list(base)].sum(axis=1)
        if added is None:
            return np.array([own.max()])
        found: Floats = (own[:, None] - worths[:, added].sum(axis=-1)).max(axis=0)
        return found

    def bounds_of_pairs(self, base: Sequence[int], added: Ints) -> Floats:
        """Return (N,) lower bounds of the dollars over a set with one of `added` (N,) and any other of these."""
        kept = min(self._count, KEPT)
        worths = self._worths[:kept, added]
        own = self._constants[:kept] - self._worths[:kept, list(base)].sum(axis=1)
        found: Floats = ((own - worths.max(axis=1, initial=-np.inf))[:, None] - worths).max(axis=0)
        return found

    def draft(self, judged: Judged, choices: Choices) -> Draft:
        """Return the allocation that was found over a set."""
        draft = Draft(choices)
        shares = np.where(judged.shares > NOTHING, judged.shares, 0.0)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
        for i, n in np.argwhere(shares):
            option = judged.chosen[n]
            j, k, _ = (int(each) for each in self.options.options[option])
            config = self.options.sizes.configuration(self.options.arrays, option, int(judged.more[n]))
            draft.place(int(i), j, k, config, float(shares[i, n]))
        return draft

    def _relaxation(self, chosen: Chosen) -> Judged | None:
        made = SetProgram(self.options, chosen)
        program = made.program(whole=False)
        self.work += len(program.values) + self.options.most.size // 40
        outcome = self._linear.solve(program)
        if outcome.values is None or not outcome.closed:
            return None
        place = self._count % KEPT
        self._constants[place], self._worths[place] = priced(made, made.prices(outcome.duals))
        self._count += 1
        relaxed = outcome.cost + float(self.options.rent[list(chosen)].sum())
        shares, more = outcome.values[made.x], _whole(outcome.values[made.more])
        total = self.options.total(chosen, shares, more)
        best = total <= relaxed + 1e-7 * max(1.0, abs(relaxed))
        return Judged(chosen, relaxed, total, shares, more, dived=best, settled=best)


def priced(made: SetProgram, prices: Prices) -> tuple[float, Floats]:
    """Return the bound that a set's prices are for all sets: a constant, and the worth (O,) of each option in dollars.

    A share's worth is what serving is paid, less what its delay, its error and its data cost at these prices.
    """
    options, arrays = made.options, made.options.arrays
    gb = prices.storage + (1 + prices.budget) * options.gb_dollars
    worth = (prices.serving - gb * arrays.data_gb)[:, None] - options.linear
    for price, used in ((prices.delay, options.delay), (prices.error, options.error)):
        if price.any():
            worth -= price[:, None] * used
    opening = np.broadcast_to(-gb * options.weights, worth.shape).copy()
    constant = float(prices.serving.sum() - prices.delay.sum() - prices.error @ options.error_room)
    constant -= prices.storage * arrays.storage + prices.budget * arrays.budget
    left, forced = arrays.unserved_dollars - prices.serving, options.forced - prices.serving
    for (query, cut), price in zip(made.cuts, prices.cuts.tolist(), strict=True):
        if not price:
            continue
        constant += price * (1 - cut.alone)
        left[query] -= price
        forced[query] -= price
        outside = np.ones(len(options.pair), dtype=bool)
        outside[[made.chosen[n] for n in cut.inside]] = False
        opening[query, outside] += price * (1 - cut.alone)
    constant += float(np.minimum(0.0, left * arrays.max_unserved).sum())
    constant += float(np.minimum(0.0, forced * (1 - arrays.max_unserved)).sum())
    stock = prices.stock[options.options[:, 1]]
    gpu = options.gpu_rent * (1 + prices.budget) + stock  # Dollars of a GPU.
    constant -= float(np.minimum(arrays.stock, MOST) @ prices.stock)
    return constant, _filled_worth(options, worth, opening, gpu)


def _filled_worth(options: OptionTable, worth: Floats, opening: Floats, gpu: Floats) -> Floats:
    """Return (O,) what an option is worth at most, filled with shares as far as its throughput allows, its GPUs paid.

    As the value of a filling is concave in the GPUs, the best number is where the next is not worth its price.

    :param worth: (I, O) dollars of a type served whole. :param opening: (I, O) dollars of storing the model for it.
    :param gpu: (O,) dollars of a GPU.
    """
    serves = worth > 0
    value = np.maximum(0.0, np.where(serves, worth, 0.0) * options.most + opening)
    size = np.where(serves & (value > 0), options.load, 0.0)  # In the throughput of the smallest configuration.
    fixed = gpu * options.gpus
    gain: Floats = np.minimum(value.sum(axis=0), (value / np.maximum(size, _LEAST)).max(axis=0)) - fixed
    sized = options.span > 0
    gain[sized] = np.maximum(0.0, value - fixed * size)[:, sized].sum(axis=0)  # Every GPU only as far as it is used.
    crowded = np.flatnonzero((size.sum(axis=0) > 1) | sized)
    some = crowded[np.argsort(-gain[crowded], kind="stable")[:FILLED]]
    values, sizes, room = value[:, some].T, size[:, some].T, np.ones(len(some))
    smallest = (filled(values, sizes, room) * values).sum(axis=1) - fixed[some]
    paid = values - fixed[some, None] * sizes
    parts = filled(paid, sizes, 1 + options.span[some] * options.speed[some])
    larger = np.where((parts * sizes).sum(axis=1) > 1, (parts * paid).sum(axis=1), -np.inf)
    gain[some] = np.maximum(smallest, larger)
    return gain


def _whole(more: Floats) -> Ints:
    """Return numbers of GPUs rounded up."""
    return np.asarray(np.ceil(more - 1e-6), dtype=np.int64)
