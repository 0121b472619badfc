"""Which calls run in a library process: its host sees that without asking, and interrupts those that nobody waits for.

It sees it in memory that both have: the number of the call whose code runs just now, and then those of the calls of
items in flight. So calls are there that came on the line to the driver; and what blocks an event loop, which could not
answer. A call that nobody waits for is interrupted, so that its library process, and what that has built, stays.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NamedTuple

from ctxflow.host.linux import CALL_NUMBER_BYTES, INTERRUPT_SIGNAL

_WORD = struct.Struct("<q")
_HEADER = CALL_NUMBER_BYTES + _WORD.size  # The call whose code runs, and which turn of the loop this is.
_ENTRY = struct.Struct("<qd")  # A call's number, 0 for a free place, and when it times out.
_FIRST_PLACES = 256
_NONE = _ENTRY.pack(0, 0.0)


class CallInterrupted(KeyboardInterrupt):
    """Raised in a call, wherever it is, once nobody waits for its answer any more: as Ctrl-C is in a program."""


class Interrupts:
    """The calls that are to be interrupted: the one that runs is at once, others when their turn comes.

    :param asked: the descriptor of a pipe that does not block, with the numbers of such calls; `INTERRUPT_SIGNAL`
        follows each, but those of calls of items in flight, and comes again while one that runs goes on.
    :param running: the descriptor of a file of `CALL_NUMBER_BYTES`, where the number of the call that runs is written
        for the host to see, 0 if none does.
    :ivar heard: called when there are more of them, if set.
    """

    def __init__(self, asked: int, running: int) -> None:
        self.heard: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._pipe = asked
        self._running = mmap.mmap(running, CALL_NUMBER_BYTES)
        self._asked: set[int] = set()
        self._call = 0
        self._may = False  # Whether the call may be interrupted just now.
        signal.signal(INTERRUPT_SIGNAL, self._heard)

    def begin(self, call: int) -> None:
        """Begin a call; raise `CallInterrupted` if it is to be interrupted."""
        self._call = call
        self._running[:] = call.to_bytes(CALL_NUMBER_BYTES, "little")
        self._may = True
        self._raise_if_asked()

    def end(self) -> None:
        """End the call; again is no error."""
        self._may = False
        self._asked.discard(self._call)
        self._call = 0
        self._running[:] = bytes(CALL_NUMBER_BYTES)

    def shielded(self, send: Callable[[], None]) -> None:
        """Do what an interrupt must not cut in half, such as to send a message."""
        might, self._may = self._may, False
        try:
            send()
        finally:
            self._may = might
        self._raise_if_asked()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # A process that the user's code forked.
            return
        self.shielded(self.look)  # Another signal within it must not cost the numbers that were just read.

    def asked(self, call: int) -> bool:
        """Return whether a call is to be interrupted that runs beside others."""
        return call in self._asked

    def forget(self, call: int) -> None:
        """Forget such a call, which has ended."""
        self._asked.discard(call)

    def look(self) -> None:
        """Look which calls are to be interrupted."""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._pipe, 512 * CALL_NUMBER_BYTES):
                for at in range(0, len(block), CALL_NUMBER_BYTES):
                    self._asked.add(int.from_bytes(block[at : at + CALL_NUMBER_BYTES], "little"))
        if self.heard is not None:
            self.heard()

    def _raise_if_asked(self) -> None:
        if self._may and self._call in self._asked:
            self._may = False  # Once: what cleans up after it is not interrupted again.
            raise CallInterrupted("nobody waits for the answer of this call any more")


class CallTable:
    """Written by the library process.

    :param descriptor: of the memory, which grows as needed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._places: dict[int, int] = {}  # Call -> where its entry is.
        self._free: list[int] = []
        self._size = _HEADER
        self._turns = 0
        self._grow(_FIRST_PLACES)

    def _grow(self, places: int) -> None:
        begin, self._size = self._size, self._size + places * _ENTRY.size
        os.truncate(self._descriptor, self._size)
        self._memory = mmap.mmap(self._descriptor, self._size)
        self._free = list(range(self._size - _ENTRY.size, begin - 1, -_ENTRY.size))

    def begin(self, call: int, deadline: float | None) -> None:
        """Add a call, which times out then by the monotonic clock; never, if None."""
        if not self._free:
            self._grow(len(self._places))
        place = self._places[call] = self._free.pop()
        _ENTRY.pack_into(self._memory, place, call, math.inf if deadline is None else deadline)

    def end(self, call: int) -> None:
        """Remove a call."""
        place = self._places.pop(call)
        self._memory[place : place + _ENTRY.size] = _NONE
        self._free.append(place)

    def running(self, call: int) -> None:
        """Note whose code runs, 0 if none does."""
        self._memory[:CALL_NUMBER_BYTES] = call.to_bytes(CALL_NUMBER_BYTES, "little")

    def turn(self, begins: bool) -> None:
        """Note that the loop runs what is ready; or that it has, and waits."""
        self._turns += begins
        _WORD.pack_into(self._memory, CALL_NUMBER_BYTES, self._turns if begins else 0)


class RunningCalls(NamedTuple):
    """What a host reads; of a call that begins or ends just now it may be wrong.

    :ivar running: the call whose code runs, 0 if none's does.
    :ivar turn: of the loop, as a number; 0 while it waits, and without a loop.
    :ivar in_flight: calls that overlap -> when they time out, by the monotonic clock.
    """

    running: int
    turn: int
    in_flight: Mapping[int, float]


def read_calls(descriptor: int) -> RunningCalls:
    """Return what runs.

    >>> memory = os.memfd_create("calls")
    >>> os.truncate(memory, CALL_NUMBER_BYTES)
    >>> read_calls(memory)
    RunningCalls(running=0, turn=0, in_flight={})
    >>> table = CallTable(memory)
    >>> table.begin(7, 12.5), table.begin(8, None), table.end(7), table.running(8), table.turn(True)
    (None, None, None, None, None)
    >>> read_calls(memory)
    RunningCalls(running=8, turn=1, in_flight={8: inf})
    >>> os.close(memory)
    """
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    running = int.from_bytes(data[:CALL_NUMBER_BYTES], "little")
    if len(data) < _HEADER:
        return RunningCalls(running, 0, {})
    places = data[_HEADER : _HEADER + (len(data) - _HEADER) // _ENTRY.size * _ENTRY.size]
    in_flight = {call: deadline for call, deadline in _ENTRY.iter_unpack(places) if call}
    return RunningCalls(running, _WORD.unpack_from(data, CALL_NUMBER_BYTES)[0], in_flight)
