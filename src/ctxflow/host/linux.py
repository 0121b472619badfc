"""What is asked of Linux: processes and how they end, memory, descriptors; and which errors are the machine's fault."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import resource
import select
import selectors
import signal
import site
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
INTERRUPT_SIGNAL, CALL_NUMBER_BYTES = signal.SIGUSR1, 8
"""How a host interrupts a call of its library process: the calls' numbers in a pipe, then the signal."""
_ORIGINAL_PATH = "CTXFLOW_ORIGINAL_PYTHONPATH"
_ENOUGH = 1 << 16
_FEW = 64  # With fewer, not all libraries that a run needs can say what they lack.
PAUSE_SECONDS = 0.5
_unreaped: dict[int, ChildProcess] = {}  # Child processes that were still there when `ended_within` gave up.


class ChildProcess(Protocol):
    """What is common to a process that was spawned and one that was forked: the part of `subprocess.Popen` in use."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """How it ended, once that was asked for: its status, or a signal's number less than 0."""

    def poll(self) -> int | None:
        """Return how it ended, None if it has not."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired` if that takes too long."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""

    def kill(self) -> None:
        """Kill it."""


def package_root() -> str:
    """Return where this very ctxflow is found: a directory, or the zip file that it is in (worker_program.py)."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python_path(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with which a process, wherever it starts, finds this very ctxflow; none if it is installed.

    What PYTHONPATH was is passed along, and `restore_python_path` gives it back to the user's code.

    :param environment: variables of the process's own, which may have a PYTHONPATH.
    """
    own = package_root()
    if os.path.realpath(own) in map(os.path.realpath, _site_directories()):
        return {}
    inherited = os.environ.get(_ORIGINAL_PATH, os.environ.get("PYTHONPATH", ""))
    original = (environment or {}).get("PYTHONPATH", inherited)
    given = [os.path.abspath(path) for path in original.split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([*given, own]), _ORIGINAL_PATH: original}


def restore_python_path() -> None:
    """Give PYTHONPATH the value that it had before `python_path`, for the user's code and what that starts."""
    original = os.environ.pop(_ORIGINAL_PATH, None)
    if original:
        os.environ["PYTHONPATH"] = original
    elif original is not None:
        os.environ.pop("PYTHONPATH", None)


def _site_directories() -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, even if that was killed itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call above.
        os._exit(1)


def adopt_orphans() -> None:
    """Have descendants of this process that lose their parent become its children, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(name: str) -> None:
    """Give this process a name for ps, of 15 bytes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def bury_orphans(own: Collection[int]) -> None:
    """Reap adopted children that have ended, but `own`, which somebody else waits for."""
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


