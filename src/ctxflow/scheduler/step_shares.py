"""What a step's seconds are made of: what each step of an app takes, what each of its sessions adds, the GPU's model.

    seconds = pace of the GPU model * (shared + sum of the sessions' own)

Steps that a session was in, and others that it was not in, tell what it adds: those whose share is known least learn
most of what a step took beyond what was expected (a Kalman filter whose estimates are taken to be independent).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

NOISE = 0.1  # Of a step's seconds, one standard deviation.
UNSURE = (
    0.1  # Of the average session's own: what is known is never taken to be surer, as estimates are not independent.
)
UNKNOWN = 1.0  # Of the average session's own, one standard deviation of one that was in no step.
UNKNOWN_PACE = 0.3
OUTLIER = 3.0  # Standard deviations: what is beyond counts as that much, as steps that compile.
REMEMBERED = 50  # Steps that the average session is averaged over.


@dataclasses.dataclass(slots=True)
class Estimate:
    """What is known of a quantity: its mean, and the variance of that."""

    mean: float
    variance: float

    def learn(self, residual: float, slope: float, total: float) -> None:
        """Take a part of a residual whose variance in all is `total`, and which changes so much with the quantity."""
        gain = self.variance * slope / total
        self.mean = max(0.0, self.mean + gain * residual)
        self.variance *= 1.0 - gain * slope


@dataclasses.dataclass(slots=True)
class StepShares:
    """What is known of an app's steps.

    :ivar shared: seconds that do not depend on the sessions; None before the first step.
    :ivar average: seconds that a session adds, on average.
    :ivar paces: GPU model -> how many times as long steps take as on the model of the first one.

    >>> shares = StepShares()
    >>> heavy, light = shares.newcomer(0.3, 1), shares.newcomer(0.3, 1)
    >>> for _ in range(100):
    ...     shares.learn([heavy], 0.31, "")
    ...     shares.learn([light], 0.11, "")
    ...     shares.learn([heavy, light], 0.41, "")
    >>> round(heavy.mean, 1), round(light.mean, 1), round(shares.shared.mean, 1)
    (0.3, 0.1, 0.0)
    """

    shared: Estimate | None = None
    average: float = 0.0
    paces: dict[str, Estimate] = dataclasses.field(default_factory=dict)

    def newcomer(self, seconds: float, sessions: int) -> Estimate:
        """Return what is expected of a session that was in no step: the average; in the first step, an even share."""
        if self.shared is None:
            self.average = seconds / (sessions + 1)
            self.shared = Estimate(self.average, self.average**2)
        return Estimate(self.average, (UNKNOWN * self.average) ** 2)

    def pace(self, model: str) -> float:
        """Return how many times as long steps take on a GPU model, 1 while nobody knows."""
        known = self.paces.get(model)
        return known.mean if known is not None else 1.0

    def learn(self, sessions: Sequence[Estimate], seconds: float, model: str) -> None:
        """Learn from a step that made chunks of these sessions, on a GPU of a model, in so many seconds."""
        shared = self.shared
        if shared is None or not sessions or not seconds > 0:
            return
        pace = self.paces.setdefault(model, Estimate(1.0, UNKNOWN_PACE**2 if self.paces else 0.0))
        own = shared.mean + sum(each.mean for each in sessions)
        slope, expected = pace.mean, pace.mean * own
        known = slope**2 * (shared.variance + sum(each.variance for each in sessions)) + own**2 * pace.variance
        total = known + (NOISE * max(expected, seconds)) ** 2
        bound = OUTLIER * math.sqrt(total)
        residual = max(-bound, min(bound, seconds - expected))
        for each in (shared, *sessions):
            each.learn(residual, slope, total)
            each.variance = max(each.variance, (UNSURE * self.average) ** 2)
        pace.learn(residual, own, total)
        mean = sum(each.mean for each in sessions) / len(sessions)
        self.average += (mean - self.average) / REMEMBERED
