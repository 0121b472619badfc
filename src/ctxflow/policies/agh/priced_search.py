"""Local search over sets of deployments where throughput or memory is short, by what each change could bring at most.

Of all sets that differ by one option more, less or another, and then by two, those with the least bound are judged
first (`option_sets`), until no bound is under the best found.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from ctxflow.policies.agh.option_sets import Chosen, Judged, OptionSets
from ctxflow.policies.agh.problem import Bools, Ints

OFFERED = 8  # Sets of each kind of change, the most promising.
FIRST = 40  # Options of which two are added at once.
SETTLED = 2  # Sets that are settled without success before the neighbourhood is made anew, with what was learnt.
FAILED = 12  # Sets that are settled without success, after which a neighbourhood is left.


@dataclasses.dataclass
class PricedSearch:
    """A search with a limit on its work.

    :ivar sets: what was learnt, also from other searches. :ivar most_work: as `OptionSets.work` counts it.
    """

    sets: OptionSets
    most_work: float

    def search(self, start: Sequence[int]) -> Judged | None:
        """Return the best set that changes lead to from this one; None if there is no room for it."""
        best = self.sets.judge(start)
        if best is None:
            return None
        for thoroughly in (False, True):
            self.sets.settle(best, np.inf, thoroughly)
            best = self._until_no_better(best, thoroughly)
        return best

    def _until_no_better(self, best: Judged, thoroughly: bool) -> Judged:
        double, failed = False, 0
        while self.sets.work < self.most_work:
            judged = len(self.sets.judged)
            better, tried = self._better(best, double, thoroughly)
            failed += tried
            if better is not None:
                best, double, failed = better, False, 0
            elif failed >= FAILED or (not tried and judged == len(self.sets.judged)):  # Nothing was learnt either.
                if double:
                    break
                double, failed = True, 0
        return best

    def _better(self, best: Judged, double: bool, thoroughly: bool) -> tuple[Judged | None, int]:
        """Return a better set, None if none was found, and how many were settled without success."""
        near, tried = self._near(best.chosen, double, thoroughly), 0
        heapq.heapify(near)
        limit = best.total - 1e-7 * max(1.0, abs(best.total))
        while near and tried < SETTLED and self.sets.work < self.most_work:
            bound, chosen = heapq.heappop(near)
            if bound >= limit:
                break
            if chosen not in self.sets.judged:
                judged = self.sets.judge(chosen)
                if judged is not None:
                    heapq.heappush(near, (max(bound, judged.relaxed), chosen))
                continue
            judged = self.sets.judged[chosen]
            if judged is None:
                continue
            self.sets.settle(judged, best.total, thoroughly)
            if judged.total < limit:
                return judged, tried
            tried += 1
        return None, tried

    def _near(self, chosen: Chosen, double: bool, thoroughly: bool) -> list[tuple[float, Chosen]]:
        """Return the most promising sets near one, with their bounds."""
        found: dict[Chosen, float] = {}
        for base, added in self._double(chosen) if double else self._single(chosen):
            if added is None:
                found[tuple(base)] = float(self.sets.bounds(base)[0])
            elif len(added):
                bounds = self.sets.bounds(base, added)
                for n in np.argsort(bounds, kind="stable")[:OFFERED]:
                    found[tuple(sorted([*base, *added[n].tolist()]))] = float(bounds[n])
        near = []
        for each, bound in found.items():
            known = self.sets.judged.get(each)
            if each not in self.sets.judged or (known and not (known.settled if thoroughly else known.dived)):
                near.append((bound if known is None else max(bound, known.relaxed), each))
        return near

    def _single(self, chosen: Chosen) -> Iterator[tuple[list[int], Ints | None]]:
        """Yield sets with one option less, and with the options (N, 1) that may be added to that, or to all."""
        yield list(chosen), self.sets.options.room_beside(chosen)[:, None]
        for base in _without_one(chosen):
            yield base, None
            yield base, self.sets.options.room_beside(base)[:, None]

    def _double(self, chosen: Chosen) -> Iterator[tuple[list[int], Ints | None]]:
        """Yield sets with two options less and the options (N, 1) that may be added; with one less or none, and two."""
        options = self.sets.options
        for n, one in enumerate(chosen):
            for other in chosen[:n]:
                base = [each for each in chosen if each not in (one, other)]
                yield base, options.room_beside(base)[:, None]
        for base in [list(chosen), *_without_one(chosen)]:
            room = options.room_beside(base)
            if len(room) > 1:
                first = room[np.argsort(self.sets.bounds_of_pairs(base, room), kind="stable")[:FIRST]]
                two = np.stack(np.triu_indices(len(first), 1), axis=1)
                pairs = first[two]
                allowed = options.pair[pairs[:, 0]] != options.pair[pairs[:, 1]]
                allowed &= options.rent[pairs].sum(axis=1) + options.rent[base].sum() <= options.arrays.budget
                yield base, pairs[allowed]


def neighbourhood(sets: OptionSets, chosen: Chosen, size: int) -> Bools:
    """Return (J, K, C) a set's options, all others of their pairs, and the `size` others with the least bounds."""
    options = sets.options
    every = np.arange(len(options.pair))[:, None]
    bounds = np.min([sets.bounds(base, every) for base in [list(chosen), *_without_one(chosen)]], axis=0)
    picked = np.isin(options.pair, options.pair[list(chosen)])
    bounds[picked] = np.inf
    picked[np.argsort(bounds, kind="stable")[:size]] = True
    mask = np.zeros(options.arrays.fits.shape, dtype=bool)
    for n in np.flatnonzero(picked):
        j, k, _ = options.options[n]
        for more in range(options.span[n] + 1):
            mask[j, k, options.sizes.configuration(options.arrays, int(n), more)] = True
    return mask


def _without_one(chosen: Chosen) -> list[list[int]]:
    return [[each for each in chosen if each != one] for one in chosen]
