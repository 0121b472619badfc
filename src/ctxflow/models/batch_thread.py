"""Take the steps of a batch in a thread of its own, for coroutines that each await a few of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ctxflow.errors import ContextLost


class BatchRow(Protocol):
    """What a batch works on."""

    error: BaseException | None


class Batch(Protocol):
    """What takes steps."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def add(self, row: Any) -> None:
        """Have a row wait."""

    def remove(self, row: Any) -> None:
        """Forget a row."""

    def step(self) -> Sequence[Any]:
        """Go on, and return the rows that ended."""


class BatchThread:
    """A thread that steps while there is something to do; rows enter at once, and those that are cancelled leave.

    :param close: called in the thread when it ends.
    """

    def __init__(self, batch: Batch, close: Callable[[], None]) -> None:
        self._batch = batch
        self._close = close
        self._orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._waited: dict[int, tuple[Any, asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ctxflow-batch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `ContextLost` if the batch can go on no more."""
        if self._lost is not None:
            raise self._loss(self._lost)

    def _loss(self, why: str) -> ContextLost:
        lost = ContextLost(why)
        lost.__cause__ = self._cause
        return lost

    async def done(self, rows: Sequence[BatchRow]) -> None:
        """Wait until rows have ended. Cancelling it has them leave the batch.

        :raises ContextLost: if the batch can go on no more.
        :raises BaseException: what a row ended with.
        """
        loop = asyncio.get_running_loop()
        futures = []
        with self._lock:
            self.check()
            for row in rows:
                futures.append(loop.create_future())
                self._waited[id(row)] = (row, loop, futures[-1])
                self._orders.put(("add", row))
        try:
            await asyncio.gather(*futures)
        except BaseException:
            for row, future in zip(rows, futures, strict=True):
                future.cancel()
                with self._lock:
                    left = self._waited.pop(id(row), None)
                if left is not None:
                    self._orders.put(("remove", row))
            raise
        for row in rows:
            if row.error is not None:
                raise row.error

    async def stop(self) -> None:
        """End the thread after the step that it takes; what waits is answered by `ContextLost`. Again: nothing."""
        self._lose("the engine was closed while it answered")
        self._orders.put(("stop", None))
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    def _run(self) -> None:
        try:
            while self._obey():
                for row in self._batch.step():
                    with self._lock:
                        waited = self._waited.pop(id(row), None)
                    if waited is not None:
                        _tell(waited[1], waited[2])
        except BaseException as error:
            # The batch, or the device, is in an unknown state: nothing that it would answer could be trusted.
            self._lose(f"the model failed with {type(error).__name__}: {error}", error)
        finally:
            self._close()

    def _obey(self) -> bool:
        """Do what was ordered, waiting where there is nothing else to do; return whether to go on."""
        while True:
            try:
                what, row = self._orders.get(block=self._batch.idle)
            except queue.Empty:
                return True
            if what == "stop":
                return False
            (self._batch.add if what == "add" else self._batch.remove)(row)

    def _lose(self, why: str, cause: BaseException | None = None) -> None:
        with self._lock:
            if self._lost is None:
                self._lost, self._cause = why, cause
            waited = list(self._waited.values())
            self._waited.clear()
        for _, loop, future in waited:
            _tell(loop, future, self._loss(self._lost))


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], error: BaseException | None = None) -> None:
    def tell() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
        loop.call_soon_threadsafe(tell)
