"""Local search over what is deployed: open, close and exchange deployments, with query types split between two.

For a set of options (a pair with a configuration), the best routes of every query type over one or two of them, in
closed form; and bounds on what adding or exchanging an option brings. Storage (5h), which couples the query types, is
priced: a GB costs what the unserved demand that it displaces does. (The paper's own moves are in `heuristics`.)
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ctxflow.policies.agh.draft import NOTHING, Choices, Draft, nearest, packed
from ctxflow.policies.agh.problem import Bools, Constants, Floats, Ints

TRIALS = 10  # Of the most promising exchanges are built, before the search is over.
FIRST = 32  # Options are tried as the first of two.
MOST = 64  # Exchanges accepted, at most: a bound on time.
UNDER = 0.999  # A price just under what displaces the marginal type, so that the type is still wanted.
_LEAST = 1e-12
_NEVER = 1e15

Change = tuple[float, list[int]]
"""A set of options with a bound on what it costs."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Query types served by one option and each other one together, at least cost: arrays (I, O).

    :ivar linear: dollars of the whole type. :ivar share: the other option's part.
    :ivar most: the share that can be served so; 0 where two are not better than one.
    :ivar whole: dollars with the storing of both models and the penalty; `_NEVER` where it is not possible.
    """

    linear: Floats
    share: Floats
    most: Floats
    whole: Floats


@dataclasses.dataclass(frozen=True)
class Routing:
    """The way (I,) and the share (I,) of each type, with the total in dollars."""

    taken: Ints
    shares: Floats
    total: float


@dataclasses.dataclass(frozen=True)
class Ways:
    """The W ways to serve a type with a set of options.

    :ivar chosen: the set. :ivar pairs: for each way the places in it of its two options; equal for one, -1 for none.
    :ivar linear: (I, W) dollars of the whole type. :ivar most: (I, W) the largest share that can be served so.
    :ivar shares: (I, W) the second option's part. :ivar fixed, weights: (W,) dollars and GB of the models stored.
    """

    chosen: Sequence[int]
    pairs: list[tuple[int, int]]
    linear: Floats
    most: Floats
    shares: Floats
    fixed: Floats
    weights: Floats

    @property
    def possible(self) -> Bools:
        """Return (I, W) whether a way serves anything, or is the one that need not."""
        found = self.most > NOTHING
        found[:, 0] = True
        return found

    def parts(self, i: int, way: int) -> list[tuple[int, float]]:
        """Return the options of a way, with their parts of what it serves of a type."""
        a, b = self.pairs[way]
        if a < 0:
            return []
        if a == b:
            return [(self.chosen[a], 1.0)]
        return [(self.chosen[b], float(self.shares[i, way])), (self.chosen[a], 1 - float(self.shares[i, way]))]


class Exchange:
    """The neighbourhoods of a problem: made once, used from many starts.

    :ivar refused: whether a set of options was left out for its throughput, memory or stock, which are not priced here.
    """

    def __init__(self, arrays: Constants, choices: Choices) -> None:
        self.arrays, self.choices = arrays, choices
        self.options: Ints = np.argwhere(arrays.options())
        j, k, c = self.options.T
        self.pair = j * arrays.shape[2] + k
        self.number = {(int(a), int(b), int(d)): n for n, (a, b, d) in enumerate(self.options)}
        self.rent: Floats = arrays.rent[k] * arrays.gpus[c]
        self.delay = np.ascontiguousarray(arrays.delay[:, j, k, c])
        self.error = np.ascontiguousarray(arrays.error[:, j, k])
        self.linear = arrays.delay_dollars[:, None] * self.delay + arrays.data_dollars[:, None]
        self.fixed: Floats = arrays.model_dollars[j]
        self.weights: Floats = arrays.weights_gb[j]
        by_error = arrays.max_error[:, None] / np.maximum(self.error, _LEAST)
        by_delay = arrays.max_delay[:, None] / np.maximum(self.delay, _LEAST)
        self.most = np.minimum(1.0, np.minimum(by_error, by_delay))
        self.worth = arrays.unserved_dollars / np.maximum(arrays.data_gb, _LEAST)
        least = arrays.data_gb.sum() + arrays.shape[0] * self.weights.min(initial=np.inf)
        tight = least > 0.9 * float(self._room(self.rent.min(initial=np.inf)))
        self.scarce = UNDER * float(self.worth.min()) if tight else 0.0
        self.by_worth = np.argsort(self.worth, kind="stable")
        self.drafts: dict[tuple[int, ...], Draft | None] = {}
        self.splits: dict[int, Split] = {}
        self.singles: dict[float, Floats] = {}
        self.refused = False

    def search(self, draft: Draft) -> Draft:
        """Return the draft, or a cheaper one that no exchange improves further."""
        draft = self.best(nearest(draft, self.options), draft.total) or draft
        for _ in range(MOST):
            if self.refused:
                break
            better = self._step(draft, self._single_changes) or self._step(draft, self._double_changes)
            if better is None:
                break
            draft = better
        return draft

    def _scarcity(self, unserved: Floats) -> float:
        """Return the dollars of a GB where storage is full: the cost of the unserved demand."""
        missing = unserved > 1e-6
        return UNDER * float(self.worth[missing].min()) if missing.any() else 0.0

    def _single(self, price: float) -> Floats:
        """Return (I, O) the cost of a type served by one option as far as it can be."""
        if price not in self.singles:
            arrays = self.arrays
            data = self.linear + price * arrays.data_gb[:, None]
            lost = arrays.unserved_dollars[:, None]
            self.singles[price] = self.fixed + price * self.weights + lost + self.most * (data - lost)
        return self.singles[price]

    def _split(self, a: int) -> Split:
        """Return how all types are served whole by each option and `a` together."""
        if a in self.splits:
            return self.splits[a]
        arrays = self.arrays
        low, high = np.zeros(self.delay.shape), np.ones(self.delay.shape)
        possible = np.ones(self.delay.shape, dtype=bool)
        for used, limit in ((self.error, arrays.max_error), (self.delay, arrays.max_delay)):
            slope, room = used - used[:, a, None], (limit - used[:, a])[:, None]
            edge = room / np.where(slope == 0, _LEAST, slope)
            high = np.where(slope > 0, np.minimum(high, edge), high)
            low = np.where(slope < 0, np.maximum(low, edge), low)
            possible &= (slope != 0) | (room >= 0)
        possible &= low <= high
        change = self.linear - self.linear[:, a, None]
        share = np.where(change < 0, high, low)
        part, most = self._corner(a)
        share, most = np.where(possible, share, part), np.where(possible, 1.0, most)
        most = np.where((share > NOTHING) & (share < 1 - NOTHING), most, 0.0)
        linear = self.linear[:, a, None] + share * change
        lost = arrays.unserved_dollars[:, None]
        whole = np.where(most > 0, lost + most * (linear - lost) + self.fixed + self.fixed[a], _NEVER)
        self.splits[a] = Split(linear, share, most, whole)
        return self.splits[a]

    def _corner(self, a: int) -> tuple[Floats, Floats]:
        """Return the other option's part and the share (I, O) that use up both the error and the delay of a type.

        It is what two options can do for a type that they cannot serve whole; 0 where that is no share of it.
        """
        arrays = self.arrays
        error, delay = arrays.max_error[:, None], arrays.max_delay[:, None]
        own_error, own_delay = self.error[:, a, None], self.delay[:, a, None]
        slope = own_error * self.delay - self.error * own_delay
        slope = np.where(slope == 0, _LEAST, slope)
        own, other = (error * self.delay - self.error * delay) / slope, (own_error * delay - error * own_delay) / slope
        total = own + other
        valid = (own > 0) & (other > 0) & (total < 1)
        return np.where(valid, other / np.where(valid, total, 1.0), 0.0), np.where(valid, total, 0.0)

    def _ways(self, chosen: Sequence[int]) -> Ways:
        """Return all ways to serve a type with none, one, or two of a set of options."""
        count, arrays = len(chosen), self.arrays
        ways = [(-1, -1), *((a, a) for a in range(count)), *((a, b) for a in range(count) for b in range(a))]
        types, width = arrays.shape[0], len(ways)
        linear, most, shares = np.zeros((types, width)), np.zeros((types, width)), np.zeros((types, width))
        fixed, weights = np.zeros(width), np.zeros(width)
        for way, (a, b) in enumerate(ways[1:], 1):
            n, m = chosen[a], chosen[b]
            if a == b:
                linear[:, way], most[:, way] = self.linear[:, n], self.most[:, n]
                fixed[way], weights[way] = self.fixed[n], self.weights[n]
            else:
                split = self._split(n)
                linear[:, way], most[:, way], shares[:, way] = (split.linear[:, m], split.most[:, m], split.share[:, m])
                fixed[way], weights[way] = self.fixed[n] + self.fixed[m], self.weights[n] + self.weights[m]
        return Ways(chosen, ways, linear, most, shares, fixed, weights)

    def _way_costs(self, ways: Ways, price: float) -> Floats:
        """Return (I, W) with each GB at its price; a way that serves nothing is above any that serves."""
        arrays = self.arrays
        lost = arrays.unserved_dollars[:, None]
        data = ways.linear + price * arrays.data_gb[:, None] - lost
        cost = ways.fixed + price * ways.weights + lost + ways.most * data
        cost[:, 0] += price * (arrays.data_gb + self.weights.max(initial=0.0))
        return np.where(ways.possible, cost, _NEVER)

    def best(self, chosen: Sequence[int], under: float = np.inf) -> Draft | None:
        """Return the cheapest draft over a set of options, None if none keeps the limits and is under `under`."""
        options = tuple(sorted(chosen))
        if options not in self.drafts:
            self.drafts[options] = self._best(options)
        found = self.drafts[options]
        return found if found is not None and found.total < under - 1e-9 else None

    def _best(self, options: Sequence[int]) -> Draft | None:
        """Find the best draft; if storage is full, find routes again with the price that it then has, and pack them."""
        ways, room = self._ways(options), float(self._room(self.rent[list(options)].sum()))
        taken, shares, full = self._settled(ways, room, 0.0)
        tries = [self._routing(ways, taken, shares)]
        if full:
            taken, shares, _ = self._settled(ways, room, self._scarcity(1 - shares))
            tries.append(self._routing(ways, taken, shares))
            tries.append(self._routing(ways, *self._packed(ways, room, taken)))
        for each in sorted(tries, key=lambda each: each.total):
            draft = self._draft(ways, each)
            if draft.within_limits():
                return draft
            self.refused = True
        return None

    def _room(self, rent: Floats | float) -> Floats:
        """Return the GB of storage that the budget pays beside a rent."""
        arrays = self.arrays
        dollars = arrays.hours * arrays.storage_price
        paid = (arrays.budget - rent) / max(dollars, _LEAST)
        return np.clip(paid, 0.0, arrays.storage) * (1 - 1e-12)

    def _settled(self, ways: Ways, room: float, price: float) -> tuple[Ints, Floats, bool]:
        """Return the best way for each type at a price of a GB, what of it is served, and whether storage limits it."""
        arrays = self.arrays
        taken = self._way_costs(ways, price).argmin(axis=1)
        shares = ways.most[np.arange(len(taken)), taken]
        full = float(ways.weights[taken].sum() + arrays.data_gb @ shares) > room
        self._settle(ways, room, taken, shares)
        return taken, shares, full

    def _packed(self, ways: Ways, room: float, taken: Ints) -> tuple[Ints, Floats]:
        """Return better ways and shares in a storage that is full."""
        arrays = self.arrays
        saved = np.where(ways.possible, arrays.unserved_dollars[:, None] - ways.linear, 0.0)
        return packed(taken, ways.most, saved, arrays.data_gb, ways.fixed, ways.weights, room)

    def _routing(self, ways: Ways, taken: Ints, shares: Floats) -> Routing:
        """Return ways and shares with their total."""
        used = {ways.chosen[a] for way in set(taken.tolist()) for a in ways.pairs[way] if a >= 0}
        total = float(self.rent[list(used)].sum()) if used else 0.0
        total += float(ways.fixed[taken].sum() + shares @ ways.linear[np.arange(len(taken)), taken])
        return Routing(taken, shares, total + float((1 - shares) @ self.arrays.unserved_dollars))

    def _draft(self, ways: Ways, routing: Routing) -> Draft:
        draft = Draft(self.choices)
        for i, share in enumerate(routing.shares):
            for n, part in ways.parts(i, int(routing.taken[i])):
                if share * part > NOTHING:
                    j, k, c = (int(place) for place in self.options[n])
                    draft.place(i, j, k, c, float(share * part))
        return draft

    def _settle(self, ways: Ways, limit: float, taken: Ints, shares: Floats) -> None:
        """Cut types until all fits the storage, the least worth a GB first, each to its best way in the room left.

        Changes `taken` and `shares`.
        """
        arrays = self.arrays
        stored = float(ways.weights[taken].sum() + arrays.data_gb @ shares)
        for i in self.by_worth:
            if stored <= limit and shares[i] >= 1 - NOTHING:
                continue
            if limit - NOTHING < stored <= limit:
                break
            others = stored - float(ways.weights[taken[i]]) - float(arrays.data_gb[i] * shares[i])
            room = np.maximum(0.0, limit - others - ways.weights) / max(float(arrays.data_gb[i]), _LEAST)
            possible = np.minimum(ways.most[i], room)
            lost = arrays.unserved_dollars[i]
            cost = np.where(possible > NOTHING, ways.fixed + lost + possible * (ways.linear[i] - lost), _NEVER)
            cost[0] = lost
            way = int(cost.argmin())
            taken[i], shares[i] = way, possible[way]
            stored = others + float(ways.weights[way] + arrays.data_gb[i] * possible[way])

    def _step(self, draft: Draft, changes: Callable[[list[int], Sequence[float]], Iterator[Change]]) -> Draft | None:
        """Return the best of the most promising changes to the set of options, None if none is better."""
        prices, best = self._prices(draft), None
        for _, chosen in heapq.nsmallest(
            TRIALS, changes(nearest(draft, self.options), prices), key=lambda change: change[0]
        ):
            best = self.best(chosen, (best or draft).total) or best
        return best

    def pair_start(self) -> Draft | None:
        """Return the best draft of the most promising one or two options, None if there is none.

        Where the budget is short, no chain of improvements through one deployment leads there.
        """
        if not len(self.options):
            return None
        prices = sorted({0.0, self.scarce})
        alone = np.max([self.added([], price)[1] for price in prices], axis=0)
        first = np.argsort(alone, kind="stable")[:FIRST]
        changes = (change for n in first for change in self._promising(prices, [int(n)], True))
        best = None
        for _, chosen in heapq.nsmallest(TRIALS, changes, key=lambda change: change[0]):
            best = self.best(chosen, np.inf if best is None else best.total) or best
        return best

    def _prices(self, draft: Draft) -> list[float]:
        """Return prices of a GB: 0, the present one, the one of scarce storage, and halves of these."""
        full = draft.stored > float(self._room(draft.rent)) * (1 - 1e-6)
        price = self._scarcity(draft.unserved) if full else 0.0
        return sorted({0.0, price, self.scarce, price / 2, self.scarce / 2})

    def _single_changes(self, chosen: list[int], prices: Sequence[float]) -> Iterator[Change]:
        """Yield sets with one option more, one less, or one for another."""
        for base in (chosen, *(_without(chosen, n) for n in chosen)):
            yield from self._promising(prices, base, base != chosen)

    def _double_changes(self, chosen: list[int], prices: Sequence[float]) -> Iterator[Change]:
        """Yield sets in which one option is another configuration of its pair, with one option more or not."""
        for n in chosen:
            for other in np.flatnonzero(self.pair == self.pair[n]):
                if other != n:
                    yield from self._promising(prices, [*_without(chosen, n), int(other)], True)

    def _promising(self, prices: Sequence[float], base: list[int], itself: bool) -> Iterator[Change]:
        """Yield the best options to add to a set, and (`itself`) the set, with a bound on their cost."""
        bounds = [self.added(base, price) for price in prices]
        if itself:
            yield max(alone for alone, _ in bounds), base
        added = np.max([each for _, each in bounds], axis=0)
        for option in np.argpartition(added, min(TRIALS, len(added) - 1))[:TRIALS] if len(added) else ():
            if added[option] < _NEVER:
                yield float(added[option]), [*base, int(option)]

    def added(self, base: list[int], price: float) -> tuple[float, Floats]:
        """Return a lower bound of the cost over a set, and over the set with each option (O,) added; storage priced."""
        arrays = self.arrays
        kept = self._way_costs(self._ways(base), price).min(axis=1)
        cost = np.minimum(self._single(price), kept[:, None])
        for n in base:
            split = self._split(n)
            whole = split.whole
            if price:
                whole = whole + price * (self.weights + self.weights[n] + split.most * arrays.data_gb[:, None])
            np.minimum(cost, whole, out=cost)
        paid = self.rent[base].sum()
        rent = paid + self.rent
        found = cost.sum(axis=0) + rent - price * self._room(rent)
        found[(rent > arrays.budget) | np.isin(self.pair, self.pair[base])] = _NEVER
        return float(kept.sum() + paid - price * self._room(paid)), found


def _without(chosen: list[int], option: int) -> list[int]:
    return [n for n in chosen if n != option]
