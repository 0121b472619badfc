"""What belongs to one process alone: files that it adds to, Ctrl-C, and how others see whether it still runs.

After a fork the child owns nothing: it may not end what its parent runs, write the parent's files, or wait for threads
that it does not have. Its copies are notified before its own code runs.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.signal` takes five times as long: it makes enumerations.
import contextlib
import errno
import fcntl
import functools
import math
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT
from typing import BinaryIO, ParamSpec, Protocol, TypeVar, cast

from ctxflow.errors import BusyError
from ctxflow.files import OTHERS_WRITE

P = ParamSpec("P")
R = TypeVar("R")
_INTERRUPT_SECONDS = 2.0  # How long after the first an interrupt is raised at once.
_BROKEN_OFF_SECONDS = 30.0  # And how long where that leaves state half changed.
_undivided: set[types.CodeType] = set()


class Owned(Protocol):
    """Something that only the process that made it may use."""

    def forked(self) -> None:
        """Note that this is a copy, in a child of the process that made it."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


class Process:
    """Which process this is."""

    generation = 0  # How many forks lie between it and the process that imported ctxflow.
    main_thread = threading.main_thread().ident  # `threading` takes too long to say so.


def belongs_here(thing: Owned) -> None:
    """Have something notified when it is a copy in a child."""
    _owned.add(thing)


def lead_nowhere(descriptor: int) -> None:
    """Have a descriptor lead to /dev/null: nothing done to it reaches the parent's file or gives up its lock."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def foreign_text(what: str) -> str:
    """Return the sentence that says why a child may not use something."""
    return (
        f"this process was forked from the one that runs {what}, which alone can use it: make calls there, or start an "
        "executor of this process's own"
    )


def _in_child() -> None:
    Process.generation += 1
    Process.main_thread = threading.get_ident()
    for thing in list(_owned):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)


def undivided(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that changes state that would be left half changed: below it `uninterrupted` waits 30 s."""
    _undivided.add(function.__code__)
    return function


