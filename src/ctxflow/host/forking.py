"""A zygote (zygote.py) as its host, or the engine, sees it: starting it, what it has imported, and forking from it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_start import command, interpreter, library_variables
from ctxflow.host.linux import ChildProcess, ended_within, is_stopped, kill_tree, readable, readable_soon
from ctxflow.host.local_files import OF_LIBRARY

LIBRARY, HOST = "library", "host"
"""What is forked: a library process, which becomes a child of the zygote's parent; a host, a child of the zygote's."""
MARK_BYTES = 1024
"""Room for a library process's directory in the variable by which its host finds what it started (`OF_LIBRARY`)."""
_MOST = 2  # Zygotes of a host: each has all that was imported in memory.
_MOST_DEATHS = 3  # Of zygotes of one environment, after which none is started any more.
_SEND_SECONDS = 10.0  # For a message to pass the socket.
IMPORT_SECONDS = 300.0
"""How long a load waits for a zygote's imports, where it may take as long as it likes."""
_END_SECONDS = 2.0
_TRACED_SECONDS = 0.01  # Between two looks whether a process that has ended is let go of by what traces it.
_UNKNOWN = 255
_LENGTH = struct.Struct("<Q")
_MOST_DESCRIPTORS = 16
# What a process may find in its environment after it has imported something, so that a zygote may have another value.
_LATE = {"CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "SHLVL", "_"}
_OWN = "CTXFLOW_"
FIRST_VARIABLE = "CTXFLOW_ZYGOTE"
"""The first variable of a zygote, kept in its place in all that it forks: setproctitle looks for the command line
before the first variable."""


def send(to: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, and descriptors with it."""
    data = json.dumps(message).encode()
    socket.send_fds(to, [_LENGTH.pack(len(data))], descriptors)
    to.sendall(data)


def receive(from_: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message, and the descriptors that come with it.

    :raises EOFError: when the other end is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(from_, _LENGTH.size, _MOST_DESCRIPTORS)
    while len(head) < _LENGTH.size:
        head += _some(from_, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    data = b""
    while len(data) < length:
        data += _some(from_, length - len(data))
    return json.loads(data), descriptors


def _some(from_: socket.socket, count: int) -> bytes:
    block = from_.recv(count)
    if not block:
        raise EOFError
    return block


class ForkedProcess:
    """A process that a zygote has forked. Where it is no child of this process, nobody tells how it ended: status 255.

    :raises OSError: if it cannot be watched.
    """

    _death = -1

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._death = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return how it ended, None if it has not."""
        if self.returncode is None and readable(self._death, 0):
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)  # It may have become one, where its zygote has ended.
            except ChildProcessError:
                self.returncode = _UNKNOWN
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None  # Who traces it is told first.
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired` if that takes too long."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        if self.returncode is None:
            readable(self._death, -0.001 if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(_TRACED_SECONDS)
        return status

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._death, sig)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self._death >= 0:
            os.close(self._death)


class CannotFork(Exception):
    """A process cannot be forked from a zygote: spawn it, with other descriptors.

    What the zygote forked before it was gone may have those that it was given, until their other ends are closed.
    """


class Zygote:
    """A zygote.

    :param variables: its environment, which is that of the processes that it forks but for what they find later.
    :param process: the zygote, where it was forked from another; else one is spawned.
    :ivar line: readable when it has answered, or is gone.
    :ivar unsafe: why nothing can be forked from it, "" if it can.
    :raises OSError: if the machine has no room for it.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        directory: str,
        output: IO[bytes] | int = subprocess.DEVNULL,
        process: tuple[ChildProcess, socket.socket] | None = None,
        dies_with: int = 0,
    ) -> None:
        self.variables = dict(variables)
        self.unsafe = ""
        self.failed: dict[str, str] = {}  # Modules that cannot be imported -> why.
        self.busy_since: float | None = None  # When it began to import.
        self.used_at = 0.0
        self.asked: set[str] = set()  # Modules that it was to import.
        self._failed = False  # Whether it was killed, since it did not answer.
        if process is not None:
            self.process, self.line = process
            self.line.settimeout(_SEND_SECONDS)
            return
        self.line, far = socket.socketpair()
        with far:
            try:
                self.process = subprocess.Popen(
                    [*command("zygote"), str(far.fileno()), str(dies_with)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[far.fileno()],
                    env={FIRST_VARIABLE: "1", **variables, OF_LIBRARY: "-" * MARK_BYTES, "PYTHONUNBUFFERED": "1"},
                    cwd=directory,
                )
            except BaseException:
                self.line.close()
                raise
        self.line.settimeout(_SEND_SECONDS)

    @property
    def ready(self) -> bool:
        """Whether something can be forked from it."""
        return self.busy_since is None and not self.unsafe and not self.ended

    def has(self, variables: Mapping[str, str]) -> bool:
        """Return whether it imports with such an environment."""
        return environment_key(self.variables) == environment_key(variables)

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Return which modules it was not told to import."""
        return [name for name in names if name not in self.asked]

    def preload(self, names: Iterable[str]) -> None:
        """Have it import modules; it is busy until `heard`."""
        self.asked.update(names := list(names))
        self.busy_since = time.monotonic()
        send(self.line, {"preload": names})

    def heard(self) -> None:
        """Take its answer.

        :raises EOFError, OSError: if it is gone.
        """
        if self._failed:  # What it said too late is about what nobody asks for any more.
            raise EOFError
        answer, _ = receive(self.line)
        self.busy_since = None
        self.failed.update(answer["failed"])
        self.unsafe = answer["unsafe"]

    def fork(
        self,
        kind: str,
        words: Sequence[str | int],
        variables: Mapping[str, str],
        directory: str,
        path: Sequence[str],
        descriptors: Sequence[int],
    ) -> ChildProcess:
        """Fork a process; one from which nothing can be forked becomes the library process itself.

        :param kind: `LIBRARY`, which becomes a child of this process, which has to be a subreaper; or `HOST`.
        :param words: of its command line; a number stands for the descriptor of that place.
        :param path: `sys.path` that it will have, empty for its own.
        :param descriptors: those that it gets; the last is for what it prints.
        :raises CannotFork: if it refuses, or is gone: it is of no more use then, and its `line` says so.
        """
        asked = {"fork": kind, "words": words, "variables": variables, "directory": directory, "path": path}
        self.used_at = time.monotonic()
        try:
            if self.stopped:
                raise OSError("it is stopped")
            send(self.line, asked, descriptors)
            if not readable_soon(self.line.fileno()):  # This blocks the host's event loop.
                raise OSError("it does not answer")
            answer, _ = receive(self.line)
        except (EOFError, OSError) as error:
            self._failed = True
            if kind == LIBRARY and self.process.poll() is None:
                kill_tree(self.process.pid)  # Not for a host: others forked earlier are in that tree, and live on.
            self.process.kill()
            with contextlib.suppress(OSError):  # It stays open: a selector may know its number.
                self.line.shutdown(socket.SHUT_RDWR)
            raise CannotFork(f"the zygote is gone ({error or 'it has ended'})") from error
        if "error" in answer:
            raise CannotFork(answer["error"])
        if answer["pid"] == self.process.pid:
            self.line.close()
            return self.process
        try:
            return ForkedProcess(answer["pid"])
        except OSError as error:
            os.kill(answer["pid"], signal.SIGKILL)
            self.bury(answer["pid"])
            raise CannotFork(f"what was forked cannot be watched ({error})") from error

    def bury(self, pid: int) -> None:
        """Tell it that nobody asks for a host any more that it has forked."""
        with contextlib.suppress(OSError):
            send(self.line, {"bury": pid})

    def end(self) -> None:
        """End it; what it has forked lives on."""
        self.process.kill()
        ended_within(self.process, _END_SECONDS)
        self.line.close()

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it, so that it will not answer."""
        return is_stopped(self.process.pid)

    @property
    def ended(self) -> bool:
        """Whether it was ended, or is of no more use."""
        return self._failed or self.line.fileno() < 0


class Zygotes:
    """The zygotes of a host, one for each environment of contexts on it: the last two that were used.

    The host is a subreaper (`adopt_orphans`): what they fork become its children.

    :param directory: where they run.
    :param first: one that is there already.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: str, first: Zygote | None = None) -> None:
        self._selector, self._directory = selector, directory
        self._zygotes: dict[object, Zygote] = {}
        self._unfit: dict[object, str] = {}  # Environments whose processes are spawned -> why.
        self._deaths: collections.Counter[object] = collections.Counter()
        self._due: dict[object, float] = {}  # When importing has taken too long.
        if first is not None:
            self._keep(environment_key(first.variables), first)

    def offer(self, load: BuildContext) -> Zygote | str | None:
        """Return what to fork the library process of a load from, or why to spawn it; None if that is not known yet.

        It is once a zygote has imported what the load imports: ask again then. One from which nothing can be forked
        becomes the library process, and is given away.
        """
        if load.preload is None:
            return ""
        key, zygote = self.preload(load.environment, load.preload)
        if zygote is None:
            return self._unfit[key]
        if zygote.unsafe:  # This load can have what it has imported.
            self._selector.unregister(self._zygotes.pop(key).line)
        if zygote.busy_since is None:
            return zygote
        due = zygote.busy_since + (load.timeout or IMPORT_SECONDS)
        self._due[key] = min(self._due.get(key, float("inf")), due)
        return None

    def preload(self, environment: Mapping[str, str], modules: Iterable[str]) -> tuple[object, Zygote | None]:
        """Have a zygote import modules where it has time; return its key, and it, or None if processes are spawned."""
        variables = library_variables(environment)
        key = environment_key(variables)
        zygote = self._zygotes.get(key)
        if zygote is not None and (zygote.ended or zygote.stopped):
            self._lost(key)
            zygote = None
        if zygote is None and key in self._unfit:
            return key, None
        try:
            if zygote is None:
                zygote = self._start(key, variables)
                zygote.preload(modules)  # Even if there are none: it can fork once it has answered.
            elif zygote.busy_since is None and not zygote.unsafe and (lacks := zygote.lacks(modules)):
                zygote.preload(lacks)
        except OSError as error:
            self._give_up(key, f"there is no zygote ({error})")
            return key, None
        return key, zygote

    def _start(self, key: object, variables: Mapping[str, str]) -> Zygote:
        idle = [each for each, zygote in self._zygotes.items() if zygote.busy_since is None]
        if len(self._zygotes) >= _MOST and idle:
            self._end(min(idle, key=lambda each: self._zygotes[each].used_at))
        os.makedirs(self._directory, exist_ok=True)
        zygote = Zygote(variables, self._directory, dies_with=os.getpid())
        self._keep(key, zygote)
        return zygote

    def _keep(self, key: object, zygote: Zygote) -> None:
        self._zygotes[key] = zygote
        self._selector.register(zygote.line, selectors.EVENT_READ, lambda: self._heard(key, zygote))

    def _heard(self, key: object, zygote: Zygote) -> None:
        self._due.pop(key, None)
        try:
            zygote.heard()
        except (EOFError, OSError):
            self._lost(key)
        else:
            if zygote.unsafe:
                self._unfit[key] = zygote.unsafe

    def _lost(self, key: object) -> None:
        self._end(key)
        self._deaths[key] += 1
        if self._deaths[key] >= _MOST_DEATHS:
            self._unfit[key] = f"{_MOST_DEATHS} zygotes have ended"

    def _give_up(self, key: object, why: str) -> None:
        self._end(key)
        self._unfit[key] = why

    def _end(self, key: object) -> None:
        self._due.pop(key, None)
        if (zygote := self._zygotes.pop(key, None)) is not None:
            self._selector.unregister(zygote.line)
            zygote.end()

    def due(self) -> float:
        """Return when to call `check`, by the monotonic clock."""
        return min(self._due.values(), default=float("inf"))

    def check(self, now: float) -> None:
        """End the zygotes that take longer to import than a load may take."""
        for key, due in list(self._due.items()):
            if due <= now:
                began = self._zygotes[key].busy_since or due
                self._give_up(key, f"what it imports took longer than {due - began:g} s")

    def close(self) -> None:
        """End them all."""
        for key in list(self._zygotes):
            self._end(key)


def environment_key(variables: Mapping[str, str]) -> object:
    """Return what tells environments apart: a zygote imports with the variables of its contexts, and their Python."""
    return interpreter(), frozenset(
        (name, value) for name, value in variables.items() if name not in _LATE and not name.startswith(_OWN)
    )
