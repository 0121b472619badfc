"""One library process as its host sees it: spawning it, its output, its calls, its end.

What lives here: a handle on the process. What does not: which contexts there are (host.py), and what runs
inside (library.py).
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from ctxflow.host.processes import kill_tree
from ctxflow.host.wire import Channel, Head

_TAIL_BYTES = 4096
_LOG_BYTES = 10_000_000


class LibraryProcess:
    """A spawned library process.

    Its host registers three things with its selector: the `channel`, the `output` pipe and the `death`
    descriptor, which becomes readable when the process has ended.

    :param context: the id of the context that it holds.
    :param scratch: a directory of its own; calls run below it.
    :param environment: the variables it gets beside the host's.
    :param log: the file that its output is kept in, up to 10 MB.
    """

    def __init__(self, context: str, scratch: str, environment: dict[str, str], log: str) -> None:
        self.context = context
        self.calls: dict[int, float] = {}  # Running calls -> when they time out (inf: never).
        self.functions: set[str] = set()  # Those that it was given.
        self.ready = False
        self.load_deadline = float("inf")
        self.memory_limit: int | None = None
        self._log: IO[bytes] | None = open(log, "ab")  # noqa: SIM115 - closed in `end`
        self._logged = 0
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0
        os.makedirs(scratch, exist_ok=True)
        ours, theirs = socket.socketpair()
        self.output, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.output, False)
        command = [sys.executable, "-m", "ctxflow.host.library", str(theirs.fileno()), scratch, str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            cwd=scratch,
        )
        theirs.close()
        os.close(write_end)
        self.channel = Channel(ours)
        self.death = os.pidfd_open(self.process.pid)

    def give_function(self, name: str, body: bytes) -> None:
        """Send a function, once."""
        if name not in self.functions:
            self.functions.add(name)
            self.channel.send({"do": "function", "function": name}, body)

    def begin(self, head: Head, body: bytes, now: float) -> None:
        """Send a call."""
        self.watch(head, now)
        self.channel.send(head, body)

    def watch(self, head: Head, now: float) -> None:
        """Note that a call runs, and how long it may."""
        timeout = head.get("timeout")
        self.calls[head["call"]] = now + timeout if timeout else float("inf")

    @property
    def deadline(self) -> float:
        """When the first of its calls, or its load, has taken too long."""
        return min([self.load_deadline, *self.calls.values()])

    def read_output(self) -> None:
        """Keep what it printed: the end in memory, the first 10 MB in the log."""
        for _ in range(64):
            try:
                block = os.read(self.output, 1 << 16)
            except (BlockingIOError, OSError):
                return
            if not block:
                return
            self._keep(block)

    def _keep(self, block: bytes) -> None:
        self._tail.append(block[-_TAIL_BYTES:])
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._log is None:
            return
        try:
            self._log.write(block[: _LOG_BYTES - self._logged])
            self._logged += len(block)
            if self._logged >= _LOG_BYTES:
                self._log.write(b"\n[ctxflow: what was printed after the first 10 MB is not kept]\n")
                self._close_log()
            else:
                self._log.flush()
        except OSError:  # A full disk must not end the worker: the tail in memory goes on.
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def tail(self, lines: int = 20) -> str:
        """The last lines that it printed; they are then forgotten."""
        self.read_output()
        text = b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")
        self._tail.clear()
        self._tail_bytes = 0
        return "\n".join(text.splitlines()[-lines:])

    def end(self) -> None:
        """Kill it and all that it started, and wait until it is gone."""
        kill_tree(self.process.pid)
        self.process.wait()
        self._close_log()
        self.channel.close()
        os.close(self.output)
        os.close(self.death)

    def cause_of_death(self) -> str:
        """How the process ended, in words; call it once `death` is readable."""
        status = self.process.wait()
        if status >= 0:
            return f"the library process ended by itself with exit status {status}"
        name = signal.Signals(-status).name
        hint = " (the machine's memory may be exhausted)" if -status == signal.SIGKILL else ""
        return f"the library process was killed by {name}{hint}"


def now() -> float:
    """The host's clock."""
    return time.monotonic()
