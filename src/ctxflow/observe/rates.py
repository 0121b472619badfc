"""How fast something goes, and how long the rest takes, from counts at moments. Pure: time comes in.

What does not live here: what is counted (batch/), and how it is shown.
"""

from __future__ import annotations

import collections
import dataclasses
import math

_NOW_SECONDS = 10.0
_NOW_STEPS = 4
_KEPT_SECONDS = 300.0
_STEP_SECONDS = 1.0
_PARTS = 8
_WIDTH = 2.0  # Standard deviations.


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast it goes at a moment.

    :ivar rate: items a second now; `rate_overall`, since the beginning.
    :ivar tokens_per_s: tokens a second now, None if nobody counts them; `tokens_per_s_overall`, since the beginning.
    :ivar left: seconds that the rest takes, None while that cannot be told; it is likely (some 95%) between
        `left_low` and `left_high`, which are None while their distance cannot be told.
    """

    rate: float
    rate_overall: float
    tokens_per_s: float | None
    tokens_per_s_overall: float | None
    left: float | None
    left_low: float | None
    left_high: float | None


class Rates:
    """Takes counts as time goes on; gives rates now and overall, and the time left with its uncertainty.

    *Now* is the last 10 seconds, or as far back as it takes to see answers come four times: large batches come
    seldom. Measuring begins with the first answer, not with the start: a context's load says nothing of the rest.

    *The time left* is the rest over the rate r of the last five minutes. Its uncertainty comes from the spread of the
    rates in eight equal parts of these minutes, each w seconds long; with their standard deviation s, the mean of
    eight is off by s / sqrt(8), and the mean of a rest that takes H seconds by s sqrt(w / H), if parts differ at
    random. So sigma^2 = s^2 (1 / 8 + w / H), and the bounds are the rest over r + 2 sigma and r - 2 sigma. What the
    last minutes do not show, such as workers that will join or be evicted, or longer rows to come, is not in it.

    >>> rates = Rates()
    >>> for second in range(60):
    ...     rates.note(second, 5 * second, None)
    >>> pace = rates.pace(60, 300, None, rest=1000)
    >>> pace.rate, pace.left, pace.left_low, pace.left_high
    (5.0, 200.0, 200.0, 200.0)
    """

    def __init__(self) -> None:
        # (seconds since the beginning, items, tokens) when answers came, a second apart or more.
        self._steps: collections.deque[tuple[float, int, int]] = collections.deque()

    def note(self, seconds: float, items: int, tokens: int | None) -> None:
        """Take in the counts of a moment.

        :param seconds: since the beginning.
        :param items: answered since the beginning; `tokens` likewise, None if nobody counts them.
        """
        if items == 0:
            return
        if self._steps:
            last, known, _ = self._steps[-1]
            if items == known or seconds - last < _STEP_SECONDS:
                return
        self._steps.append((seconds, items, tokens or 0))
        while len(self._steps) > _PARTS and self._steps[1][0] < seconds - _KEPT_SECONDS:
            self._steps.popleft()

    def pace(self, seconds: float, items: int, tokens: int | None, rest: int | None) -> Pace:
        """The figures of a moment.

        :param rest: items that are left, None if that is not known.
        """
        rate_overall = items / seconds if seconds > 0 else 0.0
        tokens_overall = None if tokens is None else tokens / seconds if seconds > 0 else 0.0
        rate, token_rate = rate_overall, tokens_overall
        since = self._since(seconds)
        if since is not None:
            passed = seconds - since[0]
            rate = (items - since[1]) / passed
            token_rate = None if tokens is None else (tokens - since[2]) / passed
        return Pace(rate, rate_overall, token_rate, tokens_overall, *self._left(seconds, items, rest))

    def _since(self, seconds: float) -> tuple[float, int, int] | None:
        """The step from which on it is now; None if too little came to tell."""
        steps = self._steps
        if len(steps) < 2 or seconds <= steps[0][0]:
            return None
        index = max(0, len(steps) - 1 - _NOW_STEPS)
        while index and seconds - steps[index][0] < _NOW_SECONDS:
            index -= 1
        return steps[index]

    def _left(self, seconds: float, items: int, rest: int | None) -> tuple[float | None, float | None, float | None]:
        if rest is None:
            return None, None, None
        if rest <= 0:
            return 0.0, 0.0, 0.0
        if len(self._steps) < 2 or seconds <= self._steps[0][0]:
            return None, None, None
        begin, known, _ = self._steps[0]
        span = seconds - begin
        mean = (items - known) / span
        if mean <= 0:
            return None, None, None
        left = rest / mean
        if len(self._steps) < _PARTS:
            return left, None, None
        parts = self._parts(seconds, items)
        variance = sum((part - mean) ** 2 for part in parts) / (_PARTS - 1)
        sigma = math.sqrt(variance * (1 / _PARTS + span / _PARTS / left))
        slowest = mean - _WIDTH * sigma
        return left, rest / (mean + _WIDTH * sigma), rest / slowest if slowest > 0 else None

    def _parts(self, seconds: float, items: int) -> list[float]:
        """The rates in equal parts of the time that is kept."""
        import numpy as np

        times = [step[0] for step in self._steps] + [seconds]
        counts = [step[1] for step in self._steps] + [items]
        cuts = np.linspace(times[0], seconds, _PARTS + 1)
        found: list[float] = (np.diff(np.interp(cuts, times, counts)) / np.diff(cuts)).tolist()
        return found
