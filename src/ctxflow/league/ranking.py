"""Ranks with confidence intervals, of games that all policies played on the same workloads and seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
LEVEL = 0.95
Played = tuple[str, int]
"""A workload and a seed."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with what it is in 95 of 100 resamples."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class LeagueStanding:
    """How a policy stands.

    :ivar rank: one more than the number of policies that are better beyond doubt: those of one rank are tied.
    :ivar ranks: the place by the mean, in 95 of 100 resamples from which to which.
    :ivar ratio: the geometric mean of the score over the bound, each workload counting alike.
    :ivar behind: the same over the best policy's, game by game: above 1 it is worse.
    :ivar workloads: the ratio on each workload.
    :ivar failure: why it did not play to the end, in a sentence; "" if it did. It has no ratio then, and is last.
    """

    policy: str
    rank: int
    ranks: tuple[int, int]
    ratio: Interval | None = None
    behind: Interval | None = None
    workloads: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""


def standings(ratios: Mapping[str, Mapping[Played, float]], failures: Mapping[str, str]) -> list[LeagueStanding]:
    """Rank policies, best first.

    Games are resampled within each workload (one fewer than there are, so that few seeds do not look surer than they
    are), or all of them where a workload has one seed alone; all policies' together, so that the comparison is paired.
    A policy is better beyond doubt if it is in 97.5 of 100 resamples. Nothing is corrected for the number of
    comparisons.

    :param ratios: policy -> game -> score over bound; games that not all of them have are left out.
    :param failures: policy -> why it did not play to the end.
    :raises ValueError: if there is no game that all policies have played.

    >>> ratios = {"a": {("w", n): 1.0 + n / 10 for n in range(5)}, "b": {("w", n): 2.0 + n / 10 for n in range(5)}}
    >>> [(each.policy, each.rank) for each in standings(ratios, {"c": "it raised"})]
    [('a', 1), ('b', 2), ('c', 3)]
    """
    names = [name for name in ratios if name not in failures]
    last = len(names) + 1
    lost = [LeagueStanding(name, last, (last, last), failure=why) for name, why in sorted(failures.items())]
    if not names:
        return lost
    games = sorted(set.intersection(*(set(ratios[name]) for name in names)))
    if not games:
        raise ValueError("there is no game that all policies have played")
    logs = np.log([[ratios[name][game] for game in games] for name in names])
    workloads = list(dict.fromkeys(workload for workload, _ in games))
    where = [[n for n, (each, _) in enumerate(games) if each == workload] for workload in workloads]
    by_workload = np.array([logs[:, those].mean(axis=1) for those in where])  # (workloads, policies)
    means = by_workload.mean(axis=0)
    drawn = _resampled(logs, where)
    best = int(np.argmin(means))
    # [better, worse]: the share of resamples, ties left out, that say so is counted by the interval of the difference.
    difference = drawn[:, :, None] - drawn[:, None, :]
    certain = np.quantile(difference, (1 + LEVEL) / 2, axis=0) < -1e-12
    places = 1 + (drawn[:, :, None] > drawn[:, None, :] + 1e-12).sum(axis=2)
    found = [
        LeagueStanding(
            name,
            rank=1 + int(certain[:, n].sum()),
            ranks=(_place(places[:, n], (1 - LEVEL) / 2), _place(places[:, n], (1 + LEVEL) / 2)),
            ratio=_interval(means[n], drawn[:, n]),
            behind=_interval(means[n] - means[best], drawn[:, n] - drawn[:, best]),
            workloads={workload: math.exp(row[n]) for workload, row in zip(workloads, by_workload, strict=True)},
        )
        for n, name in enumerate(names)
    ]
    return [*sorted(found, key=lambda each: (means[names.index(each.policy)], each.rank, each.policy)), *lost]


def _resampled(logs: NDArray[np.float64], where: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return (resamples, policies) the mean over workloads of the means of games drawn within each."""
    if min(map(len, where)) < 2:
        where = [[game for those in where for game in those]]
    chance = np.random.default_rng(0)
    total = np.zeros((RESAMPLES, len(logs)))
    for those in where:
        picked = chance.choice(np.array(those), (RESAMPLES, max(1, len(those) - 1)))
        total += logs[:, picked].mean(axis=2).T
    return total / len(where)


def _interval(value: float, drawn: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def _place(places: NDArray[np.int_], share: float) -> int:
    return int(np.quantile(places, share, method="nearest"))
