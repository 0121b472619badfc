"""The gate before TaskVine's port: who has not proven the run's password waits in a process of its own.

TaskVine speaks with one connection at a time and waits up to 5 s for each word, in which nothing else happens. `Gate`
speaks with all at once, as TaskVine would (its SHA-1 challenges), but shows its own proof only to who has shown one.
Then it proves itself to TaskVine at a private port in the worker's place, and hands the worker's connection to the
manager's process, whose `Entrance` puts it under the descriptor by which TaskVine has the private one: nothing is
forwarded (docs/security.md).
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import math
import mmap
import os
import secrets
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from ctxflow.executors.taskvine.manager_messages import BYTES, Bell
from ctxflow.host.linux import PAUSE_SECONDS, Acceptor, count_left, die_with_parent, python_path

_IDENT = b"auth password sha1"
_LINE_BYTES = 1024
MOST_INSIDE = 50  # On their way into TaskVine at a time; the rest wait, proven.
_MOST_TOLD = 100
_ESTABLISHED = 1  # As the kernel numbers the states of a TCP connection.
_PAUSE_SECONDS = 5.0  # How soon a gate that has ended may be started again.
_LEAST = 4  # For the doorbell's worker and another, while they come in.
_RESERVE = 8  # Descriptors that no worker gets: TaskVine opens files to send them, and processes are started again.
_KEPT_OPTIONS = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_NODELAY))


Talk = Generator[bytes, bytes, bool]
"""Gives what is to be sent, and takes the next line; returns whether the other has proven itself."""


def as_manager(password: bytes) -> Talk:
    """Return what TaskVine says to a worker, but for the order: no challenge of who has proven nothing is answered.

    >>> worker, gate = as_worker(b"secret"), as_manager(b"secret")
    >>> asks, says = next(gate).splitlines(), next(worker).splitlines()
    >>> _ = [worker.send(asks[0]), gate.send(says[0]), gate.send(says[1])]
    >>> gate.send(worker.send(asks[1]).strip()).endswith(b"ok\\n")
    True
    """
    mine = secrets.token_hex(32).encode()
    ident = yield _IDENT + b"\n" + mine + b"\n"
    if ident != _IDENT:
        return False
    theirs = yield b""
    proof = yield b""
    if not hmac.compare_digest(proof, _proof(password, mine)):
        return False
    accepted = yield _proof(password, theirs) + b"\nok\n"
    return accepted == b"ok"


def as_worker(password: bytes) -> Talk:
    """Return what a worker says to TaskVine."""
    yield _IDENT + b"\n" + secrets.token_hex(32).encode() + b"\n"
    theirs = yield b""
    yield _proof(password, theirs) + b"\n"
    accepted = yield b"ok\n"
    return accepted == b"ok"


def _proof(password: bytes, challenge: bytes) -> bytes:
    digest = hashlib.sha1(password + b" " + challenge, usedforsecurity=False)  # It is TaskVine's protocol.
    return digest.hexdigest().encode()


class _Party:
    """A connection over which a proof is awaited."""

    def __init__(self, connection: socket.socket, talk: Talk, host: str, seconds: float) -> None:
        connection.setblocking(False)
        self.connection, self.talk, self.host = connection, talk, host
        self.deadline = time.monotonic() + seconds
        self.worker: _Party | None = None  # Of a connection to TaskVine: the worker that it is made for.
        self._line = b""
        connection.send(next(talk))

    def go_on(self) -> bool | None:
        """Read no more than the talk's own lines; return whether the other has proven itself, None while open."""
        try:
            while True:
                come = self.connection.recv(_LINE_BYTES, socket.MSG_PEEK)
                end = come.find(b"\n") + 1
                self._line += self.connection.recv(end or len(come))
                if not come or len(self._line) > _LINE_BYTES:
                    return False
                if end:
                    line, self._line = self._line[:-1], b""
                    said = self.talk.send(line)
                    if said:
                        self.connection.send(said)
        except StopIteration as over:
            return bool(over.value)
        except BlockingIOError:
            return None
        except OSError:
            return False


