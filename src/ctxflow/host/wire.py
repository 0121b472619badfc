"""Messages between the driver, the context host and its library processes: framed, over stream sockets.

A message is a dict that JSON can hold (the head) and some bytes (the body, most often a pickle that only its
two ends open). On the wire: two little-endian 32-bit and 64-bit lengths (head, body), then head and body.
What does not live here: what the messages mean.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<IQ")
_CHUNK = 1 << 16
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_raw_decode = json.JSONDecoder().raw_decode

Head = dict[str, Any]


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


def _messages(data: bytes | bytearray) -> tuple[list[tuple[Head, bytes]], int]:
    """The whole messages at the start of some data, and how many bytes they take."""
    messages: list[tuple[Head, bytes]] = []
    start = 0
    while len(data) - start >= _LENGTHS.size:
        head, body = _LENGTHS.unpack_from(data, start)
        middle = start + _LENGTHS.size + head
        end = middle + body
        if len(data) < end:
            break
        messages.append((_decode(data[start + _LENGTHS.size : middle]), bytes(data[middle:end])))
        start = end
    return messages, start


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

    def send_frame(self, data: bytes) -> None:
        """Send a message that is framed already."""
        if self._outgoing or self.closed:
            self._outgoing.append(memoryview(data))
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.closed = True
            return
        if sent < len(data):
            self._outgoing.append(memoryview(data)[sent:])

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
        """The messages that have arrived; sets `closed` at the end of the stream."""
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
        messages, used = _messages(self._incoming)
        del self._incoming[:used]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.socket.close()


class BlockingChannel:
    """The library process's end: it has nothing else to do than wait for the next message."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self.socket = connection
        self._arrived: list[tuple[Head, bytes]] = []  # Messages that came with the one before, the last first.
        self._rest = b""  # What has arrived of the next one.

    def send(self, head: Head, body: bytes = b"") -> None:
        """Send a message."""
        self.socket.sendall(frame(head, body))

    def receive(self) -> tuple[Head, bytes]:
        """Wait for a message.

        :raises EOFError: when the other end is gone.
        """
        while not self._arrived:
            data = self._rest + self._read(_CHUNK)
            if len(data) >= _LENGTHS.size:
                missing = _LENGTHS.size + sum(_LENGTHS.unpack_from(data)) - len(data)
                if missing > _CHUNK:  # A large one: in one piece, not added up from many.
                    data = b"".join((data, self._read_all(missing)))
            messages, used = _messages(data)
            self._arrived = messages[::-1]
            self._rest = data[used:]
        return self._arrived.pop()

    def _read(self, most: int) -> bytes:
        data = self.socket.recv(most)
        if not data:
            raise EOFError
        return data

    def _read_all(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data
