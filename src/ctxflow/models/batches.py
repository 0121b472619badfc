"""Cutting work into internal batches that fit in memory: pure planning, and the retry when one did not fit.

An internal batch is what goes through the model at once; the batch that ctxflow sent may be many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ctxflow.models.errors import OutOfMemoryError

Result = TypeVar("Result")


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
        reason = None
        try:
            results.update(zip(rows, run(rows), strict=True))
        except out_of_memory as error:
            reason = str(error).split("\n", maxsplit=1)[0]
        if reason is None:
            order = order[len(rows) :]
        elif len(rows) == 1:
            raise OutOfMemoryError(
                "one prompt alone does not fit in the device's memory: give fewer max_new_tokens or "
                f"max_input_tokens, a smaller dtype, or a larger GPU ({reason})"
            )
        else:  # after the except block: with the exception went the frames that held the tensors
            max_tokens = len(rows) * lengths[rows[0]] // 2
            recover(max_tokens)
    return [results[row] for row in range(len(lengths))]
