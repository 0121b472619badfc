"""Whether the process that wrote a file still runs, told without any clock.

A process is known by its number, when the kernel started it (in ticks since the machine booted) and the boot's own
id: steps of the machine's clock, and the clock of whoever keeps the file, change none of them. What does not live
here: what a worker's host asks about processes (host/processes.py).
"""

from __future__ import annotations

import os


def birth_of(pid: int) -> str | None:
    """Return what tells a process from all others that have or had its number; None if there is none, or it has ended.

    :returns: "" for a process that is there, of which this user may see no more.

    >>> birth_of(os.getpid()) == birth_of(os.getpid()), birth_of(2**22 + 1)
    (True, None)
    """
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which may hold anything: state is the third field of all, the start the 22nd.
            fields = file.read().rpartition(b")")[2].split()
        state, start = fields[0].decode(), fields[19].decode()
    except (OSError, IndexError):
        return "" if _is_there(pid) else None
    return None if state in "ZX" else f"{start}@{_boot()}"


def lives(pid: int, birth: str | None) -> bool:
    """Return whether a process still runs.

    :param birth: what `birth_of` gave when it was known; none or "" where nothing was, so that its number alone counts.
    """
    now = birth_of(pid)
    return now is not None and (not birth or not now or birth == now)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # Not Linux's own; the start alone is known then.
        return ""
