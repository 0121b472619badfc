"""How likely an eviction is, for a worker that has lived for some time.

A tier's workers may be evicted at one constant rate, or at rates that differ: on a spot market most that last an hour
last a day. If each worker's rate is drawn from a gamma distribution of shape a and scale 1/b, lifetimes follow Lomax's
distribution (K. S. Lomax, "Business failures", 1954), and a worker that has lived for t is evicted at the rate
a / (b + t), the mean of what its life so far leaves of that distribution. What does not live here: what a batch makes
of it (opportunistic.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

PRIOR_EVICTIONS = 0.5
"""What a tier counts as having lost before anything is known: Jeffreys' half an event, soon outweighed by what is."""

PRIOR_SECONDS = 1800.0
"""In so many seconds of one worker's time: one worker an hour."""

CLEARLY = 3.0
"""Rates are taken to differ where that makes what was seen more likely by this logarithm: by chance, one time in a
hundred."""

MOMENT = 1e-3
"""Workers that lived no longer than so many seconds together tell nothing."""

SCALES = tuple(4.0**n for n in range(-4, 3))
"""The b that are tried, in mean lifetimes."""


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Evictions per worker and second at an age: shape / (scale + age), or the constant rate where scale is infinite.

    >>> Hazard(0.001).at(50.0)
    0.001
    >>> Hazard(0.001, shape=0.5, scale=500.0).at(1500.0)
    0.00025
    """

    rate: float
    shape: float = 0.0
    scale: float = math.inf

    def at(self, age: float) -> float:
        """At an age in seconds."""
        return self.rate if self.scale == math.inf else self.shape / (self.scale + age)


def fit(lifetimes: Sequence[float], ages: Sequence[float]) -> Hazard:
    """The likeliest hazard; where it is constant, with `PRIOR_EVICTIONS` more in `PRIOR_SECONDS` of one worker's time.

    :param lifetimes: seconds that those lived that were evicted.
    :param ages: seconds that those who are there have lived.

    >>> fit([], [])
    Hazard(rate=0.0002777777777777778, shape=0.0, scale=inf)
    """
    ended = np.array(lifetimes, dtype=float)
    lived = np.concatenate([ended, np.array(ages, dtype=float)])
    count, total = len(ended), float(lived.sum())
    rate = (PRIOR_EVICTIONS + count) / (PRIOR_SECONDS + total)
    best = Hazard(rate)
    if not count or total < MOMENT:
        return best
    # The logarithms of the likelihoods, less what is the same in all.
    likelihood = count * math.log(count / total) + CLEARLY
    for scale in (each * total / count for each in SCALES):
        shape = count / float(np.log1p(lived / scale).sum())
        found = count * math.log(shape / scale) - float(np.log1p(ended / scale).sum())
        if found > likelihood:
            best, likelihood = Hazard(rate, shape, scale), found
    return best
