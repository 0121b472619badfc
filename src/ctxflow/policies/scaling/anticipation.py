"""How many sessions to expect when a GPU that is asked for now will be there. Not the paper's, whose loop is without.

What sessions do within a boot is nearly a random walk: what they grew by in the last boot says nothing about the next,
what they grew by in the last minutes a little, and the spread is that of sessions which come and go independently of
each other. What does not live here: how many GPUs they want (autoscaling.py).
"""

from __future__ import annotations

import math
from collections import deque

from ctxflow.policies.scaling.volatility import EPOCH, EPOCHS

WINDOW = EPOCH * EPOCHS
"""Seconds that are looked back at: as many as volatility does."""
DEVIATIONS = 1.5
"""How many standard deviations are added to what is expected."""


def anticipated(sessions: float, came: float, went: float, share: float = 1.0, deviations: float = DEVIATIONS) -> float:
    """The sessions to expect, and some standard deviations of what may come beyond that by chance.

    A GPU that is asked for now is ready a boot from now, so a controller that looks at the present is late by what
    arrives until then. The growth of the time looked back at is expected to go on, a decline is not. So many comings
    and goings have a standard deviation of the root of their number (Poisson), so that small fleets hold more in
    reserve for each session than large ones. Where sessions come and go several times meanwhile, that is bounded: by
    the root of twice their number, at which what is there then has nothing to do with what is there now.

    :param came: sessions that became active in the time looked back at. :param went: that ceased to be.
    :param share: of the time looked back at that is looked ahead.
    :param deviations: how many standard deviations to add.

    >>> anticipated(40, 10, 6, deviations=1.0), anticipated(40, 50, 50, 0.25, 2.0), anticipated(30, 0, 16, 1.0, 1.0)
    (48.0, 50.0, 34.0)
    >>> anticipated(8, 400, 400, 1.0, 1.0)
    12.0
    """
    expected = sessions + max(0.0, came - went) * share
    return expected + deviations * math.sqrt(min((came + went) * share, 2.0 * max(1.0, expected)))


class Turnover:
    """The sessions that came and went in the last minutes, as time goes on.

    :param start: when counting begins. Until the whole window has passed, what was seen is all that is looked back at.

    >>> turnover = Turnover(0.0)
    >>> turnover.add(40.0, 8, 0)
    >>> turnover.anticipated(40.0, sessions=20, ahead=10.0), turnover.anticipated(400.0, sessions=20, ahead=10.0)
    (24.121320343559642, 20.0)
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._changes: deque[tuple[float, int, int]] = deque()
        self._came = self._went = 0

    def add(self, now: float, came: int, went: int) -> None:
        """Count sessions that became active and that ceased to be; times do not go back."""
        if came or went:
            self._changes.append((now, came, went))
            self._came += came
            self._went += went

    def anticipated(self, now: float, sessions: int, ahead: float) -> float:
        """The sessions to expect so many seconds from now; nothing is projected further than it was seen."""
        while self._changes and self._changes[0][0] <= now - WINDOW:
            _, came, went = self._changes.popleft()
            self._came -= came
            self._went -= went
        seen = min(WINDOW, now - self._start)
        return anticipated(sessions, self._came, self._went, ahead / max(ahead, seen) if ahead else 0.0)
