"""The event log's file: takes every event at once, and writes many lines at a time, on a thread of its own.

What does not live here: what a line is, and the log's replay (scheduler/log.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

from ctxflow.executors.disk import DiskThread
from ctxflow.process_identity import belongs_here, lead_nowhere
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.log import line

logger = logging.getLogger("ctxflow")
_LINES = 200
_BUFFER = 1 << 18
_MOST_BEHIND = 1 << 28  # Characters that wait for a disk which stalls.


class EventLog:
    """A run's events with the commands they led to, in a file.

    Lines are made 200 at a time, or when `flush` is called: one by one, between a call and the next, they cost
    twice as much. A disk that is full, or stalls for long, ends the log with a warning, and not the run. Its owner
    locks.

    :param path: the file, which is begun anew.
    :param first: its first line, which says how the run decides.
    :param disk: who writes; one of its own by default.
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
            tokens = tokens_of(event.results)
            event = ev.BatchFinished(event.time, event.worker, event.attempt, event.seconds, tokens=tokens)
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
    """The tokens that a model read and wrote for a batch, if its results tell, as those of `ctxflow batch` do.

    >>> tokens_of([{"prompt_tokens": 7, "completion_tokens": 2}, {"prompt_tokens": 5}])
    14
    """
    if type(results) is not list or not results or type(results[0]) is not dict or "prompt_tokens" not in results[0]:
        return None
    total = 0
    for result in results:
        if type(result) is dict:
            counts = result.get("prompt_tokens", 0), result.get("completion_tokens", 0)
            total += sum(count for count in counts if type(count) is int)
    return total or None  # An encoder that was not asked to count says 0.
