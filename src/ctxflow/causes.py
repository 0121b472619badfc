"""Why something does not run, or less than was asked for: the one form in which all views of a run tell it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ShortfallCause:
    """One cause, from its source: a tier's jobs, the scheduler, a person, a limit.

    :ivar kind: in a word, for programs: of a tier "down" (its batch system), "lost" (workers that never join), "hold",
        "removed", "queue", "evicted", "starting", "back-off", "factory"; of hosts "quarantine", "slow", "unproven";
        "drain", "limit", "start" (of the first call).
    :ivar text: what is so; `why`: the reason that was given, "" for none.
    :ivar tier: the tier that has fewer workers for it; `host`: the host that it is about; "" for none.
    :ivar until: when it is over, in seconds since 1970; None while that is not known.

    >>> ShortfallCause("hold", "2 jobs are put on hold", "ask ops (by user root)", tier="gpu").sentence()
    '2 jobs are put on hold: ask ops (by user root)'
    >>> ShortfallCause("quarantine", "host n3 gets no work", "CUDA error", host="n3", until=1540.0).sentence(now=1000.0)
    'host n3 gets no work, 9 min 00 s left: CUDA error'
    """

    kind: str
    text: str
    why: str = ""
    tier: str = ""
    host: str = ""
    until: float | None = None

    def sentence(self, now: float | None = None, of_tier: bool = False) -> str:
        """Return it in words, with how long it lasts.

        :param now: the time, in seconds since 1970.
        :param of_tier: whether to name its tier, where nothing else does.
        """
        now = time.time() if now is None else now
        left = "" if self.until is None else f", {duration(max(0.0, self.until - now))} left"
        tier = f"tier {self.tier}: " if of_tier and self.tier and self.kind != "drain" else ""
        return f"{tier}{self.text}{left}" + (f": {self.why}" if self.why else "")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ShortfallCause:
        """Return what was written as its fields, perhaps by another version.

        :raises TypeError: if that is none.

        >>> ShortfallCause.of({"kind": "queue", "text": "1 job waits", "until": "soon"})
        Traceback (most recent call last):
        TypeError: a cause is in words, and over at a number of seconds
        """
        names = {field.name for field in dataclasses.fields(cls)}
        found = cls(**{name: value for name, value in data.items() if name in names})
        words, until = (found.kind, found.text, found.why, found.tier, found.host), found.until
        timed = until is None or (isinstance(until, int | float) and abs(until) < 1e15)
        if not timed or not all(isinstance(word, str) for word in words):
            raise TypeError("a cause is in words, and over at a number of seconds")
        return found


def lasting(causes: Iterable[ShortfallCause], tier: str) -> str:
    """Return the causes of a tier in words, "" for none; without how long they last, which is another each time.

    >>> first = ShortfallCause("lost", "workers end", tier="a")
    >>> lasting([first, ShortfallCause("back-off", "it waits", tier="a", until=9.0)], "a")
    'workers end; it waits'
    """
    return "; ".join(dataclasses.replace(each, until=None).sentence() for each in causes if each.tier == tier)


def duration(seconds: float) -> str:
    """Return a time span for people.

    >>> duration(3.21), duration(75), duration(4000), duration(200_000)
    ('3.2 s', '1 min 15 s', '1 h 06 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
