"""Plan internal batches: how many rows go through a model together, and what follows where they did not fit. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ctxflow.models.results import OutOfMemoryError

Result = TypeVar("Result")

AHEAD = 4
"""How many internal batches' rows `run_each` looks at, to find rows of similar lengths among them."""


_KNOWN = 32  # Batches that must fit before as much is known to fit;
_FIRST_WAIT, _LONGEST_WAIT = 64, 4096  # and before more is tried, twice as many each time that it failed.


class Ceiling:
    """The tokens that a batch may have since more did not fit, such as beside another program on the GPU for a while.

    It rises as batches fit that are as large as it allows: by a quarter, or half of the way to what did not fit, until
    it is none. What failed is tried again after longer and longer.

    >>> ceiling = Ceiling()
    >>> ceiling.lower(800, 400)
    >>> ceiling.limit(1000), ceiling.limit(300)
    (400, 300)
    >>> for _ in range(500):
    ...     ceiling.fitted(1000)
    >>> ceiling.limit(1000)
    1000
    """

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._good = 0  # As many are known to fit,
        self._too_many = 0  # and as many not to.
        self._fitted = 0  # Batches since it was set last.
        self._wait = _FIRST_WAIT

    def limit(self, most: int) -> int:
        """Return how many tokens a batch may have that should have `most` at most."""
        return most if self._tokens is None else min(most, self._tokens)

    def lower(self, tried: int, tokens: int) -> None:
        """Note that so many tokens did not fit, and how many are tried now, if nothing is known to fit."""
        if 0 < self._good < tried:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._too_many = min(self._too_many or tried, tried)
            self._tokens = self._good
        else:
            self._good, self._too_many, self._tokens = 0, tried, max(1, tokens)
        self._fitted = 0

    def fitted(self, most: int) -> None:
        """Note that a batch fitted which was as large as it may be; `most` as of `limit`."""
        if self._tokens is None:
            return
        self._fitted += 1
        if self._fitted == _KNOWN and self._tokens > self._good:
            self._wait = _FIRST_WAIT
            self._good, self._too_many = self._tokens, self._too_many if self._too_many > self._tokens else 0
        if self._fitted >= self._wait:
            higher = self._tokens + self._tokens // 4 + 1
            between = (self._tokens + self._too_many) // 2
            if between > self._tokens + self._tokens // 16:
                higher = min(higher, between)
            self._tokens, self._fitted = higher if higher < most else None, 0


def group_size(longest: int, waiting: int, max_tokens: int, max_rows: int | None = None) -> int:
    """Return how many of the waiting rows go through the model together with the longest of them.

    A group takes its number of rows times its longest row; a row longer than `max_tokens` goes alone.

    >>> group_size(10, 4, max_tokens=20), group_size(30, 4, max_tokens=20)
    (2, 1)
    """
    fit = max(1, max_tokens // max(1, longest))
    return min(fit, waiting, max_rows or waiting)


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """How large internal batches may be.

    :ivar max_tokens: of a batch; half of what was tried, where that did not fit.
    :ivar out_of_memory: the exception that means "did not fit"; `recover` is called then with the new `max_tokens`.
    """

    max_tokens: int
    max_rows: int | None = None
    out_of_memory: type[BaseException] = MemoryError
    recover: Callable[[int], None] = lambda tokens: None

    def run_batches(self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]]) -> list[Result]:
        """Run every row in internal batches of similar lengths, longest first: what does not fit is found at once.

        :param lengths: tokens of each row.
        :param run: takes rows' numbers, returns a result for each.
        :returns: the results in the order of the rows.
        :raises OutOfMemoryError: if a row alone does not fit.

        >>> BatchLimits(12).run_batches([3, 10, 4], lambda rows: [f"{row} of {rows}" for row in rows])
        ['0 of [2, 0]', '1 of [1]', '2 of [2, 0]']
        """
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        results: dict[int, Result] = {}
        max_tokens = self.max_tokens
        while order:
            rows = order[: group_size(lengths[order[0]], len(order), max_tokens, self.max_rows)]
            found = _tried(rows, run, self.out_of_memory)
            if found is not None:
                results.update(found)
                order = order[len(rows) :]
            else:
                max_tokens = len(rows) * lengths[rows[0]] // 2
                self.recover(max_tokens)
        return [results[row] for row in range(len(lengths))]

    def run_each(
        self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]], ahead: int | None = None
    ) -> Iterator[Result]:
        """Run rows as `run_batches` does, but yield each result as soon as it and all before it are there.

        Rows are looked at in their order, as many as fill a few internal batches; the next batch is made of those that
        are most like the oldest in length. So little is padded, and only the last few batches are smaller than they may
        be.

        >>> ran = []
        >>> results = BatchLimits(12).run_each([3, 10, 4, 3] * 9, lambda rows: ran.append(rows) or rows)
        >>> next(results), ran
        (0, [[0, 3, 4, 7]])
        >>> list(results) == list(range(1, 36))
        True
        """
        waiting: list[int] = []
        results: dict[int, Result] = {}
        taken = due = tokens = 0
        max_tokens = self.max_tokens
        while due < len(lengths):
            while taken < len(lengths) and tokens < (ahead or AHEAD) * max_tokens:
                waiting.append(taken)
                tokens += lengths[taken]
                taken += 1
            waiting.sort(key=lambda row: (-lengths[row], row))
            rows = alike(waiting.index(due), waiting, [lengths[row] for row in waiting], max_tokens, self.max_rows)
            found = _tried(rows, run, self.out_of_memory)
            if found is None:
                max_tokens = len(rows) * lengths[rows[0]] // 2
                self.recover(max_tokens)
                continue
            results.update(found)
            waiting = [row for row in waiting if row not in found]
            tokens -= sum(lengths[row] for row in rows)
            while due in results:
                yield results.pop(due)
                due += 1


def alike(
    place: int, waiting: Sequence[int], lengths: Sequence[int], max_tokens: int, max_rows: int | None
) -> list[int]:
    """Return the internal batch of the row at a place, among rows that are sorted longest first.

    >>> alike(2, [7, 8, 9], [6, 5, 5], max_tokens=12, max_rows=None)
    [8, 9]
    """

    def end(start: int) -> int:
        return start + group_size(lengths[start], len(waiting) - start, max_tokens, max_rows)

    start = place
    # If there are not enough shorter ones, some that are a little longer come with them.
    while start and end(start) == len(waiting) and end(start - 1) > place:
        start -= 1
    return list(waiting[start : end(start)])


def _tried(
    rows: list[int], run: Callable[[list[int]], Sequence[Result]], out_of_memory: type[BaseException]
) -> dict[int, Result] | None:
    """Return the results of an internal batch; None if it did not fit."""
    try:
        return dict(zip(rows, run(rows), strict=True))
    except out_of_memory as error:  # With it go the frames that held tensors.
        if len(rows) > 1:
            return None
        reason = str(error).split("\n", maxsplit=1)[0]
    raise too_little_memory(reason)


def too_little_memory(reason: str) -> OutOfMemoryError:
    """Return the error of a row that does not fit alone, with what the device said."""
    return OutOfMemoryError(
        "one prompt alone does not fit in the device's memory: give fewer max_new_tokens or "
        f"max_input_tokens, a smaller dtype, or a larger GPU ({reason})"
    )
