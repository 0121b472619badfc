"""Files of plain text: a line is a row, with the one column "text".

What does not live here: lines that are data of some format (readers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxflow.rows.files import FileSource, Lines
from ctxflow.rows.readers import undecodable
from ctxflow.rows.source import Row, RowError, left_out

COLUMN = "text"


class TextSource(FileSource):
    """A file with a text a line, without the lines' ends. Blank lines are no rows, but count as lines."""

    def columns(self) -> Sequence[str]:
        """The one."""
        return (COLUMN,)

    def _rows(self, lines: Lines, skip: bytes) -> Iterator[Row]:
        number = -1
        while True:
            number += 1
            try:
                line = next(lines)
            except StopIteration:
                self.count = number
                return
            except RowError as error:
                if not left_out(skip, number):
                    yield Row(number, error, 0)
                continue
            if left_out(skip, number) or not line.strip():
                continue
            try:
                yield Row(number, {COLUMN: line.rstrip(b"\r\n").decode()}, len(line))
            except UnicodeDecodeError as error:
                yield Row(number, RowError(undecodable(error, lines.encoding, self._words)), len(line))
