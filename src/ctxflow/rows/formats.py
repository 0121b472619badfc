"""Files of lines, decompressed and decoded, as rows: JSON Lines, CSV and plain text.

A row that cannot be read is an error of its own, behind which reading continues; no line is held beyond a limit.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ctxflow.errors import InputError, counted, one_line, short
from ctxflow.files import mark_of
from ctxflow.rows.source import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    IN_BATCH,
    MAX_ROW_BYTES,
    InputFiles,
    Row,
    RowError,
    Words,
    check_names,
    first_repeated,
    left_out,
    opened,
    suffix_of,
)

_HEAD_BYTES = 1 << 16  # By which the ends of lines are recognised.
UNREADABLE = (EOFError, zlib.error, gzip.BadGzipFile)


def check_encoding(name: str) -> str:
    """Return an encoding's usual name.

    :raises ValueError: if none of text is called so.

    >>> check_encoding("UTF16"), check_encoding("latin-1")
    ('utf-16', 'iso8859-1')
    """
    try:
        found = codecs.lookup(name)
        "".encode(found.name)
    except (LookupError, ValueError):
        known = "utf-8, utf-16, latin-1 or cp1252"
        raise InputError(f"there is no encoding {short(name)}: give one such as {known}") from None
    return found.name


class TextLines:
    """The lines of a file, as an iterator that goes on after it has raised `RowError` for too long a line.

    :ivar encoding: what the file is in; its bytes that are none of it are none of UTF-8 in the lines.
    """

    def __init__(self, file: Any, encoding: str = "utf-8", name: str = "the input") -> None:
        self.encoding = encoding.upper()
        self._file = file
        self._name = name

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            line: bytes = self._file.readline(MAX_ROW_BYTES + 1)
            if not line:
                raise StopIteration
            if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (part := self._file.readline(1 << 20)) and not part.endswith(b"\n"):
                    pass
                raise RowError(f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
        except UNREADABLE as error:
            raise InputError(f"{self._name} cannot be read on, as its compressed data are broken: {error}") from None
        return line


class _Transcoded:
    """Lines of another encoding, or with other ends, as UTF-8 with newlines.

    :param end: what ends a line; None for carriage returns, newlines and both together.
    """

    def __init__(self, file: Any, encoding: str, end: str | None) -> None:
        errors = "surrogateescape" if encoding == "utf-8" else "ctxflow-marked"
        self._text = io.TextIOWrapper(file, encoding, errors=errors, newline=end)
        self._begun = False

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or its beginning."""
        text = self._text.readline(limit)
        if not self._begun:
            self._begun, text = True, text.removeprefix("\ufeff")
        return text.encode("utf-8", "surrogateescape")


def _marked(error: UnicodeError) -> tuple[str, int]:
    """Put a byte that is none of UTF-8 where some are none of the encoding."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("ctxflow-marked", _marked)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an input is to be read, where that is not as it tells itself.

    :ivar form: its format; `split`: which part of a dataset's folder.
    :ivar name: what a person calls the input, by default its path; `words`: what to write to have it read otherwise.
    :ivar told: called with notes on what may be read otherwise than expected.
    """

    form: str | None = None
    split: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    name: str = ""
    words: Words = IN_BATCH
    told: Callable[[str], None] = lambda text: None

    def called(self, path: Path) -> str:
        """Return what messages call the input."""
        return self.name or f"the input {path}"

    def other_encoding(self, encoding: str) -> str:
        """Return what else can be done about bytes that are none of an encoding, where none was named."""
        how = self.words.encoding.format("cp1252")
        return f"; if all of the input is of another encoding, {how}" if encoding == "UTF-8" else ""


