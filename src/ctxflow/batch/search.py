"""Finds status files below a directory, and says in words what became of their owners.

What does not live here: reading one that is named (status_file.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxflow.batch.status_file import SUFFIX
from ctxflow.batch.words import duration
from ctxflow.executors.run_status import NAME
from ctxflow.observe.progress import ENDED, condition, load_status

_DEPTH = 4
_MOST_FOLDERS = 5000
LIVE = ("starting", "running")


def found_below(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The status files below a folder, four levels deep: the live ones first, then the newest.

    A run's copy of a job's status is left out where the job's own is found.
    """
    found = [(path, status) for path in _files(folder) if (status := load_status(path)) is not None]
    outputs = {path for path, _ in found if path.name != NAME}
    ours = [each for each in found if each[0].name != NAME or Path(f"{each[1]['output']}{SUFFIX}") not in outputs]
    ours.sort(key=lambda each: (condition(each[1]) in LIVE, each[1].get("updated") or 0.0), reverse=True)
    return ours


def _files(folder: Path) -> Iterator[Path]:
    base = folder.resolve()
    for number, (where, folders, names) in enumerate(os.walk(base)):
        if number >= _MOST_FOLDERS:
            return
        here = Path(where)
        deep = len(here.relative_to(base).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in names if name == NAME or name.endswith(SUFFIX))


def exit_status(status: Mapping[str, Any]) -> int:
    """0 while it runs and when it is done, 3 if it is done with dead rows, 1 if it ended otherwise or is silent.

    >>> exit_status({"state": "done", "dead": 2}), exit_status({"state": "failed"})
    (3, 1)
    """
    state = condition(status)
    if state == "done":
        return 3 if status.get("dead") else 0
    return 0 if state in LIVE else 1


def told(status: Mapping[str, Any], now: float | None = None) -> tuple[str, str, str]:
    """What became of a job: its condition, a sentence that says more where there is more to say, and a style.

    >>> told({"state": "failed", "reason": "the disk is full"})
    ('failed', 'the disk is full', 'red')
    """
    now = time.time() if now is None else now
    state = condition(status, now)
    age = duration(max(0.0, now - float(status.get("updated") or 0.0)))
    host, pid = status.get("host"), status.get("pid")
    again = "the same command goes on from there"
    if state == "died":
        return state, f"its driver (process {pid} on {host}) is gone without a last word, {age} ago; {again}", "red"
    if state == "silent":
        return state, f"its driver (process {pid} on {host}) has said nothing for {age}: see if it lives", "yellow"
    if state == "interrupted":
        return state, f"stopped {age} ago; {again}", "yellow"
    style = {"done": "green", "failed": "red"}.get(state, "")
    return state, str(status.get("reason") or "") if state in ENDED else "", style
