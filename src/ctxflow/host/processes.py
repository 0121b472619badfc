"""What the host asks of the operating system about processes: ending them, their memory, their parent's death.

Linux through /proc and prctl; nothing here knows contexts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, even if that was killed itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call above.
        os._exit(1)


def descendants(pid: int) -> list[int]:
    """All children of a process and theirs, the nearest first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found.extend(int(child) for child in file.read().split())
    return found[1:]


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, at once and for good."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """The memory of a process in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def tree_bytes(pid: int) -> int:
    """The memory in bytes of a process and its descendants (what they share is counted for each)."""
    return sum(map(resident_bytes, [pid, *descendants(pid)]))
