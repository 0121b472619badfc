"""How a library program of TaskVine and its vine_worker speak: two pipes, files for the answers, and SIGCHLD.

What does not live here: what the calls mean (vine_library.py, doorbell.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import struct
import termios
import time
from collections.abc import Sequence
from typing import NamedTuple

from ctxflow.host.processes import die_with_parent

_NUDGE_SECONDS = 0.002  # After how long an answer that was not taken is taken for one that was not noticed.
_LONGEST_NUDGE_SECONDS = 0.5
_CHUNK = 1 << 16
_INT = struct.Struct("i")


class Request(NamedTuple):
    """One TaskVine call.

    :ivar task: TaskVine's number of it.
    :ivar name: its command, one token.
    :ivar sandbox: its directory, absolute; its input files are there.
    :ivar output: the file that its answer goes to.
    """

    task: int
    name: str
    sandbox: str
    output: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the vine_worker appends to a library's command line."""

    in_pipe: int
    out_pipe: int
    task: int
    cores: int
    slots: int
    worker: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Have a parser take what the vine_worker appends; `arguments` reads it."""
    for name in ("in-pipe-fd", "out-pipe-fd", "task-id", "worker-pid"):
        parser.add_argument(f"--{name}", type=int, required=True, help=argparse.SUPPRESS)
    for name in ("library-cores", "function-slots"):
        parser.add_argument(f"--{name}", type=int, default=1, help=argparse.SUPPRESS)


def arguments(parsed: argparse.Namespace) -> Arguments:
    """Return what the vine_worker appended."""
    return Arguments(
        parsed.in_pipe_fd,
        parsed.out_pipe_fd,
        parsed.task_id,
        parsed.library_cores,
        parsed.function_slots,
        parsed.worker_pid,
    )


def lead_group() -> None:
    """Lead a process group of one's own, at once: the vine_worker, which ends the group, may be too late for it."""
    with contextlib.suppress(PermissionError):  # It leads a session, when started by hand.
        os.setpgid(0, 0)


class LibraryPipes:
    """The vine_worker as its library sees it.

    A library reads `requests` when `fileno` is readable, gives each its `answer`, and calls `nudge` when `due`.

    :param given: what the vine_worker appended to the command line.
    """

    def __init__(self, given: Arguments) -> None:
        lead_group()
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
        try:
            while True:
                block = os.read(self.given.in_pipe, _CHUNK)
                if not block:
                    self.closed = True
                    break
                self._incoming += block
                if len(block) < _CHUNK:
                    break
        except BlockingIOError:
            pass
        found = []
        while (line := self._incoming.find(b"\n")) >= 0:
            end = line + 1 + int(self._incoming[:line])
            if len(self._incoming) < end:
                break
            found.append(_request(self._incoming[line + 1 : end].decode()))
            self._incoming = self._incoming[end:]
        return found

    def answer(self, request: Request, text: bytes, status: int = 0) -> None:
        """Answer a call, and have the worker take notice."""
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
        """Signal again if an answer has not been taken: a signal between two of the worker's looks gets lost."""
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


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, LibraryPipes]:
    """Read a library's command line, and be what the vine_worker expects of a library."""
    add_arguments(parser)
    parsed = parser.parse_args(argv)
    return parsed, LibraryPipes(arguments(parsed))
