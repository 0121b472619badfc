"""What wakes a manager that sleeps in TaskVine's wait: a byte to its doorbell (host/doorbell.py), from any process."""

from __future__ import annotations

import contextlib
import mmap
import socket

BYTES = 2
NEWS = 1
"""The second byte: 1 if the gate has something for the manager, which looks there for nothing else."""


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