def _is_undivided(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _undivided:
        frame = frame.f_back
    return frame is not None


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Have a short function finish before an interrupt is raised.

    Should it not be short, an interrupt that comes seconds after the first is raised at once (see `undivided`).
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != Process.main_thread:
            return function(*args, **kwargs)  # Interrupts come to the main thread.
        caught: list[float] = []

        def note(number: int, frame: types.FrameType | None) -> None:
            caught.append(time.monotonic())
            limit = _BROKEN_OFF_SECONDS if _is_undivided(frame) else _INTERRUPT_SECONDS
            if caught[-1] - caught[0] > limit and callable(handler):
                handler(number, frame)

        handler = _signal.signal(SIGINT, note)
        if not callable(handler):
            _signal.signal(SIGINT, handler if handler is not None else _signal.SIG_DFL)
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if caught:
                handler(SIGINT, None)

    return guarded


_LONGEST_WAIT = 1.0  # Python raises an interrupt that comes just before a wait for a lock only after that wait.


class InterruptibleCondition:
    """A lock, and waiting for what others change with it, of which an interrupt may break off either at any point.

    One that comes while `threading.Condition` lets go of its lock, or takes it, leaves it locked for ever, or is
    replaced by a RuntimeError.

    :ivar lock: for what is waited for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: list[threading.Lock] = []

    def notify_all(self) -> None:
        """Have all who wait look again; to be called with the lock."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.release()

    def wait_for(self, ready: Callable[[], object], timeout: float = math.inf) -> bool:
        """Wait until something is so, for so many seconds at most; return whether it is.

        :param ready: called with the lock.
        """
        deadline = time.monotonic() + timeout
        while True:
            mine = threading.Lock()
            mine.acquire()
            with self.lock:
                if ready():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._waiting.append(mine)
            if not mine.acquire(timeout=min(left, _LONGEST_WAIT)):
                with self.lock, contextlib.suppress(ValueError):
                    self._waiting.remove(mine)


def birth_of(pid: int) -> str | None:
    """Return what identifies a process among all that have or had its number; None if there is none, or it has ended.

    It is when the kernel started it (in ticks since the boot), the boot's own id, and the PID namespace in which it has
    that number (a container may have its own): no clock that is set changes them.

    :returns: "" for a process that is there, of which this user may see no more.
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
    return None if state in "ZX" else f"{start}@{_boot()}@{_pid_namespace()}"


def lives(pid: int, birth: str | None) -> bool | None:
    """Return whether the process of which `birth_of` gave this still runs; with None or "" its number alone counts.

    :returns: None where that cannot be seen from here: it has its number in another PID namespace.
    """
    _, in_namespace, namespace = (birth or "").partition("@")[2].partition("@")
    if in_namespace and namespace != _pid_namespace():
        return None
    now = birth_of(pid)
    # Earlier versions noted no namespace.
    return now is not None and (not birth or not now or now == birth or now.startswith(f"{birth}@"))


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


def _pid_namespace() -> str:
    """Return the number of this process's PID namespace, "" where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return ""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about, where they do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


class AppendFile:
    """A file that one driver alone adds to: what was added whole counts, what a kill or a full disk left half does not.

    :param path: made where it is missing; not followed where it is a link, which somebody else may have put there.
    :param private: whether it must be this user's alone to write: for what runs code when it is read.
    :ivar size: how many bytes count, 0 until `cut` says more. What is added comes behind them, over what else is there.
    :raises ValueError: if it cannot be opened, or is another user's, saying what to do.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path = path
        self.size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600 if private else 0o666)
            self._file = cast(BinaryIO, open(descriptor, "r+b", buffering=0))  # noqa: SIM115 - closed in `close`
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(
                    f"{path} is a link, which is not followed: remove it, or name another output"
                ) from None
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        if private:
            self._check_private(os.fstat(descriptor))
        belongs_here(self)

    def _check_private(self, found: os.stat_result) -> None:
        trouble = ""
        if found.st_uid != os.geteuid():
            trouble = f"{self.path} belongs to another user, and reading its results could run that user's code: "
            trouble += "name another file, or copy it if you trust it"
        elif found.st_mode & OTHERS_WRITE:
            trouble = f"others may write to {self.path}, and reading its results could run their code: name another "
            trouble += f"file, or call chmod go-w {self.path} if you trust what it holds"
        if trouble:
            self.close()
            raise ValueError(trouble)

    def lock(self, output: Path) -> None:
        """Keep other drivers out, until the file is closed or this process ends.

        :param output: the file of results that the lock is for.
        :raises BusyError: if another driver has the lock; `ValueError` if there can be none.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{output} is being written by another driver: wait for it, or name another file") from None
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be locked ({error.strerror}): put the output on a filesystem that has locks"
            ) from None

    def actual_size(self) -> int:
        """Return how many bytes the file has, whether they count or not."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Add all of the data.

        :raises OSError: if there is no room, with the file's name; then nothing of it counts.
        """
        view, offset = memoryview(data), self.size
        try:
            with naming(self.path):
                while view:
                    written = os.pwrite(self._file.fileno(), view, offset)
                    view, offset = view[written:], offset + written
        except BaseException:
            self.roll_back(self.size)
            raise
        self.size = offset

    def roll_back(self, size: int) -> None:
        """Let so many bytes count, and cut off the rest if that can be done: it would look like something else's."""
        self.size = size
        with contextlib.suppress(OSError):
            self._file.truncate(size)

    def remove_empty(self) -> None:
        """Remove it if it is empty, and what has its path is still this very file."""
        with contextlib.suppress(OSError):
            own, there = os.fstat(self._file.fileno()), os.lstat(self.path)
            if not own.st_size and os.path.samestat(own, there):
                self.path.unlink()

    def change(self, offset: int, data: bytes) -> None:
        """Overwrite bytes with as many others."""
        os.pwrite(self._file.fileno(), data, offset)

    def cut(self, size: int) -> bool:
        """Let so many bytes count, and cut off the rest; whether they are whole lines."""
        with naming(self.path):
            self._file.truncate(size)
        self.size = size
        return self.last_line(size).endswith(b"\n") if size else True

    def last_line(self, size: int) -> bytes:
        """Return the last line of the first bytes of the file."""
        block = 1 << 16
        while True:
            start = max(0, size - block)
            data = os.pread(self._file.fileno(), size - start, start)
            begin = data.rfind(b"\n", 0, -1) + 1
            if begin or not start:
                return data[begin:]
            block *= 4

    def reader(self) -> BinaryIO:
        """Open the same file for buffered reading, whatever has its path now; the caller closes it."""
        return open(f"/proc/self/fd/{self._file.fileno()}", "rb")

    def lines(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines from an offset on, each with its own offset."""
        with self.reader() as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield offset, line
                offset += len(line)

    def sync(self) -> None:
        """Have all that was added reach the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def forked(self) -> None:
        """Leave the file and its lock to the process that opened it."""
        if not self._file.closed:
            lead_nowhere(self._file.fileno())

    def close(self) -> None:
        """Close it, which lets another driver write."""
        self._file.close()
