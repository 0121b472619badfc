"""Room for rises that come faster than a GPU boots: nobody can request GPUs for them in time, but they may recur."""

from __future__ import annotations

import math
from collections import deque

RESERVE = 60.0
"""For how many boots rises are remembered: the price of the room, see `Rises`."""
UNEXPECTED = 4.0
"""Standard deviations beyond what was expected from which a rise is one: chance alone hardly ever gets there."""
LEAST_OFTEN = 2
"""How often a rise must have come in that time for there to be room for the next."""


class Rises:
    """The rises of the last while that came faster than a boot, and the room to keep for the next.

    Room is kept for the second largest of the last `boots` boot times, on top of the average number of sessions of that
    time. So what is reserved for was seen twice, half as many boots apart or less on average: a GPU stands by where it
    spares sessions a boot's wait for it at least every `boots / 2` boots. What happened once is no reason.

    :param boots: for how many boot times rises are remembered; 0 to keep no room.
    :raises ValueError: for a negative number.

    >>> rises = Rises(boots=20.0)
    >>> for start in (0, 200):
    ...     for second in range(0, 200, 5):
    ...         count = 30 if 100 <= second < 150 else 10
    ...         room = rises.room(start + second, count, count, 2.0, boot_seconds=30.0)
    >>> round(room)
    33
    """

    def __init__(self, boots: float = RESERVE) -> None:
        if not boots >= 0:
            raise ValueError("reserve is for how many boot times rises are remembered: give 0 or more")
        self._boots = boots
        self._before: deque[tuple[float, float, float]] = deque()  # (time, expected, deviation): a boot, and one more.
        self._over: deque[tuple[float, float]] = deque()  # (when it was over, sessions).
        self._rising = 0.0
        self._average: float | None = None
        self._last = 0.0, 0

    def room(self, now: float, sessions: int, expected: float, deviation: float, boot_seconds: float) -> float:
        """Note how it is now, and return the number of sessions to have room for, 0 where there is no need.

        :param sessions: that are active. :param expected: a boot from now, `deviation`: how far off that is by chance.
        """
        span = self._boots * boot_seconds
        if not span:
            return 0.0
        average = self._averaged(now, sessions, span)
        self._note(now, sessions, boot_seconds)
        self._before.append((now, expected, deviation))
        while self._over and self._over[0][0] <= now - span:
            self._over.popleft()
        sizes = sorted([*(size for _, size in self._over), self._rising], reverse=True)
        nth = sizes[LEAST_OFTEN - 1] if len(sizes) >= LEAST_OFTEN else 0.0
        return average + nth if nth else 0.0

    def _averaged(self, now: float, sessions: int, span: float) -> float:
        """Return the average of the sessions over about so many seconds, older ones counting less and less."""
        if self._average is None:
            self._average, self._last = float(sessions), (now, sessions)
        time, before = self._last
        self._last = now, sessions
        self._average += (before - self._average) * -math.expm1((time - now) / span)
        return self._average

    def _note(self, now: float, sessions: int, boot_seconds: float) -> None:
        """Compare the sessions with what was expected a boot ago."""
        while len(self._before) > 1 and self._before[1][0] <= now - boot_seconds:
            self._before.popleft()
        if not self._before or self._before[0][0] > now - boot_seconds:
            return
        _, expected, deviation = self._before[0]
        size = sessions - expected
        if size > UNEXPECTED * max(1.0, deviation):
            if not self._rising and self._over and now < self._over[-1][0] + boot_seconds:
                self._rising = self._over.pop()[1]  # It was not over.
            self._rising = max(self._rising, size)
        elif self._rising:
            self._over.append((now, self._rising))
            self._rising = 0.0
