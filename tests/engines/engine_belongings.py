"""What belongs to a run, wherever it hides: processes, segments of shared memory, sockets; and whom to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import uuid
from pathlib import Path
from typing import TypeVar

import forked
from waiting import nothing_left

T = TypeVar("T")

_SHM = Path("/dev/shm")


class Belongings:
    """Processes with a mark in the environment that they were started with, and all that descend from them.

    Those that write over their environment, to set their title, are known by their parents. While it is entered it
    looks ten times a second, and notes which segments in /dev/shm they have.

    :param folder: where they make their temporary files.
    """

    VARIABLE = "CTXFLOW_TESTED_RUN"

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.segments: set[str] = set()
        self._known: dict[int, str] = {}  # Process -> when it began.
        self._strangers: dict[int, str] = {}  # Likewise, of others, which will not become ours.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Belongings:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        for pid in self.processes():  # Of a test that failed.
            kill(pid)
        for name in self.segments:
            (_SHM / name).unlink(missing_ok=True)

    def processes(self) -> dict[int, str]:
        """Return the living ones and their command lines; what has ended and was not waited for is not there."""
        with self._lock:
            seen = {int(entry.name): _status(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
            there = {pid: status for pid, status in seen.items() if status is not None and pid != os.getpid()}
            known = {pid: began for pid, began in self._known.items() if pid in there and there[pid][1] == began}
            # A machine with clusters on it has a thousand of them, whose environments are not read each time. Only what
            # we have started ourselves may yet get another.
            strangers = {pid: began for pid, began in self._strangers.items() if there.get(pid, (0, ""))[1] == began}
            more = {pid for pid in there.keys() - known.keys() - strangers.keys() if self._is_marked(pid)}
            ours = {os.getpid(), 1, *forked.servers()}
            self._strangers = {pid: began for pid, (parent, began) in there.items() if parent not in ours}
            # What descends from what has ended meanwhile was seen before.
            while more:
                known |= {pid: there[pid][1] for pid in more}
                more = {pid for pid, (parent, _) in there.items() if pid not in known and parent in known}
            self._known = known
        return {pid: line for pid in known if (line := _command(pid)) is not None}

    def of(self, *kinds: str) -> list[int]:
        """Return the processes whose command line has one of these in it, the oldest first."""
        return sorted(pid for pid, line in self.processes().items() if any(kind in line for kind in kinds))

    def tree(self, pid: int) -> list[int]:
        """Return a process and all that descend from it."""
        parents = {each: status[0] for each in self.processes() if (status := _status(Path(f"/proc/{each}")))}
        found = [pid]
        for each in found:
            found += [child for child, parent in parents.items() if parent == each]
        return found

    def sockets(self) -> list[str]:
        """Return the sockets among their temporary files."""
        found = []
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    found.append(path)
        return found

    def files(self) -> list[str]:
        """Return their temporary files; that some go meanwhile is no error."""
        return [os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names]

    def left(self) -> list[str]:
        """Return what there is, in words."""
        return [
            *(f"process {pid}: {line}" for pid, line in self.processes().items()),
            *(f"segment {name}" for name in sorted(self.segments) if (_SHM / name).exists()),
            *(f"socket {path}" for path in self.sockets()),
            *(f"file {path}" for path in self.files() if "/vllm_dist_" in path),
        ]

    def none_left(self) -> None:
        """Wait until nothing is left."""
        nothing_left(self.left)

    def gone(self, pids: list[int]) -> None:
        """Wait until these processes have ended."""
        nothing_left(lambda: {pid: line for pid, line in self.processes().items() if pid in pids})

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return f"{self.VARIABLE}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            there = _segments()
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                    mapped = {tuple(line.split()[3:5]) for line in lines if str(_SHM) in line}
                    self.segments.update(there[each] for each in mapped & there.keys())


def _segments() -> dict[tuple[str, str], str]:
    """Return the names in /dev/shm by device and inode, as a process's maps have them.

    A semaphore is mapped under another name than it is given; and a process may have a /dev/shm of its own.
    """
    found = {}
    for path in _SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            seen = path.lstat()
            device = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}"
            found[device, str(seen.st_ino)] = path.name
    return found


def _status(entry: Path) -> tuple[int, str] | None:
    """Return a process's parent and when it began; None if it has ended."""
    try:
        state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else (int(parent), rest[17])


def _command(pid: int) -> str | None:
    """Return a process's command line and name: one that a zygote has forked has the zygote's command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return " ".join([*(word.decode(errors="replace") for word in words), f"({name})"]).strip()


def kill(pid: int) -> None:
    """End a process as the kernel does that is out of memory."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
