"""What a batch app gives back: one result for each item of its batch, in their order, at once or one by one.

An app that yields its results has them sent along while it goes on, and kept whatever happens to the rest. What does
not live here: how calls come and answers go (library.py), and what becomes of items whose app did not keep to it
(scheduler/items.py).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Set
from typing import Any

from ctxflow.errors import BatchContractError, name_of
from ctxflow.pickling import dumps

_LONGEST = 60  # Characters that are shown of what came in place of results.


def one_each(results: Any, expected: int, function: Callable[..., Any]) -> list[Any]:
    """Return what an app returned for a batch as a list with one result for each item.

    :param expected: the items of the batch.
    :param function: the app's, to name it.
    :raises BatchContractError: if it is not one result for each item. Text, mappings, sets, records and tables are
        never taken for several results, whatever their length is: not by chance for a batch of one either.

    >>> one_each(range(2), 2, len)
    [0, 1]
    >>> one_each("x", 1, len)
    Traceback (most recent call last):
    ...
    ctxflow.errors.BatchContractError: len returned a str ('x') for a batch of 1 item: return a list with one result \
for each item, in their order
    """
    if type(results) is list and len(results) == expected:  # As nearly always.
        return results
    if not _is_several(results):
        raise wrong(function, f"returned {_shown(results)}", expected, "return a list with one result for each item")
    listed = list(itertools.islice(results, expected + 1))  # Which may have no end.
    if len(listed) != expected:
        count = len(results) if hasattr(results, "__len__") else len(listed)
        more = "or more " if len(listed) > expected and not hasattr(results, "__len__") else ""
        given = f"{count} {more}result{'s' if count != 1 else ''}"
        raise wrong(function, f"returned {given}", expected, "return a list with one result for each item")
    return listed


def wrong(function: Callable[..., Any], did: str, expected: int, instead: str, more: str = "") -> BatchContractError:
    """Return the error for an app that did something else than to give one result for each item."""
    items = "1 item" if expected == 1 else f"{expected} items"
    return BatchContractError(f"{name_of(function)} {did} for a batch of {items}: {instead}, in their order{more}")


def _is_several(results: Any) -> bool:
    """Return whether what an app returned may be several results, and is not one that happens to be iterable."""
    kind = type(results)
    return (
        hasattr(kind, "__iter__")
        and not isinstance(results, (str, bytes, bytearray, memoryview, Mapping, Set))
        and not hasattr(kind, "_fields")  # A named tuple.
        and not hasattr(kind, "model_fields")  # A model of pydantic's, iterated by its fields.
        and not (hasattr(kind, "columns") and hasattr(kind, "shape"))  # A data frame, iterated by its columns.
        and getattr(results, "shape", None) != ()  # An array of no dimension.
    )


def _shown(value: Any) -> str:
    """Return a value in a message: its type, and its beginning where that is short."""
    if value is None:
        return "nothing"
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if type(value) not in (str, bytes, int, float):
        return f"{article} {kind}"
    text = repr(value)
    return f"{article} {kind} ({text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'})"


Extent = dict[str, int]
"""Which of a call's items results are for: `count` from the `first` on; empty for all."""
EVERY_SECONDS = 0.5
"""How often results are sent along, where the driver does not say: so much work may be lost with a process that is
killed, and the item in flight."""


def dump_results(results: Any) -> bytes:
    """Return an app's results, pickled.

    :raises TypeError: if they cannot be.
    """
    return dumps(results, "the result of the app", "return plain data instead")


class Yielding:
    """One such call.

    :param send: sends a message with results that were not sent yet.
    :param leaving: says whether the worker has notice: then the call ends with what is done.
    :param own: called in between; ends a process that the function forked and that came back here.
    :param every: seconds from one message to the next.
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
    ) -> None:
        self.at = 0
        self._send = send
        self._leaving = leaving
        self._own = own
        self._every = every
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
            try:
                result = next(results)
            except StopIteration:
                given = "1 result" if self.at == 1 else f"{self.at} results"
                raise self._wrong(function, given, expected) from None
            self._own()
            self._unsent.append(result)
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
        """Return what was not sent yet, pickled.

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
