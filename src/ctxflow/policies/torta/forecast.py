"""How many tasks will arrive in each region: a plain demand predictor, which needs no training (TORTA, section V-B2).

The paper trains a network offline on the last K = 5 slots; here the total follows its damped trend, and is shared out
by the regions' smoothed shares.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxflow.policies.torta.quantities import Floats, amounts

MEMORY = 0.5
"""The weight of the newest slot in level, trend and shares: less is steadier, more follows a surge sooner."""
DAMPING = 0.5
"""What is left of the trend from one slot to the next: a surge does not go on for ever."""
SOME = 1.0
"""The constant in the denominator of Eq. 12, in tasks: a slot without tasks can be missed by one for an error of 1."""


def forecast(arrivals: npt.ArrayLike, horizon: int = 1, memory: float = MEMORY, damping: float = DAMPING) -> Floats:
    """Return what will arrive in the next slots.

    Guarantees: (horizon, R), finite and not negative. A region that has not been seen to have demand has none.

    :param arrivals: (K, R) tasks of the last slots, oldest first; what is negative or not a number counts as none.
    :param horizon: slots to look ahead.
    :raises ValueError: for a history that is not a table, or a weight that is not in its range.

    >>> forecast([[10, 30]] * 3, horizon=2).round(6).tolist()
    [[10.0, 30.0], [10.0, 30.0]]
    >>> bool(forecast([[10], [20], [30]])[0, 0] > 20)
    True
    """
    history = amounts(arrivals)
    if history.ndim != 2 or horizon < 1:
        raise ValueError("a forecast needs a table of slots and regions, and at least one slot to look ahead")
    if not (0 < memory <= 1 and 0 <= damping < 1):
        raise ValueError("memory is above 0 and at most 1, damping at least 0 and below 1")
    slots, regions = history.shape
    if not slots or not history.any():
        return np.zeros((horizon, regions))
    weights = (1 - memory) ** np.arange(slots - 1, -1, -1)
    smoothed = weights @ (history / history.max())
    level, trend = _holt(history.sum(axis=1), memory, damping)
    ahead = level + trend * np.cumsum(damping ** np.arange(1, horizon + 1))
    return np.asarray(np.maximum(ahead, 0.0)[:, None] * (smoothed / smoothed.sum())[None, :], dtype=np.float64)


def _holt(totals: Floats, memory: float, damping: float) -> tuple[float, float]:
    """Return the level and the trend of exponential smoothing with a damped trend."""
    level, trend = float(totals[0]), 0.0
    for total in totals[1:]:
        before, expected = level, level + damping * trend
        level = memory * float(total) + (1 - memory) * expected
        trend = memory * (level - before) + (1 - memory) * damping * trend
    return level, trend


def accuracy(predicted: npt.ArrayLike, actual: npt.ArrayLike, some: float = SOME) -> float:
    """Compute Eq. 12: exp of minus the mean relative error; 1 is perfect, 0 is worthless.

    >>> accuracy([9.0, 9.0], [9.0, 9.0])
    1.0
    >>> round(accuracy([4.0], [9.0]), 3)
    0.607
    """
    there = amounts(actual)
    wrong = np.abs(amounts(predicted) - there) / (there + some)
    return float(np.exp(-wrong.mean())) if wrong.size else 1.0
