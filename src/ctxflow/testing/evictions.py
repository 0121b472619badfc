"""Evictions as an opportunistic pool has them: a Poisson process that takes workers away, with or without notice."""

from __future__ import annotations

import random
import threading
from typing import Protocol


class Evictable(Protocol):
    """An engine that can lose a worker on purpose."""

    def evict(self, name: str | None = None, seconds: float | None = None, notice: float | None = None) -> str | None:
        """Take a worker away, at once or after notice; give its name, None if there was none."""

    def worker_pids(self) -> dict[str, int]:
        """The workers that are there."""


class _HasEngine(Protocol):
    engine: Evictable


class Evictions:
    """Evicts a random worker at random times while it is entered; each is replaced after a while.

    :param executor: whose workers.
    :param per_minute: evictions a minute, on average, over the whole pool.
    :param rejoin_seconds: how long an evicted worker's place stays empty.
    :param at_most: stop after so many.
    :param notice: seconds that a worker has to leave by itself; None to take it at once, without a word.
    :ivar count: evictions so far.

    >>> from ctxflow import ContextExecutor
    >>> with ContextExecutor(workers=1) as executor, Evictions(executor, per_minute=6000, at_most=1) as evictions:
    ...     executor.submit(sum, {}, range(5)).result()
    10
    """

    def __init__(
        self,
        executor: _HasEngine,
        per_minute: float,
        seed: int | None = None,
        rejoin_seconds: float = 0.5,
        at_most: int | None = None,
        notice: float | None = None,
    ) -> None:
        if per_minute < 0:
            raise ValueError("per_minute is how many workers are evicted a minute: give 0 or more")
        self.count = 0
        self._engine = executor.engine
        self._rate = per_minute / 60
        self._random = random.Random(seed)
        self._rejoin_seconds = rejoin_seconds
        self._at_most = at_most
        self._notice = notice
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._evict, name="ctxflow-evictions", daemon=True)

    def __enter__(self) -> Evictions:
        if self._rate:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _evict(self) -> None:
        while self._at_most is None or self.count < self._at_most:
            if self._stop.wait(self._random.expovariate(self._rate)):
                return
            workers = sorted(self._engine.worker_pids())
            if workers and self._engine.evict(self._random.choice(workers), self._rejoin_seconds, self._notice):
                self.count += 1