@contextlib.contextmanager
def decompressed(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """Open a file that may be compressed by gzip; yields what reads its data, and the file itself."""
    with opened(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not packed:
            yield raw, raw
            return
        data: Any = gzip.GzipFile(fileobj=raw)
        with io.BufferedReader(data) as buffered:
            yield buffered, raw


def head_of(data: Any, size: int, called: str) -> bytes:
    """Return the first bytes of an open file.

    :raises ValueError: if they cannot be read.
    """
    try:
        head: bytes = data.read(size)
        return head
    except (*UNREADABLE, OSError) as error:
        raise InputError(f"{called} cannot be read, as its compressed data are broken: {error}") from None


@contextlib.contextmanager
def open_lines(path: Path, reading: Reading = Reading()) -> Iterator[tuple[TextLines, BinaryIO]]:
    """Open a file for reading its lines, without its byte order mark; yields the lines, and the file itself.

    :raises ValueError: if it cannot be read, or is in another encoding.
    """
    name = reading.name or str(path)
    with decompressed(path) as (data, raw):
        head = head_of(data, _HEAD_BYTES, reading.called(path))
        mark, encoding = encoding_of(head, reading, reading.called(path))
        data.seek(len(mark))
        begin = head.decode(encoding, "ignore")
        end = None if "\r" in begin and "\n" not in begin else "\n"  # Other lines may end otherwise.
        if encoding == "utf-8" and end == "\n":
            yield TextLines(data, encoding, name), raw
        else:
            yield TextLines(_Transcoded(data, encoding, end), encoding, name), raw


def encoding_of(head: bytes, reading: Reading, called: str, told: str = "utf-8") -> tuple[bytes, str]:
    """Return the byte order mark that does not belong to the text, and the text's encoding.

    :param head: the first bytes, four or more where there are so many.
    :param told: the encoding where neither a person nor a mark says one.
    :raises ValueError: if it seems to be another one than is said.
    """
    mark, by_mark = mark_of(head)
    chosen = check_encoding(reading.encoding) if reading.encoding is not None else by_mark or told
    if by_mark is not None and not chosen.startswith(by_mark):
        raise InputError(f"{called} begins with the byte order mark of {by_mark}: leave --encoding out")
    if chosen not in ("utf-8", "utf-8-sig", "ascii"):
        return b"", chosen
    if reading.encoding is None and by_mark is None and _seems_utf16(head):
        kind = "utf-16-le" if head[1] == 0 else "utf-16-be"
        raise InputError(f"{called} seems to be of UTF-16: {reading.words.encoding.format(kind)}")
    return mark, "utf-8"


def _seems_utf16(head: bytes) -> bool:
    zeros = tuple(byte == 0 for byte in head[:4])
    return zeros in ((False, True, False, True), (True, False, True, False))


def in_chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows some at a time, also those before an error that ends them."""
    chunk: list[Row] = []
    size = 0
    try:
        for row in rows:
            chunk.append(row)
            size += row.size
            if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    except ValueError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


class FileSource(InputFiles, abc.ABC):
    """What all kinds of files of lines share.

    :ivar count: how many numbers rows have, once it was read to its end.
    """

    def __init__(self, path: Path, reading: Reading = Reading()) -> None:
        super().__init__([path], reading.name or str(path))
        self.count = 0
        self._path = path
        self._reading = reading
        self._size = max(1, path.stat().st_size)
        self._read = 0

    def columns(self) -> Sequence[str] | None:
        """Return the columns that all rows have; None where each row has its own."""
        return None

    def fraction(self) -> float:
        """Return how much of the file is read."""
        return min(1.0, self._read / self._size)

    def place(self, number: int) -> str:
        """Return the line, for a person."""
        return f"{self.name}, line {number + 1}"

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows, whole."""
        with open_lines(self._path, self._reading) as (lines, file):
            for chunk in in_chunks(self._rows(lines, skip)):
                self._read = file.tell()
                yield chunk
            self._read = self._size

    @abc.abstractmethod
    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]: ...


class LineSource(FileSource):
    """A file whose lines are its rows. Blank lines are no rows, but count as lines."""

    @abc.abstractmethod
    def _values(self, line: bytes) -> dict[str, Any]:
        """Return the values of a line.

        :raises RowError: if it cannot be read; UnicodeDecodeError if it is not UTF-8.
        """

    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]:
        for number in itertools.count():
            values: dict[str, Any] | RowError
            try:
                line = next(lines)
                if line.isspace() or left_out(skip, number):
                    continue
                values, size = self._values(line), len(line)
            except StopIteration:
                self.count = number
                return
            except UnicodeDecodeError as error:
                known = lines.encoding
                byte = f": byte {error.start + 1} is {error.object[error.start]:#04x}" if known == "UTF-8" else ""
                values, size = RowError(f"the line is not {known}{byte}{self._reading.other_encoding(known)}"), 0
            except RowError as error:
                if left_out(skip, number):
                    continue
                values, size = error, 0
            yield Row(number, values, size)


_TEXT = "text"


class TextSource(LineSource):
    """A file with a text a line, without the lines' ends."""

    def columns(self) -> Sequence[str]:
        """Return the one column."""
        return (_TEXT,)

    def _values(self, line: bytes) -> dict[str, Any]:
        return {_TEXT: line.rstrip(b"\r\n").decode()}


class JsonLinesSource(LineSource):
    """A file with a JSON object a line."""

    def _values(self, line: bytes) -> dict[str, Any]:
        text = line.rstrip().decode()
        try:
            values = _decoded(text)
        except RowError:
            raise
        except json.JSONDecodeError as error:
            raise RowError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise RowError("the line's JSON is nested too deeply") from None
        except ValueError as error:
            raise RowError(f"the line is not JSON that can be read: {str(error).split(';')[0]}") from None
        if type(values) is not dict:
            raise RowError(f"the line is {_JSON_KINDS.get(type(values), 'a number')}, not a JSON object")
        return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which no name may stand for two values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RowError(f"the line names {short(first_repeated(name for name, _ in pairs))} twice")
    return made


