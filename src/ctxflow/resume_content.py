"""Results of a map found by what their items are, wherever these stand among the inputs now.

What does not live here: the file and its lines (resume.py).
"""

from __future__ import annotations

import array
import bisect
import json
import re
from typing import Any

import numpy

from ctxflow.resume import ResultsFile, fingerprint

_USED = (1 << 64) - 1
_KEY = re.compile(rb'\{"index": [0-9]{1,18}, "key": "([0-9a-f]{16})", ')


class ResultsByContent(ResultsFile):
    """A results file that knows items by their fingerprints of 64 bits alone. In memory it keeps 16 bytes a result.

    Equal items have a result each: so many of them are answered as the file has results, in the order in which these
    were written; the others are computed.
    """

    _found: dict[int, int]
    _by_key: array.array[int]

    def _begin(self) -> None:
        self._by_key = array.array("Q")  # Fingerprints, in rising order once all are read.
        self._found = {}  # Index -> the offset of the result of an item that is on its way.

    def _note(self, index: int, offset: int, line: bytes) -> None:
        key = _key(line)
        if key is not None:
            self._by_key.append(key)
            self._offsets.append(offset)

    def _read_all(self) -> None:
        keys, offsets = (numpy.frombuffer(each, dtype=numpy.uint64) for each in (self._by_key, self._offsets))
        order = numpy.argsort(keys, kind="stable")
        self._by_key, self._offsets = (array.array("Q", each[order].tobytes()) for each in (keys, offsets))

    def holds(self, index: int, item: Any) -> bool:
        """Whether the file has a result of such an item that no other has got; else its fingerprint is remembered."""
        key = fingerprint(item)
        number = int(key, 16)
        first = bisect.bisect_left(self._by_key, number)
        last = bisect.bisect_right(self._by_key, number, lo=first)
        # Of the results of equal items those that were used come first.
        place = bisect.bisect_left(self._offsets, True, lo=first, hi=last, key=lambda offset: offset != _USED)
        if place == last:
            self._keys[index] = key
            return False
        self._found[index] = self._offsets[place]
        self._offsets[place] = _USED
        self._skipped.add(index)
        return True

    def read(self, index: int) -> Any:
        """A result that the file holds; it is then forgotten here.

        :raises ValueError: if its line is damaged.
        """
        try:
            return super().read(index)
        finally:
            del self._found[index]

    def _offset(self, index: int) -> int:
        return self._found[index]


def _key(line: bytes) -> int | None:
    """The fingerprint in a result's line, None for one that a full disk tore: its item is computed again."""
    if not line.endswith(b"}\n"):
        return None
    if match := _KEY.match(line):
        return int(match[1], 16)
    try:
        return int(json.loads(line)["key"], 16)
    except (ValueError, KeyError, TypeError):
        return None
