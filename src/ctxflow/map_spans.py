"""Which item of a map has which number in its run. Pure."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _Span:
    """Items that were submitted together."""

    numbers: range
    first: int  # The index of the first.
    left: int  # How many are not answered.


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
        """Items got these numbers, from this index on."""
        self._spans.append(_Span(numbers, first, len(numbers)))

    def numbers(self) -> list[int]:
        """The numbers of all that are not answered, and of some that are."""
        return [item for span in self._spans for item in span.numbers]

    def indices(self, items: Sequence[int]) -> Sequence[int]:
        """The indices of items that are answered now, by their numbers."""
        span = self._span(items[0])
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

    def _span(self, item: int) -> _Span:
        return self._spans[bisect.bisect_right(self._spans, item, key=lambda span: span.numbers.start) - 1]
