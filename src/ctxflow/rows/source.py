"""Rows of an input, good and bad, in chunks: what readers give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    """Return whether a row is one of those to be skipped."""
    return number < len(skip) and skip[number] != 0


class Table(Protocol):
    """Something with rows."""

    name: str

    def columns(self) -> Sequence[str] | None:
        """Return the columns' names, None where each row has its own."""

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield all rows, bad ones among them, some at a time.

        :param skip: a byte for each of the first rows, by their numbers: those that are not 0 are left out, and
            where that can be, not even parsed.
        :param columns: those that are needed, where not all are; others may be left out.
        :raises ValueError: where nothing more can be read, saying why.
        """

    def place(self, number: int) -> str:
        """Return where a row stands, for a person."""


class Source(Table, Protocol):
    """An input that can be read from its beginning as often as one likes."""

    total: int | None
    """How many rows there are, None where only reading tells."""

    files: Sequence[Path]
    """The files that are read."""

    def fraction(self) -> float:
        """Return how much of the input has been read at the end of the last chunk, 0 to 1."""

    def types(self) -> Mapping[str, Any]:
        """Return the Arrow types of its columns, none where the input has no types."""

    def identity(self) -> str:
        """Return a digest that changes with the input: of its size and of samples of it, not of its name or times."""


class Limited:
    """The first rows of an input: those of the first numbers.

    :param limit: how many.
    :ivar whole: the input.
    """

    def __init__(self, source: Source, limit: int) -> None:
        self.whole = source
        self.name, self.files = source.name, source.files
        self.total = None if source.total is None else min(source.total, limit)
        self._limit = limit
        self._read = 0

    def columns(self) -> Sequence[str] | None:
        """Return the input's."""
        return self.whole.columns()

    def types(self) -> Mapping[str, Any]:
        """Return the input's."""
        return self.whole.types()

    def identity(self) -> str:
        """Return the input's: with a larger limit, the same rows are those that are done."""
        return self.whole.identity()

    def place(self, number: int) -> str:
        """Return where the input has it."""
        return self.whole.place(number)

    def fraction(self) -> float:
        """Return how much of the first rows is read."""
        return max(self.whole.fraction(), min(1.0, self._read / self._limit))

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield those of the input, up to the last."""
        for chunk in self.whole.chunks(skip, columns):
            first = [row for row in chunk if row.number < self._limit]
            if first:
                self._read = first[-1].number + 1
                yield first
            if len(first) < len(chunk) or self._read == self._limit:
                self._read = self._limit
                return
