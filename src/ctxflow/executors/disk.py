"""What a run writes as it goes, on a thread of its own: a disk that stalls stops no submission and no answer.

What does not live here: what is written (event_log.py, run_status.py).
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from ctxflow.process_identity import belongs_here

logger = logging.getLogger("ctxflow")
_END_SECONDS = 30.0


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

    def close(self, seconds: float = _END_SECONDS) -> bool:
        """Wait until all is done, but not for ever; says whether it is. What is given from now on is not done."""
        if self._thread is None:
            self._closed = True
            return True
        if not self._closed:  # Else somebody has waited for long enough.
            self._closed = True
            self._there.release()
            self._thread.join(seconds)
        return not self._thread.is_alive()
