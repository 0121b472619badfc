"""How many sessions to expect when a GPU that is asked for now will be there. Not the paper's, whose loop is without.

What sessions do within a boot is nearly a random walk: what they grew by in the last boot says nothing about the next,
what they grew by in the last minutes a little, and the spread is that of sessions which come and go independently of
each other. Where most sessions are idle, more can come back than go. What does not live here: how many GPUs they want
(autoscaling.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from ctxflow.policies.scaling.volatility import EPOCH, EPOCHS

WINDOW = EPOCH * EPOCHS
"""Seconds that are looked back at: as many as volatility does."""
DEVIATIONS = 1.25
"""How many standard deviations are added to what is expected."""
SPARE = 0.8
"""How many more of them there is to be room for before a GPU is given back."""


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A boot from now.

    :ivar sessions: to be ready for: those expected, and some standard deviations.
    :ivar deviation: one standard deviation of what comes and goes by chance.
    """

    sessions: float
    deviation: float = 0.0


def anticipated(
    sessions: float, came: float, went: float, share: float = 1.0, deviations: float = DEVIATIONS, idle: float = 0.0
) -> Ahead:
    """The sessions to expect, and some standard deviations of what may come beyond that by chance.

    A GPU that is asked for now is ready a boot from now, so a controller that looks at the present is late by what
    arrives until then. The growth of the time looked back at is expected to go on, a decline is not; or, if
    that is more, idle sessions are expected to come back as often as active ones cease to be. So many comings and
    goings have a standard deviation of the root of their number (Poisson), so that small fleets hold more in reserve
    for each session than large ones. Where sessions come and go several times meanwhile, that is bounded: by the root
    of twice their number, at which what is there then has nothing to do with what is there now.

    :param came: sessions that became active in the time looked back at. :param went: that ceased to be.
    :param share: of the time looked back at that is looked ahead.
    :param deviations: how many standard deviations to add.
    :param idle: sessions that have nothing to do now, and may at any time.

    >>> anticipated(40, 10, 6, deviations=1.0), anticipated(40, 50, 50, 0.25, 2.0)
    (Ahead(sessions=48.0, deviation=4.0), Ahead(sessions=50.0, deviation=5.0))
    >>> anticipated(8, 400, 400, 1.0, 1.0), anticipated(20, 2, 2, 1.0, 1.0, idle=40)
    (Ahead(sessions=12.0, deviation=4.0), Ahead(sessions=24.0, deviation=2.0))
    """
    part = min(1.0, went * share / max(1.0, sessions))  # Of the active, that cease to be.
    expected = sessions + max(0.0, (came - went) * share, part * (idle - sessions))
    deviation = math.sqrt(min((came + went) * share, 2.0 * max(1.0, expected)))
    return Ahead(expected + deviations * deviation, deviation)


class Turnover:
    """The sessions that came and went in the last minutes, as time goes on.

    :param start: when counting begins. Until the whole window has passed, what was seen is all that is looked back at.

    >>> turnover = Turnover(0.0)
    >>> turnover.add(40.0, 8, 0)
    >>> turnover.anticipated(40.0, sessions=20, ahead=5.0), turnover.anticipated(400.0, sessions=20, ahead=5.0)
    (Ahead(sessions=22.25, deviation=1.0), Ahead(sessions=20.0, deviation=0.0))
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

    def anticipated(self, now: float, sessions: int, ahead: float, idle: int = 0) -> Ahead:
        """What to be ready for so many seconds from now; nothing is projected further than it was seen."""
        while self._changes and self._changes[0][0] <= now - WINDOW:
            _, came, went = self._changes.popleft()
            self._came -= came
            self._went -= went
        seen = min(WINDOW, now - self._start)
        share = ahead / max(ahead, seen) if ahead else 0.0
        return anticipated(sessions, self._came, self._went, share, idle=idle)
