"""How an engine's throughput may depend on what is in flight: shapes of curves, and how likely each is by measurements.

A shape is a saturation, x / (1 + x^p)^(1/p) with x = window / knee, which rises as the window and bends at its knee,
slowly (p below 1) or at once (p of 30); and in some shapes a fall beyond a point: gently, as where items that wait are
looked at again and again, or at once, as where their memory does not suffice any more. What was measured at some
windows makes each shape more or less likely, whatever the scale, so that a few windows tell of those between and beyond
them. Nothing is fitted, so that doubt stays doubt: all shapes that explain what was measured count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The windows that are compared: from one to the next the same step, on a scale of logarithms."""

_KNEES = tuple(2.0 ** (n / 2) for n in range(-2, 23))
_BENDS = (0.35, 0.5, 0.7, 1.0, 1.5, 2.5, 6.0, 30.0)
_GENTLE = tuple(
    (2.0**n, power) for n in range(11) for power in (0.2, 0.5)
)  # From about where it falls, as 1 / window^power.
_CLIFFS = tuple(
    (level + 0.5, left) for level in LEVELS[:-1] for left in (0.4, 0.6, 0.8)
)  # Beyond which so much is left.
NEGLIGIBLE = 14.0  # A shape that is e to this times less likely than the likeliest does not count.
HOPELESS = 30.0  # An item is not expected to be lost more than e to this times.
GRID = 64  # Lengths for which the cost of evictions is worked out; between, it is interpolated.
_PLAIN = 0.7  # How likely it is, before anything was measured, that nothing falls.


@functools.cache
def _shapes() -> tuple[Floats, Floats]:
    """Return the logarithms of each shape's throughput at all levels, and of how likely each is beforehand."""
    levels = np.array(LEVELS, dtype=float)
    x = np.log(levels) - np.log(np.array(_KNEES))[:, None, None]
    bends = np.array(_BENDS)[None, :, None]
    # The logarithm of (1 + x^p), also where x^p is beyond all numbers.
    rising = (x - np.logaddexp(0.0, bends * x) / bends).reshape(-1, 1, len(levels))
    falling = [np.zeros(len(levels))]
    weights = [_PLAIN]
    for begin, power in _GENTLE:
        falling.append(-np.log1p((levels / begin) ** 3.0) * power / 3)
        weights.append((1 - _PLAIN) / 2 / len(_GENTLE))
    for begin, left in _CLIFFS:
        falling.append(np.where(levels > begin, math.log(left) - 0.2 * np.log(levels / begin), 0.0))
        weights.append((1 - _PLAIN) / 2 / len(_CLIFFS))
    shapes = (rising + np.array(falling)).reshape(-1, len(levels))
    return shapes, np.log(np.tile(weights, len(rising)) / len(rising))


@dataclasses.dataclass(frozen=True)
class EvictionRisk:
    """How often workers are evicted.

    :ivar rate: evictions of a worker a second.
    :ivar grace: seconds from the notice of an eviction until it; `noticed`: the share of evictions that have one.
    """

    rate: float = 0.0
    grace: float = 0.0
    noticed: float = 0.0


CALM = EvictionRisk()


@dataclasses.dataclass(frozen=True, eq=False)
class InFlightCost:
    """What makes work in flight dear: what is lost with its worker runs again, from its beginning.

    :ivar level: the number of the window's level at which it was measured.
    :ivar seconds: how long items are in flight there: each as likely as any other.
    """

    level: int
    seconds: Floats
    evictions: EvictionRisk

    def slot_seconds(self, factor: float) -> float:
        """Return the mean seconds until an item is answered, all times that it is lost included.

        :param factor: how many times longer than measured each item is in flight.

        With evictions that come at the rate h and end an item that would have S seconds, it takes (exp(h S) - 1) / h.
        With notice only those end it that are told before its last seconds, the grace.
        """
        seconds = factor * self.seconds
        rate = self.evictions.rate
        risky = seconds - self.evictions.noticed * np.minimum(seconds, self.evictions.grace)
        return float((seconds - risky + np.expm1(np.minimum(rate * risky, HOPELESS)) / rate).mean())


class CurveOdds:
    """How likely each shape is by what was measured at some levels.

    :param measured: level's number -> (logarithm of the throughput there, its variance).
    :param most: the number of levels that count: none beyond is allowed.
    """

    def __init__(self, measured: Mapping[int, tuple[float, float]], most: int = len(LEVELS)) -> None:
        shapes, likely = _shapes()
        if measured:
            where = list(measured)
            seen = np.array([measured[level][0] for level in where])
            weights = 1 / np.array([measured[level][1] for level in where])
            left = seen - shapes[:, where]
            # The scale is unknown: the best one of each shape, with which what is left has the least squares.
            likely = likely - (left**2 @ weights - (left @ weights) ** 2 / weights.sum()) / 2
        counts = likely > likely.max() - NEGLIGIBLE
        self._shapes = shapes[counts, :most]
        self._odds = np.exp(likely[counts] - likely.max())
        self._odds /= self._odds.sum()
        self._known: tuple[InFlightCost | None, Floats] | None = None

    def good(self, margin: float, load: InFlightCost | None = None) -> Floats:
        """Return for each level how likely its useful throughput is within a margin of the best level's.

        :param margin: as a share, such as 0.03.
        :param load: where evictions lose what is in flight.
        """
        useful = self._useful(load)
        return np.asarray(self._odds @ (useful >= useful.max(axis=1, keepdims=True) + math.log1p(-margin)))

    def better(self, level: int, margin: float, load: InFlightCost | None = None) -> Floats:
        """Return for each level how likely its useful throughput is above one level's, by more than a margin."""
        useful = self._useful(load)
        return np.asarray(self._odds @ (useful >= useful[:, level : level + 1] + math.log1p(margin)))

    def expected(self, load: InFlightCost | None = None) -> Floats:
        """Return for each level the useful throughput that is expected, as a share of the best level's."""
        useful = self._useful(load)
        return np.asarray(self._odds @ np.exp(useful - useful.max(axis=1, keepdims=True)))

    def _useful(self, load: InFlightCost | None) -> Floats:
        """Return the logarithms of each shape's useful throughput at all levels; the last ones are kept."""
        if self._known is None or self._known[0] != load:
            self._known = load, self._with(load)
        return self._known[1]

    def _with(self, load: InFlightCost | None) -> Floats:
        if load is None or load.evictions.rate <= 0:
            return self._shapes
        # An item's seconds are the window over the throughput, and what is lost goes with them.
        levels = np.log(np.array(LEVELS[: self._shapes.shape[1]], dtype=float))
        seconds = levels - self._shapes
        here = min(load.level, self._shapes.shape[1] - 1)
        longer = seconds - seconds[:, here : here + 1]
        grid = np.linspace(longer.min(), longer.max(), GRID)
        slots = np.log([load.slot_seconds(factor) for factor in np.exp(grid)])
        return np.asarray(levels - np.interp(longer, grid, slots))
