"""What no schedule and no placement can beat: the dynamic program over GPU budgets, and the exhaustive placement."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ctxflow.errors import counted
from ctxflow.policies.turboserve.autoscaling import Parameters, Replayed, cheapest
from ctxflow.policies.turboserve.rebalancing import Curve, Gpu, Residents, Session


@dataclasses.dataclass(frozen=True)
class Schedule:
    """:ivar gpus: ready in each slot. :ivar gpu_seconds: billed, boots included."""

    gpus: Sequence[int]
    gpu_seconds: float


def cheapest_schedule(
    needs: Sequence[int], slot_seconds: float, boot_seconds: float, initial: int = 0, most: int | None = None
) -> Schedule:
    """The schedule with the fewest GPU-seconds that has what each slot needs: a dynamic program over budgets.

    A GPU is billed from the start of its boot, so one that is not needed for a while is kept or booted anew, whichever
    is cheaper. Without that, it would be the sum of the needs. O(slots * most).

    :param needs: the GPUs that have to be ready in each slot.
    :param initial: GPUs that are ready before the first slot, without a boot that is billed.
    :param most: the most GPUs; None for the most that a slot needs, which is never more than the best schedule has.
    :raises ValueError: if a slot needs more than the most.

    >>> cheapest_schedule([1, 3, 1, 3], 60, boot_seconds=90, initial=1)
    Schedule(gpus=(1, 3, 3, 3), gpu_seconds=780.0)
    >>> cheapest_schedule([1, 3, 1, 3], 60, boot_seconds=30, initial=1)
    Schedule(gpus=(1, 3, 1, 3), gpu_seconds=600.0)
    """
    largest = max([initial, *needs])
    if most is not None and max(needs, default=0) > most:
        raise ValueError(f"a slot needs {counted(max(needs), 'GPU')}, and there are {most}: no schedule has them")
    budgets = np.arange(largest + 1)
    cost = np.where(budgets == initial, 0.0, np.inf)
    came: list[NDArray[np.int64]] = []
    for need in needs:
        # From more GPUs by releasing: the cheapest of those; from fewer by booting: boot_seconds a GPU.
        down, down_from = _running_least(cost[::-1])
        up, up_from = _running_least(cost - boot_seconds * budgets)
        down, down_from = down[::-1], largest - down_from[::-1]
        up = up + boot_seconds * budgets
        came.append(np.where(down <= up, down_from, up_from))
        cost = np.where(budgets >= need, np.minimum(down, up) + slot_seconds * budgets, np.inf)
    at = int(np.argmin(cost))
    total, gpus = float(cost[at]), []
    for origin in reversed(came):
        gpus.append(at)
        at = int(origin[at])
    return Schedule(tuple(reversed(gpus)), total)


def _running_least(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The least value so far at each place, and where it is."""
    least = np.minimum.accumulate(values)
    first = np.concatenate(([True], values[1:] < least[:-1]))
    return least, np.maximum.accumulate(np.where(first, np.arange(len(values)), 0))


def best_placement(
    sessions: Collection[Session],
    gpus: Sequence[Gpu],
    curve: Curve,
    capacity: int | None = None,
    speeds: Mapping[Gpu, float] | None = None,
) -> tuple[float, Residents]:
    """The shortest longest chunk of all placements, and one that has it, by trying all: for a handful of sessions.

    :raises ValueError: if the sessions do not fit.

    >>> from ctxflow.policies.turboserve.rebalancing import PowerCurve
    >>> best_placement("abc", [0, 1], PowerCurve(0, 1))[0]
    2.0
    """
    limit = math.inf if capacity is None else capacity
    best: tuple[float, tuple[Gpu, ...]] | None = None
    for places in itertools.product(gpus, repeat=len(sessions)):
        counts = {gpu: places.count(gpu) for gpu in gpus}
        if max(counts.values(), default=0) <= limit:
            worst = max((curve(n) / (speeds or {}).get(gpu, 1.0) for gpu, n in counts.items()), default=0.0)
            if best is None or worst < best[0]:
                best = worst, places
    if best is None:
        raise ValueError(f"{counted(len(gpus), 'GPU')} cannot hold {counted(len(sessions), 'session')}")
    pairs = list(zip(sessions, best[1], strict=True))
    return best[0], {gpu: [session for session, place in pairs if place == gpu] for gpu in gpus}


def tuned(
    windows: int,
    candidates: Sequence[Parameters],
    replay: Callable[[Sequence[Parameters]], Sequence[Replayed]],
    target: float,
) -> list[Parameters]:
    """Return the tuned oracle: for each window the cheapest parameters that keep the target, knowing what comes.

    Windows are decided from the last to the first, each for the cost of all.

    :param replay: the parameters of each window -> what each window came to.
    """
    safest = min(candidates, key=lambda each: each.utilization)
    chosen = [safest] * windows
    for number in reversed(range(windows)):

        def together(each: Parameters, number: int = number) -> Replayed:
            rows = replay([*chosen[:number], each, *chosen[number + 1 :]])
            return Replayed(sum(row.cost for row in rows), max(row.worst for row in rows))

        chosen[number] = cheapest(candidates, together, target)[0]
    return chosen
