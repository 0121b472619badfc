"""Files of plain text: a line is a row, with the one column "text".

What does not live here: lines that are data of some format (readers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctxflow.rows.files import LineSource, undecodable
from ctxflow.rows.source import RowError

COLUMN = "text"


class TextSource(LineSource):
    """A file with a text a line, without the lines' ends."""

    def columns(self) -> Sequence[str]:
        """The one."""
        return (COLUMN,)

    def _values(self, line: bytes, encoding: str) -> dict[str, Any]:
        try:
            return {COLUMN: line.rstrip(b"\r\n").decode()}
        except UnicodeDecodeError as error:
            raise RowError(undecodable(error, encoding, self._words)) from None
