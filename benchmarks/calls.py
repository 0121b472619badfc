"""The loops that send calls to an executor, whichever it is: how many a second, and how long each takes.

What does not live here: the executors (dispatch.py, dispatch_taskvine.py).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

WORKERS = 2

Submit = Callable[[int], "Future[Any]"]
"""Submits the no-op with this value."""


def calls_per_second(submit: Submit, seconds: float) -> float:
    """One call in flight per worker, the next one submitted when one ends."""
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    count = 0
    started = time.perf_counter()
    for number in range(WORKERS):
        submit(number).add_done_callback(ended.put)
    while time.perf_counter() < started + seconds:
        ended.get().result()
        count += 1
        submit(count).add_done_callback(ended.put)
    elapsed = time.perf_counter() - started
    for _ in range(WORKERS):
        ended.get().result()
    return count / elapsed


def latencies(submit: Submit, calls: int, progress: Callable[[int], None]) -> list[float]:
    """Seconds from each call's submission to its end, in order of size, with one in flight per worker.

    :param progress: told now and then how many have ended.
    """
    ended: queue.SimpleQueue[tuple[float, float, Future[Any]]] = queue.SimpleQueue()

    def send(number: int) -> None:
        started = time.perf_counter()
        submit(number).add_done_callback(lambda future: ended.put((started, time.perf_counter(), future)))

    taken: list[float] = []
    for number in range(WORKERS):
        send(number)
    for number in range(WORKERS, calls + WORKERS):
        started, finished, future = ended.get()
        future.result()
        taken.append(finished - started)
        if number < calls:
            send(number)
        if number % 2000 == 0:
            progress(number)
    return sorted(taken)


def percentile(ordered: list[float], percent: float) -> float:
    """The smallest value that so many of a hundred do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 99.9)
    (2.0, 4.0)
    """
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
