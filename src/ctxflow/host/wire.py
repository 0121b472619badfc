"""Messages between the driver, the context host and its library processes: framed, over stream sockets.

A message is a list or dict that JSON can hold (the head) and some bytes (the body, most often a pickle that only its
two ends open). On the wire: two little-endian 32-bit and 64-bit lengths (head, body), then head and body.

Most messages are classes: `pack` writes one, with its class's name and its fields as a list for a head, and the
`Direction` that it goes reads it. Which there are is said in messages.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, get_args

_LENGTHS = struct.Struct("<IQ")
_CHUNK = 1 << 16
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_HEADS = (list, dict)
_raw_decode = json.JSONDecoder().raw_decode

Head = Any
"""A list or dict, whatever it holds."""


def _decode(text: bytes | bytearray) -> Head:
    head: Head = _raw_decode(text.decode())[0]
    return head


def frame(head: Head, body: bytes = b"") -> bytes:
    """One message as bytes.

    >>> frame({"a": 1}, b"xy")[12:]
    b'{"a":1}xy'
    """
    text = _encode(head).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def unframe(data: bytes) -> list[tuple[Head, bytes]]:
    """Return the messages that some bytes consist of.

    :raises ValueError: if they do not.

    >>> unframe(frame({"a": 1}, b"xy") + frame({}))
    [({'a': 1}, b'xy'), ({}, b'')]
    """
    messages = []
    start, end = 0, len(data)
    while start < end:
        if end - start < _LENGTHS.size:
            raise ValueError("the last message is cut off")
        head, body = _LENGTHS.unpack_from(data, start)
        start += _LENGTHS.size
        if end - start < head + body:
            raise ValueError("the last message is cut off")
        message = _decode(data[start : start + head])
        if type(message) not in _HEADS:
            raise ValueError("a message's head is neither a list nor a dict")
        start += head + body
        messages.append((message, data[start - body : start]))
    return messages


class Channel:
    """A non-blocking end of a connection: buffers what cannot be sent, and what has only half arrived.

    Not thread-safe: its owner locks.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.closed = False
        self._incoming = bytearray()
        self._outgoing: list[memoryview] = []

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def send(self, head: Head, body: bytes = b"") -> None:
        """Send a message now, or as much of it as fits; `flush` sends the rest."""
        self.send_frame(frame(head, body))

    def send_frame(self, data: bytes) -> bool:
        """Send a message that is framed already; return whether it went, or part of it waits for `flush`."""
        if self._outgoing or self.closed:
            self._outgoing.append(memoryview(data))
            return False
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.closed = True
            return True
        if sent < len(data):
            self._outgoing.append(memoryview(data)[sent:])
            return False
        return True

    def wait(self, seconds: float | None = None, events: int = select.POLLIN) -> bool:
        """Wait until something has arrived, or until `events`; whether it did.

        By poll(2): select(2) knows no descriptor above 1023.
        """
        poll = select.poll()
        poll.register(self.socket, events)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def flush(self) -> None:
        """Send what waits, as far as it goes."""
        while self._outgoing and not self.closed:
            block = self._outgoing[0]
            try:
                sent = self.socket.send(block)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            if sent < len(block):
                self._outgoing[0] = block[sent:]
                return
            del self._outgoing[0]

    def receive(self) -> list[tuple[Head, bytes]]:
        """Return the messages that have arrived; sets `closed` at the end of the stream, or where it is no message."""
        try:
            while True:
                block = self.socket.recv(_CHUNK)
                if not block:
                    self.closed = True
                    break
                self._incoming += block
                if len(block) < _CHUNK:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages: list[tuple[Head, bytes]] = []
        data, start = self._incoming, 0
        while len(data) - start >= _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(data, start)
            middle = start + _LENGTHS.size + head
            if len(data) < middle + body:
                break
            try:
                message = _raw_decode(data[start + _LENGTHS.size : middle].decode())[0]
            except ValueError:
                message = None
            if type(message) not in _HEADS:
                self.closed = True
                break
            messages.append((message, bytes(data[middle : middle + body])))
            start = middle + body
        del data[:start]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.socket.close()


def listen(path: str) -> socket.socket:
    """Return a socket that waits, without blocking, for connections at a path of any length."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as address:
            listener.bind(address)
        listener.listen(64)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket.socket:
    """Return a connection to a socket that listens at a path of any length."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Return the path of a socket in at most 107 bytes, which is all that the kernel takes."""
    if len(os.fsencode(path)) < 108:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


