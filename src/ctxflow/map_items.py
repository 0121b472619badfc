"""A map's items on their way: which has which number in the run, and which wait for futures among their values.

Futures are waited for, as Parsl does for a call's arguments, and hold up no other item.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from ctxflow.errors import DependencyFailed
from ctxflow.executors.run.futures import Failed


@dataclasses.dataclass(slots=True)
class _Span:
    """Items that were submitted together."""

    numbers: range
    first: int  # The index of the first.
    left: int  # How many are not answered.


Item = tuple[Any, ...]
_START = operator.attrgetter("numbers.start")


class Spans:
    """Items that were submitted in spans of consecutive numbers, in rising order, until they are answered.

    >>> spans = Spans()
    >>> spans.add(range(7, 10), 0), spans.add(range(12, 14), 3)
    (None, None)
    >>> spans.indices([8, 9]), spans.indices([7, 12])
    ([1, 2], [0, 3])
    """

    def __init__(self) -> None:
        self._spans: list[_Span] = []  # In the order of their numbers.
        self._answered = 0  # How many are answered, but not yet forgotten.

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, numbers: range, first: int) -> None:
        """Note the numbers of items, from this index on."""
        self._spans.append(_Span(numbers, first, len(numbers)))

    def numbers(self) -> list[int]:
        """Return the numbers of all that are not answered, and of some that are."""
        return [item for span in self._spans for item in span.numbers]

    def indices(self, items: Sequence[int]) -> Sequence[int]:
        """Return the indices of items that are answered now, by their numbers."""
        span = self._spans[0]
        if items[0] not in span.numbers:
            span = self._spans[bisect.bisect_right(self._spans, items[0], key=_START) - 1]
        if min(items) not in span.numbers or max(items) not in span.numbers:
            return [self.indices((item,))[0] for item in items]
        offset = span.first - span.numbers.start
        span.left -= len(items)
        if not span.left:
            self._answered += 1
            if 2 * self._answered > len(self._spans):  # Not at each, which would take time with their square.
                self._spans = [span for span in self._spans if span.left]
                self._answered = 0
        return [item + offset for item in items]


def may_hold_futures(items: Sequence[Item | Failed]) -> bool | None:
    """Return whether there may be a future among the values of some items, told quickly.

    :returns: None for as much as False, if there are rows that failed among the items.

    >>> may_hold_futures([("a", 1), ("b", 2)]), may_hold_futures([(Future(),)])
    (False, True)
    """
    try:
        kinds = set(map(type, itertools.chain.from_iterable(items)))  # type: ignore[arg-type]
    except TypeError:  # A row that failed has no values.
        return may_hold_futures([item for item in items if type(item) is not Failed]) or None
    return any(kind is tuple or issubclass(kind, Future) for kind in kinds)


class Aside:
    """Items that wait for futures among their values, or in tuples among these; found by their index.

    :param wake: called when one may be ready, by whichever thread.
    :ivar waiting: those that wait, by index.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.waiting: dict[int, Item] = {}
        self._done: collections.deque[int] = collections.deque()  # Of these a future is done.

    def put(self, index: int, item: Item) -> Item | Failed | None:
        """Return an item with its futures' results, a `Failed` if one failed; None, and wait, if some are not done."""
        waited = [future for future in _futures(item) if not future.done()]
        if not waited:
            return _resolved(item)
        self.waiting[index] = item

        def done(future: Future[Any]) -> None:
            self._done.append(index)
            self._wake()

        for future in waited:
            future.add_done_callback(done)
        return None

    def ready(self) -> Iterator[tuple[int, Item | Failed]]:
        """Yield items that wait no more, as `put` gives them."""
        while self._done:
            index = self._done.popleft()
            item = self.waiting.get(index)
            if item is not None and all(future.done() for future in _futures(item)):
                del self.waiting[index]
                yield index, _resolved(item)


def _futures(item: Item) -> list[Future[Any]]:
    found = []
    for value in item:
        if isinstance(value, Future):
            found.append(value)
        elif type(value) is tuple:
            found += [part for part in value if isinstance(part, Future)]
    return found


def _resolved(item: Item) -> Item | Failed:
    """Return an item whose futures are all done, with their results."""
    for future in _futures(item):
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        if error is not None:
            reason = (
                "was cancelled" if isinstance(error, CancelledError) else f"failed: {type(error).__name__}: {error}"
            )
            failure = DependencyFailed(f"a future among the values of this item {reason}")
            failure.__cause__ = error
            return Failed(failure, item)
    return tuple([_value(value) for value in item])


def _value(value: Any) -> Any:
    if isinstance(value, Future):
        return value.result()
    if type(value) is tuple:
        return tuple([part.result() if isinstance(part, Future) else part for part in value])
    return value
