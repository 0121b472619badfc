"""How a job stands while it runs, and how it ended. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Progress:
    """A job at a moment.

    :ivar done: rows that have a result, of this run and earlier ones; `dead` likewise.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar running: rows that are queued or at a worker.
    :ivar read: rows read in this run.
    :ivar total: rows of the input, None while that cannot be told; `guessed` if it is an estimate.
    :ivar workers: how many there are, None before the first is needed.
    :ivar contexts: what workers do with contexts, such as "1 loading".
    :ivar seconds: since this run began.
    """

    done: int
    dead: int
    done_now: int
    dead_now: int
    running: int
    read: int
    total: int | None
    guessed: bool
    workers: int | None
    contexts: str
    seconds: float

    @property
    def rate(self) -> float:
        """Rows a second, over this run."""
        return (self.done_now + self.dead_now) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at that rate, None while that cannot be told."""
        if self.total is None or not self.rate or self.done_now + self.dead_now < 10:
            return None
        return max(0, self.total - self.done - self.dead) / self.rate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: all its rows are done or dead.

    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar seconds: that this run took.
    :ivar already: whether there was nothing to do, since an earlier run had finished.
    :ivar summary: of this run, as observe/summary.py makes it; None if nothing ran.

    >>> Outcome(done=3, dead=1, done_now=3, dead_now=1, seconds=1.0).exit_status
    3
    """

    done: int
    dead: int
    done_now: int
    dead_now: int
    seconds: float
    already: bool = False
    summary: dict[str, Any] | None = None

    @property
    def exit_status(self) -> int:
        """0 if all rows have a result, 3 if some are dead."""
        return 3 if self.dead else 0
