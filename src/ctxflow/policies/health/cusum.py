"""A sequential test of trials: has one unit failed more of them than its peers' share of failures explains?

What does not live here: what a trial is, who the peers are, and what follows (sequential.py).
"""

from __future__ import annotations

import dataclasses
import math

SHARES = (0.3, 0.9)
"""The shares of failures that a bad unit may have: one that fails now and then, and one that fails nearly always."""


def null_share(failed: float, trials: float) -> float:
    """The share of failures that a good unit may have, where its peers had so many: three times theirs, and a little.

    A few trials of theirs prove little, so half a failure in five more is supposed.

    >>> round(null_share(0, 0), 2), round(null_share(0, 1000), 3), null_share(900, 1000)
    (0.32, 0.021, 0.9)
    """
    return min(0.9, 3 * (failed + 0.5) / (trials + 5) + 0.02)


def weight(passed: bool, share: float, null: float) -> float:
    """The logarithm of how much likelier a trial's outcome is with one share of failures than with another."""
    if share <= null:
        return 0.0
    return math.log((1 - share) / (1 - null)) if passed else math.log(share / null)


@dataclasses.dataclass(slots=True)
class Cusum:
    """One unit's evidence: for each share, the largest sum of weights that ends now, never below 0 (Page's test).

    :ivar failed: trials failed since all sums were 0, `passed` likewise; `start`: the evidence that there was then.
    :ivar climate: the null share when the trials failed, on average, by all failures of peers then.
    :ivar before: what its host had tried and failed before, all its workers together.
    """

    start: float = 0.0
    sums: tuple[float, ...] = ()
    failed: int = 0
    passed: int = 0
    climate: float = 0.0
    before: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.sums = (self.start,) * len(SHARES)

    def add(self, passed: bool, null: float | None, climate: float = 0.0) -> float:
        """Count a trial; gives the largest sum.

        :param null: None where there is nobody to compare with yet.
        :param climate: the null share at the time when a failed one began, by all failures then.

        >>> test = Cusum()
        >>> for _ in range(5): _ = test.add(False, 0.05)
        >>> round(test.add(True, 0.05), 1)
        12.2
        """
        if passed:
            self.passed += 1
        else:
            self.failed += 1
            self.climate += (climate - self.climate) / self.failed
            null = None if null is None else max(null, climate)
        if null is None:
            return max(self.sums)
        self.sums = tuple(
            max(0.0, total + weight(passed, share, null)) for total, share in zip(self.sums, SHARES, strict=True)
        )
        return max(self.sums)

    def against(self, null: float) -> float:
        """The evidence of all that was counted since the sums were 0, where the null share is known better by now."""
        then = max(null, self.climate)
        return self.start + max(
            self.failed * weight(False, share, then) + self.passed * weight(True, share, null) for share in SHARES
        )
