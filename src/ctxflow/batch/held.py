"""Records as lines, where a value that the output's form cannot hold costs that value and never the answer. Pure.

What does not live here: what is in a record (records.py), and who is told (pump.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ctxflow.batch.records import line, plain_value, whole_text
from ctxflow.wording import article

_DEEP = 500  # Levels; deeper ones JSON's readers refuse.
_NULL = "values that JSON cannot hold", "null stands in their place"
_KEYS = "keys that JSON cannot hold", "their text stands in their place"
_HALVES = "texts with half of a surrogate pair, which is no character", "U+FFFD stands in its place"


class Held:
    r"""Makes lines of records, and counts the values that had to become something else.

    :param kept: the columns that are the input's own; the others are the answer.
    :param nan: whether NaN and infinities may stand in the lines, since they are only read again here.
    :param told: called with a sentence the first time that a column loses a value.
    :ivar nulled: how many values are null for that, by column; `altered`, how many texts and keys are other ones.

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
        self.altered: dict[str, int] = {}
        self._told = told or (lambda sentence: None)
        self._kept = frozenset(kept)
        self._nan = nan
        self._said: set[tuple[str, tuple[str, str]]] = set()

    def line(self, record: Mapping[str, Any]) -> bytes:
        """A record as a line.

        Values of kept columns that cannot be held are null, and so are those that are a part of an answer.

        :raises ValueError, TypeError, RecursionError: if the answer itself cannot be held, saying why.
        """
        try:
            return line(record, self._nan)
        except (ValueError, TypeError, RecursionError):
            changes: list[_Changes] = []
            mended: dict[str, Any] = {}
            for name, value in record.items():
                changes.append(_Changes(name, self._nan, name not in self._kept))
                mended[name] = changes[-1].mended(value, itself=name not in self._kept)
            made = line(mended, self._nan)
        for change in changes:
            self._count(change)
        return made

    def _count(self, change: _Changes) -> None:
        name = change.name
        for what, values, counts in (
            (_NULL, change.lost, self.nulled),
            (_KEYS, change.keys, self.altered),
            (_HALVES, change.halves, self.altered),
        ):
            if not values:
                continue
            counts[name] = counts.get(name, 0) + len(values)
            if (name, what) not in self._said:
                self._said.add((name, what))
                self._told(f"the column {name} has {what[0]}, such as {_shown(values[0])}: {what[1]}")


class _Changes:
    """What becomes of a column's value so that it can be held.

    :param nan: whether NaN and infinities can.
    :param answer: whether the column is the answer, or a part of it, not one of the input.
    :ivar lost: what became null; `keys`, of dictionaries, that became text; `halves`, texts that lost half a character.
    """

    def __init__(self, name: str, nan: bool, answer: bool) -> None:
        self.name = name
        self.lost: list[Any] = []
        self.keys: list[Any] = []
        self.halves: list[str] = []
        self._nan = nan
        self._answer = answer

    def mended(self, value: Any, itself: bool, level: int = 0) -> Any:
        """A value with something else in place of what cannot be held.

        :param itself: whether it is the answer, not a part of it: then it is refused if it cannot be held.
        """
        if level > _DEEP:
            if self._answer:
                raise RecursionError("it is nested too deeply")
            return self._null(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, float):
            if self._nan or math.isfinite(value):
                return value
            if itself:
                raise ValueError(
                    f"the {self.name} is {float(value)!r}, which JSON cannot hold: return None, or have the output end "
                    "in .parquet or .csv"
                )
            return self._null(value)
        if isinstance(value, dict):
            return self._dictionary(value, level)
        if isinstance(value, (list, tuple)):
            return [self.mended(each, False, level + 1) for each in value]
        if value is None or isinstance(value, bool):
            return value
        try:
            plain = value if isinstance(value, int) else plain_value(value)
            if isinstance(plain, int):
                line({"": plain})
                return plain
        except (ValueError, TypeError, RecursionError):
            if itself:
                raise
            return self._null(value)
        return self.mended(plain, itself, level + 1)

    def _dictionary(self, value: dict[Any, Any], level: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        others = []
        for key, each in value.items():
            if _holds({key: None}, self._nan):
                made[key] = self.mended(each, False, level + 1)
            else:
                others.append((key, each))
        for key, each in others:  # Behind those whose names they must not take.
            name = self._key(key)
            while name in made:
                name = f"{name}'"
            made[name] = self.mended(each, False, level + 1)
        return made

    def _key(self, key: Any) -> Any:
        """A key as JSON has it."""
        if isinstance(key, str):
            return self._text(key)
        try:
            plain = plain_value(key)  # As it stands for values of its type.
            if _holds({plain: None}, self._nan):
                return plain
        except (ValueError, TypeError):
            pass
        self.keys.append(key)
        return whole_text(_shown(key))

    def _text(self, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            whole = whole_text(value)
            if whole.count("\ufffd") > value.count("\ufffd"):  # Else the halves are of one pair.
                self.halves.append(value)
            return whole
        return value

    def _null(self, value: Any) -> None:
        self.lost.append(value)


def _holds(record: Mapping[Any, Any], nan: bool) -> bool:
    try:
        line(record, nan)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # An integer of more digits than Python writes, or a class that fails at it.
        text = article(type(value).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."
