"""The threads of a run: one leads its loop and runs callbacks, one writes to the disk, and Ctrl-C waits for changes.

The leading thread runs the callbacks of futures between turns of the loop; where one blocks, another takes the lead. A
thread of their own for callbacks would cost each call two more switches between threads, a tenth of its time. Files are
written on another thread, so that a disk that stalls stops no submission and no answer. And Ctrl-C must not fall in the
middle of a change, since a person in a notebook interrupts a cell and goes on. What does not live here: what the loop
does, and when futures are answered (live_run.py).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.signal` takes five times as long: it makes enumerations.
import collections
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from signal import SIGINT
from typing import Any, ParamSpec, TypeAlias, TypeVar

from ctxflow.process_identity import Process, belongs_here

logger = logging.getLogger("ctxflow")
_CALLBACK_SECONDS = 0.05  # How long a callback may take before another thread goes on with the loop.
_LEFT_SECONDS = 5.0  # How long callbacks have at the end of a run.
_DISK_SECONDS = 30.0  # How long the disk has then.
_INTERRUPT_SECONDS = 2.0  # How long after the first an interrupt is raised at once.

P = ParamSpec("P")
R = TypeVar("R")
Callback: TypeAlias = Callable[["Future[Any]"], object]


class Callbacks:
    """Runs callbacks in the order in which their futures were answered, one after the other, between turns of a loop.

    One that blocks holds up the loop and the next callback for a moment: then another thread goes on with both. So a
    callback may wait for any other future. A thread that has lost the lead stays until the end, for the processes that
    it forked would die with it; it is the next to lead where one is needed.

    :param loop: what the leading thread does; it calls `run` now and then, and returns once that says False.
    :param wake: has the loop soon call `run`; called on any thread.
    """

    def __init__(self, loop: Callable[[], None], wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._queue: collections.deque[tuple[Callback, Future[Any]]] = collections.deque()
        self._lead = threading.Condition()
        self._leader: int | None = None  # The identity of the thread that leads.
        self._followers = 0
        self._threads: list[threading.Thread] = []
        self._begun = math.inf  # When the callback began that the leader runs.
        self._waiting = threading.Event()  # For who leads when the loop is over: there are callbacks.
        self._armed = threading.Event()  # For who watches: there have been callbacks.
        self._watches = False
        self._ended = threading.Event()
        belongs_here(self)

    def start(self) -> None:
        """Begin the loop."""
        with self._lead:
            self._start(self._work, "ctxflow-run")

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def started(self) -> bool:
        """Whether there are threads."""
        return bool(self._threads)

    @property
    def leads(self) -> bool:
        """Whether it is the leading thread that asks."""
        return self._leader == threading.get_ident()

    def put(self, callback: Callback, future: Future[Any]) -> None:
        """Run a callback soon; at once where the run has ended."""
        if self._ended.is_set():
            _run(callback, future)
            return
        self._queue.append((callback, future))
        if not self._armed.is_set():
            self._arm()
        if self._leader != threading.get_ident():
            self._waiting.set()
            self._wake()

    def run(self) -> bool:
        """Run the callbacks that wait, on the leading thread.

        :returns: whether it leads still, and the run goes on.
        """
        own, queue, lead = threading.get_ident(), self._queue, self._lead
        while queue:
            callback, future = queue.popleft()
            self._begun = time.monotonic()
            _run(callback, future)
            with lead:
                if self._leader != own:
                    return False
                self._begun = math.inf
        return not self._ended.is_set()

    # --- the threads

    def _work(self) -> None:
        while self._leads_next():
            self._loop()
            while self.leads and self.run():  # The loop is over; callbacks of what its end answered are not.
                self._waiting.wait()
                self._waiting.clear()

    def _leads_next(self) -> bool:
        """Wait until nobody leads, and lead; False when all is over."""
        with self._lead:
            self._followers += 1
            while self._leader is not None and not self._ended.is_set():
                self._lead.wait()
            self._followers -= 1
            if not self._ended.is_set():
                self._leader = threading.get_ident()
            return not self._ended.is_set()

    def _arm(self) -> None:
        self._armed.set()
        with self._lead:
            if not self._watches:
                self._watches = True
                self._start(self._watch, "ctxflow-watch")

    def _watch(self) -> None:
        """Take the lead from a thread whose callback blocks. It sleeps while there are no callbacks."""
        while not self._ended.is_set():
            if self._begun == math.inf:
                self._armed.wait()
                self._armed.clear()
            self._ended.wait(_CALLBACK_SECONDS)
            with self._lead:
                if time.monotonic() - self._begun >= _CALLBACK_SECONDS and not self._ended.is_set():
                    self._leader, self._begun = None, math.inf
                    if self._followers:
                        self._lead.notify()
                    else:
                        self._start(self._work, "ctxflow-run")

    # --- the end

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all callbacks so far have begun."""
        if self._threads:
            begun = threading.Event()
            self.put(lambda _: begun.set(), Future())
            begun.wait(seconds)

    def stop(self) -> None:
        """Wait for the callbacks, a few seconds at most, and end the threads. The loop is over."""
        deadline = time.monotonic() + _LEFT_SECONDS
        self.flush(_LEFT_SECONDS)
        with self._lead:
            self._ended.set()
            self._lead.notify_all()
        self._waiting.set()
        self._armed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def forked(self) -> None:
        """Have no threads, in a child."""
        self._lead = threading.Condition()
        self._ended = threading.Event()
        self._ended.set()
        self._queue.clear()
        self._threads = []


def _run(callback: Callback, future: Future[Any]) -> None:
    try:
        callback(future)
    except (Exception, SystemExit):
        logger.exception("a callback of a future raised")


class DiskThread:
    """Does what it is given in order; begins with the first of it, and ends with `close`.

    What is given waits in memory as long as the disk stalls.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._there = threading.Semaphore(0)
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        belongs_here(self)

    def forked(self) -> None:
        """Do nothing in a child: what waits is its parent's to do."""
        self._waiting.clear()
        self._thread, self._closed, self._beginning = None, True, threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def give(self, action: Callable[[], None]) -> None:
        """Have something done soon; what it raises is logged."""
        if self._closed:
            return
        if self._thread is None:
            with self._beginning:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="ctxflow-disk", daemon=True)
                    self._thread.start()
        self._waiting.append(action)
        self._there.release()

    def _work(self) -> None:
        while True:
            self._there.acquire()
            if not self._waiting:
                return
            try:
                self._waiting[0]()
            except Exception:
                logger.exception("a run's file cannot be written")
            self._waiting.popleft()

    def close(self, seconds: float = _DISK_SECONDS) -> bool:
        """Wait until all is done, but not for ever; says whether it is. What is given from now on is not done."""
        if self._thread is None:
            self._closed = True
            return True
        if not self._closed:  # Else somebody has waited for long enough.
            self._closed = True
            self._there.release()
            self._thread.join(seconds)
        return not self._thread.is_alive()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Have a short function finish before an interrupt is raised.

    Should it not be short, an interrupt that comes seconds after the first is raised at once.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != Process.main_thread:
            return function(*args, **kwargs)  # Interrupts come to the main thread.
        caught: list[float] = []

        def note(number: int, frame: Any) -> None:
            caught.append(time.monotonic())
            if caught[-1] - caught[0] > _INTERRUPT_SECONDS and callable(handler):
                handler(number, frame)

        handler = _signal.signal(SIGINT, note)
        if not callable(handler):
            _signal.signal(SIGINT, handler if handler is not None else _signal.SIG_DFL)
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if caught:
                handler(SIGINT, None)

    return guarded
