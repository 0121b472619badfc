"""Records as lines, where a value that JSON cannot hold costs that value and never the answer. Pure.

What does not live here: what is in a record (records.py), and who is told (pump.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ctxflow.batch.records import line, plain_value

_DEEP = 500  # Levels; deeper ones JSON's readers refuse.


class Held:
    r"""Makes lines of records, and counts the values that had to become null.

    :param kept: the columns that are the input's own; the others are the answer.
    :param nan: whether NaN and infinities may stand in the lines, since they are only read again here.
    :param told: called with a sentence the first time that a column loses a value.
    :ivar nulled: how many values are null for that, by column.

    >>> held = Held(["price"], told=print)
    >>> held.line({"row": 0, "price": float("nan"), "result": "yes"})
    the column price has values that JSON cannot hold, such as nan: null stands in their place
    b'{"row": 0, "price": null, "result": "yes"}\n'
    >>> held.nulled
    {'price': 1}
    """

    def __init__(
        self, kept: Collection[str] = (), nan: bool = False, told: Callable[[str], None] | None = None
    ) -> None:
        self.nulled: dict[str, int] = {}
        self._told = told or (lambda sentence: None)
        self._kept = frozenset(kept)
        self._nan = nan

    def line(self, record: Mapping[str, Any]) -> bytes:
        """A record as a line.

        Values of kept columns that cannot be held are null; of an answer, NaN and infinities that are parts of it.

        :raises ValueError, TypeError, RecursionError: if the answer itself cannot be held, saying why.
        """
        try:
            return line(record, self._nan)
        except (ValueError, TypeError, RecursionError):
            mended: dict[str, Any] = {}
            lost: dict[str, list[Any]] = {}
            for name, value in record.items():
                lost[name] = []
                strict = name not in self._kept
                bare = value.tolist() if hasattr(value, "tolist") else value
                if strict and not self._nan and isinstance(bare, float) and not math.isfinite(bare):
                    raise ValueError(
                        f"the {name} is {float(bare)!r}, which JSON cannot hold: return None, or have the output end "
                        "in .parquet or .csv"
                    ) from None
                mended[name] = _mended(value, self._nan, strict, lost[name])
            made = line(mended, self._nan)  # Raises for what is no value at all, before anything is counted.
        for name, values in lost.items():
            if values:
                if name not in self.nulled:
                    self._told(
                        f"the column {name} has values that JSON cannot hold, such as {_shown(values[0])}: "
                        "null stands in their place"
                    )
                self.nulled[name] = self.nulled.get(name, 0) + len(values)
        return made


def _mended(value: Any, nan: bool, strict: bool, lost: list[Any], level: int = 0) -> Any:
    """A value with null in place of what cannot be held.

    :param strict: whether only numbers may become null; all else is left for JSON to refuse.
    :param lost: gets what became null.
    """
    if level > _DEEP:
        if strict:
            raise RecursionError("it is nested too deeply")
        lost.append(value)
        return None
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, float):
        if nan or math.isfinite(value):
            return value
        lost.append(value)
        return None
    if type(value) is dict:
        return {key: _mended(each, nan, strict, lost, level + 1) for key, each in value.items()}
    if type(value) in (list, tuple):
        return [_mended(each, nan, strict, lost, level + 1) for each in value]
    try:
        plain = value if isinstance(value, int) else plain_value(value)
        if isinstance(plain, int):
            line({"": plain}, nan)
            return plain
    except (ValueError, TypeError, RecursionError):
        if strict:
            return value
        lost.append(value)
        return None
    return _mended(plain, nan, strict, lost, level + 1)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An integer of more digits than Python writes.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
