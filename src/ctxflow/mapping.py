"""The work of a map: it feeds a run from its inputs and gives results, in bounded memory."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow.errors import CtxflowError, RunEnded, add_note, counted, short
from ctxflow.executors.pending import Failed, Spans, Stream
from ctxflow.map_inputs import Ahead, Aside, Here, MapInputs, may_hold_futures
from ctxflow.ownership import foreign_text
from ctxflow.resume import ResultsFile

if TYPE_CHECKING:
    from ctxflow.executors.declarations import Declaration
    from ctxflow.executors.live_run import LiveRun

_FEED = 1000  # Items that are submitted together.
_FEED_SECONDS = 0.05
_OPEN_WITHIN = (
    "iterators are taken on a thread of their own: open what belongs to one thread inside of the generator, as in "
    "def rows(): yield from sqlite3.connect(path).execute(query)"
)
_READER_SECONDS = 60.0  # So long after it took results, a thread is taken to read a map on.
_NONE = object()
NOTHING_YET = object()


class MapWork:
    """The work of a map. Nothing in it refers to the `MapResult` that people hold, so that dropping that ends it."""

    def __init__(
        self,
        run: LiveRun,
        app: Declaration,
        through: MapInputs,
        raises: bool,
        window: int,
        file: ResultsFile | None,
        called: str,
    ) -> None:
        self.called = called
        self.at_end: Callable[[], None] = lambda: None
        self._run = run
        self._app = app
        self._raises = raises
        self._stream = Stream()
        wake = functools.partial(self._stream.deliver, (), ())
        self._inputs = Ahead(through.items, wake) if through.may_wait else Here(through.items)
        self._window = window
        self._chunk = max(1, min(_FEED, window // 4))
        self._pulled = 0  # Inputs taken from the iterables.
        self._waiting = 0  # Items submitted and not answered.
        self._buffered = 0  # Answered (or in the file), but not yet yielded.
        self._unusable: dict[int, Failed] = {}  # Rows that failed before they were items, not yet yielded.
        self._aside = Aside(wake)  # Items that wait for futures among their values.
        self._ended = False
        self._spans = Spans()
        self.answered: Counter[str] = Counter()  # Items by context, of an app with alternatives.
        self._file = file
        self._held: list[tuple[int, Any]] = []  # Arrived while the executor ended, and not yet taken.
        self._reader: threading.Thread | None = None
        self._read_at = 0.0  # When that read last; without end while it waits for results.
        self.finished: Future[int] = Future()
        self.forget: Callable[[], object] = lambda: None  # Has the executor forget this map.

    def begin(self) -> None:
        """Submit the first inputs."""
        try:
            self._feed()
        except BaseException:
            self.end()
            raise

    def answered_items(self) -> int:
        """Return how many items have an answer, of this run or an earlier one."""
        return self._pulled - self._waiting - len(self._aside.waiting)

    def is_over(self) -> bool:
        """Return whether it has ended: done, closed, or its executor was shut down."""
        return self._ended or self.finished.done()

    # --- feeding

    def _feed(self) -> None:
        """Submit inputs until the window is full; where they come slowly, those that have come."""
        deadline = time.monotonic() + _FEED_SECONDS
        while (room := self._window - self._waiting - self._buffered - len(self._aside.waiting)) > 0:
            inputs = self._inputs.take(room, self._chunk, deadline)
            if not inputs:
                return
            first = self._pulled
            self._pulled += len(inputs)
            waits = may_hold_futures(inputs)
            plain = self._file is None and waits is False
            for items, index in [(inputs, first)] if plain else self._missing(inputs, first, waits):
                self._waiting += len(items)
                self._run.submit(self._app, items, self._stream, functools.partial(self._spans.add, first=index))

    def _missing(self, inputs: Sequence[Any], first: int, waits: bool | None) -> Iterator[tuple[Sequence[Any], int]]:
        """Yield runs of items that can be submitted and are not in the file, each with its first index."""
        missing: list[Any] = []
        for index, given in enumerate(inputs, first):
            item = self._aside.put(index, given) if waits and type(given) is not Failed else given
            if item is not None and not self._is_answered(index, item):
                missing.append(item)
                continue
            self._buffered += item is not None
            if missing:
                yield missing, index - len(missing)
                missing = []
        if missing:
            yield missing, first + len(inputs) - len(missing)

    def _is_answered(self, index: int, item: Any) -> bool:
        """Return whether nothing is to be run for an item: it failed as a row, or the file has its result."""
        if type(item) is Failed:
            self._unusable[index] = item
            return True
        return self._file is not None and self._file.holds(index, item)

    # --- answers

    def _arrived(self) -> list[tuple[int, Any]]:
        """Take answers that are there: (index, result or Failed). The file has them first."""
        arrived, self._held = self._held, []
        if arrived:
            return arrived
        stream = self._stream
        while stream.arrived:
            items, results = stream.arrived.popleft()
            if not items:  # Somebody has woken this thread.
                continue
            self._waiting -= len(items)
            if stream.contexts:
                self.answered.update(filter(None, (stream.contexts.pop(item, None) for item in items)))
            arrived += zip(self._spans.indices(items), results, strict=True)
        if self._file is not None:
            self._file.add(arrived)
        return arrived

    def wait(self) -> None:
        """Wait for an answer, if there is nothing else to do.

        :raises CtxflowError: in a forked child, which gets none.
        """
        if self._run.is_copy:
            raise CtxflowError(foreign_text("this map's executor"))
        self._reader, self._read_at = threading.current_thread(), math.inf
        try:
            if not self._inputs.wait():
                self._stream.wait()
        finally:
            self._read_at = time.monotonic()

    async def arrival(self) -> None:
        """Wait for an answer in a coroutine, as `wait` does."""
        if self._run.is_copy:
            raise CtxflowError(foreign_text("this map's executor"))
        self._reader, self._read_at = threading.current_thread(), math.inf
        try:
            if self._inputs.wait():
                await asyncio.sleep(0)
            else:
                await self._stream.arrival()
        finally:
            self._read_at = time.monotonic()

    def _ready(self) -> list[tuple[int, Any]]:
        """Submit the items whose futures are done; gives those that need not be."""
        answered: list[tuple[int, Any]] = []
        for index, item in self._aside.ready():
            if isinstance(item, Failed):
                answered.append((index, item))
            elif self._file is not None and self._file.holds(index, item):
                answered.append((index, self._file.read(index)))
            else:
                self._waiting += 1
                self._run.submit(self._app, [item], self._stream, functools.partial(self._spans.add, first=index))
        return answered

    def _known(self, index: int) -> Any:
        """Return the answer of an item that was answered before it was run, `_NONE` if it was not."""
        if self._file is not None and self._file.skips(index):
            self._buffered -= 1
            return self._file.read(index)
        if index in self._unusable:
            self._buffered -= 1
            return self._unusable.pop(index)
        return _NONE

    def _failure(self, index: int, failed: Failed) -> BaseException:
        """Return the error of an item, which says which it was.

        :raises BaseException: that error, if the map raises errors or its run has ended.
        """
        if failed.item:
            add_note(failed.error, f"item {index} of {self.called}.map: {', '.join(map(short, failed.item))}")
        if self._raises or isinstance(failed.error, RunEnded):
            raise failed.error
        return failed.error

    def ordered(self) -> Iterator[Any]:
        """Yield results in the order of the inputs; `NOTHING_YET` where one has to be waited for."""
        try:
            ready: dict[int, Any] = {}
            index = 0
            while True:
                on_hand = self._waiting + self._buffered + len(self._aside.waiting)
                if self._inputs.eager or on_hand <= self._window - self._chunk:
                    self._feed()
                end = min(self._pulled, index + self._chunk)  # Then the window is refilled, whatever is ready.
                while index < end:
                    if index in ready:
                        result = ready.pop(index)
                        self._buffered -= 1
                    elif (not self._file and not self._unusable) or (result := self._known(index)) is _NONE:
                        break
                    yield result if type(result) is not Failed else self._failure(index, result)
                    index += 1
                if index == end < self._pulled:
                    continue
                if index == self._pulled:
                    if self._inputs.over:
                        self._raise_input_error()
                        return
                    self._feed()
                    if self._inputs.here or self._inputs.over or index < self._pulled:
                        continue
                before = len(ready)
                ready.update(self._arrived())
                if self._aside.waiting:
                    ready.update(self._ready())
                self._buffered += len(ready) - before
                if len(ready) == before:
                    yield NOTHING_YET
        finally:
            self.end()

    def completed(self) -> Iterator[Any]:
        """Yield pairs (index, result) as they come, and `NOTHING_YET` likewise."""
        try:
            yielded = 0
            while True:
                self._feed()
                while yielded < self._pulled:
                    if (known := self._known(yielded)) is not _NONE:
                        yield yielded, known if type(known) is not Failed else self._failure(yielded, known)
                    yielded += 1
                if self._inputs.over and not self._waiting and not self._aside.waiting:
                    self._raise_input_error()
                    return
                if self._waiting or self._aside.waiting or not self._inputs.here:
                    come = self._arrived()
                    if self._aside.waiting:
                        come += self._ready()
                    if not come:
                        yield NOTHING_YET
                    self._buffered += len(come)
                    for number, (index, result) in enumerate(come, 1):
                        self._buffered -= 1
                        if number % self._chunk == 0:
                            self._feed()
                        yield index, result if type(result) is not Failed else self._failure(index, result)
        finally:
            self.end()

    def _raise_input_error(self) -> None:
        """Raise what the inputs have raised, now that all that came before it is yielded."""
        error = self._inputs.error
        if error is not None:
            add_note(error, f"raised by the inputs of {self.called}.map, after {counted(self._pulled, 'item')}")
            if not self._inputs.here and "thread" in str(error):  # As sqlite3 says it of a connection.
                add_note(error, _OPEN_WITHIN)
            raise error

    def end(self) -> None:
        """Cancel what is left, and say that the map is over."""
        if not self._ended:
            try:
                self._finish()
            finally:
                self._cancel()
                self.at_end()

    def drop(self) -> None:
        """End the map from a finalizer, which must wait for no lock: the run's thread does what needs one."""
        if not self._ended:
            try:
                self._finish()
            finally:
                self._run.soon(self._cancel)

    def _finish(self) -> None:
        """Keep what has arrived and close the file, for another map may want it at once."""
        self._ended = True
        self._inputs.close()
        if self._file is not None and not self._run.is_copy:
            try:
                self._arrived()
            finally:
                self._file.close()

    def _cancel(self) -> None:
        if self._run.is_copy:
            return
        try:
            self.forget()
            if self._waiting:
                self._run.cancel(self._spans.numbers(), stop=True)
        finally:
            self.release()

    # --- while the executor ends

    def read_elsewhere(self, here: int) -> bool:
        """Return whether a thread other than this one reads it: it waits for results, or took some a moment ago."""
        reader = self._reader
        if reader is None or reader.ident == here or not reader.is_alive():
            return False
        return time.monotonic() - self._read_at < _READER_SECONDS

    def cut(self) -> None:
        """Cancel what is left. What has arrived can be read (and is in the file); then `RunEnded` is raised."""
        if self._file is not None and not self._ended:
            self._held += self._arrived()
        gone = self._run.cancel(self._spans.numbers(), stop=True)
        if gone:
            unread = RunEnded("the map was not read to its end before its executor ended: read it there")
            self._stream.fail(gone, unread)

    def release(self) -> None:
        """Tell whoever waits for the map that it is over: done, closed, or its executor was shut down."""
        if not self.finished.done():
            self.finished.set_result(self._pulled)
