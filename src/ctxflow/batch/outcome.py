"""How a job ended. Plain data.

What does not live here: how it stands while it runs (observe/progress.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: all its rows are done or dead.

    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar seconds: that this run took.
    :ivar already: whether there was nothing to do, since an earlier run had finished.
    :ivar truncated_now: rows of this run whose input was too long and was cut, as `too_long` of the job said.
    :ivar nulled: values of this run that the output's form cannot hold, so that null stands in their place, by column;
        `altered`, texts and keys of dictionaries that had to be written otherwise.
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
    nulled: dict[str, int] = dataclasses.field(default_factory=dict)
    altered: dict[str, int] = dataclasses.field(default_factory=dict)
    summary: dict[str, Any] | None = None
    truncated_now: int = 0

    @property
    def exit_status(self) -> int:
        """0 if all rows have a result, 3 if some are dead."""
        return 3 if self.dead else 0
