"""Callbacks of futures, run beside the run itself: whatever one waits for, answers go on coming.

What does not live here: futures (futures.py), and when they are answered (run.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from ctxflow.forks import belongs_here

logger = logging.getLogger("ctxflow")
_PATIENCE = 0.05  # How long a callback may take before the next one gets a thread of its own.
_END_SECONDS = 5.0

Callback: TypeAlias = Callable[["Future[Any]"], object]


class Callbacks:
    """Runs callbacks in the order in which their futures were answered, one after the other.

    One that blocks holds up the next for a moment: then another thread goes on with those. So a callback may wait for
    any other future.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callback, Future[Any]] | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._idle: set[threading.Thread] = set()
        self._begun = 0.0  # When the last one began.
        self._stopped = False
        self._lock = threading.Lock()
        belongs_here(self)

    def put(self, callback: Callback, future: Future[Any]) -> None:
        """Run a callback soon; at once where the run has ended."""
        if self._stopped:
            _run(callback, future)
            return
        self._queue.put((callback, future))
        if not self._idle:
            self.look()

    def look(self, timeout: float = 0.0) -> float:
        """Start another thread if callbacks wait and none has begun for a moment.

        :param timeout: how long it is until this is called again.
        :returns: how long that may be at most.
        """
        if self._idle or self._queue.empty():
            return timeout
        if time.monotonic() - self._begun >= _PATIENCE:
            self._start()
        return min(timeout, _PATIENCE)

    def _start(self) -> None:
        with self._lock:
            if not self._stopped:
                self._begun = time.monotonic()
                thread = threading.Thread(target=self._work, name="ctxflow-callbacks", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _work(self) -> None:
        own = threading.current_thread()
        get, idle = self._queue.get, self._idle
        while True:
            idle.add(own)
            entry = get()
            idle.discard(own)
            if entry is None:
                break
            self._begun = time.monotonic()
            _run(*entry)
            if len(self._threads) > 1 and self._may_leave(own):
                return
        self._threads.discard(own)

    def _may_leave(self, thread: threading.Thread) -> bool:
        """Whether a thread is one too many: it, or another, came for a callback that blocked and goes on by now."""
        with self._lock:
            leaves = len(self._threads) > 1 and self._queue.empty()
            if leaves:
                self._threads.discard(thread)
        return leaves

    def flush(self) -> None:
        """Wait until all callbacks so far have begun."""
        done = threading.Event()
        if self._threads:
            self._queue.put((lambda _: done.set(), Future()))
            while not done.wait(_PATIENCE):
                self.look()

    def stop(self) -> None:
        """Wait for the callbacks, a few seconds at most."""
        deadline = time.monotonic() + _END_SECONDS
        with self._lock:
            threads = list(self._threads)
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                while thread.is_alive() and time.monotonic() < deadline:
                    thread.join(_PATIENCE)
                    self.look()
        self._stopped = True

    def forked(self) -> None:
        """Have no threads, in a child."""
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads, self._idle = set(), set()
        self._stopped = True


def _run(callback: Callback, future: Future[Any]) -> None:
    try:
        callback(future)
    except Exception:
        logger.exception("a callback of a future raised")
