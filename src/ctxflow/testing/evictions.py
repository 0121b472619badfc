"""Play a batch system in tests: evict workers at random times, and wait for what a provider reports of its jobs."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Protocol

from ctxflow.factory.provider import JobChange, Provider

_NOBODY_SECONDS = 0.01  # Between two looks for a worker.


def patience(seconds: float) -> float:
    """Return a time-out, multiplied by the environment variable CTXFLOW_TEST_PATIENCE where that is set."""
    return seconds * float(os.environ.get("CTXFLOW_TEST_PATIENCE") or 1.0)


class Evictable(Protocol):
    """An engine that can lose a worker on purpose."""

    def evict(self, name: str | None = None, seconds: float | None = None, notice: float | None = None) -> str | None:
        """Evict a worker, at once or after notice; return its name, None if there was none."""

    def worker_pids(self) -> dict[str, int]:
        """Return the workers that are there."""


class _HasEngine(Protocol):
    engine: Evictable


class Evictions:
    """Evict a random worker of an executor at random times (a Poisson process) while it is entered.

    An eviction that is due while no worker is there is that of the next that comes.

    :param per_minute: evictions a minute, on average, over the whole pool.
    :param rejoin_seconds: how long an evicted worker's place stays empty.
    :param at_most: stop after so many.
    :param notice: seconds that a worker has to leave by itself; None to evict it without notice.
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
        self._engine, self._rate, self._random = executor.engine, per_minute / 60, random.Random(seed)
        self._rejoin_seconds, self._at_most, self._notice = rejoin_seconds, at_most, notice
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
            while not self._evict_one():
                if self._stop.wait(_NOBODY_SECONDS):
                    return
            self.count += 1

    def _evict_one(self) -> bool:
        workers = sorted(self._engine.worker_pids())
        return bool(workers and self._engine.evict(self._random.choice(workers), self._rejoin_seconds, self._notice))


class JobWatch:
    """A provider, and the changes that it reported and `until` did not return yet.

    >>> class Told:
    ...     def changes(self):
    ...         return [JobChange("1.0", "running"), JobChange("1.1", "held", "no memory")]
    >>> watch = JobWatch(Told())
    >>> watch.until("1.1", "held").reason
    'no memory'
    >>> [(change.job, change.state) for change in watch.changes]
    [('1.0', 'running')]
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.changes: list[JobChange] = []

    def until(self, job: str, *states: str, limit: float = 60.0) -> JobChange:
        """Return the first new change of a job to one of some states; AssertionError after `patience(limit)`."""
        deadline = time.monotonic() + patience(limit)
        while True:
            self.changes += self.provider.changes()
            for place, change in enumerate(self.changes):
                if change.job == job and change.state in states:
                    self.changes[: place + 1] = [each for each in self.changes[:place] if each.job != job]
                    return change
            assert time.monotonic() < deadline, f"{job} was never {' or '.join(states)}: {self.changes}"
            time.sleep(0.02)