class Gate:
    """Serves the public port until the manager is gone; TaskVine listens at the private one.

    :param manager: to the manager's process, which gets connections and messages; `bell` wakes it.
    :param proof_seconds: how long whoever connects may take to prove itself, which takes a worker milliseconds.
    :param most_open: of those; beyond that, one of the address that has most is ended.
    """

    def __init__(
        self,
        public: socket.socket,
        private: socket.socket,
        manager: socket.socket,
        password: bytes,
        bell: Bell,
        *,
        proof_seconds: float = 5.0,  # As TaskVine has it.
        most_open: int = 500,
    ) -> None:
        self._proof_seconds, self._most_open = proof_seconds, most_open
        self._public, self._private, self._manager, self._bell = public, private, manager, bell
        self._password = password
        self._selector = selectors.DefaultSelector()
        self._open: dict[_Party, None] = {}  # Who has proven nothing yet, the oldest first.
        self._proven: collections.deque[_Party] = collections.deque()
        self._inside: dict[int, _Party] = {}  # Port of this end -> a connection to TaskVine.
        self._told: set[str] = set()
        public.setblocking(False)
        self._over = False
        self._may = MOST_INSIDE
        self._acceptor = Acceptor(self._selector, public, self._accepted, lambda text: self._tell({"trouble": text}))
        self._selector.register(manager, selectors.EVENT_READ, self._heard_manager)

    def serve(self) -> None:
        """Serve until the manager is gone."""
        while not self._over:
            first = next(iter(self._open), None)
            wait = self._acceptor.resume()
            if self._may_admit():  # There was no descriptor for it.
                wait = min(wait, PAUSE_SECONDS)
            if first is not None:
                wait = min(wait, max(0.0, first.deadline - time.monotonic()))
            for key, _ in self._selector.select(None if wait == math.inf else wait):
                if self._selector.get_map().get(key.fd) == key:  # An earlier one of this round may have ended it.
                    key.data()
            now = time.monotonic()
            for party in [party for party in self._open if party.deadline <= now]:
                self._refuse(party)
            self._admit()

    def _heard_manager(self) -> None:
        """Take the manager's number of those that may be on their way in; without one it is gone."""
        said = b""
        with contextlib.suppress(OSError):
            said = self._manager.recv(1024)
        if said:
            self._may = int(json.loads(said)["may"])
        self._over = not said

    def _accepted(self, connection: socket.socket, address: Any) -> None:
        party = _Party(connection, as_manager(self._password), str(address[0]), self._proof_seconds)
        self._open[party] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._heard(party))
        if len(self._open) > self._most_open:
            hosts = collections.Counter(each.host for each in self._open)
            [(most, _)] = hosts.most_common(1)
            self._refuse(next(each for each in self._open if each.host == most))

    def _heard(self, party: _Party) -> None:
        proven = party.go_on()
        if proven:
            del self._open[party]
            self._selector.unregister(party.connection)
            self._proven.append(party)
        elif proven is not None:
            self._refuse(party)

    def _refuse(self, party: _Party) -> None:
        del self._open[party]
        self._selector.unregister(party.connection)
        party.connection.close()
        if party.host not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(party.host)
            self._tell({"stranger": party.host})

    def _forget_gone(self) -> None:
        """Drop who has proven itself, and left before there was room, whatever it has sent before."""
        for party in list(self._proven):
            if party.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
                self._proven.remove(party)
                party.connection.close()

    def _may_admit(self) -> bool:
        return bool(self._proven) and len(self._inside) < self._may

    def _admit(self) -> None:
        if self._proven and not self._may:
            self._forget_gone()
            self._acceptor.complain(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        while self._may_admit():
            try:
                inner = socket.socket()
            except OSError as error:
                self._acceptor.complain(error)
                return
            worker = self._proven.popleft()
            try:
                inner.connect(self._private.getsockname())
                port = inner.getsockname()[1]
                party = self._inside[port] = _Party(inner, as_worker(self._password), worker.host, self._proof_seconds)
            except OSError:
                inner.close()
                worker.connection.close()
                continue
            party.worker = worker
            self._selector.register(inner, selectors.EVENT_READ, lambda port=port: self._answered(port))

    def _answered(self, port: int) -> None:
        """Read what TaskVine says; it closes this connection when the worker is in its place."""
        party = self._inside[port]
        proven = party.go_on() if party.worker is not None else False
        if proven and party.worker is not None:
            self._tell({"port": port, "host": party.host}, party.worker.connection)
            party.worker = None
        elif proven is not None:
            self._selector.unregister(party.connection)
            party.connection.close()
            if party.worker is not None:
                party.worker.connection.close()
            del self._inside[port]

    def _tell(self, news: dict[str, object], connection: socket.socket | None = None) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(self._manager, [json.dumps(news).encode()], [connection.fileno()] if connection else [])
        if connection is not None:
            connection.close()
        self._bell.ring(news=True)


class Entrance:
    """Starts the gate before TaskVine's port, whose socket's descriptor is given, and takes workers from it.

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
        self.troubles: list[str] = []  # What keeps workers from connecting, for people.
        self._known: set[int] = set()  # Inodes of sockets that are no worker's place.
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
        self._may = -1  # How many may be on their way in, as the gate was told.

    def serve(self) -> list[str]:
        """Put workers in their places; return the hosts of those who had no password."""
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
        """Raise an OSError if there are no descriptors for any worker."""
        if count_left() < _RESERVE + _LEAST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _tell_room(self) -> None:
        """Limit the gate to whom there are descriptors for: where one is missing, TaskVine loses workers."""
        room = max(0, count_left() - _RESERVE)
        may = min(MOST_INSIDE, (room + 1) // 2)  # On its way in, a worker takes two.
        if may != self._may:
            with contextlib.suppress(OSError):  # It is gone, or has not read the last number: later.
                self._channel.send(json.dumps({"may": may}).encode())
                self._may = may

    def origin(self, address: str) -> str:
        """Return where a worker's connection comes from."""
        host, _, port = address.rpartition(":")
        return self._origins.get(int(port), host)

    def _replace(self) -> None:
        """Put each waiting worker's connection under the descriptor of TaskVine's private one."""
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
                            for option in _KEPT_OPTIONS:  # As TaskVine has set them.
                                worker.setsockopt(*option, found.getsockopt(*option))
                            fcntl.fcntl(worker, fcntl.F_SETFL, fcntl.fcntl(found, fcntl.F_GETFL))
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


def main(descriptors: Sequence[str], doorbell: str, password_file: str, parent: int) -> None:
    """Serve until the manager is gone; `descriptors`: of the public socket, the private one, its own, its bell."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(password_file, "rb") as file:
        password = file.read()
    public, private, manager = (socket.socket(fileno=int(each)) for each in descriptors[:3])
    bell = Bell(mmap.mmap(int(descriptors[3]), BYTES), doorbell)
    Gate(public, private, manager, password, bell).serve()


if __name__ == "__main__":
    main(sys.argv[1:5], sys.argv[5], sys.argv[6], int(sys.argv[7]))
