"""A run's status file, `status.json` in its directory: for `ctxflow top` and `ctxflow status` beside any program.

What does not live here: how it is written (observe/status_file.py), and a batch's, which says more (batch/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from ctxflow.executors.status import Status, figures_of
from ctxflow.observe.progress import Progress
from ctxflow.observe.rates import Rates
from ctxflow.observe.status_file import VERSION, owner, write_status

NAME = "status.json"


class RunStatusFile:
    """Rewrites a run's status file. A disk that is full ends no run; calls come one at a time.

    :param directory: the run's.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / NAME
        self._facts = {"version": VERSION, "output": "", "run": directory, **owner()}
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
        with contextlib.suppress(OSError):
            write_status(self._path, {**facts, **dataclasses.asdict(progress)})
