"""The gate before TaskVine's port, a process of its own: who has not proven the run's password waits here.

TaskVine speaks with one connection at a time and waits up to 5 s for each word, in which nothing else happens. The gate
speaks with all at once, as TaskVine would (its SHA-1 challenges), but shows its own proof only to who has shown one.
Then it proves itself to TaskVine at a private port in the worker's place, and hands the worker's connection to the
manager's process, which puts it where TaskVine has the private one (entrance.py): nothing is forwarded.
"""

from __future__ import annotations

import collections
import contextlib
import errno
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
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from ctxflow.host.machine_errors import PAUSE_SECONDS, Acceptor
from ctxflow.host.processes import die_with_parent

_IDENT = b"auth password sha1"
_LINE_BYTES = 1024
_PROOF_SECONDS = 5.0  # As TaskVine has it.
_MOST_OPEN = 500  # Beyond that one of the address that has most is ended: a worker takes milliseconds.
MOST_INSIDE = 50  # On their way into TaskVine at a time; the rest wait, proven.
_MOST_TOLD = 100
_ESTABLISHED = 1  # As the kernel numbers the states of a TCP connection.

BYTES = 2
NEWS = 1
"""The second byte: 1 if the gate has something for the manager, which looks there for nothing else."""
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


class Bell:
    """The rope of the doorbell.

    :param asleep: shared bytes, the first 1 while the manager can be woken by it alone.
    :param path: the socket that the doorbell listens at.
    """

    def __init__(self, asleep: mmap.mmap, path: str) -> None:
        self._asleep, self._path = asleep, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def ring(self, news: bool = False) -> None:
        """Wake the manager, if it sleeps; to be called after what it is to find."""
        if news:
            self._asleep[NEWS] = 1
        if self._asleep[0]:
            with contextlib.suppress(OSError):  # It is not there yet; or full, and so has rung.
                self._socket.sendto(b".", self._path)

    def close(self) -> None:
        """Free its socket."""
        self._socket.close()


class _Party:
    """A connection on which somebody is to prove something."""

    def __init__(self, connection: socket.socket, talk: Talk, host: str) -> None:
        connection.setblocking(False)
        self.connection, self.talk, self.host = connection, talk, host
        self.deadline = time.monotonic() + _PROOF_SECONDS
        self.worker: _Party | None = None  # Whom this one, to TaskVine, is for.
        self._line = b""
        connection.send(next(talk))

    def go_on(self) -> bool | None:
        """Take what has come, never more than the talk's own lines: what follows them is TaskVine's.

        :returns: whether there was proof; None as long as that is not known.
        """
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
    """Serves a port until its manager is gone.

    :param public: where all connect.
    :param private: where TaskVine listens, on this machine alone.
    :param manager: to the manager's process, which gets connections and what is to be told.
    :param bell: wakes it.
    """

    def __init__(
        self, public: socket.socket, private: socket.socket, manager: socket.socket, password: bytes, bell: Bell
    ) -> None:
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
            if self._may_admit():  # It had no descriptor to do so.
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
        """The manager has counted how many may be on their way in; or it is gone."""
        said = b""
        with contextlib.suppress(OSError):
            said = self._manager.recv(1024)
        if said:
            self._may = int(json.loads(said)["may"])
        self._over = not said

    def _accepted(self, connection: socket.socket, address: Any) -> None:
        party = _Party(connection, as_manager(self._password), str(address[0]))
        self._open[party] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._heard(party))
        if len(self._open) > _MOST_OPEN:
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

    # --- into TaskVine

    def _forget_gone(self) -> None:
        """Those who have proven themselves, and left before there was room for them."""
        gone = [party for party in self._proven if not _connected(party.connection)]
        for party in gone:
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
                party = self._inside[port] = _Party(inner, as_worker(self._password), worker.host)
            except OSError:
                inner.close()
                worker.connection.close()
                continue
            party.worker = worker
            self._selector.register(inner, selectors.EVENT_READ, lambda port=port: self._answered(port))

    def _answered(self, port: int) -> None:
        """TaskVine has said something; or it has closed this, the worker being in its place."""
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


def _connected(connection: socket.socket) -> bool:
    """Return whether the other end has not said that it leaves, whatever it has said before."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def main(descriptors: Sequence[str], doorbell: str, password_file: str, parent: int) -> None:
    """Serve until the manager's process is gone.

    :param descriptors: of the public socket, the private one, the manager's, and of its bell.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(password_file, "rb") as file:
        password = file.read()
    public, private, manager = (socket.socket(fileno=int(each)) for each in descriptors[:3])
    bell = Bell(mmap.mmap(int(descriptors[3]), BYTES), doorbell)
    Gate(public, private, manager, password, bell).serve()


if __name__ == "__main__":
    main(sys.argv[1:5], sys.argv[5], sys.argv[6], int(sys.argv[7]))
