"""Interrupting a call that nobody waits for: so that its library process, and what that has built, stays.

What lives here: the library process's end. What does not: who asks for it, and what happens where a call goes on all
the same (process.py, host.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable
from types import FrameType

NUMBER_BYTES = 8
SIGNAL = signal.SIGUSR1


class CallInterrupted(KeyboardInterrupt):
    """Raised in a call, wherever it is, once nobody waits for its answer any more: as Ctrl-C is in a program."""


class Interrupts:
    """The calls that are to be interrupted: the one that runs is at once, others when their turn comes.

    :param asked: the descriptor of a pipe that does not block, with the numbers of such calls; `SIGNAL` follows each.
    :param running: the descriptor of a file of `NUMBER_BYTES`, where the number of the call that runs is written for
        the host to see, 0 if none does.
    """

    def __init__(self, asked: int, running: int) -> None:
        self._pid = os.getpid()
        self._pipe = asked
        self._running = mmap.mmap(running, NUMBER_BYTES)
        self._asked: set[int] = set()
        self._call = 0
        self._may = False  # Whether the call may be interrupted just now.
        signal.signal(SIGNAL, self._heard)

    def begin(self, call: int) -> None:
        """A call begins.

        :raises CallInterrupted: if it is one of those.
        """
        self._call = call
        self._running[:] = call.to_bytes(NUMBER_BYTES, "little")
        self._may = True
        self._raise_if_asked()

    def end(self) -> None:
        """The call is over; it may be said more than once."""
        self._may = False
        self._asked.discard(self._call)
        self._call = 0
        self._running[:] = bytes(NUMBER_BYTES)

    def shielded(self, send: Callable[[], None]) -> None:
        """Do something during a call that must be done wholly or not at all, such as to send a message."""
        might, self._may = self._may, False
        try:
            send()
        finally:
            self._may = might
        self._raise_if_asked()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # A process that the user's code forked.
            return
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._pipe, 512 * NUMBER_BYTES):
                for at in range(0, len(block), NUMBER_BYTES):
                    self._asked.add(int.from_bytes(block[at : at + NUMBER_BYTES], "little"))
        self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self._may and self._call in self._asked:
            self._may = False  # Once: what cleans up after it is not interrupted again.
            raise CallInterrupted("nobody waits for the answer of this call any more")