def next_signal(numbers: Collection[int], seconds: float) -> int | None:
    """Wait for one of these signals, which are blocked, as SIGALRM is; return its number, None if none came in time.

    :param seconds: how long to wait, more than 0. The process's real-time timer is used for it.

    CPython's `signal.sigtimedwait` returns a made-up signal if the process was stopped and continued, as a batch system
    suspends and resumes a job, and the time ran out meanwhile.
    """
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would be never.
    found = signal.sigwait({*numbers, signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.sigtimedwait([signal.SIGALRM], 0)  # It may have come as well.
    return None if found == signal.SIGALRM else found


def descendants(pid: int, deep: bool = True) -> list[int]:
    """Return all children of a process and, unless it is not to be `deep`, theirs, the nearest first."""
    found = [pid]
    for parent in found if deep else [pid]:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found.extend(int(child) for child in file.read().split())
    return found[1:]


def visible_processes() -> list[int]:
    """Return the numbers of all processes that this one can see, also other users'."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def session_members(leader: int) -> list[int]:
    """Return the processes of a session that still run, as far as that can be seen."""
    found = []
    with contextlib.suppress(OSError):  # For lack of a descriptor.
        for pid in visible_processes():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, _, _, session = _stat(pid)[:4]
                if int(session) == leader and state != "Z":
                    found.append(pid)
    return found


def transfer_server(worker: int) -> int | None:
    """Return a vine_worker's process that serves files to its peers: any file of its user, and to whoever asks."""
    for each in descendants(worker):
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
            if file.read().startswith(b"vine_worker [transfer"):
                return each
    return None


def kill_tree(pid: int) -> None:
    """Kill a process, all its descendants, and what is left of the process group that it leads."""
    # The farthest first: should this be interrupted, whoever is left still finds all that it started.
    _kill(reversed([pid, *descendants(pid)]))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_adopted(variable: str, value: str) -> None:
    """Kill the adopted children of this process whose environment has a variable of that value, and what they started.

    So the processes of one that has ended are found, also those that have left its group and its session.
    """
    _kill_marked(f"{variable}={value}", lambda: descendants(os.getpid(), deep=False), time.monotonic() + 1.0)


def adopted(variable: str, value: str) -> list[int]:
    """Return the children of this process whose environment has a variable of that value."""
    sought = os.fsencode(f"{variable}={value}")
    return [pid for pid in descendants(os.getpid(), deep=False) if sought in (_environment(pid) or ())]


def kill_marked(variable: str, value: str, seconds: float) -> None:
    """Kill the processes of this machine whose environment has a variable of that value, and what they started.

    :param seconds: how long to wait for their end; a disk or a device that hangs keeps a process.
    """
    deadline = time.monotonic() + seconds
    killed = _kill_marked(f"{variable}={value}", visible_processes, deadline)
    while any(process_state(pid) not in ("", "Z") for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.002)


def _kill_marked(mark: str, candidates: Callable[[], Iterable[int]], deadline: float) -> set[int]:
    """Kill the candidates that have a setting in their environment, until none is left; return their numbers.

    A candidate that ended before it was examined may have left a child that was not listed: candidates are listed again
    until all of them were examined and none had ended.
    """
    sought, seen, killed = os.fsencode(mark), set[int](), set[int]()
    while True:
        again = False
        for pid in set(candidates()) - seen:
            environment = _environment(pid)
            if environment is None:
                again = True
                continue
            seen.add(pid)
            if sought in environment:
                kill_tree(pid)
                killed.add(pid)
            again = again or not environment or pid in killed
        if not again or time.monotonic() > deadline:
            return killed
        time.sleep(0.001)


def _environment(pid: int) -> list[bytes] | None:
    """Return the settings that a process was started with, none if it has ended or is another user's.

    None if the process is executing another program: in execve, its environment reads as empty.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if found := file.read():
                return found.split(b"\0")
        numbers = _stat(pid)
        memory, start_code, begin, end = (int(numbers[at]) for at in (20, 23, 47, 48))
    except (OSError, IndexError):
        return []
    return [] if memory == 0 or (start_code and begin == end) else None  # start_code is set last.


def kill_children() -> None:
    """Kill all descendants of this process."""
    _kill(reversed(descendants(os.getpid())))


def kill_session(leader: int) -> None:
    """Kill all that belongs to the session which a process leads or led, also what lost its parents."""
    killed: set[int] = set()
    while new := set(session_members(leader)) - killed:
        killed |= new
        _kill(new)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def ended_within(process: ChildProcess, seconds: float) -> bool:
    """Return whether a killed process ends in time; one that hangs in the kernel cannot be waited for for ever.

    A process that is still there is kept and reaped by a later call, so that its owner may drop it.
    """
    import subprocess  # Here, since a library process needs none.

    for number, earlier in list(_unreaped.items()):
        if earlier.poll() is not None:
            _unreaped.pop(number, None)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    if process.returncode is None:
        _unreaped[id(process)] = process
    return process.returncode is not None


def activity(pid: int) -> tuple[str, ...]:
    """Return what changes as long as a process gets anything done, if only slowly; nothing of one that is gone."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = _stat(pid)[7:13]
        with open(f"/proc/{pid}/status") as file:
            found += [line for line in file if "ctxt_switches" in line]
    return tuple(found)


def running_seconds(pid: int) -> tuple[float, float]:
    """Return how long a process's main thread has run, and has waited for a core; zeros where that is not told."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        ran, waited, _ = file.read().split()
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as of ps; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0]
    return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped (SIGSTOP), or a tracer holds it."""
    return process_state(pid) in ("T", "t")


def is_exiting(pid: int) -> bool:
    """Return whether a process is gone, or about to be: it closes what it has open before it has ended."""
    with contextlib.suppress(OSError):
        return bool(int(_stat(pid)[6]) & _PF_EXITING)
    return True


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name: state, parent, group, session, ...; see proc(5)."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


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


def free_memory() -> int:
    """Return the memory available without paging, in bytes; all of it where that is not known."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return machine_memory()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process (RSS) in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Return the proportional memory of a process (PSS: a page divided by who shares it) in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, IndexError, ValueError):
        return resident_bytes(pid)


def tree_bytes(pids: Iterable[int], limit: int = 0) -> int:
    """Return the memory in bytes of processes and their descendants, what they share counted once.

    :param limit: a sum up to this need not be exact: pages may count for each that shares them, which is quicker.
    """
    tree = {each for pid in pids for each in (pid, *descendants(pid))}
    total = sum(map(resident_bytes, tree))
    return total if total <= limit else sum(map(proportional_bytes, tree))


def holds_gpu(pid: int, processes: str = "/proc") -> bool:
    """Return whether a process has an NVIDIA GPU open, as far as that can be seen."""
    folder = os.path.join(processes, str(pid), "fd")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if re.fullmatch(r"/dev/nvidia\d+", os.readlink(os.path.join(folder, name))):
                    return True
    return False


def take_enough() -> None:
    """Raise this process's limit of descriptors, as far as its hard limit lets it, for very many connections."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _ENOUGH if most == resource.RLIM_INFINITY else min(_ENOUGH, most)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether there is something to read, waiting for it so long; select(2) knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def readable_soon(descriptor: int) -> bool:
    """Return whether there is something to read within ten polls of one second each.

    Polls are counted, not seconds: if the whole machine was suspended, one poll has timed out, and the writer, which
    was suspended too, still has the others.
    """
    return any(readable(descriptor, 1.0) for _ in range(10))


def count_left() -> int:
    """Return how many more descriptors this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # Listing takes one.
    except OSError as error:
        if not none_left(error):
            raise
        return 0
    return max(0, (1 << 31 if limit == resource.RLIM_INFINITY else limit) - used)


def none_left(error: BaseException | None) -> bool:
    """Return whether an error says that there is no descriptor left, of this process or of the machine."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def advice(error: BaseException | None) -> str:
    """Return what to do where no descriptor is left, to be put after the error; "" for another error.

    >>> advice(OSError(28, "No space left on device"))
    ''
    """
    if not none_left(error):
        return ""
    if isinstance(error, OSError) and error.errno == errno.ENFILE:
        return ": all descriptors of the machine are in use, so end programs that hold many"
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    further = f" (up to {most} here)" if limit < most else ""
    return f": all {limit} descriptors that a process may have are in use, so raise `ulimit -n`{further}"


def scarcity() -> str:
    """Return what to do if a process with this one's limit, which ended without a word, may have had too few."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = most != resource.RLIM_INFINITY and most < _FEW
    return f": a process may have {most} descriptors at most, so raise `ulimit -n`" if few else ""


class Acceptor:
    """Serves a listening socket by a selector; its owner asks `resume` in each round how long that may last.

    Where no descriptor is left, connections wait for a moment: else the socket would be readable for ever.

    :param accepted: called with each connection, and where it comes from.
    :param tell: called once with what is wrong where connections have to wait.
    :ivar paused: whether they do.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        accepted: Callable[[socket.socket, Any], None],
        tell: Callable[[str], None],
    ) -> None:
        self._selector, self._listener = selector, listener
        self._accepted, self._tell = accepted, tell
        self._told = False
        self.paused = False
        self._resume_at = 0.0
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if none_left(error):
                self._selector.unregister(self._listener)
                self.paused, self._resume_at = True, time.monotonic() + PAUSE_SECONDS
                self.complain(error)
            return
        with contextlib.suppress(OSError):  # It may have left again.
            self._accepted(connection, address)

    def complain(self, error: OSError) -> None:
        """Tell that there is no descriptor, once."""
        if not self._told:
            self._told = True
            self._tell(f"connections of workers have to wait ({error}){advice(error)}")

    def resume(self) -> float:
        """Serve the socket again, if it is time; return the seconds until then."""
        if not self.paused:
            return math.inf
        left = self._resume_at - time.monotonic()
        if left > 0:
            return left
        self.paused = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return math.inf

    def close(self) -> None:
        """Let nobody connect any more."""
        self._listener.close()


# Compiled by `re` when first needed: most processes never meet an error.
_DEVICE = (
    r"(?i)\bCUDA\b|\bECC\b|\bXid\b|\bNCCL\b|\bcuDNN\b|CUDNN_STATUS|CUBLAS_STATUS|\bHIP error\b|\bNVML\b|"
    r"driver (?:version|is|not|fail|shut)|device (?:is |was )?lost|GPU (?:is |has fallen )?(?:lost|off the bus)|"
    r"No space left|Input/output error|Stale file handle|Read-only file system"
)
_TOO_MUCH = r"(?i)out of memory|ALLOC_FAILED"  # A smaller batch may do, on the same machine.


def looks_like_the_machine(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is of the kinds that bad machines raise.

    A call that raised one is tried on another machine before anybody is blamed.

    >>> looks_like_the_machine(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    True
    >>> looks_like_the_machine(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    False
    >>> looks_like_the_machine(ModuleNotFoundError("no module named torch")), looks_like_the_machine(KeyError("x"))
    (True, False)
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _looks(cause):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def _looks(error: BaseException) -> bool:
    if isinstance(error, (OSError, ImportError)):
        return True
    try:
        text = str(error)
    except Exception:  # The user's class may say nothing.
        return False
    return bool(re.search(_DEVICE, text)) and not re.search(_TOO_MUCH, text)
