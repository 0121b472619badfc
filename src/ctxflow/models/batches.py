"""Cutting work into internal batches that fit in memory: pure planning, and the retry when one did not fit.

An internal batch is what goes through the model at once; the batch that ctxflow sent may be many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ctxflow.models.errors import OutOfMemoryError

Result = TypeVar("Result")
AHEAD = 4
"""How many internal batches' rows `run_each` looks at, to find rows of similar lengths among them."""


def group_size(longest: int, waiting: int, max_tokens: int, max_rows: int | None = None) -> int:
    """How many of the waiting rows go through the model together with the longest of them.

    A group takes its number of rows times its longest row; a row longer than `max_tokens` goes alone.

    :param longest: tokens of the longest row.
    :param waiting: how many rows there are.

    >>> group_size(10, 4, max_tokens=20), group_size(30, 4, max_tokens=20)
    (2, 1)
    """
    fit = max(1, max_tokens // max(1, longest))
    return min(fit, waiting, max_rows or waiting)


def run_batches(
    lengths: Sequence[int],
    run: Callable[[list[int]], Sequence[Result]],
    *,
    max_tokens: int,
    max_rows: int | None = None,
    out_of_memory: type[BaseException] = MemoryError,
    recover: Callable[[int], None] = lambda tokens: None,
) -> list[Result]:
    """Run every row in internal batches of similar lengths, so that little is padded.

    Longest first, so that what does not fit is found at once; then `max_tokens` becomes half of what was
    tried, for this and all later groups.

    :param lengths: tokens of each row.
    :param run: takes rows' numbers, gives a result for each.
    :param out_of_memory: the exception that means "did not fit".
    :param recover: called after it with the new `max_tokens`.
    :returns: the results in the order of the rows.
    :raises OutOfMemoryError: if a row alone does not fit.

    >>> run_batches([3, 10, 4], lambda rows: [f"{row} of {rows}" for row in rows], max_tokens=12)
    ['0 of [2, 0]', '1 of [1]', '2 of [2, 0]']
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    results: dict[int, Result] = {}
    while order:
        rows = order[: group_size(lengths[order[0]], len(order), max_tokens, max_rows)]
        found = _tried(rows, run, out_of_memory)
        if found is not None:
            results.update(found)
            order = order[len(rows) :]
        else:
            max_tokens = len(rows) * lengths[rows[0]] // 2
            recover(max_tokens)
    return [results[row] for row in range(len(lengths))]


def run_each(
    lengths: Sequence[int],
    run: Callable[[list[int]], Sequence[Result]],
    *,
    max_tokens: int,
    max_rows: int | None = None,
    out_of_memory: type[BaseException] = MemoryError,
    recover: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Result]:
    """As `run_batches`, but yields each row's result as soon as it and all before it are there.

    Rows are looked at in their order, as many as fill a few internal batches; the next batch is made of those that are
    most like the oldest in length. So little is padded, and none but the last few batches is smaller than it may be.

    >>> ran = []
    >>> results = run_each([3, 10, 4, 3] * 9, lambda rows: ran.append(rows) or rows, max_tokens=12)
    >>> next(results), ran
    (0, [[0, 3, 4, 7]])
    >>> list(results) == list(range(1, 36))
    True
    """
    waiting: list[int] = []
    results: dict[int, Result] = {}
    taken = due = tokens = 0
    while due < len(lengths):
        while taken < len(lengths) and tokens < AHEAD * max_tokens:
            waiting.append(taken)
            tokens += lengths[taken]
            taken += 1
        waiting.sort(key=lambda row: (-lengths[row], row))
        rows = _like(waiting.index(due), waiting, [lengths[row] for row in waiting], max_tokens, max_rows)
        found = _tried(rows, run, out_of_memory)
        if found is None:
            max_tokens = len(rows) * lengths[rows[0]] // 2
            recover(max_tokens)
            continue
        results.update(found)
        waiting = [row for row in waiting if row not in found]
        tokens -= sum(lengths[row] for row in rows)
        while due in results:
            yield results.pop(due)
            due += 1


def _like(
    place: int, waiting: Sequence[int], lengths: Sequence[int], max_tokens: int, max_rows: int | None
) -> list[int]:
    """The internal batch of the row at a place, among rows that are sorted longest first.

    >>> _like(2, [7, 8, 9], [6, 5, 5], max_tokens=12, max_rows=None)
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
    """The results of an internal batch; None if it did not fit: with the exception go the frames that held tensors.

    :raises OutOfMemoryError: if it was one row.
    """
    try:
        return dict(zip(rows, run(rows), strict=True))
    except out_of_memory as error:
        if len(rows) > 1:
            return None
        reason = str(error).split("\n", maxsplit=1)[0]
    raise OutOfMemoryError(
        "one prompt alone does not fit in the device's memory: give fewer max_new_tokens or "
        f"max_input_tokens, a smaller dtype, or a larger GPU ({reason})"
    )