class BlockingChannel:
    """The library process's end: it has nothing else to do than wait for the next message."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self.socket = connection
        self._rest = b""  # What arrived beyond the last message.

    def send(self, head: Head, body: bytes = b"") -> None:
        """Send a message."""
        self.socket.sendall(frame(head, body))

    def send_frame(self, data: bytes) -> None:
        """Send a message that is framed already."""
        self.socket.sendall(data)

    def receive(self) -> tuple[Head, bytes]:
        """Wait for a message.

        :raises EOFError: when the other end is gone.
        """
        head, body = _LENGTHS.unpack(self._take(_LENGTHS.size))
        data = self._take(head + body)
        return _decode(data[:head]), data[head:]

    @property
    def has_more(self) -> bool:
        """Whether something of the next message is here."""
        return bool(self._rest)

    def unblocked(self) -> Channel:
        """Return the same end for who does not wait; this one is not used any more."""
        channel = Channel(self.socket)
        channel._incoming += self._rest
        return channel

    def _take(self, count: int) -> bytes:
        """Return the next bytes: a short message comes whole in one system call, a long one without being added up."""
        while len(self._rest) < count:
            missing = count - len(self._rest)
            block = self.socket.recv(max(missing, _CHUNK), socket.MSG_WAITALL if missing > _CHUNK else 0)
            if not block:
                raise EOFError
            self._rest += block
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


class Message:
    """A message; its class is its kind."""

    __slots__ = ()

    @property
    def body(self) -> bytes:
        """What travels beside the fields, most often a pickle that only the two ends open."""
        return b""

    # One of each for all classes: to make them for each takes time at each start.
    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and pack(self) == pack(other)

    def __hash__(self) -> int:
        return hash(pack(self))


class Trouble(NamedTuple):
    """Why something failed on a worker, as data.

    :ivar kind: as of `ctxflow.scheduler.events.Failure`.
    :ivar output: the last lines that the library process printed; its host adds them.
    :ivar machine: whether it looks like the machine's fault.
    """

    kind: str
    error: str
    message: str
    traceback: str = ""
    output: str = ""
    machine: bool = False


M = TypeVar("M", bound=Message)
_writers: dict[type[Message], Callable[[Any], tuple[Any, ...]]] = {}


def pack(message: Message) -> bytes:
    """Return a message as a frame of wire.py.

    >>> from ctxflow.host.messages import LibraryEnded
    >>> pack(LibraryEnded("c"))[12:]
    b'["LibraryEnded","c"]'
    """
    kind = type(message)
    write = _writers.get(kind) or _writer(kind)
    text, body = _encode([kind.__name__, *write(message)]).encode(), message.body
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def _writer(kind: type[Message]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gives the fields of a kind of message, but its body."""
    names = _fields(kind)
    get: Callable[[Any], Any] = attrgetter(*names) if names else lambda message: ()
    _writers[kind] = write = (lambda message: (get(message),)) if len(names) == 1 else get
    return write


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name != "body"]


class Direction(Generic[M]):
    """Reads the messages of one direction, a union of their classes.

    >>> from ctxflow.host.messages import FROM_HOST
    >>> FROM_HOST.open(["LibraryEnded", "c"], b"")
    LibraryEnded(context='c')
    """

    def __init__(self, union: Any) -> None:
        self._kinds: dict[str, tuple[Callable[..., M], bool]] = {}
        for kind in get_args(union):
            names = [field.name for field in dataclasses.fields(kind)]
            has_body = names[-1:] == ["body"]
            made = _with_trouble(kind, names.index("trouble")) if "trouble" in names else kind
            self._kinds[kind.__name__] = made, has_body

    def open(self, head: Head, body: bytes) -> M:
        """Return a message that came.

        :raises ValueError: if it is none of this direction.
        """
        try:
            kind, has_body = self._kinds[head[0]]
            return kind(*head[1:], body) if has_body else kind(*head[1:])
        except (LookupError, TypeError) as error:
            raise ValueError(f"this is no message that may come here ({error!r}); is it of another ctxflow?") from None


def _with_trouble(kind: Callable[..., M], place: int) -> Callable[..., M]:
    def made(*values: Any) -> M:
        return kind(*values[:place], Trouble(*values[place]), *values[place + 1 :])

    return made
