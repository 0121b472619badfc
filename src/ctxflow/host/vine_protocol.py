"""How TaskVine's calls reach a library program: the vine_worker's pipes, and seals; and the smallest one, the doorbell.

**Pipes**: two pipes, files for the answers, and SIGCHLD. **Seals**: TaskVine's password keeps out who does not know it,
but whoever reaches a worker's transfer port can have that answer challenges (docs/security.md). So answers and calls
count only with a keyed digest, by a key that is made of the password and never leaves the memory of the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hmac
import json
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from ctxflow.host.linux import die_with_parent, process_state, transfer_server

_NUDGE_SECONDS = 0.002  # After how long an answer that was not taken is taken for one that was not noticed.
_LONGEST_NUDGE_SECONDS = 0.5
_CHUNK = 1 << 16
_INT = struct.Struct("i")
SEAL_BYTES = 16
_HOST = "host.pid"  # In a worker's directory.
_NUMBER = 8
_CALL, _ANSWER = b"ctxflow call", b"ctxflow answer"  # What goes one way is never good for the other.


class Request(NamedTuple):
    """One TaskVine call."""

    task: int  # TaskVine's number of it.
    name: str  # Its command, one token.
    sandbox: str  # Its directory, absolute; its input files are there.
    output: str  # The file that its answer goes to.


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the vine_worker appends to a library's command line."""

    in_pipe: int
    out_pipe: int
    task: int
    cores: int
    worker: int


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, LibraryPipes]:
    """Read a library's command line, and be what the vine_worker expects of a library."""
    for name in ("in-pipe-fd", "out-pipe-fd", "task-id", "worker-pid"):
        parser.add_argument(f"--{name}", type=int, required=True, help=argparse.SUPPRESS)
    for name in ("library-cores", "function-slots"):
        parser.add_argument(f"--{name}", type=int, default=1, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    given = Arguments(parsed.in_pipe_fd, parsed.out_pipe_fd, parsed.task_id, parsed.library_cores, parsed.worker_pid)
    return parsed, LibraryPipes(given)


class LibraryPipes:
    """The vine_worker as its library sees it.

    A library reads `requests` when `fileno` is readable, sends each its `answer`, and calls `nudge` when `due`.
    """

    def __init__(self, given: Arguments) -> None:
        with contextlib.suppress(PermissionError):  # It leads a session, when started by hand.
            os.setpgid(0, 0)  # At once: the vine_worker, which ends the group, may be too late for it.
        _close_all_but(given.in_pipe, given.out_pipe)
        die_with_parent(given.worker)
        os.set_inheritable(given.in_pipe, False)
        os.set_inheritable(given.out_pipe, False)
        os.set_blocking(given.in_pipe, False)
        self.given = given
        self.closed = False
        self._incoming = b""
        self._nudge_at = float("inf")
        self._nudge_after = _NUDGE_SECONDS

    def announce(self, name: str) -> None:
        """Say that the library is ready for calls."""
        text = json.dumps({"name": name, "taskid": self.given.task, "exec_mode": "fork"})
        self._send(text.encode())

    def fileno(self) -> int:
        """For selectors."""
        return self.given.in_pipe

    def requests(self) -> list[Request]:
        """Return the calls that have come; sets `closed` at the end."""
        with contextlib.suppress(BlockingIOError):
            while len(block := os.read(self.given.in_pipe, _CHUNK)) == _CHUNK:
                self._incoming += block
            self._incoming += block
            self.closed = self.closed or not block
        found = []
        while (line := self._incoming.find(b"\n")) >= 0:
            end = line + 1 + int(self._incoming[:line])
            if len(self._incoming) < end:
                break
            found.append(_request(self._incoming[line + 1 : end].decode()))
            self._incoming = self._incoming[end:]
        return found

    def answer(self, request: Request, text: bytes, status: int = 0) -> None:
        """Answer a call, and signal the vine_worker."""
        try:
            _write_file(request.output, text)
        except OSError:  # The call was cancelled, and its sandbox is gone; or the disk is full.
            status = status or 1
        self._send(b"%d %d" % (request.task, status))

    def _send(self, text: bytes) -> None:
        try:
            os.write(self.given.out_pipe, b"%d\n%s" % (len(text), text))
        except BrokenPipeError:
            self.closed = True
        self._nudge_after = _NUDGE_SECONDS
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.given.worker, signal.SIGCHLD)
        self._nudge_at = time.monotonic() + self._nudge_after

    @property
    def taken(self) -> bool:
        """Whether the worker has read every answer."""
        answer: bytes = fcntl.ioctl(self.given.out_pipe, termios.FIONREAD, bytes(_INT.size))
        return not _INT.unpack(answer)[0]

    def due(self) -> float | None:
        """Return in how many seconds `nudge` wants to be called, None if it does not."""
        return None if self._nudge_at == float("inf") else max(0.0, self._nudge_at - time.monotonic())

    def nudge(self) -> None:
        """Signal again if an answer has not been read: the vine_worker loses signals between two of its looks."""
        if self._nudge_at > time.monotonic():
            return
        if self.taken:
            self._nudge_at = float("inf")
        else:
            self._nudge_after = min(2 * self._nudge_after, _LONGEST_NUDGE_SECONDS)
            self._signal()


