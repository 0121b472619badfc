"""A status file: how something stands, as JSON that its owner rewrites about once a second for whoever looks.

What lives here: writing and reading it, and telling whether its owner still lives. What does not: what is in it
(batch/status_file.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxflow.process_identity import birth_of, lives
from ctxflow.safe_files import written_whole

VERSION = 1
SILENT_SECONDS = 30.0
_GONE_SECONDS = 3.0
ENDED = ("done", "failed", "interrupted")


def owner() -> dict[str, Any]:
    """Who writes: keys by which a reader tells whether this process still lives."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "born": birth_of(os.getpid())}


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Write a status file at once or not at all, so that a reader never sees half of it.

    :raises OSError: if it cannot be written.
    """
    text = json.dumps(status, indent=1) + "\n"
    # The last word is to outlive a power cut; the others are news for a second.
    with written_whole(path, sync=status.get("state") in ENDED) as file:
        file.write(text.encode())


def load_status(path: Path) -> dict[str, Any] | None:
    """What a status file says, None if there is none, or none of this version."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) and status.get("version") == VERSION else None


def condition(status: Mapping[str, Any], now: float | None = None) -> str:
    """The state that a status file tells, or what became of an owner that cannot tell any more.

    :param now: the time, in seconds since 1970.
    :returns: the file's "state" ("starting", "running", "done", "failed", "interrupted"); "died" if its process is
        gone from this host without a last word; "silent" if it was not rewritten for 30 s, by a process that hangs,
        or on a host that cannot be seen from here.

    >>> condition({"state": "done", "updated": 0.0})
    'done'
    >>> condition({"state": "running", "updated": 100.0, "pid": 1, "host": "another"}, now=140.0)
    'silent'
    """
    state = str(status.get("state"))
    if state in ENDED:
        return state
    age = (time.time() if now is None else now) - float(status.get("updated") or 0.0)
    # A file that was written this moment has a live owner, even one whose number means nothing here (a container's).
    if abs(age) > _GONE_SECONDS and status.get("host") == socket.gethostname() and not _lives(status):
        return "died"
    return "silent" if age > SILENT_SECONDS else state


def _lives(status: Mapping[str, Any]) -> bool:
    """Whether the owner's process is there, and not another that has its number now."""
    try:
        return lives(int(status["pid"]), status.get("born"))
    except (KeyError, ValueError, TypeError):
        return False


class StatusReader:
    """A status file that is read again and again: one that changes has a live owner, whatever the clock that dates it.

    :ivar status: what it said last, dated by this machine's clock once it has been seen to change.
    """

    def __init__(self, path: Path, status: dict[str, Any]) -> None:
        self.path, self.status = path, status
        self._said = status.get("updated")
        self._changed: float | None = None

    def look(self) -> dict[str, Any]:
        """Read it again."""
        status = load_status(self.path)
        if status is None:
            return self.status
        if status.get("updated") != self._said:
            self._said, self._changed = status.get("updated"), time.monotonic()
        if self._changed is not None:
            status["updated"] = time.time() - (time.monotonic() - self._changed)
        self.status = status
        return status

    def settle(self, seconds: float = 2.5) -> dict[str, Any]:
        """Read it again, if it seems silent, after it was to be rewritten: only its clock may be off."""
        if condition(self.status) == "silent":
            time.sleep(seconds)
            self.look()
        return self.status
