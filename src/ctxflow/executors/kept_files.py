"""The files that a run keeps in its directory as it goes: its event log, its status, and its workers.

The event log takes every event at once, and writes many lines at a time; `status.json` says how the run as a whole
stands, `workers.json` what each worker did and where its log is (`ctxflow workers`). All are written on a thread of
their own, so that a disk that stalls stops no submission and no answer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.executors.contract import Engine, KnowsJobs
from ctxflow.executors.figures import Status, figures_of
from ctxflow.files import written_whole
from ctxflow.host.linux import advice
from ctxflow.observe.progress import STATUS, VERSION, Progress, Rates, has_type, owner, write_status
from ctxflow.ownership import belongs_here, lead_nowhere
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.log import line
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Worker

logger = logging.getLogger("ctxflow")
_DISK_SECONDS = 30.0  # How long the disk has at the end of a run.
_LINES = 200
_BUFFER = 1 << 18
_MOST_BEHIND = 1 << 28  # Characters that wait for a disk which stalls.


class EventLog:
    """A run's events with the commands they led to, in a file; the first line says how it decides. Its owner locks.

    Lines are made 200 at a time, or when `flush` is called: one by one, between a call and the next, they cost
    twice as much. A disk that is full, or stalls for long, ends the log with a warning, and not the run.

    :raises OSError: if it cannot be opened.
    """

    def __init__(self, path: str, first: str, disk: DiskThread | None = None) -> None:
        self._path = path
        self._disk = disk or DiskThread()
        self._behind = 0
        self._flushing = False
        self._file = open(path, "w", _BUFFER)  # noqa: SIM115 - closed in `close`
        self._file.write(first + "\n")
        self._unwritten: list[tuple[ev.Event, Sequence[Command]]] = []
        belongs_here(self)

    def forked(self) -> None:
        """Leave the file to the process that opened it: what is buffered is that one's to write."""
        if not self._file.closed:
            lead_nowhere(self._file.fileno())

    def add(self, event: ev.Event, commands: Sequence[Command]) -> None:
        """Note an event."""
        if type(event) is ev.BatchFinished:  # Its results must not live on here.
            results, tokens, cached = event.results, event.tokens, None
            if type(results) is list and results and type(results[0]) is dict:
                tokens, cached = tokens_of(results) if tokens is None else tokens, _cached_tokens(results)
            place = event.time, event.worker, event.attempt
            event = ev.BatchFinished(*place, event.seconds, tokens=tokens, cached_tokens=cached)
        elif type(event) is ev.ItemsFinished:
            tokens = tokens_of(event.results)
            event = ev.ItemsFinished(event.time, event.worker, event.attempt, event.first, event.count, tokens=tokens)
        self._unwritten.append((event, commands))
        if len(self._unwritten) >= _LINES:
            self._write()

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if self._file.closed or self._behind > _MOST_BEHIND:
            return
        text = "".join([line(event, commands) + "\n" for event, commands in unwritten])
        self._behind += len(text)
        if self._behind > _MOST_BEHIND:
            self._disk.give(functools.partial(self._end, "its disk is too slow"))
        else:
            self._disk.give(functools.partial(self._put, text))

    def _put(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
        except OSError as error:
            self._end(error)
        self._behind -= len(text)

    def flush(self) -> None:
        """Have everything in the file soon."""
        if self._unwritten:
            self._write()
        if not self._flushing:
            self._flushing = True
            self._disk.give(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._file.closed:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError | str) -> None:
        logger.warning("the event log ends here (%s): make room in %s", error, self._path)
        self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # A full disk must not keep the run from ending.
            self._file.close()

    def close(self) -> None:
        """Write what is left, and close the file; what is added from now on is dropped."""
        self._write()
        self._disk.give(self._flush)  # Which tells of a full disk.
        self._disk.give(self._close_file)
        if not self._disk.close():
            logger.warning("the end of the event log could not be written: the disk of %s does not answer", self._path)


def tokens_of(results: Any) -> int | None:
    """Return the tokens that a model read and wrote for a batch, if its results tell, as those of `ctxflow batch` do.

    >>> tokens_of([{"prompt_tokens": 7, "completion_tokens": 2}, {"prompt_tokens": 5}])
    14
    >>> tokens_of([{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}])
    9
    """
    if type(results) is not list or not results or type(results[0]) is not dict:
        return None
    if "prompt_tokens" not in results[0] and "usage" not in results[0]:
        return None
    total = 0
    for result in results:
        if type(result) is dict:
            if type(said := result.get("usage")) is dict:  # A response of OpenAI's form.
                result = said  # noqa: PLW2901
            counts = result.get("prompt_tokens", 0), result.get("completion_tokens", 0)
            total += sum(count for count in counts if type(count) is int)
    return total or None  # An encoder that was not asked to count says 0.


def _cached_tokens(responses: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the tokens of prompts that an engine found in its cache, if responses of OpenAI's form tell.

    >>> _cached_tokens([{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}])
    4
    """
    found = None
    for response in responses:
        usage = response.get("usage") if type(response) is dict else None
        details = usage.get("prompt_tokens_details") if type(usage) is dict else None
        cached = details.get("cached_tokens") if type(details) is dict else None
        if type(cached) is int:
            found = (found or 0) + cached
    return found


class StatusWriter:
    """Rewrites status files. A disk that is full, or no descriptor left for one, ends nothing, and is logged once."""

    def __init__(self) -> None:
        self._warned = False

    def write(self, path: Path, status: Mapping[str, Any]) -> None:
        """Write one at once or not at all."""
        try:
            write_status(path, status)
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "%s cannot be rewritten, so that it says how things stood before (%s)%s"
                logger.warning(text, path, error, advice(error) or ": make room there")


class RunStatusFile:
    """Rewrites a run's status file; calls come one at a time."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / STATUS
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


WORKERS = "workers.json"
NOTED = frozenset((ev.BatchFailed, ev.ContextFailed, ev.WorkerLost))
"""The events that it takes note of."""
_SECONDS, _SECONDS_EACH = 2.0, 0.01  # How often it is written: the more seldom, the more workers there are.
_MOST_GONE = 50
_LENGTH = 300  # Of the last error.


class WorkerTable:
    """Notes what workers do, and has it written now and then on the thread of `soon`; calls come one at a time."""

    def __init__(self, directory: str, soon: Callable[[Callable[[], None]], None]) -> None:
        self._path = Path(directory) / WORKERS
        self._soon = soon
        self._waits = False  # To be written.
        self._accounts: dict[str, tuple[int, str]] = {}  # How often calls failed on a worker, and the last error.
        self._gone: dict[str, dict[str, Any]] = {}  # Those that were lost last.
        self._due = 0.0

    def note(self, event: ev.Event, state: RunState, engine: Engine) -> None:
        """Note an event; to be called before the scheduler handles it."""
        if isinstance(event, (ev.BatchFailed, ev.ContextFailed)):
            if event.failure.kind != "cancelled":
                failed, _ = self._accounts.get(event.worker, (0, ""))
                error = f"{event.failure.error}: {event.failure.message}"[:_LENGTH]
                self._accounts[event.worker] = failed + 1, error
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
        lines = [self._line(each, now, "ended" if end else _does(state, each), engine) for each in workers]
        told = {"version": 1, "updated": round(time.time(), 3), "workers": lines + list(self._gone.values())}
        self._waits = True

        def put() -> None:
            self._waits = False
            with contextlib.suppress(OSError), written_whole(self._path, sync=False, mode=0o600, alone=True) as file:
                file.write(json.dumps(told).encode())

        self._soon(put)

    def _line(self, worker: Worker, now: float, does: str, engine: Engine) -> dict[str, Any]:
        failed, error = self._accounts.get(worker.id, (0, ""))
        job, log = engine.job_of(worker.id) if isinstance(engine, KnowsJobs) else (None, "")
        return {
            "worker": worker.id,
            "host": worker.host,
            "gpus": worker.gpus,
            "gpu_model": worker.spec.gpu_model,
            "tier": worker.tier,
            "job": job,
            "state": does,
            "joined": round(time.time() - (now - worker.joined), 1),
            "ended": None if does in _STATES else round(time.time(), 1),
            "done": worker.done,
            "failed": failed,
            "error": error,
            "log": log,
        }


_STATES = ("in quarantine", "leaving", "working", "loading", "idle")


def _does(state: RunState, worker: Worker) -> str:
    """Return what a worker does, in one of these words."""
    if worker.id in state.wards.held:
        return "in quarantine"
    if worker.leaving:
        return "leaving"
    return "working" if worker.running else "loading" if worker.loading else "idle"


def read_workers(directory: str) -> list[Mapping[str, Any]]:
    """Return the workers of the run in a directory, as it wrote them last; none where it has not."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((Path(directory) / WORKERS).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("version") == 1 and isinstance(found.get("workers"), list):
            return [each for each in found["workers"] if _is_line(each)]
    return []


_LINE: dict[str, Any] = {
    **dict.fromkeys(("worker", "host", "tier", "state", "error", "log"), str), "gpus": int, "gpu_model": str | None,
    "job": str | None, "joined": float, "ended": float | None, "done": int, "failed": int,
}  # fmt: skip


def _is_line(told: Any) -> bool:
    return isinstance(told, dict) and all(has_type(told.get(name), kind) for name, kind in _LINE.items())


class DiskThread:
    """Does what it is given, in order, until `close`; what is given waits in memory as long as the disk stalls."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._there = threading.Semaphore(0)
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        belongs_here(self)

    def forked(self) -> None:
        """Do nothing in a child: what waits is its parent's to do."""
        self._waiting.clear()
        self._thread, self._closed, self._beginning = None, True, threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def give(self, action: Callable[[], None]) -> None:
        """Have something done soon; what it raises is logged."""
        if self._closed:
            return
        if self._thread is None:
            with self._beginning:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="ctxflow-disk", daemon=True)
                    self._thread.start()
        self._waiting.append(action)
        self._there.release()

    def _work(self) -> None:
        while True:
            self._there.acquire()
            if not self._waiting:
                return
            try:
                self._waiting[0]()
            except Exception:
                logger.exception("a run's file cannot be written")
            self._waiting.popleft()

    def close(self, seconds: float = _DISK_SECONDS) -> bool:
        """Wait until all is done, but not for ever; says whether it is. What is given from now on is not done."""
        if self._thread is None:
            self._closed = True
            return True
        if not self._closed:  # Else somebody has waited for long enough.
            self._closed = True
            self._there.release()
            self._thread.join(seconds)
        return not self._thread.is_alive()
