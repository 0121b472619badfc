"""Calls whose function yields its results one by one: they are sent along, and kept whatever happens to the rest.

What does not live here: how calls come and answers go (library.py), and what becomes of them (scheduler/).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Any

from ctxflow.errors import BatchContractError
from ctxflow.host.one_each import wrong
from ctxflow.pickling import dumps

Extent = dict[str, int]
"""Which of a call's items results are for: `count` from the `first` on; empty for all."""
EVERY_SECONDS = 0.5
"""How often results are sent along, where the driver does not say: so much work may be lost with a process that is
killed, and the item in flight."""


def dump_results(results: Any) -> bytes:
    """An app's results, pickled.

    :raises TypeError: if they cannot be.
    """
    return dumps(results, "the result of the app", "return plain data instead")


class Yielding:
    """One such call.

    :param send: sends a message with results that were not sent yet.
    :param leaving: says whether the worker has notice: then the call ends with what is done.
    :param own: called in between; ends a process that the function forked and that came back here.
    :param every: seconds from one message to the next.
    :param slowdown: how many times longer items are made to take, for tests.
    :ivar at: the item that the function is about, counted from 0; once something was raised, the one to blame.

    >>> def squares(numbers):
    ...     for number in numbers:
    ...         yield number * number
    >>> call = Yielding(lambda head, body: None, lambda: False, lambda: None)
    >>> call.run(squares([1, 2, 3]), 3, squares) == ({}, dump_results([1, 4, 9]))
    True
    """

    def __init__(
        self,
        send: Callable[[Extent, bytes], None],
        leaving: Callable[[], bool],
        own: Callable[[], None],
        every: float = EVERY_SECONDS,
        slowdown: float = 1.0,
    ) -> None:
        self.at = 0
        self._send = send
        self._leaving = leaving
        self._own = own
        self._every = every
        self._slowdown = slowdown
        self._sent = 0
        self._unsent: list[Any] = []

    def run(
        self, results: Generator[Any, Any, Any], expected: int, function: Callable[..., Any]
    ) -> tuple[Extent, bytes]:
        """Take one result for each of so many items.

        :param function: which made the results, to name it.
        :returns: what an answer to the call says of its results, and those that were not sent yet.
        :raises BaseException: what the function raises; TypeError for a result that cannot be pickled. What came
            before it has been sent then.
        :raises BatchContractError: if it yields too few or too many results. What was not sent yet is dropped: it may
            be that of other items.
        """
        try:
            whole = self._take(results, expected, function)
            if not whole:
                self._flush()
                _close(results)
            body = self._dumped()
        except BatchContractError:
            self._own()
            _close(results)
            raise
        except BaseException:
            self._own()
            _close(results)
            self._flush()
            raise
        if whole and not self._sent:
            return {}, body
        return {"first": self._sent, "count": len(self._unsent)}, body

    def _take(self, results: Generator[Any, Any, Any], expected: int, function: Callable[..., Any]) -> bool:
        """Say whether all results have come: else the worker is about to leave."""
        due = time.monotonic() + self._every
        for self.at in range(expected):
            if self._leaving():
                return False
            if self._unsent and time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + self._every
            began = time.monotonic()
            try:
                result = next(results)
            except StopIteration:
                given = "1 result" if self.at == 1 else f"{self.at} results"
                raise self._wrong(function, given, expected) from None
            self._own()
            self._unsent.append(result)
            if self._slowdown > 1:
                time.sleep((time.monotonic() - began) * (self._slowdown - 1))
        # What the function does after the last result, such as to yield another, goes to the last item's account.
        last = self._unsent.pop()
        for _ in results:
            raise self._wrong(function, "too many results", expected)
        self._unsent.append(last)
        return True

    def _wrong(self, function: Callable[..., Any], given: str, expected: int) -> BatchContractError:
        more = f"; the {self._sent} that were sent along before may be those of other items" if self._sent else ""
        return wrong(function, f"yielded {given}", expected, "yield one for each item", more)

    def _flush(self) -> None:
        """Send what was not sent yet."""
        if not self._unsent:
            return
        body = self._dumped()
        self._send({"first": self._sent, "count": len(self._unsent)}, body)
        self._sent += len(self._unsent)
        self._unsent = []

    def _dumped(self) -> bytes:
        """What was not sent yet, pickled.

        :raises TypeError: if one cannot be; those before it have been sent then, and those after it are dropped.
        """
        try:
            return dump_results(self._unsent)
        except Exception:
            for number, result in enumerate(self._unsent):
                try:
                    dump_results([result])
                except Exception:
                    self.at = self._sent + number
                    del self._unsent[number:]
                    self._flush()
                    raise
            raise


def _close(results: Generator[Any, Any, Any]) -> None:
    """Let the function clean up; what it raises then is of no account any more."""
    with contextlib.suppress(BaseException):
        results.close()
