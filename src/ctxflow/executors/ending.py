"""How a program leaves its executor: what is waited for, and what a person is told of that and of what was cancelled.

What does not live here: ending the run (run.py), and maps (mapping.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from ctxflow.executors.run.figures import Status
from ctxflow.terminal import timed, visible
from ctxflow.wording import counted

_FIRST_SECONDS = 2.0  # A wait that is over by then needs no explanation.
_LONGEST_SECONDS = 60.0


class OpenMap(Protocol):
    """A map that goes on, as its executor sees it.

    :ivar finished: done when it is over.
    """

    finished: Future[int]

    def read_elsewhere(self, here: int) -> bool:
        """Return whether a thread other than this one, by its identifier, reads it."""

    def release(self) -> None:
        """Tell who waits for the map as a whole, as Parsl does, not to wait any longer."""

    def cut(self) -> None:
        """Cancel what nobody has read; to read further raises `RunEnded`."""


def tell(text: str) -> None:
    """Write a line for the person at the terminal, wherever logging goes."""
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        print(timed(f"ctxflow: {visible(text)}"), file=sys.stderr, flush=True)  # noqa: T201 - it is what this is for


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
