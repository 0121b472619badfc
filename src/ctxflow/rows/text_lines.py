"""Files of plain text: a line is a row, with the one column "text".

What does not live here: lines that are data of some format (readers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxflow.rows.readers import BOM, FileSource, Lines, opened
from ctxflow.rows.source import Row, RowError, left_out

COLUMN = "text"


class TextSource(FileSource):
    """A file with a text a line, in UTF-8, without the lines' ends. Blank lines are no rows, but count as lines."""

    def place(self, number: int) -> str:
        """The line."""
        return f"{self.name}, line {number + 1}"

    def columns(self) -> Sequence[str]:
        """The one."""
        return (COLUMN,)

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The lines."""
        with opened(self._path) as file:
            yield from self._chunked(self._rows(Lines(file), skip), file)

    @staticmethod
    def _rows(lines: Lines, skip: bytes) -> Iterator[Row]:
        number = -1
        while True:
            number += 1
            try:
                line = next(lines)
            except StopIteration:
                return
            except RowError as error:
                if not left_out(skip, number):
                    yield Row(number, error, 0)
                continue
            if number == 0:
                line = line.removeprefix(BOM)
            if left_out(skip, number) or not line.strip():
                continue
            try:
                yield Row(number, {COLUMN: line.rstrip(b"\r\n").decode()}, len(line))
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} is {error.object[error.start]:#04x}"
                yield Row(number, RowError(f"the line is not UTF-8: {byte}"), len(line))
