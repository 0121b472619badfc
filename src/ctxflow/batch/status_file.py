"""OUTPUT.status.json: how a job stands, for other terminals and programs; a copy lies in the run's directory.

What does not live here: how a status file is written, and whether its writer lives (observe/progress.py).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ctxflow.executors.interrupts import uninterrupted
from ctxflow.executors.run import Run
from ctxflow.executors.run_status import NAME, StatusWriter
from ctxflow.observe.progress import VERSION, Progress, load_status, owner

SUFFIX = ".status.json"
_SECONDS = 1.0
_REASON = 500  # Characters.


def status_path(output: Path) -> Path:
    """Where the status of the job with that output is."""
    real = output.resolve()
    return real.with_name(real.name + SUFFIX)


def find_status(path: Path) -> Path | None:
    """The status file that is meant.

    :param path: it, its job's output, or a run's directory or the one above it.
    """
    if path.is_dir():
        inside = [path / NAME, *path.glob(f"*/{NAME}")]
        found = sorted((each for each in inside if each.is_file()), key=lambda each: each.stat().st_mtime)
        return found[-1] if found else None
    if path.name == NAME or path.name.endswith(SUFFIX):
        return path if path.is_file() else None
    beside = status_path(path)
    return beside if beside.is_file() else None


def read_status(path: Path) -> dict[str, Any] | None:
    """How a job stands, or stood when its driver ended; None if nothing tells.

    :param path: the job's output, its status file, or a run's directory.
    :returns: the file's JSON: "version", "state" ("starting", "running", "done", "failed", "interrupted"), "reason" (of
        a failure), "updated" (seconds since 1970), "pid" and "host" of the driver, "run" (the run's directory, or
        ""), "output", and the fields of `ctxflow.observe.progress.Progress`. Whether a driver that seems to run still
        does, `ctxflow.observe.progress.condition` tells.

    >>> read_status(Path("no/such/output.jsonl")) is None
    True
    """
    found = find_status(Path(path))
    return None if found is None else load_status(found)


class StatusFile:
    """Keeps a job's status file while the job runs, from a thread of its own: a slow disk delays no row.

    It is rewritten once a second, also when nothing changes, so that a reader sees that the driver lives; the last
    time at the end, with what became of the job. A disk that is full ends no job.

    :param output: the job's output.
    :ivar progress: how the job stood last.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with StatusFile(Path(folder) / "results.jsonl") as file:
    ...         file.update(Progress(done=3, total=3))
    ...     status = read_status(Path(folder) / "results.jsonl")
    >>> status["state"], status["done"]
    ('done', 3)
    """

    def __init__(self, output: Path) -> None:
        self._paths = [status_path(output)]
        self._facts = {"version": VERSION, "output": str(output.resolve()), "run": "", **owner()}
        self._writer = StatusWriter()
        self._state, self._reason = "starting", ""
        self.progress = Progress()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, name="ctxflow-status", daemon=True)

    def update(self, progress: Progress) -> None:
        """How it stands now; it is written within a second."""
        self.progress, self._state = progress, "running"

    def run_began(self, run: Run) -> None:
        """A run has begun: its directory gets a copy, in place of the run's own status file, which says less."""
        run.keeps_status = False
        self._facts["run"] = run.directory
        self._paths.append(Path(run.directory) / NAME)

    def __enter__(self) -> StatusFile:
        """Write the first."""
        self._write()
        self._thread.start()
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last."""
        self._ending.set()
        self._thread.join()
        if error is None:
            self._state = "done"
        elif isinstance(error, KeyboardInterrupt):
            self._state = "interrupted"
        else:
            self._state = "failed"
            self._reason = " ".join(str(error).split())[:_REASON] or type(error).__name__
        self._write()

    def _rewrite(self) -> None:
        while not self._ending.wait(_SECONDS):
            self._write()

    def _write(self) -> None:
        facts = {**self._facts, "state": self._state, "reason": self._reason, "updated": round(time.time(), 3)}
        status = {**facts, **dataclasses.asdict(self.progress)}
        for path in list(self._paths):
            self._writer.write(path, status)
