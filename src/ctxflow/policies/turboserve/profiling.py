"""The offline profiler: the cheapest parameters that keep the latency target, by level; and the tuned oracle.

Both are searches over a `replay` that the caller gives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from ctxflow.policies.turboserve.autoscaling import Levels, Parameters

Segment = TypeVar("Segment")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """:ivar cost: what the GPUs cost, in any unit. :ivar worst: the longest chunk in seconds."""

    cost: float
    worst: float


@dataclasses.dataclass(frozen=True)
class Profiled:
    """A row of Table 6.

    :ivar valid: whether the target is kept; where no candidate keeps it, the one with the shortest chunk is taken.
    """

    volatility: float
    parameters: Parameters
    replayed: Replayed
    valid: bool


def cheapest(
    candidates: Sequence[Parameters], replay: Callable[[Parameters], Replayed], target: float
) -> tuple[Parameters, Replayed, bool]:
    """Return the cheapest candidate whose longest chunk keeps the target, or else the one with the shortest.

    :raises ValueError: without candidates.

    >>> rows = {0.5: Replayed(9.0, 0.4), 0.8: Replayed(5.0, 0.7)}
    >>> cheapest([Parameters(0.5), Parameters(0.8)], lambda each: rows[each.utilization], 0.6)[0].utilization
    0.5
    """
    if not candidates:
        raise ValueError("there is nothing to choose from: give one candidate or more")
    found = [(each, replay(each)) for each in candidates]
    valid = [row for row in found if row[1].worst <= target]
    if valid:
        return (*min(valid, key=lambda row: row[1].cost), True)
    return (*min(found, key=lambda row: (row[1].worst, row[1].cost)), False)


def profile(
    segments: Sequence[tuple[float, Segment]],
    candidates: Sequence[Parameters],
    replay: Callable[[Segment, Parameters], Replayed],
    target: float,
) -> list[Profiled]:
    """Return the profiled parameters of each segment, by ascending volatility.

    :param segments: the volatility of each, and whatever `replay` takes.
    :param target: the longest that a chunk may take, in seconds.
    """

    def row(volatility: float, segment: Segment) -> Profiled:
        return Profiled(volatility, *cheapest(candidates, lambda each: replay(segment, each), target))

    return [row(*each) for each in sorted(segments, key=lambda each: each[0])]


def levels(rows: Sequence[Profiled]) -> Levels:
    """Return the table that the controller reads: neighbours with the same parameters are one level.

    >>> rows = [Profiled(v, Parameters(rho), Replayed(1, 1), True) for v, rho in ((1, 0.8), (2, 0.8), (4, 0.5))]
    >>> levels(rows).bounds
    (3.0,)
    """
    bounds, found = [], [rows[0].parameters]
    for before, row in itertools.pairwise(rows):
        if row.parameters != found[-1]:
            bounds.append((before.volatility + row.volatility) / 2)
            found.append(row.parameters)
    return Levels(tuple(bounds), tuple(found))


def tuned(
    windows: int,
    candidates: Sequence[Parameters],
    replay: Callable[[Sequence[Parameters]], Sequence[Replayed]],
    target: float,
) -> list[Parameters]:
    """Return the tuned oracle: for each window the cheapest parameters that keep the target, knowing what comes.

    Windows are decided from the last to the first, each for the cost of all, and once more from the first to the last.

    :param replay: the parameters of each window -> what each window came to.
    """
    safest = min(candidates, key=lambda each: each.utilization)
    chosen = [safest] * windows
    for number in (*reversed(range(windows)), *range(windows)):

        def together(each: Parameters, number: int = number) -> Replayed:
            rows = replay([*chosen[:number], each, *chosen[number + 1 :]])
            return Replayed(sum(row.cost for row in rows), max(row.worst for row in rows))

        chosen[number] = cheapest(candidates, together, target)[0]
    return chosen
