"""A server's processes as the library process sees them: starting them, their log, what they listen at, their end.

A warden (server_warden.py) holds them, so that they end together, whoever dies first.
"""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ctxflow.errors import CtxflowError
from ctxflow.host.linux import descendants, is_stopped
from ctxflow.models.server_command import find_program

_LINES, _KEPT_LINES, _ERROR_LINES, _LINE_CHARACTERS = 20, 400, 5, 500
_END_SECONDS = 1.5  # How long a server may take to end by itself, before it is killed; a context has 2 s for that.
_LISTENS = "0A"  # In /proc/net/tcp.
_EVERYWHERE = {"0" * 8, "0" * 32, "0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
"""The addresses that a connection to 127.0.0.1 may arrive at, as the kernel writes them, and ::1."""


class ServerFailed(CtxflowError, RuntimeError):
    """A server that could not be started, or that failed at a request; the message says what it printed."""


_TELLING = 4  # Characters of a secret's beginning that are not shown where the text ends.


class Redaction:
    """Puts *** in place of a secret in text that comes in parts: what may be its beginning waits for the next.

    >>> redaction = Redaction("key-123")
    >>> redaction.redact("my ke"), redaction.redact("y-123, a k"), redaction.redact("ey", final=True)
    ('my ', '***, a ', 'key')
    """

    def __init__(self, secret: str) -> None:
        self._secret, self._waits = secret, ""

    def redact(self, text: str, final: bool = False) -> str:
        """Return what can be shown by now; all of it after the last part."""
        if not self._secret:
            return text
        text = (self._waits + text).replace(self._secret, "***")
        beginnings = (self._secret[:size] for size in range(min(len(self._secret) - 1, len(text)), 0, -1))
        self._waits = next(filter(text.endswith, beginnings), "")
        shown = text.removesuffix(self._waits)
        if final:
            shown += "***" if len(self._waits) >= _TELLING else self._waits
        return shown


class ServerProcess:
    """A server with all that it started, while it runs; it is started by making one, in an event loop.

    :param environment: all of its variables.
    :param folder: a directory of its own, which is removed when it has ended.
    :param secret: what is not to be shown where its log says it.
    :ivar started: awaits its start, which fails if there is no such program.
    :ivar ended: how it ended, in words, once it has.
    :ivar pid: the server's own process.
    :raises ServerFailed: if the machine has no room for it.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: str, secret: str
    ) -> None:
        self.name, self._folder = name, folder
        self._redaction = Redaction(secret)
        self.pid = 0
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._family: dict[int, str] = {}  # Its processes -> when they began.
        self._told = b""
        self._log_ended = False
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self._control, far = socket.socketpair()
            ours.callback(self._control.close)
            theirs.callback(far.close)
            self._log, write = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, self._log)
            theirs.callback(os.close, write)
            try:
                self._warden = self._spawn(command, environment, far.fileno(), write)
            except OSError as error:
                raise ServerFailed(f"{name} could not be started: {error}") from error
            ours.pop_all()
        self._control.setblocking(False)
        os.set_blocking(self._log, False)
        self._loop.add_reader(self._control, self._listen)
        self._loop.add_reader(self._log, self._read_log)

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], control: int, log: int
    ) -> subprocess.Popen[bytes]:
        # As a file, since ctxflow may be imported from an archive.
        warden = os.path.join(self._folder, "warden.py")
        with open(warden, "xb") as file:
            file.write(pkgutil.get_data("ctxflow.models", "server_warden.py") or b"")
        given = (control, os.getpid(), _END_SECONDS, self._folder, find_program(command[0], environment), *command[1:])
        return subprocess.Popen(
            [sys.executable, "-I", "-S", warden, *map(str, given)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[control],
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                data = self._control.recv(4096)
            except ConnectionResetError:
                data = b""
            *lines, self._told = (self._told + data).split(b"\n")
            for line in lines:
                self._hear(*line.decode().split(" ", 1))
            if not data:
                self._loop.remove_reader(self._control)
                self._note_end("was killed, with the process that held it")

    def _hear(self, what: str, rest: str) -> None:
        if what == "started":
            self.pid = int(rest)
            if not self.started.done():
                self.started.set_result(None)
        elif what == "failed":
            if not self.started.done():
                self.started.set_exception(ServerFailed(f"{self.name} could not be started: {rest}"))
        else:
            self._note_end(_ending(int(rest)))

    def _note_end(self, how: str) -> None:
        if not self.started.done():
            self.started.set_exception(ServerFailed(f"{self.name} could not be started: its holder {how}"))
        if not self.ended.done():
            self.ended.set_result(how)

    def _read_log(self) -> None:
        with contextlib.suppress(BlockingIOError):
            block = os.read(self._log, 1 << 16)
            if not block:
                self._loop.remove_reader(self._log)
                self._log_ended = True
            self._keep(self._redaction.redact(self._decoder.decode(block, final=not block), final=not block))

    def _keep(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # Nobody may read what this process prints.
            sys.stdout.write(text)
            sys.stdout.flush()
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        self._rest = self._rest[-_LINE_CHARACTERS:]
        self._lines.extend(line[:_LINE_CHARACTERS] for line in lines if line.strip())

    def last_lines(self) -> list[str]:
        """Return the last lines that it printed, behind the last before them that speak of errors."""
        lines = [*self._lines, *([self._rest] if self._rest.strip() else [])]
        errors = [line for line in lines[:-_LINES] if "error" in line.lower()]  # What it says as it ends may hide them.
        return [*errors[-_ERROR_LINES:], *lines[-_LINES:]]

    async def told_end(self, what: str) -> str:
        """Return a sentence on its end, with its last lines, which may still be on their way."""
        for _ in range(20):
            before = len(self._lines), self._rest
            await asyncio.sleep(0.01)
            if before == (len(self._lines), self._rest) and _ >= 5:
                break
        lines = "\n".join(self.last_lines())
        return f"{self.name} {what}" + (
            f"; the last lines that it printed:\n{lines}" if lines else "; it printed nothing"
        )

    def note_family(self) -> list[int]:
        """Return its processes that run, and remember them, should what holds them be killed."""
        found = [] if self._warden.poll() is not None else descendants(self._warden.pid)
        self._family = {pid: began for pid in found if (began := _began(pid))}
        return list(self._family)

    def processor_seconds(self) -> float:
        """Return the processor time that its processes have taken."""
        return sum(map(_seconds, self.note_family()))

    def stopped(self) -> bool:
        """Return whether one of its processes was stopped (SIGSTOP)."""
        return any(is_stopped(pid) for pid in self._family or self.note_family())

    def listeners(self, port: int) -> tuple[list[str], bool]:
        """Return the sockets that connections to a port of 127.0.0.1 may reach, and whether all are this server's."""
        found = listening_sockets(port)
        if not found:
            return [], False
        own = {name for pid in self.note_family() for name in _sockets(pid)}
        return found, all(f"socket:[{inode}]" in own for inode in found)

    async def end(self) -> None:
        """End it with all that it started, and return when nothing of it is left; a second call does nothing."""
        if self._warden.returncode is None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            while self._warden.poll() is None:
                await asyncio.sleep(0.01)
            if self._warden.returncode:  # It was killed, and could not do its duty.
                self._kill_family()
            shutil.rmtree(self._folder, ignore_errors=True)
        for descriptor in (self._log, self._control.fileno()):
            if descriptor >= 0:
                self._loop.remove_reader(descriptor)
        if self._log >= 0:
            with contextlib.suppress(OSError):
                self._read_log()
            os.close(self._log)
            self._log = -1
            self._control.close()

    def _kill_family(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._warden.pid, signal.SIGKILL)
        for pid, began in self._family.items():
            if _began(pid) == began:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def listening_sockets(port: int) -> list[str]:
    """Return the inodes of the sockets that connections to a port of the loopback interface may reach."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                # Its number, local address, remote address, state, ..., inode.
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if fields[3] == _LISTENS and int(number, 16) == port and address in _EVERYWHERE:
                    found.append(fields[9])
    return found


def free_port() -> int:
    """Return a port of the loopback interface at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _began(pid: int) -> str:
    """Return when a process began, which tells it from later ones of its number; "" if it is gone."""
    return _told_of(pid)[19]


def _seconds(pid: int) -> float:
    return sum(map(int, _told_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def _told_of(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name; see proc(5)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return [""] * 11 + ["0"] * 2 + [""] * 7


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    known = -status in set(signal.Signals)
    name = signal.Signals(-status).name if known else f"signal {-status}"
    hint = " (the machine's memory may be exhausted)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
