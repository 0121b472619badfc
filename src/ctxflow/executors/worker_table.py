"""Each worker of a run, in a file of its directory: where it is, what it did, and where its log is (`ctxflow workers`).

What does not live here: how the run as a whole stands (run_status.py), and what happened over time (the event log).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctxflow.executors.engine import Engine, KnowsJobs
from ctxflow.safe_files import written_whole
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.eligibility import goes
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Worker

NAME = "workers.json"
NOTED = frozenset((ev.BatchFailed, ev.ContextFailed, ev.WorkerLost))
"""The events that it takes note of."""
_SECONDS, _SECONDS_EACH = 2.0, 0.01  # How often it is written: the more seldom, the more workers there are.
_MOST_GONE = 50
_LENGTH = 300  # Of the last error.


@dataclasses.dataclass(slots=True)
class _Account:
    """What went wrong on a worker."""

    failed: int = 0
    error: str = ""


class WorkerTable:
    """Takes note of what workers do, and writes it now and then; calls come one at a time.

    :param directory: the run's.
    :param soon: has something done on the thread that writes.
    """

    def __init__(self, directory: str, soon: Callable[[Callable[[], None]], None]) -> None:
        self._path = Path(directory) / NAME
        self._soon = soon
        self._waits = False  # To be written.
        self._accounts: dict[str, _Account] = {}
        self._gone: dict[str, dict[str, Any]] = {}  # Those that were lost last.
        self._due = 0.0

    def note(self, event: ev.Event, state: RunState, engine: Engine) -> None:
        """Something happened; to be called before the scheduler hears of it."""
        if isinstance(event, (ev.BatchFailed, ev.ContextFailed)):
            if event.failure.kind != "cancelled":
                account = self._accounts.setdefault(event.worker, _Account())
                account.failed += 1
                account.error = f"{event.failure.error}: {event.failure.message}"[:_LENGTH]
        elif isinstance(event, ev.WorkerLost):
            worker = state.workers.get(event.worker)
            if worker is not None:
                became = "given back" if worker.released else "evicted" if event.evicted else "lost"
                self._gone[worker.id] = self._line(worker, state.now, became, engine)
            if len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]
            self._accounts.pop(event.worker, None)

    def write(self, state: RunState, now: float, engine: Engine, end: bool = False) -> None:
        """Write it, if it is time; a disk that is full ends no run."""
        if (now < self._due or self._waits) and not end:
            return
        self._due = now + max(_SECONDS, _SECONDS_EACH * len(state.workers))
        workers = state.workers.values()
        lines = [self._line(each, now, "ended" if end else _does(each), engine) for each in workers]
        told = {"version": 1, "updated": round(time.time(), 3), "workers": lines + list(self._gone.values())}
        self._waits = True

        def put() -> None:
            self._waits = False
            with contextlib.suppress(OSError), written_whole(self._path, sync=False, mode=0o600) as file:
                file.write(json.dumps(told).encode())

        self._soon(put)

    def _line(self, worker: Worker, now: float, does: str, engine: Engine) -> dict[str, Any]:
        account = self._accounts.get(worker.id, _Account())
        job, log = engine.job_of(worker.id) if isinstance(engine, KnowsJobs) else (None, "")
        return {
            "worker": worker.id,
            "host": worker.host,
            "gpus": worker.gpus,
            "gpu_model": worker.gpu_model,
            "tier": worker.tier,
            "job": job,
            "state": does,
            "joined": round(time.time() - (now - worker.joined), 1),
            "ended": None if does in _STATES else round(time.time(), 1),
            "done": worker.done,
            "failed": account.failed,
            "error": account.error,
            "log": log,
        }


_STATES = ("in quarantine", "leaving", "working", "loading", "idle")


def _does(worker: Worker) -> str:
    """What a worker does, in one of these words."""
    if worker.held:
        return "in quarantine"
    if goes(worker):
        return "leaving"
    return "working" if worker.running else "loading" if worker.loading else "idle"


def read_workers(directory: str) -> list[Mapping[str, Any]]:
    """The workers of a run, as it said last; none where it has not said.

    :param directory: the run's.
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((Path(directory) / NAME).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("version") == 1:
            return list(found["workers"])
    return []
