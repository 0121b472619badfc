"""Why something does not run, or less than was asked for: the one form in which all views of a run tell it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ShortfallCause:
    """One cause, from whoever knows it: a tier's jobs, the scheduler, a person, a limit.

    :ivar kind: in a word, for programs: of a tier "down" (its batch system), "lost" (workers that never join), "hold",
        "removed", "queue", "evicted", "starting", "back-off", "factory"; of hosts "quarantine", "slow", "unproven";
        "drain", "limit", "start" (of the first call).
    :ivar text: what is so; `why`: the reason that somebody gave, "" for none.
    :ivar tier: the tier that has fewer workers for it; `host`: the host that it is about; "" for none.
    :ivar until: when it is over, in seconds since 1970; None while that is not known.

    >>> ShortfallCause("hold", "2 jobs are put on hold", "ask ops (by user root)", tier="gpu").sentence()
    '2 jobs are put on hold: ask ops (by user root)'
    >>> ShortfallCause("quarantine", "host n3 gets no work", "CUDA error", host="n3", until=1540.0).sentence(now=1000.0)
    'host n3 gets no work, 540 s left: CUDA error'
    """

    kind: str
    text: str
    why: str = ""
    tier: str = ""
    host: str = ""
    until: float | None = None

    def sentence(self, now: float | None = None) -> str:
        """Return it in words, with how long it lasts.

        :param now: the time, in seconds since 1970.
        """
        now = time.time() if now is None else now
        left = "" if self.until is None else f", {max(0.0, self.until - now):.0f} s left"
        return f"{self.text}{left}" + (f": {self.why}" if self.why else "")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ShortfallCause:
        """Return what was written as its fields, perhaps by another version.

        :raises TypeError: if that is none.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


def lasting(causes: Iterable[ShortfallCause], tier: str) -> str:
    """Return the causes of a tier in words, "" for none; without how long they last, which is another each time.

    >>> first = ShortfallCause("lost", "workers end", tier="a")
    >>> lasting([first, ShortfallCause("back-off", "it waits", tier="a", until=9.0)], "a")
    'workers end; it waits'
    """
    return "; ".join(dataclasses.replace(each, until=None).sentence() for each in causes if each.tier == tier)
