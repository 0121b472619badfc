"""A map over many items: an iterator that feeds a run from iterables and yields results, in bounded memory.

What does not live here: what one call is (apps.py), and the file that keeps results (resume.py).
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow.errors import RunEnded
from ctxflow.executors.futures import Failed, Stream
from ctxflow.resume import ResultsFile

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp
    from ctxflow.executors.executor import ContextExecutor

_FEED = 1000
_LEAST_WINDOW = 20_000


class Mapped:
    """The results of a map: an iterator; see `BatchApp.map`.

    Inputs are pulled on the consumer's thread, up to a window of items that are on their way or wait for their
    turn. Closing it (or dropping it) cancels what is still queued.
    """

    def __init__(
        self,
        app: BatchApp,
        inputs: Sequence[Iterable[Any]],
        constants: Mapping[str, Any],
        executor: ContextExecutor,
        resume: str | None,
        on_error: str,
        order: str,
        window: int | None,
    ) -> None:
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error={on_error!r} is not known: write "raise" or "return"')
        if order not in ("input", "completed"):
            raise ValueError(f'order={order!r} is not known: write "input" or "completed"')
        if window is not None and window < 1:
            raise ValueError("window is how many items may be on their way: give 1 or more")
        self._run = executor.calls.run
        self._app = app.declare(self._run, constants)
        self._raises = on_error == "raise"
        self._items: Iterator[tuple[Any, ...]] = zip(*inputs, strict=False)
        self._stream = Stream()
        self._window = window or _LEAST_WINDOW
        self._pulled = 0  # Inputs taken from the iterables.
        self._waiting = 0  # Items submitted and not answered.
        self._buffered = 0  # Answered, but not yet yielded.
        self._exhausted = False
        self._spans: collections.deque[tuple[range, int]] = collections.deque()
        self.finished: Future[int] = Future()
        self._file = ResultsFile(resume, app, constants) if resume is not None else None
        executor.at_shutdown(_weakly(self))
        ordered = order == "input"
        try:
            self._feed()
        except BaseException:
            self.close()
            raise
        self._results = self._ordered() if ordered else self._completed()

    def __iter__(self) -> Mapped:
        return self

    def __next__(self) -> Any:
        return next(self._results)

    def close(self) -> None:
        """Stop: cancel what is queued, keep what is done."""
        results = getattr(self, "_results", None)
        if results is not None:
            results.close()
        self._end()

    def __del__(self) -> None:
        if hasattr(self, "finished") and not self.finished.done():
            self._end()

    # --- feeding

    def _feed(self) -> None:
        """Submit inputs until the window is full."""
        while not self._exhausted and self._waiting + self._buffered < self._window:
            count = min(_FEED, self._window - self._waiting - self._buffered)
            inputs = list(itertools.islice(self._items, count))
            if len(inputs) < count:
                self._exhausted = True
            first = self._pulled
            self._pulled += len(inputs)
            if self._file is None:
                self._submit(inputs, first)
            else:
                self._submit_missing(inputs, first, self._file)

    def _submit(self, inputs: Sequence[Any], first: int) -> None:
        if inputs:
            self._waiting += len(inputs)
            self._run.submit(self._app, inputs, self._stream, lambda items: self._spans.append((items, first)))

    def _submit_missing(self, inputs: Sequence[Any], first: int, file: ResultsFile) -> None:
        """Submit what the file does not hold; runs of missing items go together."""
        missing: list[Any] = []
        for index, item in enumerate(inputs, first):
            if file.holds(index, item):
                self._submit(missing, index - len(missing))
                missing = []
            else:
                missing.append(item)
        self._submit(missing, first + len(inputs) - len(missing))

    # --- answers

    def _arrived(self) -> Iterator[tuple[int, Any]]:
        """Answers that are there, after waiting for some: (index, result or Failed)."""
        arrived = self._stream.take(timeout=None)
        for items, results in arrived:
            self._waiting -= len(items)
            indices = self._indices(items)
            if self._file is not None:
                self._file.add(indices, results)
            yield from zip(indices, results, strict=True)

    def _indices(self, items: Sequence[int]) -> Sequence[int]:
        """The indices of items: they were submitted in spans of consecutive numbers."""
        first, last = items[0], items[-1]
        for numbers, start in self._spans:
            if first in numbers and last in numbers:
                offset = start - numbers.start
                if len(items) == last - first + 1 and isinstance(items, (range, tuple, list)):
                    consecutive = range(first + offset, last + offset + 1)
                    if last - first < 2 or list(items) == list(range(first, last + 1)):
                        return consecutive
                return [item + offset for item in items]
        return [self._index(item) for item in items]

    def _index(self, item: int) -> int:
        for numbers, start in self._spans:
            if item in numbers:
                return item - numbers.start + start
        raise LookupError(f"item {item} is none of this map's")

    def _forget_spans(self, below: int) -> None:
        """Spans whose results were all yielded are of no more use."""
        while self._spans and self._spans[0][1] + len(self._spans[0][0]) <= below:
            self._spans.popleft()

    def _value(self, index: int, result: Any) -> Any:
        if type(result) is Failed:
            if self._raises or isinstance(result.error, RunEnded):
                raise result.error
            return result.error
        return result

    def _ordered(self) -> Iterator[Any]:
        try:
            ready: dict[int, Any] = {}
            index = 0
            while True:
                if self._waiting + self._buffered <= self._window - min(_FEED, self._window):
                    self._feed()
                while index < self._pulled:
                    if index in ready:
                        result = ready.pop(index)
                        self._buffered -= 1
                        yield self._value(index, result)
                    elif self._file is not None and self._file.skips(index):
                        yield self._file.read(index)
                    else:
                        break
                    index += 1
                self._forget_spans(index)
                if index == self._pulled:
                    if self._exhausted:
                        return
                    self._feed()
                    continue
                before = len(ready)
                ready.update(self._arrived())
                self._buffered += len(ready) - before
        finally:
            self._end()

    def _completed(self) -> Iterator[tuple[int, Any]]:
        try:
            yielded = 0
            while True:
                self._feed()
                if self._file is not None:
                    while yielded < self._pulled:
                        if self._file.skips(yielded):
                            yield yielded, self._file.read(yielded)
                        yielded += 1
                if self._exhausted and not self._waiting:
                    return
                if self._waiting:
                    for index, result in self._arrived():
                        yield index, self._value(index, result)
        finally:
            self._end()

    def _end(self) -> None:
        """Cancel what is left, and say that the map is over."""
        if self.finished.done():
            return
        self.finished.set_result(self._pulled)
        if self._waiting:
            done = [range(items.start, items.stop) for items, _ in self._spans]
            self._run.cancel([item for items in done for item in items])
        if self._file is not None:
            self._file.close()

    def _shut(self) -> None:
        """The executor was shut down; whoever waits has been told by the run."""
        if not self.finished.done():
            self.finished.set_result(self._pulled)


def _weakly(mapped: Mapped) -> Callable[[], None]:
    """Shut a map if somebody still holds it."""
    reference = weakref.ref(mapped)

    def shut() -> None:
        held = reference()
        if held is not None:
            held._shut()

    return shut
