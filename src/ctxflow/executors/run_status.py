"""What a run tells of itself as it goes: its status file, and a reminder of the workers that it waits for.

The file is `status.json` in its directory: for `ctxflow top` and `ctxflow status` beside any program.
What does not live here: how it is written (observe/progress.py), and a batch's, which says more (batch/).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxflow.executors.status import Status, awaiting_text, figures_of
from ctxflow.host.descriptors import advice
from ctxflow.observe.progress import VERSION, Progress, Rates, owner, write_status
from ctxflow.scheduler.run_state import RunState

logger = logging.getLogger("ctxflow")
NAME = "status.json"
_AWAITING_SECONDS = 60.0  # How often it is said that workers are awaited before the first call.


class StatusWriter:
    """Rewrites status files. A disk that is full, or no descriptor left for one, ends nothing, and is told once."""

    def __init__(self) -> None:
        self._told = False

    def write(self, path: Path, status: Mapping[str, Any]) -> None:
        """Write one at once or not at all."""
        try:
            write_status(path, status)
        except OSError as error:
            if not self._told:
                self._told = True
                text = "%s cannot be rewritten, so that it says how things stood before (%s)%s"
                logger.warning(text, path, error, advice(error) or ": make room there")


class RunStatusFile:
    """Rewrites a run's status file; calls come one at a time.

    :param directory: the run's.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / NAME
        self._facts = {"version": VERSION, "output": "", "run": directory, **owner()}
        self._writer = StatusWriter()
        self._rates, self._chunk_rates = Rates(), Rates()

    def write(self, status: Status, state: str = "running", reason: str = "") -> None:
        """Say how the run stands.

        :param state: "running", "done" or "failed", for the `reason`.
        """
        done, answered = status.items_done, status.items_done + status.items_dead
        self._rates.note(status.time, answered, None)
        self._chunk_rates.note(status.time, status.chunks, None)
        progress = Progress(
            unit="items",
            done=done,
            dead=status.items_dead,
            done_now=done,
            dead_now=status.items_dead,
            running=status.items_queued + status.items_running,
            read=status.items_submitted,
            seconds=status.time,
            chunks_per_s=self._chunk_rates.pace(status.time, status.chunks, None, None).rate,
            **vars(self._rates.pace(status.time, answered, None, None)),
            **figures_of(status),
        )
        facts = {**self._facts, "state": state, "reason": reason, "updated": round(time.time(), 3)}
        self._writer.write(self._path, {**facts, **dataclasses.asdict(progress)})


class AwaitingReminder:
    """Now and then, who waits for calls learns that they wait for workers: so many may never come."""

    def __init__(self) -> None:
        self._due: float | None = None

    def say(self, state: RunState, now: float) -> None:
        """Say it, if calls have waited for long enough since it was said last; asked while they wait."""
        if self._due is None:
            self._due = now + _AWAITING_SECONDS
        elif now >= self._due:
            self._due = now + _AWAITING_SECONDS
            logger.warning("%s", awaiting_text(state))