def _write_file(path: str, data: bytes) -> None:
    """Write a file: in half the time that a file object takes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _request(text: str) -> Request:
    """Read `ID NAME SANDBOX OUTPUT`, where OUTPUT lies in SANDBOX, whose path may have spaces.

    >>> _request("7 hi /a b/func.7 /a b/func.7/.taskvine.stdout").sandbox
    '/a b/func.7'
    """
    task, name, places = text.split(" ", 2)
    middle = places.index(" ")
    while not places.startswith(places[:middle] + "/", middle + 1):
        middle = places.index(" ", middle + 1)
    return Request(int(task), name, places[:middle], places[middle + 1 :])


def _close_all_but(*kept: int) -> None:
    """Close what was inherited: the worker's connection to its manager, and pipes of other libraries."""
    for entry in os.listdir("/proc/self/fd"):
        if (descriptor := int(entry)) > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def answer_rings(argv: Sequence[str]) -> int:
    """Serve as the doorbell, a TaskVine library whose calls end when a byte arrives, until the vine_worker is gone.

    A manager that sleeps in TaskVine's wait cannot be woken; a worker beside it with this library, and one standing
    call, ends the call and so the sleep. That worker runs where the user's program does, so it serves files to nobody.
    """
    from ctxflow.host.wire import short_path  # Here: the wrapper (worker.py) needs seals alone.

    parser = argparse.ArgumentParser("doorbell", description="A TaskVine library that wakes its manager.")
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to wait for the byte")
    parsed, worker = parse(parser, argv)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parsed.socket)
        with short_path(parsed.socket) as address:
            bell.bind(address)
        bell.setblocking(False)
        if (server := transfer_server(worker.given.worker)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        worker.announce("doorbell")
        _serve(worker, bell)
    return 0


def _serve(worker: LibraryPipes, bell: socket.socket) -> None:
    waiting: list[Request] = []
    rung = False
    while not worker.closed:
        ready = select.select([worker.fileno(), bell.fileno()], [], [], worker.due())[0]
        if worker.fileno() in ready:
            waiting += worker.requests()
        if bell.fileno() in ready:
            rung = True
            with contextlib.suppress(BlockingIOError):
                while True:
                    bell.recv(64)
        if rung and waiting:
            for request in waiting:
                worker.answer(request, b"")
            waiting, rung = [], False
        worker.nudge()


def key_of(password: bytes) -> bytes:
    """Return the key that a run's password stands for."""
    return blake2b(password, digest_size=32, person=b"ctxflow seal").digest()


class Once:
    """Which calls a worker has had: none counts twice, in whatever order they come.

    Their numbers are a worker's own, 1 and up, so that few are ever missing.

    >>> once = Once()
    >>> [once.take(number) for number in (1, 3, 2, 3, 2, 4)]
    [True, True, True, False, False, True]
    """

    def __init__(self) -> None:
        self._highest = 0
        self._missing: set[int] = set()

    def take(self, number: int) -> bool:
        """Return whether a call is new."""
        if number > self._highest:
            self._missing.update(range(self._highest + 1, number))
            self._highest = number
            return True
        if number in self._missing:
            self._missing.remove(number)
            return True
        return False


def seal_call(key: bytes, worker: str, number: int, frames: bytes) -> bytes:
    """Return a call as it travels: good for this worker alone, and once, by its number.

    >>> key = key_of(b"secret")
    >>> open_call(key, "w1", seal_call(key, "w1", 7, b"frames"))
    (7, b'frames')
    """
    rest = number.to_bytes(_NUMBER, "big") + frames
    return _tag(key, _CALL, worker.encode(), rest) + rest


def open_call(key: bytes, worker: str, call: bytes) -> tuple[int, bytes]:
    """Return the number of a call, and its frames; raise `ValueError` if it is not the driver's, or for another."""
    tag, rest = call[:SEAL_BYTES], call[SEAL_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, _CALL, worker.encode(), rest)):
        raise ValueError("it has not the seal of this worker's run")
    return int.from_bytes(rest[:_NUMBER], "big"), rest[_NUMBER:]


def seal_answer(key: bytes, call: bytes, reports: bytes) -> bytes:
    """Return an answer as it travels: good for this call alone, of which the first `SEAL_BYTES` bytes do."""
    return _tag(key, _ANSWER, call[:SEAL_BYTES], reports) + reports


def open_answer(key: bytes, call: bytes, answer: bytes) -> bytes | None:
    """Return the reports of an answer, None if it is not this call's, from a worker that has the key.

    >>> key, call = key_of(b"secret"), b"0123456789abcdef"
    >>> open_answer(key, call, seal_answer(key, call, b"reports")), open_answer(key, call, b"forged")
    (b'reports', None)
    """
    tag, reports = answer[:SEAL_BYTES], answer[SEAL_BYTES:]
    return reports if hmac.compare_digest(tag, _tag(key, _ANSWER, call[:SEAL_BYTES], reports)) else None


def _tag(key: bytes, direction: bytes, about: bytes, data: bytes) -> bytes:
    prefix = len(about).to_bytes(_NUMBER, "big") + about
    digest = blake2b(prefix, digest_size=SEAL_BYTES, key=key, person=direction)
    digest.update(data)
    return digest.digest()


def note_host(directory: str) -> None:
    """Tell the wrapper (worker.py) whom to pass an eviction notice on to: this process."""
    path = os.path.join(directory, _HOST)
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)


def noted_host(directory: str) -> int:
    """Return a worker's context host; raise OSError or ValueError if there was none yet."""
    with open(os.path.join(directory, _HOST)) as file:
        return int(file.read())


def host_died(directory: str) -> bool:
    """Return whether a worker's context host has ended, and with it its contexts and calls."""
    try:
        return process_state(noted_host(directory)) in ("", "Z", "X")
    except (OSError, ValueError):
        return False
