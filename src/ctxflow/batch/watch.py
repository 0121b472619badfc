"""Looks at a job while it runs, and says how it stands: to its display and to its status file.

What does not live here: how figures are made of counts (observe/progress.py), and how they are shown (display.py).
"""

from __future__ import annotations

import time

from ctxflow.batch.display import Display
from ctxflow.batch.intake import Intake
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.status_file import StatusFile
from ctxflow.batch.words import one_line
from ctxflow.executors.bare import BareExecutor
from ctxflow.executors.status import Status, figures_of
from ctxflow.observe.progress import Progress, Rates
from ctxflow.rows.source import Source

_SHOW_SECONDS = 0.5


class Watch:
    """Sees a job through.

    :param began: the monotonic time at which it began.
    """

    def __init__(self, source: Source, ledger: Ledger, display: Display, file: StatusFile, began: float) -> None:
        self._source = source
        self._ledger = ledger
        self._display = display
        self._file = file
        self._began = began
        self._before = ledger.done, ledger.dead
        self._rates = Rates()
        self._next = 0.0
        self._newest_dead = ""
        self._status: Status | None = None

    def dead(self, place: str, message: str) -> None:
        """A row went to the dead letters."""
        self._newest_dead = f"{place}: {one_line(message)}"
        self._display.dead(place, message)

    def look(
        self, intake: Intake, executor: BareExecutor | None, running: int, tokens: int | None, last: bool = False
    ) -> None:
        """Say how it stands, if it is time.

        :param running: rows on their way.
        :param tokens: that models read and wrote, None if nobody counts them.
        :param last: whether it is time in any case.
        """
        if not last and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SHOW_SECONDS
        status = executor.status() if executor is not None else None
        progress = self._progress(intake, status, running, tokens)
        self._file.update(progress)
        self._display.progress(progress)

    def _progress(self, intake: Intake, status: Status | None, running: int, tokens: int | None) -> Progress:
        ledger, seconds = self._ledger, time.monotonic() - self._began
        total, fraction = self._source.total, self._source.fraction()
        if total is None and fraction > 0.001:
            total = round(intake.read / fraction)
        done_now, dead_now = ledger.done - self._before[0], ledger.dead - self._before[1]
        rest = None if total is None else max(0, total - ledger.done - ledger.dead)
        self._rates.note(seconds, done_now + dead_now, tokens)
        pace = self._rates.pace(seconds, done_now + dead_now, tokens, rest)
        return Progress(
            done=ledger.done,
            dead=ledger.dead,
            done_now=done_now,
            dead_now=dead_now,
            running=running,
            read=intake.read,
            total=total,
            guessed=self._source.total is None and fraction < 1,
            seconds=seconds,
            tokens=tokens,
            newest_dead=self._newest_dead,
            **vars(pace),
            **(figures_of(status) if status is not None else {}),
        )
