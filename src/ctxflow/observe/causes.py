"""Group failures by cause: those that differ in numbers and paths alone are one, with an example.

They come from history_reader.py, and from a batch job's dead letters in run_report.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

MOST = 500  # Causes that are kept apart.
_LONGEST = 300
_KEPT = 6_000  # Characters of a message, of a traceback's end and of output's.
# What a dead letter calls an error that is told in other words than the worker's.
_WRAPPED = {"CallCrashed", "CallTimeout", "WorkersLost", "RemoteError"}
_REPLACED = [
    (r"(?<![\w.])~?(?:/[\w.@%+~-]+){2,}/?|(?<![\w/])~?/[\w.@%+~-]+\.\w+", "PATH"),
    (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b0x[0-9a-fA-F]+\b", "ID"),
    (r"\b(?=[a-f]*\d)[0-9a-f]{12,}\b(?<!\d{12})", "ID"),
    (r"\d+(?:[.,:_]\d+)*(?:[eE][+-]?\d+)?", "N"),
    (r"\s+", " "),
]


@functools.cache
def _replaced() -> list[tuple[re.Pattern[str], str]]:
    """Compile what is replaced: at the first failure, since it takes longer than most of what a driver imports."""
    return [(re.compile(expression), name) for expression, name in _REPLACED]


def pattern(message: str) -> str:
    """Return a message without what differs from time to time: its numbers, ids and paths.

    >>> pattern("row 17 of /data/night/claims.csv needs 2.5e9 bytes at 0x7f31")
    'row N of PATH needs N bytes at ID'
    """
    text = message[: 4 * _LONGEST]
    for expression, name in _replaced():
        text = expression.sub(name, text)
    return text.strip()[:_LONGEST]


@dataclasses.dataclass
class Cause:
    """Failures that have one cause.

    :ivar error: the name of the exception, or what kind of failure it was; `pattern`: its message without numbers.
    :ivar calls, contexts: how many failed; `items`: how many died of it; `rows`: of a batch job's dead letters.
    :ivar message, traceback, output, where: of the first that was seen; `place`: of the first dead letter's row.
    """

    error: str
    pattern: str
    message: str = ""
    traceback: str = ""
    output: str = ""
    where: str = ""
    place: str = ""
    calls: int = 0
    contexts: int = 0
    items: int = 0
    rows: int = 0

    @property
    def count(self) -> int:
        """What causes are ordered by: items lost for good, or else failures."""
        return max(self.rows, self.items) or self.calls + self.contexts


@dataclasses.dataclass
class Causes:
    """The causes of a run's failures. Beyond `MOST`, those of further causes are one together.

    >>> causes = Causes()
    >>> for row in (3, 17):
    ...     causes.call({"kind": "exception", "error": "ValueError", "message": f"row {row} is empty"})
    >>> [(cause.error, cause.pattern, cause.calls, cause.message) for cause in causes.ordered()]
    [('ValueError', 'row N is empty', 2, 'row 3 is empty')]
    """

    found: dict[tuple[str, str], Cause] = dataclasses.field(default_factory=dict)
    _by_pattern: dict[str, Cause] = dataclasses.field(default_factory=dict)

    def ordered(self) -> list[Cause]:
        """Return the causes, that of the most failures first."""
        return sorted(self.found.values(), key=lambda cause: -cause.count)

    def call(self, failure: dict[str, Any]) -> None:
        """Count a failed call."""
        self._of(failure).calls += 1

    def context(self, failure: dict[str, Any]) -> None:
        """Count a context that could not be built."""
        self._of(failure).contexts += 1

    def bury(self, failure: dict[str, Any], items: int) -> None:
        """Count items that died."""
        self._of(failure).items += items

    def dead_letters(self, lines: Iterable[bytes]) -> None:
        """Count the rows of a batch job's dead letters; lines that are none are passed over."""
        for text in lines:
            try:
                letter = json.loads(text)
                error, message = letter["error"]["code"], letter["error"]["message"]
            except (ValueError, KeyError, TypeError):
                continue
            known = None
            if error in _WRAPPED:
                name, separator, rest = message.partition(": ")
                if error == "RemoteError" and separator:
                    error, message = name, rest
                else:
                    known = self._by_pattern.get(pattern(message))
            cause = known or self._cause(str(error), str(message))
            cause.rows += 1
            if not cause.place:
                cause.place = str(letter.get("place") or "")
                cause.traceback = cause.traceback or str(letter.get("traceback") or "")[-_KEPT:]

    def _of(self, failure: dict[str, Any]) -> Cause:
        cause = self._cause(failure.get("error") or failure["kind"], failure.get("message") or "")
        if not cause.where:
            places = [f"worker {failure['worker']}" if failure.get("worker") else "", failure.get("host") or ""]
            cause.where = " on ".join(filter(None, places))
            cause.traceback = (failure.get("traceback") or "")[-_KEPT:]
            cause.output = (failure.get("output") or "")[-_KEPT:]
        return cause

    def _cause(self, error: str, message: str) -> Cause:
        key = (error, pattern(message))
        cause = self.found.get(key)
        if cause is None:
            if len(self.found) >= MOST:
                key, message = ("other causes", ""), "these are too many to keep apart"
            cause = self.found.setdefault(key, Cause(*key, message=message[:_KEPT]))
            self._by_pattern.setdefault(key[1], cause)
        return cause
