"""Find and remove the folders of runs that have ended.

A run's folder holds its event log, its summary and what its workers wrote: what reports are made of. No job needs it to
be resumed: that is in OUTPUT.progress and what lies beside it, which nothing here touches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxflow.observe.progress import ENDED, STATUS, condition, load_status

_OVER = (*ENDED, "died")


@dataclasses.dataclass(frozen=True)
class KnownRun:
    """A run's folder.

    :ivar state: "done", "failed", "interrupted" or "died" if it is over; "starting", "running", or "silent" where its
        driver is on another machine and cannot be asked.
    :ivar updated: when it said so last, in seconds since 1970.
    :ivar size: of all that is in the folder, in bytes.
    :ivar output: the output of the batch job that it was of, "" for another program's run.
    """

    folder: Path
    state: str
    updated: float
    size: int
    output: str

    @property
    def is_over(self) -> bool:
        """Whether its driver is gone."""
        return self.state in _OVER


def known_runs(base: Path) -> list[KnownRun]:
    """Return the runs that wrote to `runs/TIME-PID/LABEL` below a folder, the oldest first; links are not followed."""
    found = [run for folder in _folders(base / "runs") for run in _runs_in(folder)]
    return sorted(found, key=lambda run: run.updated)


def removable(runs: list[KnownRun], older_than: float, now: float | None = None) -> list[KnownRun]:
    """Return those that are over, and have been for so many seconds.

    >>> run = KnownRun(Path("runs/a/ctxflow"), "done", 100.0, 5, "")
    >>> removable([run], 60, now=150.0), removable([run], 60, now=170.0) == [run]
    ([], True)
    """
    then = (time.time() if now is None else now) - older_than
    return [run for run in runs if run.is_over and run.updated <= then]


def remove(run: KnownRun) -> bool:
    """Remove a run's folder, and the one above it if nothing is left in that; False if the run goes on after all.

    :raises OSError: if it cannot be removed.
    """
    status = load_status(run.folder / STATUS)
    if status is None or condition(status) not in _OVER:
        return False
    shutil.rmtree(run.folder)
    with contextlib.suppress(OSError):  # Something else is in it.
        run.folder.parent.rmdir()
    return True


def _folders(parent: Path) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield from sorted(found)


def _runs_in(folder: Path) -> Iterator[KnownRun]:
    for place in _folders(folder):
        status: dict[str, Any] | None = load_status(place / STATUS)
        if status is not None and "run" in status:
            updated = float(status.get("updated") or 0.0)
            yield KnownRun(place, condition(status), updated, _size(place), str(status.get("output") or ""))


def _size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
