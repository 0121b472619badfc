"""The threads of a run: one leads its loop and runs the callbacks of futures; where one blocks, another takes the lead.

A thread of their own for callbacks would cost each call two more switches between threads, a tenth of its time. What
does not live here: futures (futures.py), what the loop does, and when futures are answered (run.py).
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from ctxflow.process_identity import belongs_here

logger = logging.getLogger("ctxflow")
_PATIENCE = 0.05  # How long a callback may take before another thread goes on with the loop.
_END_SECONDS = 5.0

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
            self._ended.wait(_PATIENCE)
            with self._lead:
                if time.monotonic() - self._begun >= _PATIENCE and not self._ended.is_set():
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
        deadline = time.monotonic() + _END_SECONDS
        self.flush(_END_SECONDS)
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
