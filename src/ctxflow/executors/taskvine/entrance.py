"""The manager's end of the gate: it keeps TaskVine's port, and knows who is connected.

TaskVine knows a connection by its descriptor. So its listening socket is replaced by one at a private port, and where
it has taken a connection of the gate's (gate.py) and let that in, the worker's own is put under the same descriptor.
TaskVine takes workers' names as they are told: none is believed here that another has, and the doorbell's worker has
one that nobody can guess (docs/security.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxflow.executors.taskvine.gate import MOST_INSIDE
from ctxflow.host.machine_errors import count_left
from ctxflow.host.own_modules import python_path

_SILENT_SECONDS = 600
_BACKLOG = 4096
SHORT_SECONDS = 5
_PAUSE_SECONDS = 5.0  # How soon a gate that has ended may be started again.
_LEAST = 4  # For the doorbell's worker and another, while they come in.
_RESERVE = 8  # Descriptors that no worker gets: TaskVine opens files to send them, and processes are started again.
_KEPT_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
)


def sockets() -> Iterator[tuple[int, socket.socket]]:
    """Return the sockets of this process: descriptors, and each as a socket for the moment."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    yield int(entry), found


class Entrance:
    """What stands before TaskVine's port.

    :param descriptor: of the socket at which TaskVine listens.
    :param asleep: descriptor of the manager's bell; `doorbell`: what wakes it.
    """

    def __init__(self, descriptor: int, asleep: int, doorbell: str, password_file: str) -> None:
        self._public = socket.socket(fileno=os.dup(descriptor))
        self._private = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._private.setblocking(False)
        os.dup2(self._private.fileno(), descriptor, inheritable=False)
        self._asleep, self._words = asleep, [doorbell, password_file]
        self._origins: dict[int, str] = {}  # Port of the gate's -> the worker's address.
        self._waiting: dict[int, socket.socket] = {}  # Likewise -> its connection.
        self.troubles: list[str] = []  # What the gate has to say.
        self._known: set[int] = set()  # Inodes of sockets that are nobody's place.
        self._may = -1  # How many may be on their way in, as the gate was told.
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            given = [self._public.fileno(), self._private.fileno(), theirs.fileno(), self._asleep]
            words = [*map(str, given), *self._words, str(os.getpid())]
            self._gate = subprocess.Popen(
                [sys.executable, "-m", "ctxflow.executors.taskvine.gate", *words],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env={**os.environ, **python_path()},
            )
        self._since = time.monotonic()
        self._may = -1

    def fileno(self) -> int:
        """For poll."""
        return self._channel.fileno()

    def serve(self) -> list[str]:
        """Put workers in their places; gives the hosts of those who had no password."""
        strangers = []
        with contextlib.suppress(BlockingIOError, ConnectionResetError):  # The latter: the gate was killed.
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._channel, 4096, 1)
                if not message:
                    break
                news = json.loads(message)
                if "trouble" in news:
                    self.troubles.append(news["trouble"])
                if "stranger" in news:
                    strangers.append(news["stranger"])
                for descriptor in descriptors:
                    self._waiting[news["port"]] = socket.socket(fileno=descriptor)
                    self._origins[news["port"]] = news["host"]
        if self._waiting:
            self._tell_room()  # First: a place that is taken is one that the gate may fill again.
            self._replace()
        return strangers

    def check(self) -> None:
        """Start the gate again, if it has ended, and count descriptors: to be called once a second."""
        if self._gate.poll() is not None and time.monotonic() > self._since + _PAUSE_SECONDS:
            self._channel.close()
            self._start()
        self._tell_room()

    def require_room(self) -> None:
        """See that there can be workers.

        :raises OSError: if there are no descriptors for any.
        """
        if count_left() < _RESERVE + _LEAST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _tell_room(self) -> None:
        """Have the gate let in only whom there are descriptors for: where one is missing, TaskVine loses workers."""
        room = max(0, count_left() - _RESERVE)
        may = min(MOST_INSIDE, (room + 1) // 2)  # On its way in, a worker takes two.
        if may != self._may:
            with contextlib.suppress(OSError):  # It is gone, or has not read what it was told: later.
                self._channel.send(json.dumps({"may": may}).encode())
                self._may = may

    def origin(self, address: str) -> str:
        """Return where a worker's connection comes from."""
        host, _, port = address.rpartition(":")
        return self._origins.get(int(port), host)

    def _replace(self) -> None:
        seen = set()
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/self/fd/{entry}")
                inode = status.st_ino
                if not stat.S_ISSOCK(status.st_mode) or inode in self._known:
                    seen.add(inode)
                    continue
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    if found.getsockname() == self._private.getsockname():
                        port = found.getpeername()[1]
                        if port not in self._waiting:
                            continue  # Its worker is on the way here; it is a place, yet.
                        with self._waiting.pop(port) as worker:
                            _take_over(worker, found)
                            os.dup2(worker.fileno(), int(entry), inheritable=False)
                            inode = os.fstat(worker.fileno()).st_ino
                self._known.add(inode)
                seen.add(inode)
        self._known &= seen
        for worker in self._waiting.values():  # TaskVine has ended it meanwhile.
            worker.close()
        self._waiting.clear()

    def close(self) -> None:
        """End the gate."""
        self._gate.kill()
        self._gate.wait()
        self._channel.close()
        self._public.close()
        self._private.close()


def _take_over(worker: socket.socket, place: socket.socket) -> None:
    """Set for a connection what TaskVine has set for the one in whose place it comes."""
    for level, option in _KEPT_OPTIONS:
        worker.setsockopt(level, option, place.getsockopt(level, option))
    fcntl.fcntl(worker, fcntl.F_SETFL, fcntl.fcntl(place, fcntl.F_GETFL))


_NAMELESS_SECONDS = 15.0  # A worker tells its name a moment after it has connected; after that none is waited for.
_LOOK_SECONDS = 0.1  # How often it is looked for meanwhile: TaskVine lists all workers each time.


@dataclasses.dataclass(frozen=True)
class Joined:
    """A worker is connected."""

    worker: str
    address: str
    host: str


@dataclasses.dataclass(frozen=True)
class Lost:
    """A worker's connection is gone."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Stranger:
    """Somebody is connected who gets nothing."""

    host: str
    reason: str


class Roster:
    """The connections, from what TaskVine lists of them.

    >>> roster = Roster()
    >>> roster.look([{"addrport": "10.0.0.1:4", "factory_name": "n1.ab", "hostname": "n1"}], 0.0)
    [Joined(worker='n1.ab', address='10.0.0.1:4', host='n1')]
    >>> roster.look([], 1.0)
    [Lost(worker='n1.ab')]
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Address -> worker.
        self._nameless: dict[str, float] = {}  # Address -> since when.
        self._strangers: set[str] = set()  # Addresses.
        self._seen: object = None
        self._next_look = 0.0

    def due(self, moved: object, now: float) -> bool:
        """Return whether to look.

        :param moved: TaskVine's counts of connections made and ended, or what else differs when they do.
        """
        changed, self._seen = moved != self._seen, moved
        return changed or (bool(self._nameless) and now >= self._next_look)

    def look(self, rows: Sequence[Mapping[str, Any]], now: float) -> list[Joined | Lost | Stranger]:
        """Return what has happened since the last look.

        :param rows: TaskVine's list of workers.
        """
        self._next_look = now + _LOOK_SECONDS
        there = {each["addrport"]: each for each in rows}
        news: list[Joined | Lost | Stranger] = []
        for address in [address for address in self._names if address not in there]:
            news.append(Lost(self._names.pop(address)))
        self._strangers &= there.keys()
        self._nameless = {address: since for address, since in self._nameless.items() if address in there}
        for address, each in there.items():
            if address not in self._names and address not in self._strangers:
                found = self._appeared(address, each, now)
                news += [] if found is None else [found]
        return news

    def _appeared(self, address: str, each: Mapping[str, Any], now: float) -> Joined | Stranger | None:
        name, host = each.get("factory_name"), str(each.get("hostname", address))
        if name is None:
            if now < self._nameless.setdefault(address, now) + _NAMELESS_SECONDS:
                return None
            reason = "it tells no name"
        elif name in self._names.values():
            reason = "it has the name of another worker"
        else:
            self._nameless.pop(address, None)
            self._names[address] = str(name)
            return Joined(str(name), address, host)
        self._nameless.pop(address, None)
        self._strangers.add(address)
        return Stranger(host, reason)


def tune_connections(port: int, timeout: int) -> int:
    """Have the kernel keep back connections on which nothing is said, and end those that take nothing.

    TaskVine would wait for each of the former in turn, 5 seconds, with TLS without end; workers speak first. And it
    listens with room for 5 connections only, too few where hundreds of workers start together. While it sends a file
    it does nothing else: where the worker is cut off or stopped meanwhile, it would wait for a minute or longer.

    :param timeout: seconds in which a worker must take some of what is sent to it.
    :returns: the descriptor at which TaskVine listens.
    """
    for descriptor, found in sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            _tune_listener(found, timeout)
            return descriptor
    raise RuntimeError(f"TaskVine does not listen at its port {port}")


def _tune_listener(listener: socket.socket, timeout: int) -> None:
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
    # Accepted connections inherit these; the second is of use while TLS is agreed on, which has no limit else.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * timeout)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SHORT_SECONDS, 0))
    listener.listen(_BACKLOG)
