"""A status file: how something stands, as JSON that its owner rewrites about once a second for whoever looks.

What lives here: writing and reading it, and telling whether its owner still lives. What does not: what is in it
(batch/status_file.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

VERSION = 1
SILENT_SECONDS = 30.0
_GONE_SECONDS = 3.0
ENDED = ("done", "failed", "interrupted")


def owner() -> dict[str, Any]:
    """Who writes: keys by which a reader tells whether this process still lives."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "began": psutil.Process().create_time()}


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Write a status file at once or not at all, so that a reader never sees half of it.

    :raises OSError: if it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


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
    if age > _GONE_SECONDS and status.get("host") == socket.gethostname() and not _lives(status):
        return "died"
    return "silent" if age > SILENT_SECONDS else state


def _lives(status: Mapping[str, Any]) -> bool:
    """Whether the owner's process is there, and not another that has its number now."""
    try:
        process = psutil.Process(int(status["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        began = process.create_time()
    except (psutil.NoSuchProcess, KeyError, ValueError, TypeError):
        return False
    except psutil.AccessDenied:
        return True
    known = status.get("began")
    return known is None or abs(began - float(known)) < 2.0
