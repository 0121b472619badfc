"""What the host asks of the operating system about processes: ending them, their memory, their parent's death.

Linux through /proc and prctl; nothing here knows contexts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, even if that was killed itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call above.
        os._exit(1)


def adopt_orphans() -> None:
    """Have descendants of this process that lose their parent become its children, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(own: Collection[int]) -> None:
    """Take note of adopted children that have ended, else they stay as zombies.

    :param own: the children that somebody else waits for.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:  # The next time, when it is out of the way.
                return
            os.waitpid(ended.si_pid, 0)


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
    """Kill a process, all its descendants, and what is left of the process group that it leads."""
    # The farthest first: should this be interrupted, whoever is left still finds all that it started.
    for each in reversed([pid, *descendants(pid)]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process that was killed ends in time; one that hangs in the kernel cannot be waited for for ever."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def activity(pid: int) -> tuple[str, ...]:
    """What changes as long as a process gets anything done, if only slowly; nothing of one that is gone."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = _stat(pid)[7:13]
        with open(f"/proc/{pid}/status") as file:
            found += [line for line in file if "ctxt_switches" in line]
    return tuple(found)


def process_state(pid: int) -> str:
    """The letter of a process's state, as of ps; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0]
    return ""


def _stat(pid: int | str) -> list[str]:
    """What the kernel tells of a process after its name, which may hold anything.

    The state, parent, group, session, terminal, its group, flags, faults (4 kinds), time (2), and more.

    :raises OSError: if it is gone.
    """
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def end_transfer_server(worker: int) -> None:
    """End a vine_worker's process that serves files to its peers: any file of its user, and to whoever asks."""
    for each in descendants(worker):
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
            if file.read().startswith(b"vine_worker [transfer"):
                os.kill(each, signal.SIGKILL)


def kill_children() -> None:
    """Kill all descendants of this process."""
    for each in reversed(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kill all that belongs to the session which a process leads or led, also what lost its parents."""
    killed: set[int] = set()
    while new := set(session_members(leader)) - killed:
        killed |= new
        for each in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)


def session_members(leader: int) -> list[int]:
    """The processes of a session that still run, as far as that can be seen."""
    found = []
    try:
        entries = os.listdir("/proc")
    except OSError:  # For lack of a descriptor.
        return []
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, _, _, session = _stat(entry)[:4]
                if int(session) == leader and state != "Z":
                    found.append(int(entry))
    return found


def listening_ports(pid: int) -> list[int]:
    """The TCP ports that a process listens at."""
    sockets, ports = set(), []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as file:
            for line in file.readlines()[1:]:
                # Its number, local address, remote address, state (0A: listens), ..., inode.
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def machine_memory() -> int:
    """The memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def resident_bytes(pid: int) -> int:
    """The memory of a process in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def proportional_bytes(pid: int) -> int:
    """The memory of a process in bytes, shared pages divided by those who share them; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, IndexError, ValueError):
        return resident_bytes(pid)


def tree_bytes(pid: int, limit: int = 0) -> int:
    """The memory in bytes of a process and its descendants.

    Forked children share much with their parent: that is told apart, which takes longer, above `limit`.
    """
    tree = [pid, *descendants(pid)]
    total = sum(map(resident_bytes, tree))
    return total if total <= limit else sum(map(proportional_bytes, tree))
