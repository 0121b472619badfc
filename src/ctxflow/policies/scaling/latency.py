"""How long a chunk takes on a GPU that several sessions share, and what moving a session costs.

What does not live here: any decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

Curve = Callable[[int], float]
"""Seconds of a chunk on a GPU with so many sessions; more sessions never make it shorter."""


@dataclasses.dataclass(frozen=True)
class PowerCurve:
    """Seconds `fixed + each * sessions ** exponent`, and 0 without a session.

    >>> PowerCurve(0.1, 0.2)(3)
    0.7
    """

    fixed: float
    each: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.each < 0 or self.exponent < 0:
            raise ValueError("a chunk takes no less for more sessions: give numbers of 0 or more")

    def __call__(self, sessions: int) -> float:
        """Seconds of a chunk with so many sessions."""
        return round(self.fixed + self.each * sessions**self.exponent, 12) if sessions else 0.0


def most_sessions(curve: Curve, chunk_target: float, limit: int = 4096) -> int:
    """K: the most sessions on a GPU with which a chunk takes no longer than the target, 0 if none.

    >>> most_sessions(PowerCurve(0.0, 0.1), 0.55)
    5
    """
    count = 0
    while count < limit and curve(count + 1) <= chunk_target:
        count += 1
    return count


@dataclasses.dataclass(frozen=True)
class MigrationCost:
    """C_mig of (4): the alpha-beta model of a transfer.

    :ivar alpha: seconds of any move. :ivar bandwidth: bytes a second.

    >>> MigrationCost(0.02, 50e9).seconds(500_000_000)
    0.03
    """

    alpha: float
    bandwidth: float = math.inf

    def seconds(self, state_bytes: float) -> float:
        """What moving a session with so much state takes."""
        return self.alpha + state_bytes / self.bandwidth
