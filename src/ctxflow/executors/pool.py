"""A run as a `concurrent.futures.Executor`, for code that takes one: `asyncio`, libraries, programs that had a pool.

What does not live here: how a call is made (submission.py).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import Any, TypeVar

from ctxflow.errors import RunEnded
from ctxflow.executors.submission import CallOptions, Calls
from ctxflow.option_values import whole

Result = TypeVar("Result")


class Pool(Executor):
    """Calls of any functions on a run's workers, as any executor of `concurrent.futures` makes them.

    When it is shut down its calls are waited for; the run goes on. A call can be cancelled also while it runs.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._ended = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Make one call; its result comes in a future.

        :raises RuntimeError: after `shutdown`, or when the run has ended.
        :raises TypeError: if the function or an argument cannot be pickled, naming it.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown: make another with executor.pool()")
            try:
                future = self._calls.call(fn, args, kwargs, CallOptions())
            except RunEnded as error:
                raise RuntimeError(f"cannot schedule new futures: {error}") from error
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def map(
        self,
        fn: Callable[..., Result],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Result]:
        """Return the results of many calls, in order. All inputs are read at once; the `map` of a `batch_app` reads on.

        :param timeout: seconds from now by which each result has to be there.
        :param chunksize: how many calls go to a worker together.
        :raises TimeoutError: when one is asked for that has not come in time; calls that were not begun are cancelled
            then, as they are when a call raises.
        """
        whole("chunksize", chunksize, "how many calls go to a worker together, 1 or more", 1)
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = super().map(
            functools.partial(_call_each, fn), _chunks(zip(*iterables, strict=False), chunksize), timeout=timeout
        )
        return _joined(chunks)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        :param wait: whether to return only when all its calls are done.
        :param cancel_futures: whether to cancel those that are not.
        """
        with self._lock:
            self._ended = True
            left = list(self._open)
        if cancel_futures:
            for future in left:
                future.cancel()
        if wait:
            _wait(left)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for its calls; Ctrl-C and `sys.exit` cancel them, also those that run."""
        self.shutdown(cancel_futures=kind is not None and not issubclass(kind, Exception))


_wait = wait


def _chunks(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(itertools.islice(calls, size)):
        yield chunk


def _call_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for args in chunk]


def _joined(chunks: Iterator[list[Result]]) -> Iterator[Result]:
    for chunk in chunks:
        yield from chunk
