"""What readers give: rows of an input, good and bad, in chunks.

What does not live here: any format (readers.py, arrow_readers.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

CHUNK_ROWS = 1000
CHUNK_BYTES = 1 << 20
MAX_ROW_BYTES = 16 << 20


class RowError(ValueError):
    """A row cannot be used; the message says why, without its place."""


@dataclasses.dataclass(slots=True)
class Row:
    """One row.

    :ivar number: its place in the input, from 0: a line's (blank ones count), or a record's.
    :ivar values: column -> value, or the reason why the row cannot be read.
    :ivar size: bytes that it takes in memory, roughly.
    """

    number: int
    values: dict[str, Any] | RowError
    size: int


def left_out(skip: bytes, number: int) -> bool:
    """Whether a row is one of those to be skipped."""
    return number < len(skip) and skip[number] != 0


class Source(Protocol):
    """An input that can be read from its beginning as often as one likes."""

    name: str
    total: int | None
    """How many rows there are, None where only reading tells."""

    def chunks(self, skip: bytes = b"") -> Iterator[list[Row]]:
        """All rows, bad ones among them, some at a time.

        :param skip: a byte for each of the first rows, by their numbers: those that are not 0 are left out, and
            where that can be, not even parsed.
        :raises ValueError: where nothing more can be read, saying why.
        """

    def fraction(self) -> float:
        """How much of the input the last chunk's end is, 0 to 1."""

    def place(self, number: int) -> str:
        """Where a row stands, for a person."""

    def identity(self) -> str:
        """A digest that changes with the input: of its size and of samples of it, not of its name or times."""
