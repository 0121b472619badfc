"""How many GPUs a load wants: TurboServe's autoscaling controller, as functions on numbers.

What does not live here: the parameters that suit a workload (volatility.py, profiling.py), which GPUs go
(consolidation.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

_TRIFLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What steers the controller.

    :ivar utilization: rho*, the share of a GPU's capacity that is to be used.
    :ivar tolerance: delta: the load may be so far from it before anything is done.
    :ivar latency_weight: the lambda of (1). The rule for the target does not read it, as in the paper.
    """

    utilization: float = 0.8
    tolerance: float = 0.1
    latency_weight: float = 0.2

    def __post_init__(self) -> None:
        if not self.utilization > 0:
            raise ValueError("utilization is the share of a GPU to be used: give more than 0")
        if not self.tolerance >= 0:
            raise ValueError("tolerance is how far the load may be off: give 0 or more")


def load(counts: Iterable[int], capacity: int) -> float:
    """rho_e: the fullest GPU's sessions over the capacity K.

    >>> load([3, 4, 1], 5)
    0.8
    """
    if capacity < 1:
        raise ValueError("a GPU has room for 1 session or more")
    return max(counts, default=0) / capacity


def target_gpus(sessions: float, capacity: int, utilization: float, most: int, least: int = 1) -> int:
    """m*: the GPUs on which so many sessions make the utilization wanted, within bounds.

    >>> target_gpus(38, 5, 0.6, most=16)
    13
    """
    carried = capacity * utilization
    if not carried > 0 or math.isnan(sessions):
        raise ValueError(
            "a GPU carries some sessions: give a capacity and a utilization above 0, and a number of sessions"
        )
    wish = math.ceil(min(sessions / carried, most) - _TRIFLE)
    return max(least, min(most, wish))


def decide(
    rho: float,
    sessions: float,
    gpus: int,
    capacity: int,
    parameters: Parameters,
    most: int,
    least: int = 1,
) -> int:
    """The GPUs to hold from now on, those that boot included.

    More only if rho is over utilization + tolerance, fewer only if it is under utilization - tolerance; then as many
    as `target_gpus` says.

    :param rho: `load` after rebalancing, on the GPUs that are ready.
    :param gpus: held now, those that boot included.

    >>> decide(0.95, 19, 4, 5, Parameters(0.8), most=16), decide(0.85, 17, 4, 5, Parameters(0.8), most=16)
    (5, 4)
    """
    wish = target_gpus(sessions, capacity, parameters.utilization, most, least)
    if rho > parameters.utilization + parameters.tolerance + _TRIFLE:
        return max(gpus, wish)
    if rho < parameters.utilization - parameters.tolerance - _TRIFLE:
        return min(gpus, wish)
    return gpus


def decide_ahead(
    expected: float, gpus: int, capacity: int, utilization: float, most: int, least: int = 1, spare: float = 0.0
) -> int:
    """The GPUs to hold from now on, where it is known what to expect of the time when they are ready. Not the paper's.

    More as soon as the sessions expected want them; fewer only if these would suffice for some sessions more. The
    paper's tolerance is a share of the load, which is several GPUs of a large fleet and too little of a small one.

    :param expected: sessions a boot from now (`anticipation.py`).
    :param gpus: held now, those that boot included.
    :param spare: sessions that there is to be room for beyond those before a GPU is given back.

    >>> [decide_ahead(19, gpus, 5, 0.8, most=16) for gpus in (4, 5, 6)], decide_ahead(19, 6, 5, 0.8, 16, spare=2.0)
    ([5, 5, 5], 6)
    """
    out = target_gpus(expected, capacity, utilization, most, least)
    back = target_gpus(expected + spare, capacity, utilization, most, least)
    return max(out, min(gpus, back))


def settled(wish: int, gpus: int, since_out: float, boot_seconds: float) -> int:
    """The wish, but none is given back sooner after asking for more than a boot takes: more is asked for at once.

    :param since_out: seconds since more were last asked for.

    >>> settled(3, 5, 20.0, 30.0), settled(3, 5, 30.0, 30.0), settled(7, 5, 0.0, 30.0)
    (5, 3, 7)
    """
    return gpus if wish < gpus and since_out < boot_seconds else wish