_decoded = json.JSONDecoder(object_pairs_hook=_object).decode
_JSON_KINDS: dict[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


class CsvSource(FileSource):
    """A file of comma-separated values (tab-separated for .tsv), with the columns' names on top."""

    def __init__(self, path: Path, reading: Reading = Reading()) -> None:
        super().__init__(path, reading)
        self._delimiter = reading.delimiter or ("\t" if suffix_of(path) == ".tsv" else ",")
        self._told = False

    def place(self, number: int) -> str:
        """Return the record, for a person."""
        return f"{self.name}, row {number + 1} below the header"

    def columns(self) -> Sequence[str] | None:
        """Return the columns that the header names; None if there is none."""
        with open_lines(self._path, self._reading) as (lines, _):
            return self._columns(self._reader(lines), lines.encoding) or None

    def _reader(self, lines: TextLines) -> Any:
        csv.field_size_limit(MAX_ROW_BYTES)
        # What is not UTF-8 becomes surrogates, by which `_row` knows it.
        text = map(functools.partial(str, encoding="utf-8", errors="surrogateescape"), lines)
        return csv.reader(text, delimiter=self._delimiter, strict=True)

    def _rows(self, lines: TextLines, skip: bytes) -> Iterator[Row]:
        reader = self._reader(lines)
        columns = self._columns(reader, lines.encoding)
        number = 0
        while columns:
            begun = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                break
            except (csv.Error, RowError) as error:
                if not left_out(skip, number):
                    reason = f"the row cannot be read: {_unreadable(error, begun, reader.line_num)}"
                    yield Row(number, RowError(reason), 0)
                number += 1
                continue
            if fields:
                if not left_out(skip, number):
                    if reader.line_num - begun >= _MANY_LINES:
                        self._look_for_rows(number, fields, begun, reader.line_num)
                    yield self._row(number, columns, fields, lines.encoding)
                number += 1
        self.count = number

    def _look_for_rows(self, number: int, fields: list[str], begun: int, end: int) -> None:
        """Tell once of a row that seems to be several."""
        if not self._told and _holds_rows(fields, self._delimiter):
            self._told = True
            self._reading.told(
                f"{self.place(number)}, has {end - begun + 1:,} lines, {begun:,} to {end:,} of the file, which look "
                "like rows of their own: if they are, a quote at the beginning of a field has no other at its end"
            )

    def _columns(self, reader: Iterator[list[str]], encoding: str) -> list[str]:
        try:
            named = next((fields for fields in reader if fields), [])
        except (csv.Error, RowError) as error:
            raise InputError(f"the header of {self.name} cannot be read: {_unreadable(error)}") from None
        columns = _without_empty_end(named)
        if len(named) - len(columns) == 1 or not columns:  # The one column without a name may have values.
            columns = named
        for name in columns:
            try:
                name.encode()
            except UnicodeEncodeError:
                shown = one_line(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"), 60)
                how = self._reading.words.encoding.format("cp1252")
                raise InputError(f"the header of {self.name} is not {encoding} ({shown}): {how}") from None
        check_names(columns, f"the header of {self.name}")
        return columns

    def _row(self, number: int, columns: list[str], fields: list[str], encoding: str) -> Row:
        size = sum(map(len, fields))
        if len(fields) > len(columns):
            fields = [*fields[: len(columns)], *_without_empty_end(fields[len(columns) :])]
        elif len(fields) == len(columns) - 1 and not columns[-1]:
            fields = [*fields, ""]
        if len(fields) != len(columns):
            reason = f"the row has {counted(len(fields), 'field')}, but the header has {len(columns)}"
            return Row(number, RowError(reason), size)
        values: dict[str, Any] = dict(zip(columns, fields, strict=True))
        if not "".join(fields).isascii():
            for name, value in values.items():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    reason = f"the column {short(name)} is not {encoding}{self._reading.other_encoding(encoding)}"
                    return Row(number, RowError(reason), size)
        return Row(number, values, size)


_MANY_LINES = 3  # A row that goes on for so many may be several, of which a quote made one.


def _holds_rows(fields: Sequence[str], delimiter: str) -> bool:
    """Return whether most of the lines in a row's longest field have as many fields as the row, as texts rarely have.

    For rows of one field that is unknown.

    >>> _holds_rows(["2", "6 ft tall\\n3,three\\n4,four\\n5,the end"], ","), _holds_rows(["2", "so\\nit\\nis, he"], ",")
    (True, False)
    """
    within = max(fields, key=lambda field: field.count("\n")).split("\n")[1:]
    return len(fields) > 1 and 2 * sum(line.count(delimiter) == len(fields) - 1 for line in within) > len(within)


def _without_empty_end(fields: list[str]) -> list[str]:
    """Return fields without the last ones that are empty, as spreadsheets write them.

    >>> _without_empty_end(["id", "", "text", "", ""])
    ['id', '', 'text']
    """
    return fields[: max((n for n, field in enumerate(fields, 1) if field), default=0)]


def _unreadable(error: Exception, begun: int = 0, end: int = 0) -> str:
    """Return why the csv module cannot read a row that stands on some lines of its file."""
    if "new-line character" in str(error):
        return "a carriage return stands in it, outside of quotes"
    if end > begun:
        return (
            f"{error} in lines {begun:,} to {end:,} of the file, which are one row if the quotes are right: one at the "
            "beginning of a field goes on to the next"
        )
    return str(error)
