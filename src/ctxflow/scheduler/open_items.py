"""Compact tables for millions of items: which are open, and the queue of each app.

Items are numbered in the order of submission, and batches are mostly consecutive numbers. So a queue stores ranges, and
open items are stored in pages (lists of 1,024 entries), of which a batch is one slice. Neither table has an object for
each item, which the garbage collector would traverse.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

_BITS = 10
_PAGE = 1 << _BITS
_LAST = _PAGE - 1
T = TypeVar("T")


class OpenItems(Mapping[int, T]):
    """Which items are open, and of which app each is.

    >>> open_items = OpenItems()
    >>> open_items.add(range(5000), "an app")
    >>> open_items.has_all(range(1000, 2000)), 4999 in open_items, 5000 in open_items
    (True, True, False)
    >>> open_items.close(range(10, 4990))
    >>> len(open_items), list(open_items)[8:12]
    (20, [8, 9, 4990, 4991])
    """

    def __init__(self) -> None:
        self._pages: dict[int, list[T | None]] = {}
        self._counts: dict[int, int] = {}  # Of the open ones in a page; one without any is dropped.

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, item: Any) -> bool:
        page = self._pages.get(item >> _BITS)
        return page is not None and page[item & _LAST] is not None

    def __getitem__(self, item: int) -> T:
        page = self._pages.get(item >> _BITS)
        if page is None or (app := page[item & _LAST]) is None:
            raise KeyError(item)
        return app

    def __iter__(self) -> Iterator[int]:
        for number, page in sorted(self._pages.items()):
            yield from (number * _PAGE + place for place, app in enumerate(page) if app is not None)

    def add(self, items: Iterable[int], app: T) -> None:
        """Open items, or note that open ones are another app's now."""
        for number, begin, end in _slices(items):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = [None] * _PAGE
            new = page[begin:end].count(None)
            page[begin:end] = [app] * (end - begin)
            self._counts[number] = self._counts.get(number, 0) + new

    def has_all(self, items: Collection[int]) -> bool:
        """Return whether all of these are open."""
        for number, begin, end in _slices(items):
            page = self._pages.get(number)
            if page is None or None in page[begin:end]:
                return False
        return True

    def close(self, items: Collection[int]) -> None:
        """Take out items, all of which are open."""
        for number, begin, end in _slices(items):
            self._pages[number][begin:end] = [None] * (end - begin)
            self._counts[number] -= end - begin
            if not self._counts[number]:
                del self._pages[number], self._counts[number]


def _runs(items: Iterable[int]) -> Iterator[range]:
    """Yield items as runs of consecutive ones, which all are in one as a rule."""
    if isinstance(items, range):
        if items:
            yield items
        return
    those = items if isinstance(items, (list, tuple)) else list(items)
    if not those:
        return
    run = range(those[0], those[0] + len(those))
    if len(those) == 1 or those == type(those)(run):
        yield run
    else:
        yield from (range(item, item + 1) for item in those)


def _slices(items: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the page and the slice of each run of consecutive items, page by page."""
    for run in _runs(items):
        begin, count = run.start, len(run)
        while count:
            place = begin & _LAST
            size = min(count, _PAGE - place)
            yield begin >> _BITS, place, place + size
            begin, count = begin + size, count - size


class ItemQueue:
    """The items that wait for a worker, in order: some one by one, and after them ranges.

    >>> queue = ItemQueue(range(1000))
    >>> queue.take(3), len(queue), list(queue)[:2]
    ((0, 1, 2), 997, [3, 4])
    >>> queue.put_back([1, 2])
    >>> queue.pop(1), queue.take(3)
    (2, (1, 3, 4))
    """

    __slots__ = ("_front", "_later", "_ranges")

    def __init__(self, items: Iterable[int] = ()) -> None:
        self._front: collections.deque[int] = collections.deque()
        self._ranges: collections.deque[range] = collections.deque()
        self._later = 0  # Items in ranges.
        self.extend(items)

    def __len__(self) -> int:
        return len(self._front) + self._later

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._front, *self._ranges)

    def extend(self, items: Iterable[int]) -> None:
        """Add items at the end."""
        ranges = self._ranges
        for run in _runs(items):
            if ranges and ranges[-1].stop == run.start:
                ranges[-1] = range(ranges[-1].start, run.stop)
            else:
                ranges.append(run)
            self._later += len(run)

    def put_back(self, items: Sequence[int]) -> None:
        """Put items at the beginning, in their order."""
        self._front.extendleft(reversed(items))

    def take(self, count: int) -> tuple[int, ...]:
        """Take so many items off the beginning, or all there are."""
        front = self._front
        if not front and self._ranges and count < len(self._ranges[0]):
            return tuple(self._cut(count))
        self._bring(count)
        if count >= len(front):
            taken = tuple(front)
            front.clear()
            return taken
        return tuple([front.popleft() for _ in range(count)])

    def pop(self, place: int = 0) -> int:
        """Take the item at a place, counted from the beginning, where there is one."""
        self._bring(place + 1)
        item = self._front[place]
        del self._front[place]
        return item

    def clear(self) -> None:
        """Take out all."""
        self._front.clear()
        self._ranges.clear()
        self._later = 0

    def _bring(self, count: int) -> None:
        """Have so many items one by one, as far as there are."""
        while self._ranges and len(self._front) < count:
            self._front.extend(self._cut(count - len(self._front)))

    def _cut(self, count: int) -> range:
        """Take so many items off the first range, or all of it."""
        first = self._ranges[0]
        if count < len(first):
            self._ranges[0] = first[count:]
        else:
            del self._ranges[0]
        self._later -= min(count, len(first))
        return first[:count]
