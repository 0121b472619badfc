"""Files of lines as rows: JSON Lines, CSV, plain text, and several files as one table.

A row that cannot be read is an error of its own; reading goes on behind it, and no line, however long, is held
whole beyond a limit.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ctxflow.errors import counted
from ctxflow.rows.columns import IN_BATCH, Words, other_columns
from ctxflow.rows.source import CHUNK_BYTES, CHUNK_ROWS, MAX_ROW_BYTES, Row, RowError, left_out
from ctxflow.rows.text_lines import TextLines, file_identity, open_lines, suffix_of


class FileSource:
    """What all kinds of files of lines share.

    :param encoding: by default as a byte order mark tells, or UTF-8.
    :param name: what a person calls it, by default its path; `words`, what to write to have it read otherwise.
    :ivar count: how many numbers rows have, once it was read to its end.
    """

    def __init__(self, path: Path, encoding: str | None = None, name: str = "", words: Words = IN_BATCH) -> None:
        self.name = name or str(path)
        self.total: int | None = None
        self.files: Sequence[Path] = [path]
        self.count = 0
        self._path = path
        self._encoding = encoding
        self._called = name
        self._words = words
        self._size = max(1, path.stat().st_size)
        self._read = 0

    def columns(self) -> Sequence[str] | None:
        """Return the columns that all rows have; None where each row has its own."""
        return None

    def fraction(self) -> float:
        """Return how much of the file is read."""
        return min(1.0, self._read / self._size)

    def identity(self) -> str:
        """Return a digest of samples."""
        return file_identity([self._path])

    def types(self) -> Mapping[str, Any]:
        """Return none: all is text, or what JSON has."""
        return {}

    def place(self, number: int) -> str:
        """Return the line, for a person."""
        return f"{self.name}, line {number + 1}"

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows, whole."""
        with self._open() as (lines, raw):
            yield from self._chunked(self._rows(lines, skip), raw)

    def _open(self) -> contextlib.AbstractContextManager[tuple[TextLines, BinaryIO]]:
        return open_lines(self._path, self._encoding, self._called, self._words)

    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]:
        raise NotImplementedError

    def _chunked(self, rows: Iterable[Row], file: BinaryIO) -> Iterator[list[Row]]:
        chunk: list[Row] = []
        size = 0
        try:
            for row in rows:
                chunk.append(row)
                size += row.size
                if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
                    self._read = file.tell()
                    yield chunk
                    chunk, size = [], 0
        except ValueError:
            if chunk:
                yield chunk
            raise
        self._read = self._size
        if chunk:
            yield chunk


class LineSource(FileSource):
    """A file whose lines are its rows. Blank lines are no rows, but count as lines."""

    def _values(self, line: bytes, encoding: str) -> dict[str, Any]:
        """Return the values of a line.

        :raises RowError: if it says nothing that can be read.
        """
        raise NotImplementedError

    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]:
        for number in itertools.count():
            values: dict[str, Any] | RowError
            try:
                line = next(lines)
                if line.isspace() or left_out(skip, number):
                    continue
                values, size = self._values(line, lines.encoding), len(line)
            except StopIteration:
                self.count = number
                return
            except RowError as error:
                if left_out(skip, number):
                    continue
                values, size = error, 0
            yield Row(number, values, size)


def undecodable(error: UnicodeDecodeError, encoding: str, words: Words) -> str:
    """Return what is to be said of a line that is not of its file's encoding."""
    byte = f": byte {error.start + 1} is {error.object[error.start]:#04x}" if encoding == "UTF-8" else ""
    return f"the line is not {encoding}{byte}{another_encoding(encoding, words)}"


def another_encoding(encoding: str, words: Words) -> str:
    """Return what else can be done, where nobody named the encoding."""
    return (
        f"; if all of the input is of another encoding, {words.encoding.format('cp1252')}"
        if encoding == "UTF-8"
        else ""
    )


COLUMN = "text"


class TextSource(LineSource):
    """A file with a text a line, without the lines' ends."""

    def columns(self) -> Sequence[str]:
        """Return the one column."""
        return (COLUMN,)

    def _values(self, line: bytes, encoding: str) -> dict[str, Any]:
        try:
            return {COLUMN: line.rstrip(b"\r\n").decode()}
        except UnicodeDecodeError as error:
            raise RowError(undecodable(error, encoding, self._words)) from None


class JsonLinesSource(LineSource):
    """A file with a JSON object a line."""

    def _values(self, line: bytes, encoding: str) -> dict[str, Any]:
        try:
            values = json.loads(line.rstrip().decode())
        except (ValueError, RecursionError) as error:
            raise RowError(_json_reason(error, encoding, self._words)) from None
        if type(values) is not dict:
            raise RowError(f"the line is {_JSON_KINDS.get(type(values), 'a number')}, not a JSON object")
        return values


