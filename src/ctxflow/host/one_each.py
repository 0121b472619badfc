"""What a batch app must keep to: one result for each item of its batch, in their order.

What does not live here: how results are taken one by one (yielding.py), and what becomes of items whose app did not
keep to it (scheduler/items.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set
from typing import Any

from ctxflow.errors import BatchContractError
from ctxflow.wording import name_of

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
    """Whether what an app returned may be several results: none of the things that are one, and iterated by chance."""
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
    """A value in a message: its type, and its beginning where that is short."""
    if value is None:
        return "nothing"
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if type(value) not in (str, bytes, int, float):
        return f"{article} {kind}"
    text = repr(value)
    return f"{article} {kind} ({text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'})"
