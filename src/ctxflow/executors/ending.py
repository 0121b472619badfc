"""How a program leaves its executor: what is waited for, and what a person is told of that and of what was cancelled.

What does not live here: ending the run (run.py), and maps (mapping.py).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, Protocol

from parsl.dataflow.dflow import DataFlowKernel

from ctxflow.executors.status import Status
from ctxflow.wording import counted

_FIRST_SECONDS = 2.0  # A wait that is over by then needs no explanation.
_LONGEST_SECONDS = 60.0


class OpenMap(Protocol):
    """A map that goes on, as its executor sees it.

    :ivar finished: done when it is over.
    """

    finished: Future[int]

    def read_elsewhere(self, here: int) -> bool:
        """Whether a thread other than this one, by its identifier, reads it."""

    def release(self) -> None:
        """Tell who waits for the map as a whole, as Parsl does, not to wait any longer."""

    def cut(self) -> None:
        """Cancel what nobody has read; to read further raises `RunEnded`."""


def tell(text: str) -> None:
    """Write a line for the person at the terminal, wherever logging goes."""
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        print(f"ctxflow: {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is what this is for


def waiting_text(calls: int, maps: int, status: Status) -> str:
    """Return the line that says for what a program waits before it ends its workers."""
    what = [counted(calls, "call")] if calls else []
    what += [f"{counted(maps, 'map')} that another thread reads"] if maps else []
    workers = counted(status.workers, "worker") if status.workers else "no worker yet"
    return f"waiting for {' and '.join(what)} ({workers}); Ctrl-C cancels what is left"


def cancelled_text(calls: int, cause: str) -> str:
    """Return the line that says how many calls came to nothing, and why."""
    return f"{counted(calls, 'call')} cancelled before an answer came: {cause}"


def cause_of(error: BaseException | None) -> str:
    """Return why calls are cancelled, in words.

    >>> cause_of(KeyboardInterrupt())
    'the block ended with KeyboardInterrupt'
    """
    return "the executor was shut down" if error is None else f"the block ended with {type(error).__name__}"


class Teller:
    """Says for what is waited: after two seconds, and then ever more seldom, where it has changed."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _FIRST_SECONDS
        self._pause = 4 * _FIRST_SECONDS
        self._said = ""

    @property
    def seconds(self) -> float:
        """Return how long there is nothing to say."""
        return max(0.0, self._due - time.monotonic())

    def say(self, text: str) -> None:
        """Say it, if it is time and if it is new."""
        if self.seconds:
            return
        self._due = time.monotonic() + self._pause
        self._pause = min(_LONGEST_SECONDS, 2 * self._pause)
        if text != self._said:
            self._said = text
            tell(text)


def await_answers(
    calls: Callable[[], Sequence[Future[Any]]], maps: Callable[[], Sequence[Future[Any]]], status: Callable[[], Status]
) -> None:
    """Wait until no call is open and no map is read by another thread; callbacks may make new calls meanwhile.

    :param calls: gives the calls that are not answered.
    :param maps: gives, for each map that another thread reads, what is done when it is over.
    """
    teller = Teller()
    while awaited := calls() or maps():
        for future in awaited:  # One after the other: to wait for all would cost a visit to each every time.
            if not future.done():
                wait([future], timeout=max(0.05, min(teller.seconds, 1.0)))
            if not teller.seconds:
                teller.say(waiting_text(len(calls()), len(maps()), status()))
            if not future.done():
                break


class ParslWait:
    """A wait for all of Parsl's tasks, of which Parsl tells nobody: it is seen from the threads' stacks.

    :ivar thread: who waits, None if nobody does.
    :ivar leaving: whether that is the end of `with parsl.load()`.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.leaving = False
        self.teller = Teller()
        self._kernel: DataFlowKernel | None = None
        self._left = 0

    def look(self) -> None:
        """See who waits now; called once a second."""
        before, self.thread = self.thread, None
        own = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            at: FrameType | None = None if ident == own else frame
            for _ in range(8):
                if at is not None and at.f_code is _WAITS:
                    self.thread, self._left = ident, 0
                    self.leaving = at.f_back is not None and at.f_back.f_code is _LEAVES
                    self._kernel = at.f_locals["self"]
                at = at.f_back if at is not None else None
        if self.thread is not None and before is None:
            self.teller = Teller()

    def was_interrupted(self) -> DataFlowKernel | None:
        """Return the kernel whose end was waited for, if Ctrl-C ended that: Parsl leaves it running then.

        It takes two looks to be sure, since a wait that was over is followed by the end of the kernel.
        """
        kernel = self._kernel
        if self.thread is not None or not self.leaving or kernel is None or kernel.cleanup_called:
            return None
        self._left += 1
        if self._left < 3:
            return None
        self._kernel = None
        return kernel


_WAITS = DataFlowKernel.wait_for_current_tasks.__code__
_LEAVES = DataFlowKernel.__exit__.__code__