_JSON_KINDS: dict[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _json_reason(error: Exception, encoding: str, words: Words) -> str:
    if isinstance(error, UnicodeDecodeError):
        return undecodable(error, encoding, words)
    if isinstance(error, json.JSONDecodeError):
        return f"the line is not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "the line's JSON is nested too deeply"
    return f"the line is not JSON that can be read: {str(error).split(';')[0]}"


class _Text:
    """Lines as text for the csv module; what is not UTF-8 becomes surrogates, by which `CsvSource._row` knows it."""

    def __init__(self, lines: TextLines) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines).decode("utf-8", "surrogateescape")


class CsvSource(FileSource):
    """A file of comma-separated values (tab-separated for .tsv), with the columns' names on top.

    :param delimiter: what separates values, if it is another character.
    """

    def __init__(
        self,
        path: Path,
        encoding: str | None = None,
        name: str = "",
        words: Words = IN_BATCH,
        delimiter: str | None = None,
    ) -> None:
        super().__init__(path, encoding, name, words)
        self._delimiter = delimiter or ("\t" if suffix_of(path) == ".tsv" else ",")

    def place(self, number: int) -> str:
        """Return the record, for a person."""
        return f"{self.name}, row {number + 1} below the header"

    def columns(self) -> Sequence[str] | None:
        """Return the columns that the header names; None if there is none."""
        with self._open() as (lines, _):
            return self._columns(self._reader(lines), lines.encoding) or None

    def _reader(self, lines: TextLines) -> Iterator[list[str]]:
        csv.field_size_limit(MAX_ROW_BYTES)
        return csv.reader(_Text(lines), delimiter=self._delimiter, strict=True)

    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]:
        reader = self._reader(lines)
        columns = self._columns(reader, lines.encoding)
        number = 0
        while columns:
            try:
                fields = next(reader)
            except StopIteration:
                break
            except (csv.Error, RowError) as error:
                if not left_out(skip, number):
                    yield Row(number, RowError(f"the row cannot be read: {error}"), 0)
                number += 1
                continue
            if fields:
                if not left_out(skip, number):
                    yield self._row(number, columns, fields, lines.encoding)
                number += 1
        self.count = number

    def _columns(self, reader: Iterator[list[str]], encoding: str) -> list[str]:
        try:
            columns = next((fields for fields in reader if fields), [])
        except (csv.Error, RowError) as error:
            raise ValueError(f"the header of {self.name} cannot be read: {error}") from None
        for name in columns:
            try:
                name.encode()
            except UnicodeEncodeError:
                shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                raise ValueError(
                    f"the header of {self.name} is not {encoding} ({shown}): {self._words.encoding.format('cp1252')}"
                ) from None
        if repeated := {name for name in columns if columns.count(name) > 1}:
            raise ValueError(f"the header of {self.name} names the column {min(repeated)!r} twice")
        return columns

    def _row(self, number: int, columns: list[str], fields: list[str], encoding: str) -> Row:
        size = sum(map(len, fields))
        if len(fields) != len(columns):
            reason = f"the row has {counted(len(fields), 'field')}, but the header has {len(columns)}"
            return Row(number, RowError(reason), size)
        values: dict[str, Any] = dict(zip(columns, fields, strict=True))
        if not "".join(fields).isascii():
            for name, value in values.items():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    reason = f"the column {name!r} is not {encoding}{another_encoding(encoding, self._words)}"
                    return Row(number, RowError(reason), size)
        return Row(number, values, size)


class Shards:
    """A table in several files of lines, one after the other.

    :raises ValueError: if they do not have the same columns.
    """

    def __init__(self, parts: Sequence[Any], name: str) -> None:
        self.name = name
        self.total: int | None = None
        self.files: Sequence[Path] = [file for part in parts for file in part.files]
        self._parts = parts
        self._sizes = [max(1, file.stat().st_size) for file in self.files]
        self._begins = [0]  # The numbers of the first rows of those that were read, and of the next.
        headers = [part.columns() for part in parts]
        for file, found in zip(self.files, headers, strict=True):
            if found is not None and set(found) != set(headers[0] or ()):
                raise ValueError(other_columns(self.files[0], headers[0] or (), file, found))

    def columns(self) -> Sequence[str] | None:
        """Return the columns of the first."""
        found: Sequence[str] | None = self._parts[0].columns()
        return found

    def types(self) -> Mapping[str, Any]:
        """Return none: all is text, or what JSON has."""
        return {}

    def fraction(self) -> float:
        """Return how much of the files is read."""
        read = sum(part.fraction() * size for part, size in zip(self._parts, self._sizes, strict=True))
        return float(min(1.0, read / sum(self._sizes)))

    def identity(self) -> str:
        """Return a digest of samples."""
        return file_identity(self.files)

    def place(self, number: int) -> str:
        """Return the file, and the place in it."""
        n = min(bisect.bisect_right(self._begins, number), len(self._parts)) - 1
        place: str = self._parts[n].place(number - self._begins[n])
        return place

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows of one file after the other."""
        begin = 0
        self._begins = [0]
        for part in self._parts:
            for chunk in part.chunks(skip[begin:] if begin < len(skip) else b""):
                for row in chunk:
                    row.number += begin
                yield chunk
            begin += part.count
            self._begins.append(begin)
