"""What a host asks of the operating system about processes: ending them, their memory, their parent's death.

Linux through /proc and prctl; nothing here knows contexts. What was killed and is not gone yet (`Undead`), because its
memory is large or the kernel waits in its name, is looked after until it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

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


def on_signal(number: int, selector: selectors.BaseSelector, act: Callable[[], None]) -> None:
    """Act on a signal in the selector's turn: a handler may have interrupted a message half sent."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def handler(signum: int, stack: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(write_end, b".")

    def woken() -> None:
        os.read(read_end, 4096)
        act()

    signal.signal(number, handler)
    selector.register(read_end, selectors.EVENT_READ, woken)


def descendants(pid: int) -> list[int]:
    """Return all children of a process and theirs, the nearest first."""
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
    """Return whether a killed process ends in time; one that hangs in the kernel cannot be waited for for ever."""
    import subprocess  # Here: a library process, which needs none, starts the sooner.

    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def activity(pid: int) -> tuple[str, ...]:
    """Return what changes as long as a process gets anything done, if only slowly; nothing of one that is gone."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = _stat(pid)[7:13]
        with open(f"/proc/{pid}/status") as file:
            found += [line for line in file if "ctxt_switches" in line]
    return tuple(found)


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as of ps; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0]
    return ""


def _stat(pid: int | str) -> list[str]:
    """Return what the kernel tells of a process after its name, which may hold anything.

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
    """Return the processes of a session that still run, as far as that can be seen."""
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
    """Return the TCP ports that a process listens at."""
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
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def resident_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, shared pages divided by those who share them; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, IndexError, ValueError):
        return resident_bytes(pid)


def tree_bytes(pid: int, limit: int = 0) -> int:
    """Return the memory in bytes of a process and its descendants.

    Forked children share much with their parent: that is told apart, which takes longer, above `limit`.
    """
    tree = [pid, *descendants(pid)]
    total = sum(map(resident_bytes, tree))
    return total if total <= limit else sum(map(proportional_bytes, tree))


_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 20.0  # After which a process in which nothing moves is said to stay.


class _Killed:
    def __init__(self, process: subprocess.Popen[bytes], now: float) -> None:
        self.process = process
        self.moved_at = now
        self._activity = activity(process.pid)

    def look(self, now: float) -> None:
        seen = activity(self.process.pid)
        if seen != self._activity:
            self._activity, self.moved_at = seen, now


class Undead:
    """All of a host's.

    :ivar stuck_seconds: how long nothing may move in one.
    :ivar look_at: when to call `look`.
    """

    def __init__(self) -> None:
        self.stuck_seconds = _STUCK_SECONDS
        self.look_at = float("inf")
        self._killed: list[_Killed] = []
        self._told = False

    def __bool__(self) -> bool:
        return bool(self._killed)

    def add(self, process: subprocess.Popen[bytes], now: float) -> None:
        """One more."""
        self._killed.append(_Killed(process, now))
        self.look_at = now + _LOOK_SECONDS

    def pids(self) -> list[int]:
        """Return their numbers."""
        return [each.process.pid for each in self._killed]

    def look(self, now: float) -> str | None:
        """Forget those that are gone; what is to be told of one that stays, if that was not told before."""
        self._killed = [each for each in self._killed if each.process.poll() is None]
        self.look_at = now + _LOOK_SECONDS if self._killed else float("inf")
        for each in self._killed:
            each.look(now)
            if now >= each.moved_at + self.stuck_seconds and not self._told:
                self._told = True
                return (
                    f"its process {each.process.pid} was killed and does not end, so that its GPU and memory stay "
                    "taken: see what it waits for in the kernel (a GPU that failed, a file server that hangs)"
                )
        return None

    def wait(self, seconds: float) -> None:
        """Give each so long to end."""
        for each in self._killed:
            ended_within(each.process, seconds)
