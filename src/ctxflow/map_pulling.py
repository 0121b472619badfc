"""How a map's inputs are pulled: on the thread that reads it, or, where they may keep it waiting, on one of their own.

So a generator may be slow, or wait for results of the very map that it feeds: the results that are there are yielded
meanwhile. What does not live here: when inputs are asked for, and submitted (mapping.py).
"""

from __future__ import annotations

import collections
import contextvars
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Inputs(Protocol):
    """The items that a map has yet to get.

    :ivar here: whether `take` waits for them itself.
    :ivar error: what they ended with, if it was no end.
    """

    here: bool
    error: BaseException | None

    @property
    def eager(self) -> bool:
        """Whether the map should ask whenever it can, not only when it has room for many."""

    def ask(self, count: int) -> None:
        """The map has room for so many."""

    def take(self, count: int, deadline: float) -> list[Any]:
        """Up to so many of them, fewer if time is up; none if nothing more comes for now."""

    def wait(self) -> bool:
        """Say whether the map is to look for more at once; else it is woken when something has come."""

    def settle(self, deadline: float) -> None:
        """Wait until what was asked for can be taken, as long as there is time."""

    @property
    def over(self) -> bool:
        """Whether all has been taken that there is."""

    def close(self) -> None:
        """Take no more; waits for nothing."""


class Here:
    """Items that are there, or are read from a file: they are pulled by whoever reads the map."""

    here = True

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.error: BaseException | None = None
        self.over = False
        self.eager = False  # They come so slowly that time was up.

    def ask(self, count: int) -> None:
        """Begin anew to see whether they come slowly."""
        self.eager = False

    def take(self, count: int, deadline: float) -> list[Any]:
        """Look at the clock ever more seldom while they come fast."""
        taken: list[Any] = []
        step = 1
        while len(taken) < count and not self.over and not self.eager:
            wanted, before = min(step, count - len(taken)), len(taken)
            try:
                taken.extend(itertools.islice(self._items, wanted))  # What came before an error stays.
            except Exception as error:
                self.error = error
            self.over = len(taken) < before + wanted
            self.eager = time.monotonic() > deadline
            step *= 2
        return taken

    def wait(self) -> bool:
        """Nobody wakes the map."""
        return self.eager

    def settle(self, deadline: float) -> None:
        """They are there."""

    def close(self) -> None:
        """Nothing is open."""


class Ahead:
    """Items that a thread takes from an iterator, as far ahead as the map asks, whose thread calls all but `close`.

    :param items: runs in the context variables of who makes this.
    :param wake: called when items have come that were waited for.
    """

    here = False

    def __init__(self, items: Iterator[Any], wake: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._items = items
        self._wake = wake
        self._come: collections.deque[Any] = collections.deque()
        self._given = 0  # To the map.
        self._asked = 0  # May have been taken, in all.
        self._over = False
        self._told = False  # That it is over.
        self._awaited = False
        self._paused = True
        self._resume: queue.SimpleQueue[None] = queue.SimpleQueue()  # Finalizers may put something there.
        self._settled = threading.Event()
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._take_all,), name="ctxflow-inputs", daemon=True)

    def ask(self, count: int) -> None:
        """Have up to so many taken beyond what the map has got."""
        self._asked = self._given + count
        if not self._thread.ident:
            self._thread.start()
        if self._paused and self._asked > self._given + len(self._come):
            self._resume.put(None)

    @property
    def eager(self) -> bool:
        """Whether not all has come, or been taken, that was asked for."""
        return not self._paused or bool(self._come) or self._over

    def settle(self, deadline: float) -> None:
        """Wait until all that was asked for has come, or no more will."""
        self._settled.wait(max(0.0, deadline - time.monotonic()))

    def take(self, count: int, deadline: float) -> list[Any]:
        """What has come, up to so many."""
        come = self._come
        taken = [come.popleft() for _ in range(min(count, len(come)))]
        self._given += len(taken)
        return taken

    def wait(self) -> bool:
        """Say whether something has come, or, once, that no more will; else have the map woken when it does."""
        self._awaited = True
        over, told = self._over, self._told
        self._told = over
        return bool(self._come) or (over and not told)

    @property
    def over(self) -> bool:
        """Whether all has been taken that there is."""
        return self._over and not self._come

    def close(self) -> None:
        """Take no more. Waits for nothing: an iterator that blocks keeps its thread until it goes on."""
        self._asked = -1
        self._resume.put(None)

    def _take_all(self) -> None:
        append, pulled = self._come.append, 0
        try:
            if not self._may_go_on(pulled):
                return
            for item in self._items:
                append(item)
                pulled += 1
                if self._awaited:
                    self._awaited = False
                    self._wake()
                if pulled >= self._asked and not self._may_go_on(pulled):
                    return
        except BaseException as error:  # It is the map's reader to whom it happens.
            self.error = error
        finally:
            self._items = iter(())  # Which closes a generator, on the thread that it ran on.
            self._over = True
            self._settled.set()
            self._wake()

    def _may_go_on(self, pulled: int) -> bool:
        """Wait until more is asked for; False if nothing ever will be."""
        while 0 <= self._asked <= pulled:
            if not self._settled.is_set():
                self._settled.set()
            self._paused = True
            if 0 <= self._asked <= pulled:
                self._resume.get()
            self._paused = False
        return self._asked >= 0
