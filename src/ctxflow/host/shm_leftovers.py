"""Segments that killed library processes leave in /dev/shm, where they have none of their own (private_shm.py).

A host looks from time to time what its library processes have mapped there, and when they are gone removes what nobody
has mapped any more, of the names that libraries make up: what somebody named himself is his. It is written down in a
file, for the next host of this user on the machine, should this one be killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable

from ctxflow.host.linux import descendants, visible_processes
from ctxflow.host.private_shm import FOLDER

_MADE_UP = re.compile(r"psm_[0-9a-f]+|torch_\d+_.*|nccl-.*|sem\.mp-.*")
_RECORD = "ctxflow-segments-{user}"
_FIRST_NAMESPACE = "pid:[4026531836]"
_LOOK_SECONDS = 1.0
_CAREFULLY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # Somebody else may have put a pipe there.
_AFTER_SECONDS = 5.0  # How long after an end processes may take to let go of what they have mapped.

Segment = tuple[int, int]
"""The device and inode of one: its name may be another's by now, or one of another /dev/shm."""


class ShmLeftovers:
    """What one host's library processes have in /dev/shm.

    :param folder: where the file is that hosts of this user share; by default the temporary directory.
    """

    def __init__(self, folder: str = "") -> None:
        record = _RECORD.format(user=os.getuid()) + _namespace()
        self._record = os.path.join(folder or os.environ.get("TMPDIR", "/tmp"), record)
        self._seen: dict[str, Segment] = {}
        self._changed = -1
        self._look_at = 0.0
        self._sweep_until = 0.0
        self.sweep()

    def due(self, libraries: int) -> float:
        """When to call `check`, while there are so many library processes."""
        return self._look_at if libraries or self._seen else float("inf")

    def check(self, processes: Iterable[int], time: float) -> None:
        """Look what these processes, and those that they started, have mapped; remove what ended ones have left."""
        if self._look_at <= time:
            self._look_at = time + _LOOK_SECONDS
            self.look(processes)
            if self._seen and time < self._sweep_until:
                self.sweep()

    def ended(self, time: float) -> None:
        """Remove what a process has left that was killed just now."""
        self._sweep_until = time + _AFTER_SECONDS
        if self._seen:
            self.sweep()

    def look(self, processes: Iterable[int]) -> None:
        """Note what these processes, and those that they started, have mapped; quick where nothing is new there."""
        with contextlib.suppress(OSError):
            changed = os.stat(FOLDER).st_mtime_ns
            if changed == self._changed:
                return
            self._changed = changed
            trees = [pid for process in processes for pid in (process, *descendants(process))]
            new = {name: of for name, of in _mapped(trees).items() if name not in self._seen}
            if new:
                self._seen |= new
                _append(self._record, new)

    def sweep(self) -> list[str]:
        """Remove what was noted, here or by hosts that were killed, and nobody has mapped; return the names."""
        removed = []
        recorded = {**_read(self._record), **self._seen}
        there = {name: of for name, of in recorded.items() if _is_there(name, of)}
        used = set(_mapped(visible_processes())) if there else set()
        for name in there.keys() - used:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(FOLDER, name))
                removed.append(name)
        self._seen = {name: of for name, of in there.items() if name in used}
        with contextlib.suppress(OSError):
            if recorded and not self._seen:
                os.unlink(self._record)
        return sorted(removed)


def _namespace() -> str:
    """Return what tells PID namespaces apart: of other containers with this /dev/shm no process sees what is mapped."""
    with contextlib.suppress(OSError):
        if (found := os.readlink("/proc/self/ns/pid")) != _FIRST_NAMESPACE:
            return "-" + found.strip("pid:[]")
    return ""


def _mapped(pids: Iterable[int]) -> dict[str, Segment]:
    """Return the segments of made-up names that processes have mapped, and that are in this process's /dev/shm.

    By their inodes: a semaphore is mapped under another name than it is given.
    """
    there = _made_up()
    found: dict[str, Segment] = {}
    for pid in pids if there else ():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                if FOLDER in line:
                    _, _, _, device, inode, *_ = line.split(maxsplit=5)
                    major, minor = (int(part, 16) for part in device.split(":"))
                    segment = os.makedev(major, minor), int(inode)
                    if segment in there:
                        found[there[segment]] = segment
    return found


def _made_up() -> dict[Segment, str]:
    """Return this user's segments of made-up names that are there."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(FOLDER):
            with contextlib.suppress(OSError):
                seen = entry.stat(follow_symlinks=False)
                if _MADE_UP.fullmatch(entry.name) and seen.st_uid == os.getuid():
                    found[seen.st_dev, seen.st_ino] = entry.name
    return found


def _is_there(name: str, segment: Segment) -> bool:
    with contextlib.suppress(OSError):
        seen = os.stat(os.path.join(FOLDER, name))
        return (seen.st_dev, seen.st_ino) == segment and seen.st_uid == os.getuid()
    return False


def _is_ours(descriptor: int) -> bool:
    seen = os.fstat(descriptor)
    return stat.S_ISREG(seen.st_mode) and seen.st_uid == os.getuid()


def _append(record: str, segments: dict[str, Segment]) -> None:
    # Others may write there, whose lines are of no use: what they name must be this user's, and mapped by nobody.
    descriptor = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFULLY, 0o600)
    try:
        if not _is_ours(descriptor):
            return
        text = "".join(f"{device} {inode} {name}\n" for name, (device, inode) in segments.items())
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _read(record: str) -> dict[str, Segment]:
    found: dict[str, Segment] = {}
    with contextlib.suppress(OSError):
        descriptor = os.open(record, os.O_RDONLY | _CAREFULLY)
        with open(descriptor, errors="replace") as file:
            if not _is_ours(descriptor):
                return {}
            for line in file:
                device, inode, name = [*line.split(maxsplit=2), "", "", ""][:3]
                if device.isdigit() and inode.isdigit() and _MADE_UP.fullmatch(name.strip()):
                    found[name.strip()] = int(device), int(inode)
    return found
